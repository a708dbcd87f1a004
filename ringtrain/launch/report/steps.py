"""Ranks on one clock, and their operations as steps of training; pure.

Ranks of different hosts have clocks of their own. No operation ends anywhere before all have submitted it, so each pair
of ranks bounds how far their clocks are apart; a rank whose clock lies without these bounds is moved to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringtrain.launch.report.trace_arrays import RankTrace

REMNANT = 0.1  # of a step's bytes: less is none


@dataclass
class Steps:
    """The steps of all ranks; times in microseconds since the first submission of all.

    Attributes:
        traces: of each rank, by that clock.
        clocks: float64, by how much each rank's clock was moved.
        names: of all tensors, by their numbers here.
        tensor: int64, the tensor of each operation of the world.
        step: int64, the step of each operation of the world; they are sorted by it.
        place: int64 of shape (ranks, operations), the number of the operation in that rank's trace; -1 if it has none.
        begun, first, usual, summed, last, ended: float64 of shape (ranks, steps): when the rank had the sums of the step before,
            its first submission in this one, its last one of a tensor that comes in most steps, when it had the sums of those, its
            last submission, and when it had all sums; NaN where there is none.
        is_whole: whether there is but one step, which has all, since no name comes twice.
    """

    traces: list[RankTrace]
    clocks: np.ndarray
    names: list[str]
    tensor: np.ndarray
    step: np.ndarray
    place: np.ndarray
    begun: np.ndarray
    first: np.ndarray
    usual: np.ndarray
    summed: np.ndarray
    last: np.ndarray
    ended: np.ndarray
    is_whole: bool

    @property
    def count(self) -> int:
        """Number of steps."""
        return self.first.shape[1]

    def of(self, moments: str) -> np.ndarray:
        """Such moments of a rank's trace by rank and operation of the world; NaN where a rank has none."""
        return _by_operation(self.traces, self.place, moments)

    def operations_of(self, step: int) -> slice:
        """The operations of the world that belong to a step."""
        return slice(*np.searchsorted(self.step, [step, step + 1]))


def steps_of(traces: Sequence[RankTrace]) -> Steps:
    """Puts the traces on one clock and cuts them into steps.

    Raises:
        ValueError: there is no operation in them.
    """
    if not any(len(trace.submitted) for trace in traces):
        raise ValueError("the traces must have operations, but have none. Was the timeline on while the job trained?")
    names, tensor, place = _matched(traces)
    submitted, ended = _by_operation(traces, place, "submitted"), _by_operation(traces, place, "ended")
    clocks = clocks_of(submitted, ended)
    submitted -= clocks[:, None]
    origin = float(np.nanmin(submitted))
    moved = [trace.moved(clock + origin) for trace, clock in zip(traces, clocks, strict=True)]
    submitted -= origin
    order = np.argsort(_earliest(submitted), kind="stable")
    tensor, place = tensor[order], place[:, order]
    ended = ended[:, order] - (clocks[:, None] + origin)
    before = np.maximum.accumulate(np.fmax.reduce(ended, axis=0))
    size_bytes = np.fmax.reduce(_by_operation(traces, place, "size_bytes"), axis=0)
    step = numbered(tensor, _earliest(submitted[:, order]) - np.concatenate(([0.0], before[:-1])), size_bytes)
    is_whole = step[-1] == 0
    recurs = recurring(tensor, size_bytes)
    step = without_remnants(step, np.where(np.bincount(tensor)[tensor] > 1, size_bytes, 0.0))
    order = np.argsort(step, kind="stable")[np.count_nonzero(step < 0) :]
    tensor, place, step = tensor[order], place[:, order], step[order]
    starts = np.searchsorted(step, np.arange(step[-1] + 1))
    submitted, ended = _by_operation(moved, place, "submitted"), _by_operation(moved, place, "ended")
    first = np.fmin.reduceat(submitted, starts, axis=1)
    last = np.fmax.reduceat(submitted, starts, axis=1)
    usual, summed = (
        np.fmax.reduceat(np.where(recurs[tensor], each, np.nan), starts, axis=1) for each in (submitted, ended)
    )
    end = np.fmax.reduceat(ended, starts, axis=1)
    begun = np.concatenate([first[:, :1], end[:, :-1]], axis=1)
    usual, summed = np.where(np.isnan(usual), last, usual), np.where(np.isnan(summed), end, summed)
    return Steps(
        traces=moved,
        clocks=clocks,
        names=names,
        tensor=tensor,
        step=step,
        place=place,
        begun=begun,
        first=first,
        usual=usual,
        summed=summed,
        last=last,
        ended=end,
        is_whole=bool(is_whole),
    )


