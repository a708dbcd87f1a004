"""What follows from the steps of all ranks: where their time goes, what could be faster; pure. `lateness` has who is late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringtrain.launch.report.lateness import LateRank, late_ranks
from ringtrain.launch.report.steps import Steps, chosen_steps, common, length, union, within
from ringtrain.launch.report.trace_arrays import STAGES, RankTrace

MOST_STEPS = 40  # of which averages are made
# What a thread that waits for sums is held up by: of what happens at the same time, the first counts.
CAUSES = ("wire", "reduce", "unpack", "pack", "queue", "negotiate", "late ranks")
COMPUTING = ("before the first gradient", "from the first gradient to the last", "after the last gradient")
PARTS = (*COMPUTING, *CAUSES, "other waiting")


@dataclass(frozen=True)
class Interconnect:
    """What connects the hosts: bytes a second of each, and how many hosts."""

    rate: float
    hosts: int


@dataclass(frozen=True)
class TensorCost:
    """A tensor's share of the time under way, by step and rank; in microseconds.

    Attributes:
        name: of the tensor, behind that of the operation.
        size_bytes: of one rank.
        under_way: from the agreement of all to the sum; tensors of one batch share its time by their bytes.
        waiting: from a rank's submission until the last rank's.
        ended_last: the share of steps in which its sum was the last.
    """

    name: str
    size_bytes: int
    under_way: float
    waiting: float
    ended_last: float


@dataclass(frozen=True)
class Findings:
    """All that the page says; times in microseconds.

    Attributes:
        ranks, steps: how many.
        step: of a step, the median; the first does not count if there are others.
        parts: by name, of a mean step of a mean rank; they add up to it.
        parts_of_ranks: the same for each rank, by its number.
        under_way: of a step, in which sums were under way on a mean rank.
        overlap: the share of it in which the program did not wait.
        floor: what a step's sums take at least: by the link, or as in the fastest step.
        floor_share: floor by the median of the time under way.
        link: where the floor comes from; None: from the fastest step.
        bytes_of_a_step: of one rank.
        tensors: the most expensive first.
        late: the latest rank first.
        knows_waits: whether the traces say when the program waited; else it is taken to wait from its last submission on.
        clock: the most that a rank's clock was moved.
        dropped: spans that the traces had no room for.
        is_whole: whether there is but one step, which has all, as in ``Steps``.
    """

    ranks: int
    steps: int
    step: float
    parts: dict[str, float]
    parts_of_ranks: dict[int, dict[str, float]]
    under_way: float
    overlap: float
    floor: float
    floor_share: float
    link: Interconnect | None
    bytes_of_a_step: int
    tensors: list[TensorCost]
    late: list[LateRank]
    knows_waits: bool
    clock: float
    dropped: int
    is_whole: bool


@dataclass
class RankStep:
    """One step of one rank, as intervals of shape (intervals, 2) that are apart.

    Attributes:
        begun, first, last, ended: moments, as in ``Steps``.
        kinds: by name, ``CAUSES``.
        waited: when the program waited.
        under_way: from the agreement on an operation to its end.
    """

    begun: float
    first: float
    last: float
    ended: float
    kinds: dict[str, np.ndarray]
    waited: np.ndarray
    under_way: np.ndarray


def find(steps: Steps, link: Interconnect | None = None) -> Findings:
    """What the steps say."""
    sampled = list(chosen_steps(steps.count, MOST_STEPS))
    durations = step_durations(steps)
    knows_waits = any(len(trace.waits) for trace in steps.traces)
    rank_steps = {step: [rank_step(steps, rank, step) for rank in range(len(steps.traces))] for step in sampled}
    of_ranks = {
        trace.rank: _mean_parts([each for step in sampled if (each := rank_steps[step][number]) is not None])
        for number, trace in enumerate(steps.traces)
    }
    every = [each for of_step in rank_steps.values() for each in of_step if each is not None]
    under_way = np.array([np.mean([length(each.under_way) for each in of_step if each is not None] or [0.0])
                          for of_step in rank_steps.values()])  # fmt: skip
    total = sum(length(each.under_way) for each in every)
    waited = sum(common(each.under_way, each.waited) for each in every)
    size_bytes, link_bytes = _bytes_of_a_step(steps, sampled, link.hosts if link else len(steps.traces))
    median = float(np.median(under_way))
    floor = link_bytes / link.rate * 1e6 if link else float(under_way.min())
    late = late_ranks(steps)
    return Findings(
        ranks=len(steps.traces),
        steps=steps.count,
        step=float(np.median(durations[min(1, len(durations) - 1) :])),
        parts={part: float(np.mean([parts[part] for parts in of_ranks.values()])) for part in PARTS},
        parts_of_ranks=of_ranks,
        under_way=median,
        overlap=1 - waited / total if total else 1.0,
        floor=floor,
        floor_share=min(floor / median, 1.0) if median else 1.0,
        link=link,
        bytes_of_a_step=size_bytes,
        tensors=tensor_costs(steps, sampled),
        late=late,
        knows_waits=knows_waits,
        clock=float(np.abs(steps.clocks).max()),
        dropped=sum(trace.dropped for trace in steps.traces),
        is_whole=steps.is_whole,
    )


def step_durations(steps: Steps) -> np.ndarray:
    """Of each step, the mean over the ranks: float64 of shape (steps,)."""
    return np.nanmean(steps.ended - steps.begun, axis=0)


# ---- one step of one rank ----


def rank_step(steps: Steps, rank: int, step: int) -> RankStep | None:
    """A step of a rank, by its place among the traces; None if it has no operation in it."""
    operations = steps.operations_of(step)
    place = steps.place[rank, operations]
    has = place >= 0
    if not has.any():
        return None
    trace, own = steps.traces[rank], place[has]
    begun, first, last, ended = (
        float(moments[rank, step]) for moments in (steps.begun, steps.first, steps.last, steps.ended)
    )
    begun = min(begun, first)
    all_submitted = np.fmax.reduce(
        np.stack([_of_those(each, "submitted", steps.place[number, operations][has])
                  for number, each in enumerate(steps.traces)])
    )  # fmt: skip
    submitted, agreed, ends = trace.submitted[own], trace.agreed[own], trace.ended[own]
    latest = np.fmin(all_submitted, agreed)
    kinds = {stage: union(trace.stages[own, number, 0], trace.stages[own, number, 1])
             for number, stage in enumerate(STAGES)}  # fmt: skip
    kinds["queue"] = union(agreed, trace.started[own])
    kinds["negotiate"] = union(latest, agreed)
    kinds["late ranks"] = union(submitted, latest)
    waits = within(_waits(trace, begun, ended), begun, ended) if len(trace.waits) else np.array([[last, ended]])
    return RankStep(
        begun=begun,
        first=first,
        last=last,
        ended=ended,
        kinds=kinds,
        waited=union(waits[:, 0], waits[:, 1]),
        under_way=union(np.fmin(agreed, ends), ends),
    )


def _of_those(trace: RankTrace, moments: str, place: np.ndarray) -> np.ndarray:
    return np.where(place >= 0, getattr(trace, moments)[place], np.nan)


def _waits(trace: RankTrace, begin: float, end: float) -> np.ndarray:
    """Those that may lie between two moments; they stand in the order of their ends."""
    return trace.waits[np.searchsorted(trace.waits[:, 1], begin) :][: max(1, np.searchsorted(trace.waits[:, 0], end))]


def parts_of(step: RankStep) -> dict[str, float]:
    """Where a step's time has gone; the parts add up to it."""
    parts = dict.fromkeys(PARTS, 0.0)
    borders = [step.begun, step.first, step.last, step.ended]
    for part, begin, end in zip(COMPUTING, borders, borders[1:], strict=False):
        parts[part] = max(end - begin, 0.0) - length(within(step.waited, begin, end))
    known, held_up = np.zeros((0, 2)), 0.0
    for cause in CAUSES:
        known = np.concatenate([known, step.kinds[cause]])
        known = union(known[:, 0], known[:, 1])
        explained = common(known, step.waited)
        parts[cause] = explained - held_up
        held_up = explained
    parts["other waiting"] = length(step.waited) - held_up
    return parts


