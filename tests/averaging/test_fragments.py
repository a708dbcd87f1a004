"""What is decided about streaming fragments, without a world: which part leaves when, and what it is merged to."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ringtrain._training.averaging.fragments import Fragments, merged
from ringtrain._training.averaging.negotiation import Agreed, AveragingRow, AveragingStage, agreed, decoded
from ringtrain._training.averaging.period import Period
from ringtrain.errors import InvalidArgumentError, MismatchError

# ---- the schedule ----


@some.composite
def schedules(draw):
    every = draw(some.integers(1, 40))
    return Fragments(every, draw(some.integers(1, every)), draw(some.integers(0, every - 1)))


@settings(max_examples=15, deadline=None)
@given(schedules(), some.integers(0, 3))
def test_each_fragment_leaves_once_a_period_always_after_the_same_step(schedule, period):
    steps = range(period * schedule.every + 1, (period + 1) * schedule.every + 1)
    leaving = [schedule.leaving(step) for step in steps]
    assert [part for part in leaving if part is not None] == list(range(schedule.count))
    assert leaving == [schedule.leaving(step) for step in range(1, schedule.every + 1)]
    assert leaving[-1] == schedule.count - 1  # the period's last step has the last one
    assert schedule.leaving(0) is None


@settings(max_examples=15, deadline=None)
@given(schedules())
def test_fragments_leave_at_even_distances_and_are_back_before_they_leave_again(schedule):
    steps = [step for step in range(1, 3 * schedule.every + 1) if schedule.leaving(step) is not None]
    distances = {after - before for before, after in itertools.pairwise(steps)}
    assert max(distances) - min(distances) <= 1
    for part in range(schedule.count):
        own = [step for step in steps if schedule.leaving(step) == part]
        assert all(step + schedule.overlap < after for step, after in itertools.pairwise(own))


@settings(max_examples=15, deadline=None)
@given(some.integers(1, 8), some.lists(some.integers(1, 1000), min_size=1, max_size=60))
def test_fragments_are_of_like_size(count, sizes):
    """No fragment has more than the mean and the largest tensor together."""
    schedule, loads = Fragments(8, count), [0] * count
    for size in sizes:
        loads[schedule.least_loaded(loads)] += size
    assert max(loads) <= sum(sizes) / count + max(sizes)
    assert not len(sizes) >= count or min(loads) > 0


@settings(max_examples=15, deadline=None)
@given(schedules(), some.lists(some.integers(0, 5), max_size=100))
def test_what_steps_weigh_is_sent_once(schedule, samples):
    """In each fragment what was sent and what is left is all that was counted, also where something is recalled."""
    period, sent = Period(schedule.every, 0, schedule.count, schedule.overlap), [0] * schedule.parts
    for step, number in enumerate(samples):
        period.count_samples(number)
        period.note_step(used=step % 7 != 3)
        part = schedule.leaving(period.steps)
        if part is not None:
            weight = period.send(part)
            if step % 5 == 2:
                period.recall(part, weight)
            else:
                sent[part] += weight
    used = sum(number for step, number in enumerate(samples) if step % 7 != 3)
    assert [before + left for before, left in zip(sent, period.weights, strict=True)] == [used] * schedule.parts


@pytest.mark.parametrize("arguments, text", [
    ((4, 5), "fragments must be between 1 and 4 with every=4, but is 5"),
    ((4, 0), "fragments must be between 1 and 4"),
    ((4, 2.0), "fragments must be an integer, but is 2.0"),
    ((4, 1, 4), "overlap must be between 0 and 3 with every=4, but is 4"),
    ((4, 1, -1), "overlap must be between 0 and 3"),
    ((4, 2, 1, "none"), "merge must be one of additive, half, but is 'none'"),
    ((4, 2, 0, "half"), "merge must be additive without overlap, since .* but is 'half'"),
])  # fmt: skip
def test_fragments_that_cannot_be(arguments, text):
    with pytest.raises(InvalidArgumentError, match=f"local steps: {text}"):
        Fragments(*arguments)


def test_parts():
    assert (Fragments(4).parts, Fragments(4).streams, Fragments(4).of_buffers) == (1, False, 0)
    assert (Fragments(4, 1, 1).parts, Fragments(4, 3).parts, Fragments(4, 3).of_buffers) == (2, 4, 3)


# ---- merging ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_merging(dtype):
    x, sent, common = (np.array(values, dtype) for values in ([5.0, 1.0], [3.0, 1.5], [10.0, -2.0]))
    assert merged(x, sent.copy(), common, "additive").tolist() == [12.0, -2.5]  # 5 + (10 - 3)
    assert merged(x, x, common, "half").tolist() == [7.5, -0.5]
    assert merged(x, sent.copy(), common, "additive").dtype == merged(x, x, common, "half").dtype == dtype
    assert x.tolist() == [5.0, 1.0] and common.tolist() == [10.0, -2.0]


# ---- meetings ----


def row(rank, stage=AveragingStage.STEP, **said):
    usual = {"terms": 1, "terms_bytes": 9, "start": 0, "round": 3, "steps": 4, "samples": 4, "counted": 0}
    return AveragingRow(**{"rank": rank, "stage": stage, **usual, **said})


def test_a_rank_without_data_weighs_what_it_has_done_of_the_part_that_the_others_average():
    joined = row(1, AveragingStage.JOIN, part=0, weights=3, samples=99)
    numbers = [*row(0, part=2), *joined, 7, 8, 9, *row(2, part=2)]
    rows = decoded(numbers)
    assert [said.samples for said in rows] == [4, 9, 4]
    assert agreed(rows, [0, 1, 2], "x") == Agreed(3, 17, False, 2)


def test_of_ranks_without_data_each_says_the_part():
    rows = decoded(
        [*row(0, AveragingStage.JOIN, part=1, weights=2), 5, 6]
        + [*row(1, AveragingStage.JOIN, part=1, weights=2, steps=9), 7, 8]
    )
    assert agreed(rows, [0, 1], "x") == Agreed(2, 14, True, 1)


def test_other_parts_are_an_error():
    with pytest.raises(
        MismatchError, match="'x': which part of the parameters is averaged .* 0 on rank 0 and 1 on rank 1"
    ):
        agreed([row(0, part=0), row(1, part=1)], [0, 1], "x")
