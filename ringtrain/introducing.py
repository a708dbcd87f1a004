"""What ranks that meet without `ringtrainrun` tell rank 0, and what it answers: calls in, one answer for all out. Pure.

The answer has no secret of its own where all ranks know one: each makes the world's from that and from the answer's seed.
"""

import hmac
import platform
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ringtrain.meeting import SECRET_BYTES, Introduction, named, of_the_late

LOOPBACKS = ("127.", "[::1]")
ONE_SECRET = "Give all ranks the same one."
A_RANK_EACH = "Give each process a rank of its own."


class Call(TypedDict):
    """What a rank says of itself.

    Attributes:
        rank, size: of the world that it expects.
        addresses: where it listens.
        host: name of its host.
        seconds: how long it waits for the others.
    """

    rank: int
    size: int
    addresses: str
    host: str
    seconds: float


class Answer(TypedDict, total=False):
    """What all ranks are told: why there is no world, or

    Attributes:
        peers: where each listens, by rank.
        seed: of the world's secret, in hexadecimal.
        epoch: the world's number.
        late: that ranks have not come; the text names them.
        refusal: what is wrong with those that have.
    """

    peers: list[str]
    seed: str
    epoch: int
    late: str
    refusal: str


def call_of(rank: int, size: int, addresses: str, seconds: float) -> Call:
    """This rank's."""
    return {"rank": rank, "size": size, "addresses": addresses, "host": platform.node(), "seconds": seconds}


def answer_to(calls: Mapping[int, Call], size: int) -> Answer:
    """The answer to the calls of all ranks, with a new seed and epoch."""
    if refusal := refusal_of([calls[rank] for rank in sorted(calls)]):
        return {"refusal": refusal}
    peers = [calls[rank]["addresses"] for rank in range(size)]
    return {"peers": peers, "seed": secrets.token_hex(SECRET_BYTES), "epoch": secrets.randbits(63)}


def refusal_of(calls: Sequence[Call]) -> str:
    """Why these ranks cannot form a world; "" if they can."""
    size = calls[0]["size"]
    if others := [call["rank"] for call in calls if call["size"] != size]:
        return (
            f"init: size must be the same on all ranks, but is {size} on rank {calls[0]['rank']} and "
            f"{calls[others[0]]['size']} on {named(others)}. Give all ranks the same number."
        )
    on_loopback = [call["rank"] for call in calls if call["addresses"].startswith(LOOPBACKS)]
    if on_loopback and len({call["host"] for call in calls}) > 1:
        return (
            f"init: ranks must listen where other hosts reach them, but {named(on_loopback)} can be reached on "
            f"{'its' if len(on_loopback) == 1 else 'their'} own host alone. Name a network of all hosts in "
            "RINGTRAIN_NETWORK_INTERFACES, such as 10.0.0.0/24."
        )
    return ""


def introduction(rank: int, answer: Answer, secret: bytes) -> Introduction:
    """What a rank takes away from an answer. secret: that all ranks know, b"" without one."""
    made = hmac.digest(secret, b"ringtrain world " + bytes.fromhex(answer["seed"]), "sha256")
    return Introduction(rank, answer["peers"], bytearray(made), answer["epoch"])


def read_call(text: Any, size: int) -> Call | None:
    """A call out of what another process has sent, None if it is none."""
    if not isinstance(text, dict):
        return None
    rank, theirs, addresses, host, seconds = (
        text.get(name) for name in ("rank", "size", "addresses", "host", "seconds")
    )
    if not (isinstance(addresses, str) and isinstance(host, str) and isinstance(theirs, int)):
        return None
    if not isinstance(rank, int) or not 0 <= rank < max(size, theirs) or not isinstance(seconds, (int, float)):
        return None
    return {"rank": rank, "size": theirs, "addresses": addresses, "host": host, "seconds": seconds}


def answer_to_the_present(calls: Mapping[int, Call], size: int, further: str = "", advice: str = "") -> Answer:
    """The answer when the time is over and ranks are missing.

    Args:
        further: what else is known, behind the words.
        advice: what to do about that; "" for what helps a rank that is late.
    """
    missing = [rank for rank in range(size) if rank not in calls]
    seconds = min(call["seconds"] for call in calls.values())
    return {"late": of_the_late(f"all {size} ranks", seconds, f"{named(missing)} did not{further}", advice)}
