"""Which ranks are late, by how much, and in which part of a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ringtrain.launch.report.steps import Steps

RARE, MOST_OF_IT = 0.1, 0.6  # late in so many steps, which have so much of all lateness
TWICE = 2.0
SMALL = 0.2  # a part of a step beside the other, of which no factor tells anything


@dataclass(frozen=True)
class LateRank:
    """A rank beside the middle one of the others, on average over the steps; in microseconds.

    Attributes:
        rank: which one.
        last_in: number of steps in which it was the last of all to submit its last gradient.
        late: how much later it submitted its last gradient; with ``BEHIND`` what comes in few steps, as a metric, after it.
        before_first: how much longer it took until its first gradient: input, forward pass, the update before.
        in_backward: how much longer it took from there to its last one.
        before_ratio, backward_ratio: its times, divided by those of the middle one of the others.
        rare_steps: the number of steps in which it was late, if they are few; else 0.
        where: one of ``REASONS``.
        host: its name; "" if all ranks are on one, or the traces do not say.
    """

    rank: int
    last_in: int
    late: float
    before_first: float
    in_backward: float
    before_ratio: float
    backward_ratio: float
    rare_steps: int
    where: str
    host: str = ""

    @property
    def place(self) -> str:
        """For people: ``3``, or ``3 (host node-b)``."""
        return f"{self.rank} (host {self.host})" if self.host else f"{self.rank}"


def late_ranks(steps: Steps) -> list[LateRank]:
    """All ranks beside the others, the latest first; empty for a single one."""
    count = len(steps.traces)
    if count < 2:
        return []
    chosen = slice(1 if steps.count > 1 else 0, None)
    begun, first = steps.begun[:, chosen], steps.first[:, chosen]
    usual, behind = steps.usual[:, chosen], np.fmax(steps.last - steps.summed, 0.0)[:, chosen]
    was_last = np.bincount(np.argmax(np.nan_to_num(usual, nan=-np.inf), axis=0), minlength=count)
    found = [
        _late_rank(rank, steps.traces[rank].rank, int(was_last[rank]), begun, first, usual, behind)
        for rank in range(count)
    ]
    if len({trace.host for trace in steps.traces}) > 1:
        found = [replace(each, host=trace.host) for each, trace in zip(found, steps.traces, strict=True)]
    return sorted(found, key=lambda each: -each.late)


def _late_rank(
    row: int, rank: int, last_in: int, begun: np.ndarray, first: np.ndarray, usual: np.ndarray, behind: np.ndarray
) -> LateRank:
    others = np.arange(len(first)) != row

    def middle(times: np.ndarray) -> np.ndarray:
        return np.nanmedian(times[others], axis=0)

    late, late_behind = usual[row] - middle(usual), behind[row] - middle(behind)
    is_behind = _mean(late_behind) > max(_mean(late), 0.0)
    late = late_behind if is_behind else late
    counted = ~np.isnan(late)
    rare = _rare_steps(np.where(counted, late, 0.0))
    if len(rare):
        counted = np.isin(np.arange(len(late)), rare)
    before, usual_before = _mean((first - begun)[row, counted]), _mean(middle(first - begun)[counted])
    backward, usual_backward = _mean((usual - first)[row, counted]), _mean(middle(usual - first)[counted])
    return LateRank(
        rank=rank,
        last_in=last_in,
        late=_mean(late[counted]),
        before_first=before - usual_before,
        in_backward=backward - usual_backward,
        before_ratio=before / max(usual_before, 1e-3),
        backward_ratio=backward / max(usual_backward, 1e-3),
        rare_steps=len(rare),
        where=BEHIND
        if is_behind
        else where_late(before - usual_before, backward - usual_backward, usual_before, usual_backward),
    )


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if len(values) else 0.0


def _rare_steps(late: np.ndarray) -> np.ndarray:
    """The steps in which a rank was late, if a few have most of its lateness; else none."""
    most = int(RARE * len(late))
    positive = np.maximum(late, 0.0)
    order = np.argsort(-positive)
    sums = np.cumsum(positive[order])
    if most < 1 or sums[-1] <= 0 or sums[most - 1] < MOST_OF_IT * sums[-1]:
        return np.zeros(0, np.int64)
    return order[: int(np.searchsorted(sums, MOST_OF_IT * sums[-1])) + 1]


def where_late(before: float, backward: float, usual_before: float, usual_backward: float) -> str:
    """Where a rank loses its time: it takes so much longer in two parts of a step, which usually take so long.

    One that is slow in all that it does is slower by the same factor in both; else it is where the factor is the larger, unless
    the time is in the other: a part that hardly takes time has any factor. One that is late, but longer in neither, has had the
    sums of the step before later than the others.
    """
    if before <= 0 and backward <= 0:
        return "with the sums of the step before"
    if backward <= 0 or (usual_backward < SMALL * usual_before and before >= backward):
        return "before its first gradient"
    if before <= 0 or usual_before <= 0:
        return "in its backward pass"
    ratio = (before / usual_before) / (backward / usual_backward)
    if 1 / TWICE <= ratio <= TWICE:
        return "evenly"
    is_before = before >= backward / TWICE if ratio > TWICE else before > backward * TWICE
    return "before its first gradient" if is_before else "in its backward pass"


BEHIND = "behind its last gradient"
REASONS = {
    BEHIND: "look at what only this rank does between two steps, as to save a file, before an operation of all",
    "before its first gradient": "look at its input, at what only this rank does, and at its forward pass",
    "with the sums of the step before": "it has them later than others: look at what shares its cores, and at its clock",
    "in its backward pass": "look at what shares its cores, and at what else it computes there",
    "evenly": "its processor is slower, or shared with something else",
}
