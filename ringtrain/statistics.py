"""Who is slow, and where the time goes: ``ringtrain.stats``."""

from typing import NamedTuple

from ringtrain.context import current


class Late(NamedTuple):
    """A rank that others waited for.

    Attributes:
        rank: which one.
        times: operations that it was the last to submit.
        seconds: how long all the others together with it could have been on already: the time between the last but one
            submission and its own, over all these operations.
        longest: the longest of these times, in seconds.
        name: the operation in which that was.
    """

    rank: int
    times: int
    seconds: float
    longest: float
    name: str


class Stats(NamedTuple):
    """What ``stats`` returns, since ``init``.

    Attributes:
        late: ranks by the time that others waited for them, the slowest first. Those that coordinate know it: rank 0
            for the world, the lowest rank of a process set for the set; empty elsewhere.
        waiting_seconds: how long this rank's threads waited for operations.
        wire_seconds: how long its chunks were between hosts, each counted on its own.
        counters: as in ``ringtrain.counters``: operations, batches, bytes, cache hits and so on.
    """

    late: list[Late]
    waiting_seconds: float
    wire_seconds: float
    counters: dict[str, int]


def stats() -> Stats:
    """Who is slow, and what this rank has done since ``init``.

    Example:
        >>> if rt.rank() == 0:
        ...     for late in rt.stats().late[:3]:
        ...         print(f"rank {late.rank} was last {late.times} times, {late.seconds:.1f} s, most in {late.name}")
    """
    context = current()
    late = []
    for line in context.lateness():
        rank, times, total, longest, name = line.split("|", 4)
        late.append(Late(int(rank), int(times), int(total) / 1e9, int(longest) / 1e9, name))
    late.sort(key=lambda each: -each.seconds)
    counters = context.counters()
    return Stats(late, counters["wait_nanoseconds"] / 1e9, counters["wire_nanoseconds"] / 1e9, counters)
