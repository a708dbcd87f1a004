"""What is decided about local steps, without a world: which step averages, what ranks must agree on, the outer update."""

import numpy as np
import pytest

from ringtrain._runtime.process_sets import RankPlace, ranks_by_host
from ringtrain._training import terms
from ringtrain._training.averaging.negotiation import AveragingRow, AveragingStage, agreed, terms_differ
from ringtrain._training.averaging.outer import Outer, advance
from ringtrain._training.averaging.period import Period, factor_of
from ringtrain.errors import InvalidArgumentError, MismatchError

# ---- which step averages ----


@pytest.mark.parametrize("every, warmup, expected", [
    (1, 0, [1, 2, 3, 4, 5, 6, 7]), (3, 0, [3, 6]), (3, 2, [5]), (2, 1, [3, 5, 7]), (9, 0, [])])  # fmt: skip
def test_steps_that_average(every, warmup, expected):
    period, found = Period(every, warmup), []
    for step in range(1, 8):
        period.note_step()
        if period.due and not period.warms_up:
            found.append(step)
            period.begin()
    assert found == expected and period.round == len(expected) and period.total == 7


def test_what_steps_weigh():
    period = Period(4)
    period.note_step()
    period.note_step(used=False)  # skipped by a scaler
    assert (period.steps, period.samples, period.counted) == (2, 1, False)
    period.begin()
    for samples in (5, 0, 7):
        period.count_samples(samples)
        period.note_step()
    period.count_samples(2)
    period.count_samples(3)
    period.note_step(used=False)
    assert (period.steps, period.samples, period.counted, period.due) == (4, 12, True, True)


def test_a_period_goes_on_where_it_was_saved():
    period = Period(5, 1)
    for samples in (1, 2, 3):
        period.count_samples(samples)
        period.note_step()
    other = Period(5, 1)
    other.load(period.state())
    assert other.state() == period.state() and other.counted is True


@pytest.mark.parametrize("arguments, text", [
    ((0,), "local steps: every must be at least 1, but is 0"),
    ((2.5,), "local steps: every must be an integer, but is 2.5"),
    ((True,), "local steps: every must be an integer"),
    ((1, -1), "local steps: warmup must be at least 0, but is -1"),
])  # fmt: skip
def test_periods_that_cannot_be(arguments, text):
    with pytest.raises(InvalidArgumentError, match=text):
        Period(*arguments)
    with pytest.raises(InvalidArgumentError, match="samples must be at least 0"):
        Period(1).count_samples(-1)


def test_equal_weights_are_the_plain_average():
    assert [factor_of(samples, 8, 2) for samples in (3, 4, 5, 0, 8)] == [0.75, 1.0, 1.25, 0.0, 2.0]
    assert factor_of(7, 21, 3) == 1.0


# ---- the outer update ----


def test_plain_averaging():
    common = np.array([4.0, 8.0], np.float32)
    advance(common, np.array([1.0, -2.0], np.float32), None, None)
    assert common.tolist() == [3.0, 10.0]


