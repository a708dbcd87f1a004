"""What a rank's own program tells the launcher's agent on its host.

That it fails now, before its peers hear of it and fail in turn; and which shared memory its MPI has made, which nobody
else removes if rank and engine are killed.
"""

import json
import socket
import time

from ringtrain._binding.options import environment
from ringtrain._rendezvous.agent_protocol import RankNews
from ringtrain._rendezvous.launcher import is_alone

LONGEST_REASON = 500  # characters


def announce_failure(code: int = 1, follows: bool = False, at: float | None = None, because: str = "") -> None:
    """Marks this rank as failing from this moment on, so that it is reported as the first cause even if it leaves last.

    `code` is what its process is about to return; it counts even if the rank is ended before it does. `follows` says
    that another rank's failure is the reason, so that this one is blamed only if nobody else is; `because` is the error
    that tells of it. `at` is when it failed (time.monotonic), now by default.
    To be called before the other ranks are told. Without ringtrainrun it does nothing.
    """
    reason = " ".join(because.strip().partition("\n")[0].split())[:LONGEST_REASON]
    at = time.monotonic() if at is None else at
    _tell({"failing": code, "follows": follows, "because": reason, "at": at})


def announce_leaving() -> None:
    """Says that this rank ends from this moment on, with a code that only the end of its process will tell.

    To be called before the other ranks are told. Without ringtrainrun it does nothing.
    """
    _tell({"leaving": True, "at": time.monotonic()})


def announce_segments() -> None:
    """Names the files in /dev/shm that this process has mapped by now, with their inodes.

    To be called once MPI has started. Without ringtrainrun it does nothing.
    """
    if "RINGTRAIN_LAUNCHER" not in environment():
        return
    with open("/proc/self/maps") as maps:  # address, rights, offset, device, inode, path
        regions = [line.split(None, 5) for line in maps if " /dev/shm/" in line]
    segments = {(path.rstrip("\n"), int(inode)) for *_, inode, path in regions}
    _tell({"segments": sorted(segments)})


def tell(agent: socket.socket, rank: int, facts: RankNews) -> None:
    """Sends facts about a rank to the agent, over a socket that is connected here. Raises OSError if the agent has gone."""
    agent.connect("\0" + environment()["RINGTRAIN_LAUNCHER"])
    agent.sendall(json.dumps({**facts, "rank": rank}).encode() + b"\n")


def _tell(facts: RankNews) -> None:
    name, rank = environment().get("RINGTRAIN_LAUNCHER"), environment().get("RINGTRAIN_RANK")
    if not name or not rank or is_alone(environment()):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            tell(agent, int(rank), facts)
    except OSError:  # the agent has gone, and nobody waits for this rank any more
        pass
