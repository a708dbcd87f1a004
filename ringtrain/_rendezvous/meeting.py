"""How a rank finds the others where TCP connects them: it tells the launcher's agent on its host where it listens, and waits.

The launcher answers all ranks at once, when the last one has come or one has waited long enough (see
``ringtrain.launch.meeting``). The secret of the world comes with the answer: over the agents' connections (ssh) and a
Unix socket of this user, and so it is in no environment, command line or file.
"""

import builtins
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ringtrain._rendezvous import announce
from ringtrain._rendezvous.agent_protocol import Introduce
from ringtrain.errors import TimeoutError, UnsupportedError

SECRET_BYTES = 32  # as the core takes it
SECONDS_FOR_THE_ANSWER = (
    10.0  # beyond those in which all ranks must have come: the launcher may be busy, its network slow
)


@dataclass(frozen=True)
class Introduction:
    """What a rank must know to connect with the others.

    Attributes:
        rank: its place among them.
        peers: where each of them listens, by rank.
        secret: of their world, 32 bytes.
        epoch: number of their world, which no other world of the job has.
    """

    rank: int
    peers: list[str]
    secret: bytearray = field(repr=False)
    epoch: int


def endpoint(address: str, ports: str) -> str:
    """Where a rank listens, as the core reads it: "10.0.0.1:0", "[fd00::1]:20000-20999"."""
    return f"[{address}]:{ports}" if ":" in address else f"{address}:{ports}"


def meet(rank: int, ranks: Sequence[int], addresses: str, seconds: float) -> Introduction:
    """Waits until all ranks have come, and returns what they were told.

    Args:
        rank: this one's number in the job.
        ranks: whom to meet, ascending, this one among them; empty for all of the job.
        addresses: where this rank listens.
        seconds: how long to wait for the others.

    Raises:
        TimeoutError: some rank did not come; the text names it, and is the same on all.
        UnsupportedError: the launcher has gone, or another process has called ``init`` for this rank.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        try:
            announce.tell(agent, rank, {"meets": {"addresses": addresses, "ranks": list(ranks), "seconds": seconds}})
            if user_of(agent) != os.getuid():
                raise PermissionError("its socket belongs to another user")
            line = _read_line(agent, time.monotonic() + seconds + SECONDS_FOR_THE_ANSWER)
        except TimeoutError:
            raise
        except OSError as error:
            raise UnsupportedError(
                "init: ringtrainrun must introduce the ranks to each other, but its agent on this host cannot be reached: "
                f"{error}. Start the job anew, with ringtrainrun."
            ) from None
    answer: Introduce = json.loads(line)
    if "failure" in answer:
        raise TimeoutError(answer["failure"])
    if "refusal" in answer:
        raise UnsupportedError(answer["refusal"])
    place = list(ranks).index(rank) if ranks else rank
    return Introduction(place, answer["peers"], bytearray.fromhex(answer["secret"]), answer["epoch"])


EARLIER_OR_LONGER = "Call init() on every rank before what takes long, or raise start_timeout_seconds."


def of_the_late(who: str, seconds: float, what: str, advice: str = "") -> str:
    """What all ranks are told if some have not come: whom they expected, for how long, what became of whom, what to do."""
    return f"init: expected {who} to call init() within {seconds:g} s, but {what}. {advice or EARLIER_OR_LONGER}"


def named(ranks: Sequence[int]) -> str:
    """For people."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def user_of(agent: socket.socket) -> int:
    """The user id of the process that listens at the other end of a Unix socket."""
    credentials = agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def _read_line(agent: socket.socket, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        agent.settimeout(max(0.001, left))
        try:
            data = agent.recv(1 << 16)
        except builtins.TimeoutError:
            raise TimeoutError(
                "init: expected ringtrainrun to answer once all ranks had called init(), or the time for it was over, but "
                "it did not. It may be stopped, or its machine cut off."
            ) from None
        if not data:
            raise ConnectionResetError("it has ended the job")
        line += data
    return line
