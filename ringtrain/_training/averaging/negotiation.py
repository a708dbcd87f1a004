"""What ranks say to each other before they average, and what follows from it. Pure.

Each rank says one row of whole numbers, and sees those of all; so all come to the same result, or to the same error.
"""

import enum
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from ringtrain._training.adapter.checks import named_ranks
from ringtrain._training.terms import by_value
from ringtrain.errors import MismatchError


class AveragingStage(enum.IntEnum):
    """Why a rank has come."""

    TERMS = 0  # to compare the terms alone
    BEGIN = 1  # local steps begin, or go on from a checkpoint
    STEP = 2  # to average: a period has ended, or the user asks for it
    JOIN = 3  # to average as long as others do, having no more data


class AveragingRow(NamedTuple):
    """One rank's row.

    Attributes:
        rank: who says it.
        stage: why it has come.
        terms: digest of the terms.
        terms_bytes: their length, for those who must tell them.
        start: digest of the common copy and the outer momentum; 0 where they are not compared.
        round: number of synchronisations so far.
        steps: local steps since the last one.
        samples: what they weigh.
        counted: whether that is a number of samples, and not of steps.
        part: which part of the tensors it comes to average; what a rank without data says counts only among such.
        settings: digest of what its optimizer steps with; 0 where that is not compared.
        weights: how many numbers follow the row: of a rank that is to learn which part is averaged, the weight of each.
    """

    rank: int
    stage: int
    terms: int
    terms_bytes: int
    start: int
    round: int
    steps: int
    samples: int
    counted: int
    part: int = 0
    settings: int = 0
    weights: int = 0


class Agreed(NamedTuple):
    """What all ranks know after a meeting.

    Attributes:
        workers: how many ranks there are.
        samples: sum of their weights; 0: nobody has changed anything.
        is_last: whether no rank has more data.
        part: which part of the tensors is averaged.
    """

    workers: int
    samples: int
    is_last: bool
    part: int = 0


def part_of(rows: Sequence[AveragingRow]) -> int:
    """Which part of the tensors is averaged: what those say who train, if there are any."""
    training = [row for row in rows if row.stage != AveragingStage.JOIN]
    return (training or rows)[0].part


def decoded(numbers: Sequence[int]) -> list[AveragingRow]:
    """The rows of all ranks, of all their numbers; the weights that follow a row become its ``samples``."""
    rows: list[AveragingRow] = []
    weights: list[Sequence[int]] = []
    place, width = 0, len(AveragingRow._fields)
    while place < len(numbers):
        row = AveragingRow(*numbers[place : place + width])
        place += width
        rows.append(row)
        weights.append(numbers[place : place + row.weights])
        place += row.weights
    part = part_of(rows)
    return [row._replace(samples=own[part]) if part < len(own) else row for row, own in zip(rows, weights, strict=True)]


def terms_differ(rows: Sequence[AveragingRow]) -> bool:
    """Whether the ranks must tell each other their terms, to say what differs."""
    return len({row.terms for row in rows}) > 1


def settings_differ(rows: Sequence[AveragingRow]) -> bool:
    """Whether the ranks that train step with other settings."""
    return len({row.settings for row in rows if row.settings}) > 1


def agreed(rows: Sequence[AveragingRow], members: Sequence[int], name: str) -> Agreed:
    """What follows from the rows of all ranks, whose terms are equal.

    Args:
        rows: what came, in rank order; nothing of ranks that have called ``ringtrain.join``.
        members: all ranks.
        name: the subject of errors.

    Raises:
        MismatchError: the ranks cannot average; the same text on all.
    """
    present = [row.rank for row in rows]
    if len(rows) < len(members):
        gone = [rank for rank in members if rank not in present]
        raise MismatchError(
            f"synchronisation '{name}': all ranks must take part, but {named_ranks(gone)} "
            f"{'has' if len(gone) == 1 else 'have'} called ringtrain.join(). Where data are uneven, call the join() of the "
            "optimizer instead."
        )
    _require_equal(rows, lambda row: _STAGES[row.stage], name, (
        "what ranks wait for", "Load checkpoints on all ranks or on none, and take as many steps on each."))  # fmt: skip
    _require_equal(rows, lambda row: f"{row.start:016x}", name, (
        "the digest of parameters and outer momentum at the beginning",
        "Call broadcast_parameters, or load the same checkpoint, before the first step."))  # fmt: skip
    _require_equal(rows, lambda row: row.round, name, (
        "the number of synchronisations so far", "Load the same checkpoint on all ranks."))  # fmt: skip
    training = [row for row in rows if row.stage != AveragingStage.JOIN]
    _require_equal(training, lambda row: row.steps, name, (
        "the number of steps since the last synchronisation",
        "Call synchronize() on all ranks after the same step; where data are uneven, call the optimizer's join() on a rank "
        "that has no more."))  # fmt: skip
    _require_equal(training, lambda row: row.part, name, (
        "which part of the parameters is averaged", "Call synchronize() on all ranks or on none."))  # fmt: skip
    weighing = [row for row in rows if row.samples]
    _require_equal(weighing, lambda row: "samples" if row.counted else "steps", name, (
        "what workers are weighed by", "Call count_samples() before each step on all ranks, or on none."))  # fmt: skip
    return Agreed(len(rows), sum(row.samples for row in rows), not training, part_of(rows))


_STAGES: dict[int, str] = {
    AveragingStage.TERMS: "to begin",
    AveragingStage.BEGIN: "to begin",
    AveragingStage.STEP: "to average",
    AveragingStage.JOIN: "to average",
}


def _require_equal(
    rows: Sequence[AveragingRow], value_of: Callable[[AveragingRow], Hashable], name: str, words: tuple[str, str]
) -> None:
    values = [(row.rank, value_of(row)) for row in rows]
    if len({value for _, value in values}) > 1:
        subject, advice = words
        raise MismatchError(
            f"synchronisation '{name}': {subject} must be the same on all ranks, but is {by_value(values)}. {advice}"
        )
