"""What ranks that meet without `ringtrainrun` tell rank 0, and what it answers: calls in, one answer for all out. Pure.

The answer has no secret of its own where all ranks know one: each makes the world's from that and from the answer's seed.
"""

import platform
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from ringtrain._rendezvous.handshake import key_of_world
from ringtrain._rendezvous.meeting import SECRET_BYTES, Introduction, named, of_the_late

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
        uid: of this attempt to meet: a rank that calls again is not another one.
    """

    rank: int
    size: int
    addresses: str
    host: str
    seconds: float
    uid: str


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
    return {
        "rank": rank, "size": size, "addresses": addresses, "host": platform.node(), "seconds": seconds,
        "uid": secrets.token_hex(16),
    }  # fmt: skip


class Gathering:
    """Which ranks have come to rank 0: calls and ends of connections in, one answer for all out. Times are rank 0's.

    deadline: when the first of those who have come has waited for long enough.
    """

    def __init__(self, own: Call, now: float):
        self.deadline = now + own["seconds"]
        self._size = own["size"]
        self._calls = {0: own}
        self._callers: dict[int, object] = {}
        self._refusal = ""

    def come(self, caller: object, said: Any, now: float) -> None:
        """A process has said this; what is no call is not heeded."""
        call = read_call(said, self._size)
        if call is None:
            return
        rank = call["rank"]
        self.deadline = min(self.deadline, now + said.get("left", call["seconds"]))
        if rank in self._calls and self._calls[rank]["uid"] != call["uid"]:
            self._refusal = self._refusal or two_processes(rank)
            return
        self._calls[rank], self._callers[rank] = call, caller

    def go(self, caller: object) -> None:
        """A connection has ended; its rank may come again."""
        for rank in [rank for rank, other in self._callers.items() if other is caller]:
            del self._calls[rank], self._callers[rank]

    def refuse(self, text: str) -> None:
        """There can be no world; "": nothing is known of that."""
        self._refusal = self._refusal or text

    def answer(self, now: float, refused: int = 0) -> Answer:
        """For all who have come; {} as long as others may come. refused: callers with another secret."""
        if self._refusal:
            return {"refusal": self._refusal}
        if len(self._calls) == self._size or any(call["size"] != self._size for call in self._calls.values()):
            return answer_to(self._calls, self._size)
        if now < self.deadline:
            return {}
        others = f"; connections with another secret: {refused}" if refused else ""
        return answer_to_the_present(self._calls, self._size, others, ONE_SECRET if refused else "")


def two_processes(rank: int) -> str:
    """What all are told if two are of one rank."""
    return f"init: one process of rank {rank} must call init() at a time, but two have. {A_RANK_EACH}"


def on_its_host_alone(ranks: Sequence[int]) -> str:
    """What all are told if others cannot call these."""
    return (
        f"init: ranks must listen where other hosts reach them, but {named(ranks)} can be reached on "
        f"{'its' if len(ranks) == 1 else 'their'} own host alone. Name a network of all hosts in "
        "RINGTRAIN_NETWORK_INTERFACES, such as 10.0.0.0/24."
    )


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
        return on_its_host_alone(on_loopback)
    return ""


def introduction(rank: int, answer: Answer, secret: bytes) -> Introduction:
    """What a rank takes away from an answer. secret: that all ranks know, b"" without one."""
    return Introduction(rank, answer["peers"], key_of_world(secret, answer["seed"]), answer["epoch"])


def read_call(text: Any, size: int) -> Call | None:
    """A call out of what another process has sent, None if it is none."""
    if not isinstance(text, dict):
        return None
    rank, theirs, addresses, host, seconds, uid = (
        text.get(name) for name in ("rank", "size", "addresses", "host", "seconds", "uid")
    )
    if not all(isinstance(each, str) for each in (addresses, host, uid)):
        return None
    if not all(isinstance(each, (int, float)) for each in (seconds, text.get("left", 0.0))):
        return None
    if not isinstance(rank, int) or not isinstance(theirs, int) or not 0 <= rank < max(size, theirs):
        return None
    call = {"rank": rank, "size": theirs, "addresses": addresses, "host": host, "seconds": seconds, "uid": uid}
    return cast(Call, call)


def answer_to_the_present(calls: Mapping[int, Call], size: int, further: str = "", advice: str = "") -> Answer:
    """The answer when the time is over and ranks are missing.

    Args:
        further: what else is known, behind the words.
        advice: what to do about that; "" for what helps a rank that is late.
    """
    missing = [rank for rank in range(size) if rank not in calls]
    seconds = min(call["seconds"] for call in calls.values())
    return {"late": of_the_late(f"all {size} ranks", seconds, f"{named(missing)} did not{further}", advice)}