def _mean_parts(rank_steps: Sequence[RankStep]) -> dict[str, float]:
    each = [parts_of(step) for step in rank_steps]
    return {part: float(np.mean([parts[part] for parts in each])) if each else 0.0 for part in PARTS}


# ---- bytes and tensors ----


def _bytes_of_a_step(steps: Steps, sampled: Sequence[int], hosts: int) -> tuple[int, float]:
    """Bytes of one rank, and those of them that each host must send at least; means of the steps."""
    size_bytes = _size_bytes(steps)
    factor = np.array([2 if name.startswith("allreduce.") else 1 for name in steps.names]) * (hosts - 1) / max(hosts, 1)
    of_steps = [steps.operations_of(step) for step in sampled]
    total = np.mean([size_bytes[each].sum() for each in of_steps])
    return int(total), float(np.mean([(size_bytes[each] * factor[steps.tensor[each]]).sum() for each in of_steps]))


def _size_bytes(steps: Steps) -> np.ndarray:
    """Of each operation of the world, the most of any rank."""
    sizes = np.zeros(len(steps.tensor))
    for trace, place in zip(steps.traces, steps.place, strict=True):
        has = place >= 0
        sizes[has] = np.maximum(sizes[has], trace.size_bytes[place[has]])
    return sizes


def tensor_costs(steps: Steps, sampled: Sequence[int]) -> list[TensorCost]:
    """Of each tensor in these steps, the most expensive first."""
    count = len(steps.names)
    under_way, waiting, ended_last, times = (np.zeros(count) for _ in range(4))
    submitted = steps.of("submitted")
    all_submitted = np.fmax.reduce(submitted, axis=0)
    sizes = _size_bytes(steps)
    for step in sampled:
        operations = steps.operations_of(step)
        tensor = steps.tensor[operations]
        latest = np.zeros(len(tensor))
        for rank, trace in enumerate(steps.traces):
            place = steps.place[rank, operations]
            has = place >= 0
            share = _shares_of_batches(trace, place[has], sizes[operations][has])
            np.add.at(under_way, tensor[has], share)
            np.add.at(waiting, tensor[has], (all_submitted[operations] - submitted[rank, operations])[has])
            np.add.at(times, tensor[has], 1)
            latest[has] = np.maximum(latest[has], trace.ended[place[has]])
        ended_last[tensor[int(np.argmax(latest))]] += 1
    largest = np.zeros(count)
    np.maximum.at(largest, steps.tensor, sizes)
    seen = np.flatnonzero(times)
    order = seen[np.argsort(-under_way[seen], kind="stable")]
    rank_steps = len(steps.traces) * len(sampled)
    return [
        TensorCost(steps.names[each], int(largest[each]), float(under_way[each] / rank_steps),
                   float(waiting[each] / times[each]), float(ended_last[each] / len(sampled)))
        for each in order
    ]  # fmt: skip


def _shares_of_batches(trace: RankTrace, place: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Of each operation the part of its batch's time that falls to its bytes. A batch is agreed upon at one moment."""
    agreed = np.where(np.isnan(trace.agreed[place]), trace.submitted[place], trace.agreed[place])
    _, batch = np.unique(np.round(agreed, 1), return_inverse=True)
    count = int(batch.max(initial=-1)) + 1
    ended = np.full(count, -np.inf)
    np.maximum.at(ended, batch, trace.ended[place])
    of_batch = np.bincount(batch, sizes + 1, count)  # one more, since a batch may have no bytes
    return (ended[batch] - agreed) * (sizes + 1) / of_batch[batch]


# ---- who is late ----


# ---- in words ----
