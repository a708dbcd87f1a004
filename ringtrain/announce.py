"""What a rank's own program tells the launcher: that it fails now, before its peers hear of it and fail in turn."""

import json
import socket
import time

from ringtrain.options import environment


def announce_failure(code: int = 1, follows: bool = False) -> None:
    """Marks this rank as failing from this moment on, so that it is reported as the first cause even if it leaves last.

    `code` is what its process is about to return; it counts even if the rank is ended before it does. `follows` says
    that another rank's failure is the reason, so that this one is blamed only if nobody else is.
    To be called before the other ranks are told. Without ringtrainrun it does nothing.
    """
    name, rank = environment().get("RINGTRAIN_LAUNCHER"), environment().get("RINGTRAIN_RANK")
    if not name or not rank:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.connect("\0" + name)
            facts = {"rank": int(rank), "failing": code, "follows": follows, "at": time.monotonic()}
            agent.sendall(json.dumps(facts).encode() + b"\n")
    except OSError:  # the agent has gone, and nobody waits for this rank any more
        pass
