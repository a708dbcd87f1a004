"""What follows from the steps of all ranks: where their time goes, what could be faster, and who is late; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ringtrain.launch.report.reading import STAGES, RankTrace
from ringtrain.launch.report.steps import Steps, chosen_steps, common, length, union, within

MOST_STEPS = 40  # of which averages are made
COUNTS = 0.02  # a share of a step below which nobody is called late
RARE, MOST_OF_IT = 0.1, 0.6  # late in so many steps, which have so much of all lateness
TWICE = 2.0
SMALL = 0.2  # a part of a step beside the other, of which no factor tells anything
# What a thread that waits for sums is held up by: of what happens at the same time, the first counts.
CAUSES = ("wire", "reduce", "unpack", "pack", "queue", "negotiate", "late ranks")
COMPUTING = ("before the first gradient", "from the first gradient to the last", "after the last gradient")
PARTS = (*COMPUTING, *CAUSES, "other waiting")


@dataclass(frozen=True)
class Link:
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
        verdicts: sentences.
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
    link: Link | None
    bytes_of_a_step: int
    tensors: list[TensorCost]
    late: list[LateRank]
    knows_waits: bool
    clock: float
    dropped: int
    verdicts: list[str]


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


def find(steps: Steps, link: Link | None = None) -> Findings:
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
    found = Findings(
        len(steps.traces),
        steps.count,
        float(np.median(durations[min(1, len(durations) - 1) :])),
        {part: float(np.mean([parts[part] for parts in of_ranks.values()])) for part in PARTS},
        of_ranks,
        median,
        1 - waited / total if total else 1.0,
        floor,
        min(floor / median, 1.0) if median else 1.0,
        link,
        size_bytes,
        tensor_costs(steps, sampled),
        late,
        knows_waits,
        float(np.abs(steps.clocks).max()),
        sum(trace.dropped for trace in steps.traces),
        [],
    )
    found.verdicts.extend(verdicts(found, steps.is_whole))
    return found


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
        begun, first, last, ended, kinds, union(waits[:, 0], waits[:, 1]), union(np.fmin(agreed, ends), ends)
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
        rank,
        last_in,
        _mean(late[counted]),
        before - usual_before,
        backward - usual_backward,
        before / max(usual_before, 1e-3),
        backward / max(usual_backward, 1e-3),
        len(rare),
        BEHIND
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


# ---- in words ----


def verdicts(found: Findings, is_whole: bool) -> list[str]:
    """What a person should know first."""
    said = []
    if is_whole:
        said.append("No operation comes twice under one name, so the whole trace stands here as one step.")
    computing = sum(found.parts[part] for part in COMPUTING)
    total = sum(found.parts.values()) or 1.0
    said.append(f"Of a mean step {_percent(computing / total)} is computing, and {_percent(1 - computing / total)} waiting for "
                f"sums; {_percent(found.overlap)} of the time in which sums were under way was hidden behind computing.")  # fmt: skip
    held_up = {part: found.parts[part] for part in PARTS if part not in COMPUTING}
    largest = max(held_up, key=lambda part: held_up[part])
    if held_up[largest] > COUNTS * total:
        said.append(f"What held the program up most: {largest}, {_percent(held_up[largest] / total)} of a step.")
    said.append(_floor_in_words(found))
    if found.late:
        said.append(_late_in_words(found))
    if not found.knows_waits:
        said.append("The traces do not say when the program waited: it is taken to wait from its last submission on.")
    if found.clock > 0:
        said.append(f"The clocks of the hosts differ; ranks were moved by up to {time_text(found.clock)}.")
    if found.dropped:
        said.append(f"{found.dropped} spans had no room in the traces and are missing here (timeline_events).")
    return said


def _floor_in_words(found: Findings) -> str:
    if found.link:
        what = f"{found.link.hosts} hosts at {found.link.rate * 8e-9:.3g} Gbit/s need at least {time_text(found.floor)}"
    else:
        what = f"the fastest step needed {time_text(found.floor)}"
    return (f"Sums were under way for {time_text(found.under_way)} of a step; {what}, "
            f"which is {_percent(found.floor_share)} of it.")  # fmt: skip


def _late_in_words(found: Findings) -> str:
    latest = found.late[0]
    if latest.late * (latest.rare_steps / found.steps if latest.rare_steps else 1) < COUNTS * found.step:
        return (f"No rank stands out: rank {latest.place} was last in {latest.last_in} of {found.steps} steps, "
                f"{time_text(max(latest.late, 0.0))} behind the others.")  # fmt: skip
    often = (f"in {latest.rare_steps} of {found.steps} steps, by {time_text(latest.late)}" if latest.rare_steps else
             f"by {time_text(latest.late)} on average, and the last in {latest.last_in} of {found.steps} steps")  # fmt: skip
    at = {"evenly": "evenly, before its first gradient and after it"}.get(latest.where, latest.where)
    return (f"Rank {latest.place} is late {often}: {at} "
            f"({_more(latest.before_ratio)} before its first gradient, {_more(latest.backward_ratio)} from there on); "
            f"{REASONS[latest.where]}.")  # fmt: skip


def _more(ratio: float) -> str:
    return f"{ratio:.2f} times the others' time"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def time_text(microseconds: float) -> str:
    """``12.3 ms``."""
    for unit, size in (("µs", 1.0), ("ms", 1e3)):
        if microseconds < 999.5 * size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{number_text(microseconds / 1e6)} s"


def number_text(number: float) -> str:
    """Three digits, or all of a whole number that has more: ``0.0123``, ``12.3``, ``1512``."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