def test_three_steps_of_nesterov_are_those_of_the_paper():
    outer, random = Outer(0.7, 0.9), np.random.default_rng(1)
    common, velocity = random.standard_normal(50), np.zeros(50)
    expected, m = common.copy(), np.zeros(50)
    for _ in range(3):
        change = random.standard_normal(50)
        m = 0.9 * m + change
        expected = expected - 0.7 * (change + 0.9 * m)
        advance(common, change.copy(), outer, velocity)
    np.testing.assert_allclose(common, expected, rtol=1e-14)
    np.testing.assert_allclose(velocity, m, rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rate_one_without_momentum_is_plain_averaging(dtype):
    change = np.random.default_rng(0).standard_normal(99).astype(dtype)
    one, other = np.ones(99, dtype), np.ones(99, dtype)
    advance(one, change.copy(), None, None)
    advance(other, change.copy(), Outer(1, 0), None)
    assert one.tobytes() == other.tobytes() and one.dtype == dtype


@pytest.mark.parametrize("arguments, text", [
    ((0, 0.9), "Outer: rate must be a number above 0, but is 0"),
    ((float("nan"),), "Outer: rate must be a number above 0, but is nan"),
    (("0.7",), "Outer: rate must be a number above 0, but is '0.7'"),
    ((0.7, 1.0), r"Outer: momentum must be a number in \[0, 1\), but is 1.0"),
    ((0.7, None), r"Outer: momentum must be a number in \[0, 1\), but is None"),
])  # fmt: skip
def test_outer_optimizers_that_cannot_be(arguments, text):
    with pytest.raises(InvalidArgumentError, match=text):
        Outer(*arguments)


# ---- meetings ----


def rows(*changes, **all_have):
    """What ranks say; each change is that of one rank."""
    usual = {
        "stage": AveragingStage.STEP, "terms": 1, "terms_bytes": 9, "start": 0, "round": 3, "steps": 4, "samples": 4, "counted": 0,
    } | all_have  # fmt: skip
    return [AveragingRow(rank, **(usual | change)) for rank, change in enumerate(changes)]


def test_ranks_that_agree():
    known = agreed(rows({}, {}, {}), [0, 1, 2], "x")
    assert known == (3, 12, False, 0)


def test_ranks_without_data_weigh_what_they_have_done():
    known = agreed(rows({"stage": AveragingStage.JOIN, "steps": 1, "samples": 1}, {}), [0, 1], "x")
    assert known == (2, 5, False, 0)
    assert agreed(rows({"samples": 0}, {}, stage=AveragingStage.JOIN), [0, 1], "x").is_last


def test_who_has_nothing_need_not_have_counted():
    known = agreed(rows({"counted": 1, "samples": 8}, {"samples": 0, "counted": 0}), [0, 1], "x")
    assert known.samples == 8


@pytest.mark.parametrize("changes, text", [
    (({}, {"steps": 5}), "number of steps since the last synchronisation must be the same on all ranks, but is 4 on rank 0 "
     "and 5 on rank 1"),
    (({}, {"round": 2}, {}), "number of synchronisations so far must be the same on all ranks, but is 3 on ranks 0, 2 and "
     "2 on rank 1"),
    (({}, {"stage": AveragingStage.BEGIN}), "what ranks wait for must be the same on all ranks, but is to average on rank 0 and "
     "to begin on rank 1"),
    (({}, {"start": 7}), "digest of parameters and outer momentum at the beginning must be the same"),
    (({}, {"counted": 1}), "what workers are weighed by must be the same on all ranks, but is steps on rank 0 and samples "
     "on rank 1"),
])  # fmt: skip
def test_ranks_that_cannot_average(changes, text):
    with pytest.raises(MismatchError, match=f"synchronisation 'x': .*{text}"):
        agreed(rows(*changes), list(range(len(changes))), "x")


def test_ranks_that_have_joined_the_world_are_named():
    with pytest.raises(MismatchError, match=r"but ranks 0, 2 have called ringtrain.join\(\)"):
        agreed(rows({}, {})[1:], [0, 1, 2], "x")


def test_terms_that_differ():
    assert terms_differ(rows({}, {"terms": 2})) and not terms_differ(rows({}, {}))
    own = {"every": 4, "outer": [0.7, 0.9], "compression": "none"}
    assert terms.decoded(terms.encoded(own)) == own
    assert terms.difference([(0, own), (1, dict(own))]) is None
    other = own | {"outer": None}
    assert terms.difference([(0, own), (1, other), (2, own)]) == (
        "outer",
        "[0.7, 0.9] on ranks 0, 2 and None on rank 1",
    )
    more = own | {"tensor 'w'": "float32 of 4"}
    assert terms.difference([(0, own), (1, more)]) == (
        "tensor 'w'",
        "absent on rank 0 and float32 of 4 on rank 1",
    )


# ---- hosts ----


@pytest.mark.parametrize("hosts", [
    [[0, 1, 2]], [[0], [1]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3, 4], [1], [2, 5]], [[0], [1, 2, 3], [4, 5]]])  # fmt: skip
def test_ranks_of_each_host(hosts):
    places = []
    for number, ranks in enumerate(hosts):
        for local_rank, rank in enumerate(ranks):
            before = sum(len(other) > local_rank for other in hosts[:number])
            places.append(RankPlace(rank, local_rank, len(ranks), before))
    assert ranks_by_host(places) == hosts
    assert ranks_by_host(places[::-1]) == hosts
