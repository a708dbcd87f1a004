"""What a rank's own program tells the launcher's agent on its host.

That it fails now, before its peers hear of it and fail in turn; and which shared memory its MPI has made, which nobody
else removes if rank and engine are killed.
"""

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
    _tell(failing=code, follows=follows, at=time.monotonic())


def announce_segments() -> None:
    """Names the files in /dev/shm that this process has mapped by now, with their inodes.

    To be called once MPI has started. Without ringtrainrun it does nothing.
    """
    if "RINGTRAIN_LAUNCHER" not in environment():
        return
    with open("/proc/self/maps") as maps:  # address, rights, offset, device, inode, path
        regions = [line.split(None, 5) for line in maps if " /dev/shm/" in line]
    segments = {(path.rstrip("\n"), int(inode)) for *_, inode, path in regions}
    _tell(segments=sorted(segments))


def _tell(**facts: object) -> None:
    name, rank = environment().get("RINGTRAIN_LAUNCHER"), environment().get("RINGTRAIN_RANK")
    if not name or not rank:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.connect("\0" + name)
            agent.sendall(json.dumps({"rank": int(rank), **facts}).encode() + b"\n")
    except OSError:  # the agent has gone, and nobody waits for this rank any more
        pass
