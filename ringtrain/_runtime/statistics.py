"""Who is slow, where the time goes, and how fast operations are: ``ringtrain.stats``; and what TCP has found of its lines."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from ringtrain._binding._native import lib, take_answer
from ringtrain._runtime.context import Context, current

_SHARES_SHOWN = 8
_shares: "weakref.WeakKeyDictionary[Context, list[Share]]" = weakref.WeakKeyDictionary()


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


class Traffic(NamedTuple):
    """What this rank has exchanged by operations of one kind and size.

    Attributes:
        operation: ``allreduce`` and so on.
        least_bytes, most_bytes: the size class: powers of two, of what one operation is about. That is all that this rank
            gives, the whole group where tensors are grouped; of an allgather what all receive.
        operations: how many, each of a fused batch.
        bytes: of all of them.
        link_bytes: of these, what each rank must send at least, whatever the algorithm: 2 (n - 1) / n of an allreduce's.
        seconds: that they were under way, from the moment when all ranks had submitted them. Operations of one batch share
            its time by their bytes, and batches that overlap count once, so these seconds add up to time by the clock.
        waiting_seconds: from this rank's submission until all ranks had submitted, of each on its own.
    """

    operation: str
    least_bytes: int
    most_bytes: int
    operations: int
    bytes: int
    link_bytes: int
    seconds: float
    waiting_seconds: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second; 0 without any."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that go through a rank's link at least: comparable between operations and numbers of ranks."""
        return self.link_bytes / self.seconds if self.seconds > 0 else 0.0


class Share(NamedTuple):
    """A rank's part of each batch, in a job with ``--batch balanced``.

    Attributes:
        rank: which one.
        samples: of a whole batch.
        samples_per_second: that it has computed lately, waiting left out; 0 before it was measured.
    """

    rank: int
    samples: int
    samples_per_second: float