def clocks_of(submitted: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """By how much each rank's clock must be moved so that nothing ends before all have submitted it: float64, of rank 0 0.

    Args:
        submitted, ended: of shape (ranks, operations), each rank's by its own clock; NaN where it has none.
    """
    clocks = np.zeros(len(submitted))
    for rank in range(1, len(submitted)):
        both = ~np.isnan(submitted[rank]) & ~np.isnan(submitted[0])
        if not both.any():
            continue
        most = float(np.min(ended[rank, both] - submitted[0, both]))
        least = float(np.max(submitted[rank, both] - ended[0, both]))
        if least <= most:  # else operations of a process set or of another kind have misled us: left as it is
            clocks[rank] = min(max(0.0, least), most)
    return clocks


def numbered(tensor: np.ndarray, gaps: np.ndarray, size_bytes: np.ndarray) -> np.ndarray:
    """The step of each operation, from 0, by the order in which tensors come: int64.

    When a recurring tensor comes again, a step has ended since it last came: where the longest time lies in which no operation was
    pending on any rank. Tensors that come more or less often belong to where they stand.

    Args:
        tensor: of each operation.
        gaps: float64, from the end of all operations before it until it was submitted; less than 0 if others were pending.
        size_bytes: of each operation.
    """
    recurs = recurring(tensor, size_bytes)
    begins = np.zeros(len(tensor), np.int64)
    latest: dict[int, int] = {}  # where each tensor of the present step came
    begun = 0
    for at, each in enumerate(tensor.tolist()):
        if not recurs[each]:
            continue
        if latest.get(each, -1) >= begun:
            begun = latest[each] + 1 + int(np.argmax(gaps[latest[each] + 1 : at + 1]))
            begins[begun] = 1
        latest[each] = at
    return np.cumsum(begins)


def recurring(tensor: np.ndarray, size_bytes: np.ndarray) -> np.ndarray:
    """By tensor whether it comes about as often as most bytes do that come again: bool.

    Of bytes, not of tensors: gradients travel one by one at first, and as a few buckets in all later steps.
    """
    count = np.bincount(tensor)
    again = count[tensor] > 1
    usual = _weighted_median(count[tensor][again], size_bytes[again] + 1.0)
    return (count >= max(2, 0.5 * usual)) & (count <= 1.5 * usual)


def without_remnants(step: np.ndarray, size_bytes: np.ndarray) -> np.ndarray:
    """Steps without what is none at the ends of a trace: an agreement before the first, a metric behind the last.

    What is there has a small part of the bytes of a step. It becomes part of the first step, or has -1.

    Args:
        step: of each operation, ascending.
        size_bytes: of those that come again; 0 for others.
    """
    of_steps = np.bincount(step, size_bytes)
    least = REMNANT * np.median(of_steps)
    first, last = 0, len(of_steps) - 1
    while first < last and of_steps[first] < least:
        first += 1
    while first < last and of_steps[last] < least:
        last -= 1
    return np.where(step > last, -1, np.maximum(step - first, 0))


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """The value at half of the weight; 0 of none."""
    if not len(values):
        return 0.0
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])


def _matched(traces: Sequence[RankTrace]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Operations of the world, the n-th of a name being one on all ranks: names, tensor, place by rank."""
    names = sorted({name for trace in traces for name in trace.names})
    number_of = {name: number for number, name in enumerate(names)}
    most = max(len(trace.submitted) for trace in traces) + 1
    keys = []
    for trace in traces:
        own = np.array([number_of[name] for name in trace.names], np.int64)[trace.tensor]
        keys.append(own * most + _occurrences(own, trace.submitted))
    every = np.unique(np.concatenate(keys))
    place = np.full((len(traces), len(every)), -1)
    for rank, own in enumerate(keys):
        place[rank, np.searchsorted(every, own)] = np.arange(len(own))
    return names, every // most, place


def _occurrences(tensor: np.ndarray, submitted: np.ndarray) -> np.ndarray:
    """How often each operation's tensor has come before."""
    order = np.lexsort((submitted, tensor))
    ordered = tensor[order]
    starts = np.concatenate(([True], ordered[1:] != ordered[:-1])) if len(ordered) else np.zeros(0, bool)
    first = np.maximum.accumulate(np.where(starts, np.arange(len(ordered)), 0)) if len(ordered) else ordered
    occurrences = np.empty(len(tensor), np.int64)
    occurrences[order] = np.arange(len(ordered)) - first
    return occurrences


def _by_operation(traces: Sequence[RankTrace], place: np.ndarray, moments: str) -> np.ndarray:
    """Such moments of each rank and operation of the world; NaN where a rank has none."""
    return np.stack([_picked(getattr(trace, moments), own) for trace, own in zip(traces, place, strict=True)])


def _picked(values: np.ndarray, place: np.ndarray) -> np.ndarray:
    picked = np.full(len(place), np.nan)
    has = place >= 0
    picked[has] = values[place[has]]
    return picked


def _earliest(submitted: np.ndarray) -> np.ndarray:
    return np.fmin.reduce(submitted, axis=0)


# ---- intervals ----


def union(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """What intervals cover: float64 of shape (intervals, 2), sorted and apart; those with NaN or no length are left out."""
    has = ends > begins
    begins, ends = begins[has], ends[has]
    if not len(begins):
        return np.zeros((0, 2))
    order = np.argsort(begins, kind="stable")
    begins, reached = begins[order], np.maximum.accumulate(ends[order])
    apart = np.concatenate(([True], begins[1:] > reached[:-1]))
    lasts = np.concatenate((np.flatnonzero(apart)[1:] - 1, [len(begins) - 1]))
    return np.stack([begins[apart], reached[lasts]], axis=1)


def length(intervals: np.ndarray) -> float:
    """Of intervals that are apart."""
    return float(np.sum(intervals[:, 1] - intervals[:, 0]))


def within(intervals: np.ndarray, begin: float, end: float) -> np.ndarray:
    """What of the intervals lies between two moments."""
    clipped = np.clip(intervals, begin, end)
    return clipped[clipped[:, 1] > clipped[:, 0]]


def common(one: np.ndarray, other: np.ndarray) -> float:
    """The length of what both cover, each of intervals that are apart."""
    both = np.concatenate([one, other])
    return length(one) + length(other) - length(union(both[:, 0], both[:, 1]))


def chosen_steps(count: int, most: int) -> Iterator[int]:
    """At most so many steps, evenly spread, without the first, which warms up, if there are others."""
    first = min(1, count - 1)
    yield from np.unique(np.linspace(first, count - 1, min(most, count - first)).round().astype(int)).tolist()