class Stats(NamedTuple):
    """What ``stats`` returns, since ``init``. Printed, it is a table.

    Example:
        >>> stats = rt.stats()
        >>> seconds = sum(each.seconds for each in stats.traffic)

    Attributes:
        late: ranks by the time that others waited for them, the slowest first. Those that coordinate know it: rank 0
            for the world, the lowest rank of a process set for the set; empty elsewhere.
        waiting_seconds: how long this rank's threads waited for operations.
        wire_seconds: how long its chunks were between hosts, each counted on its own.
        counters: as in ``ringtrain.counters``: operations, batches, bytes, cache hits and so on.
        traffic: what was exchanged, by operation and size.
        shares: of all ranks, as they were decided last; empty where shares do not follow speed.
    """

    late: list[Late]
    waiting_seconds: float
    wire_seconds: float
    counters: dict[str, int]
    traffic: list[Traffic]
    shares: list[Share]

    def since(self, earlier: "Stats") -> "Stats":
        """What came after an earlier ``stats()`` of the same world; of late ranks the longest time is still that since ``init``.

        Example:
            >>> before = rt.stats()
            >>> train_one_epoch()
            >>> print(rt.stats().since(before))
        """
        known = {(each.operation, each.least_bytes): each for each in earlier.traffic}
        traffic = [_less(each, known.get((each.operation, each.least_bytes))) for each in self.traffic]
        lates = {each.rank: each for each in earlier.late}
        late = [_less_late(each, lates.get(each.rank)) for each in self.late]
        return Stats(
            sorted((each for each in late if each.times > 0), key=lambda each: -each.seconds),
            self.waiting_seconds - earlier.waiting_seconds,
            self.wire_seconds - earlier.wire_seconds,
            {name: value - earlier.counters.get(name, 0) for name, value in self.counters.items()},
            [each for each in traffic if each.operations > 0],
            self.shares,
        )

    def __str__(self) -> str:
        """The traffic as a table, the three ranks that others waited for most, and shares that follow speed."""
        head = ("operation", "size", "count", "total", "time", "mean", "waiting", "algbw", "busbw")
        rows = [head, *(_row(each) for each in self.traffic)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
        lines.append(f"waited {self.waiting_seconds:.3f} s for operations, {self.counters['batches']} batches")
        lines += [
            f"rank {each.rank} was last {each.times} times, for {each.seconds:.3f} s; longest in '{each.name}'"
            for each in self.late[:3]
        ]
        lines += [f"shares {shares_text(self.shares)}"] if self.shares else []
        return "\n".join(lines)


def stats() -> Stats:
    """Who is slow, and what this rank has done since ``init``.

    Example:
        >>> if rt.rank() == 0:
        ...     print(rt.stats())
        ...     for late in rt.stats().late[:3]:
        ...         print(f"rank {late.rank} was last {late.times} times, {late.seconds:.1f} s, most in {late.name}")

    It is always counted, and costs a few additions for each operation. ``Stats.since`` gives what lies between two calls.

    Returns:
        The counts and times since ``init``, as attributes; printed, a short report.
    """
    context = current()
    return from_lines(lateness_of(context), context.counters(), traffic_of(context), shares_of(context))


def lateness_of(context: Context) -> list[str]:
    """The lines of ``rt_lateness``."""
    return take_answer(lib.rt_lateness(context.native)).split("\n")[:-1]  # other line ends may stand in a name


def traffic_of(context: Context) -> list[str]:
    """The lines of ``rt_traffic``."""
    return take_answer(lib.rt_traffic(context.native)).splitlines()


def note_shares(context: Context, samples: Sequence[int], speeds: Sequence[float]) -> None:
    """All ranks of the world have decided what part of each batch each has; by rank."""
    _shares[context] = [Share(rank, *each) for rank, each in enumerate(zip(samples, speeds, strict=True))]


def shares_of(context: Context) -> list[Share]:
    """Those that were noted last."""
    return _shares.get(context, [])


def shares_text(shares: Sequence[Share]) -> str:
    """``36 : 73 : 147 of 256 samples, at 310, 620, 1240 a second``; of many ranks the least and the most."""
    samples, speeds = [each.samples for each in shares], [each.samples_per_second for each in shares]
    if len(shares) > _SHARES_SHOWN:
        return f"from {min(samples)} to {max(samples)} of {sum(samples)} samples, at {min(speeds):.4g} to {max(speeds):.4g} a second"
    told = ", ".join(f"{speed:.4g}" for speed in speeds)
    return f"{' : '.join(map(str, samples))} of {sum(samples)} samples, at {told} a second"


def from_lines(
    lateness: Sequence[str], counters: dict[str, int], traffic: Sequence[str], shares: Sequence[Sequence[float]] = ()
) -> Stats:
    """``stats()`` of what the core has said, here or in another process; pure."""
    late = []
    for line in lateness:
        rank, times, total, longest, name = line.split("|", 4)
        late.append(Late(int(rank), int(times), int(total) / 1e9, int(longest) / 1e9, name))
    late.sort(key=lambda each: -each.seconds)
    rows = [_traffic(line) for line in traffic]
    waits, on_wire = counters["wait_nanoseconds"] / 1e9, counters["wire_nanoseconds"] / 1e9
    return Stats(late, waits, on_wire, counters, rows, [Share(int(a), int(b), c) for a, b, c in shares])


def _traffic(line: str) -> Traffic:
    operation, *numbers = line.split("|")
    size_class, count, size_bytes, link_bytes, time, waiting = map(int, numbers)
    least, most = (1 << size_class - 1, (1 << size_class) - 1) if size_class else (0, 0)
    return Traffic(
        operation=operation,
        least_bytes=least,
        most_bytes=most,
        operations=count,
        bytes=size_bytes,
        link_bytes=link_bytes,
        seconds=time / 1e9,
        waiting_seconds=waiting / 1e9,
    )


def _less(now: Traffic, earlier: Traffic | None) -> Traffic:
    if earlier is None:
        return now
    return now._replace(
        operations=now.operations - earlier.operations,
        bytes=now.bytes - earlier.bytes,
        link_bytes=now.link_bytes - earlier.link_bytes,
        seconds=now.seconds - earlier.seconds,
        waiting_seconds=now.waiting_seconds - earlier.waiting_seconds,
    )


def _less_late(now: Late, earlier: Late | None) -> Late:
    if earlier is None:
        return now
    return now._replace(times=now.times - earlier.times, seconds=now.seconds - earlier.seconds)


def _row(each: Traffic) -> tuple[str, ...]:
    return (
        each.operation,
        bytes_text(each.least_bytes),
        str(each.operations),
        bytes_text(each.bytes),
        _seconds_text(each.seconds),
        _seconds_text(each.seconds / each.operations),
        _seconds_text(each.waiting_seconds / each.operations),
        f"{bytes_text(each.algorithm_bandwidth)}/s",
        f"{bytes_text(each.bus_bandwidth)}/s",
    )


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip


def bytes_text(size_bytes: float) -> str:
    """``4 KiB``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"


def _seconds_text(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3f} s"


class Line(NamedTuple):
    """The way to a rank that this one sends tensors to.

    Attributes:
        rank: the other one.
        streams: connections for tensors over each link.
        congestion: the kernel's name of what controls their rate.
        round_trip_seconds: the least that was seen.
        rate: bytes a second that were delivered of late, of all connections together.
        loss: share of the packets that were sent again.
    """

    rank: int
    streams: int
    congestion: str
    round_trip_seconds: float
    rate: float
    loss: float


def lines_of(context: Context) -> list[Line]:
    """Of the ranks that this one has sent tensors to; [] where a library connects them."""
    found = [line.split("|") for line in take_answer(lib.rt_lines(context.native)).splitlines()]
    return [
        Line(int(rank), int(streams), congestion, float(seconds), float(rate), float(loss))
        for rank, streams, congestion, seconds, rate, loss in found
    ]
