"""When ranks compare what they step with and their parameters, and the words in which they hear of a difference. Pure."""

import numpy as np
import pytest

import ringtrain as rt
from ringtrain._training import differences, drift, rounds, trained, watch
from ringtrain._training.adapter import checks
from ringtrain._training.differences import Differences
from ringtrain._training.drift import ComparedReplica, Forms, Told, Words
from ringtrain._training.rounds import Said
from ringtrain._training.session import Session
from ringtrain._training.trained import Parameter
from ringtrain.errors import MismatchError
from ringtrain.testing import World

CALLED = Words("broadcast_all()")


class Rank:
    """A replica, and what it has."""

    def __init__(self):
        self.now = 0.0
        self.settings = {"lr": 0.1, "betas": [0.9, 0.999]}
        self.parameters = [("w", np.ones(3, np.float32)), ("b", np.zeros(2))]
        self.took = 0.0
        self.replica = ComparedReplica(
            lambda: dict(self.settings), self.read, Forms(checks.digest, np.copy), CALLED, clock=lambda: self.now
        )

    def read(self):
        self.now += self.took
        return self.parameters

    def round(self, any_asks=None):
        """Of a step, which then makes its update."""
        told = self.replica.tell(comes_alike=True)
        self.replica.hear(told.asks if any_asks is None else any_asks)
        self.replica.note_step()
        return told


def test_parameters_are_compared_after_the_first_update_and_once_a_second():
    rank = Rank()
    compared = []
    for number in range(20):
        rank.now = number / 4
        if rank.round().parameters is not None:
            compared.append(number)
    assert compared == [1, 5, 9, 13, 17]  # asked for after a second, told after the next update


def test_what_takes_long_is_compared_less_often():
    rank = Rank()
    rank.took = 0.5  # then it is due after 500 s
    compared, number = [], 0
    for number in range(2000):
        rank.now = max(rank.now, float(number))
        if rank.round().parameters is not None:
            compared.append(number)
    assert len(compared) == 4 and min(np.diff(compared)) >= 500


def test_what_is_not_seen_of_a_look_counts():
    """Of a program, whose look is a call of the host, with copies of the parameters."""
    compared, now = [], 0.0
    with World(1) as world:

        def body(rank):
            nonlocal now
            watched = watch.Watch(Session(rt.global_process_set), "model", CALLED, clock=lambda: now)
            parameters = [("w", np.ones(1_000_000, np.float32))]
            for number in range(200):
                now = number / 10
                row = watched.row({})
                if row[-1]:
                    compared.append(now)
                    watched.digests(row, parameters)

        world.run(body)
    assert compared == [1.0, 7.0, 13.0, 19.0]  # from the tenth step on, however long the first ones took; each is 6 ms


def test_a_rank_tells_when_another_one_asks():
    rank = Rank()
    assert rank.round().parameters is None and rank.round().parameters is not None
    assert rank.round(any_asks=True).parameters is None
    assert rank.round().parameters is not None
    assert rank.round().parameters is None


def test_a_round_that_does_not_come_alike_tells_what_the_last_update_has_left():
    rank = Rank()
    rank.round()
    rank.parameters[0][1][0] = 7.0  # for a while
    told = rank.replica.tell(comes_alike=False)
    other = Rank()
    other.round()
    assert told == other.replica.tell(comes_alike=True)._replace(settings=None)


def test_what_was_not_every_ranks_step_is_not_told():
    rank = Rank()
    rank.round()
    rank.replica.forget_step()
    assert rank.round()[1:3] == (None, None)


def test_each_setting_and_each_parameter_makes_another_digest():
    rank = Rank()
    rank.round()
    first = rank.round(any_asks=True)
    rank.settings = {"lr": 0.1, "betas": [0.9, 0.99]}
    second = rank.round(any_asks=True)
    assert second.settings != first.settings and second.parameters == first.parameters
    rank.parameters[1][1][1] = 1e-300
    rank.round(any_asks=True)
    third = rank.round()
    assert third.settings == second.settings and third.parameters != second.parameters


def test_the_order_of_settings_is_nobodys_difference():
    """A schedule that is made later has put its own behind the others."""
    one, other = Rank(), Rank()
    other.settings = dict(reversed(other.settings.items()))
    assert one.round().settings == other.round().settings


def test_settings_of_the_last_update_are_told():
    rank = Rank()
    assert rank.round().last_settings is None
    rank.settings = {"lr": 0.2}
    told = rank.round()
    assert told.last_settings is not None and told.last_settings != told.settings


ROWS = ["settings", "last settings", "parameters"]


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("values, equal", [
    ((5, 5), True), ((None, 5), True), ((None, None), True), ((5, None, 5), True),
    ((5, 6), False), ((5, None, 6), False), ((2**62, 5), False),
])  # fmt: skip
def test_a_round_compares_those_that_know(row, values, equal):
    told = [Told(*(value if place == row else 7 for place in range(3))) for value in values]
    own = [rounds.encoded(Said(b"\1\2", False), 3, b"{}", each) for each in told]
    agreed = bytes(map(max, zip(*own, strict=True)))
    for place, name in enumerate(ROWS):
        assert rounds.are_equal(name, agreed) is (equal or place != row)
    assert rounds.are_equal("steps", agreed) and rounds.are_equal("terms", agreed)
    assert rounds.decoded(agreed).codes == b"\1\2"


@pytest.mark.parametrize("values, equal", [
    ((5, 5), True), ((None, 5), True), ((None, None), True), ((5, 6), False), ((5, None, 5 + 2**31), False), ((0, 1), False),
])  # fmt: skip
def test_a_round_compares_what_those_train_that_tell(values, equal):
    own = [rounds.encoded(Said(b"\1\2", False), 3, b"{}", Told(7, 7, 7), each) for each in values]
    agreed = bytes(map(max, zip(*own, strict=True)))
    assert rounds.are_equal("trained", agreed) is equal
    assert all(rounds.are_equal(name, agreed) for name in [*ROWS, "steps", "terms"])


def parameters_of(*names, shape="[2]"):
    return [Parameter(name, shape) for name in names]


@pytest.mark.parametrize(
    "of_ranks, words",
    [
        ([("a/w", "b/w"), ("b/w",)], "'a/w' of shape [2] is trained on rank 0 and not on rank 1."),
        ([("b/w",), ("a/w", "b/w"), ("b/w",)], "'a/w' of shape [2] is trained on rank 1 and not on ranks 0, 2."),
        ([("m/d_1/w", "m/d_2/w"), ("m/d_2/w",)], "'m/d_1/w' of shape [2] is trained on rank 0 and not on rank 1."),
        ([("m/d/w", "m/d_1/w"), ("n/d_7/w",)], "'m/d_1/w' of shape [2] is trained on rank 0 and not on rank 1."),
        ([("a", "c"), ("b", "c")], "'a' of shape [2] is trained on rank 0 and not on rank 1 and 'b' of shape [2] is trained on rank 1 and"),
        ([("a", "a"), ("a",)], "'a' of shape [2] is trained on rank 0 and not on rank 1."),
        ([("a", "b"), ("b", "a")], "but their order differs."),
        ([tuple("abcdefz"), ("z",)], "'d' of shape [2] and 2 more are trained on rank 0 and not on rank 1."),
    ],
)  # fmt: skip
def test_the_error_of_what_is_trained_names_it_and_both_sides(of_ranks, words):
    told = list(enumerate(parameters_of(*names) for names in of_ranks))
    assert words in trained.unequal_trained("model", told) and not trained.are_alike(told)


def test_paths_of_models_that_were_counted_otherwise_are_alike():
    one, other = parameters_of("sequential/dense_1/kernel"), parameters_of("sequential_3/dense_7/kernel")
    assert trained.digest_of(one) == trained.digest_of(other) and trained.are_alike([(0, one), (1, other)])
    assert trained.digest_of(one) != trained.digest_of(parameters_of("sequential/dense_1/kernel", shape="[3]"))
    assert trained.decoded(trained.encoded(one)) == one


def test_settings_are_called_by_their_group():
    groups = [{"lr": 0.1, "params": None}, {"lr": 0.2, "params": None}]
    assert drift.flat_settings(groups) == {"lr of group 0": 0.1, "lr of group 1": 0.2}
    assert drift.flat_settings(groups[:1]) == {"lr": 0.1}


def test_the_error_of_settings_leaves_out_who_does_not_know():
    theirs = [(0, {"lr": 0.1}), (1, {}), (2, {"lr": 0.2})]
    text = differences.unequal_settings("optimizer.0", theirs, "was in the last step", CALLED)
    assert text.startswith(
        "step 'optimizer.0': lr must be the same on all ranks, but was in the last step 0.1 on rank 0 and 0.2 on rank 2. "
    )
    assert "broadcast_all()" in text and 'replicas="differ"' in text


def test_the_error_of_parameters_names_the_first_and_the_sides():
    rows = np.array([[0, 7, 8, 9], [1, 7, 5, 6], [2, 7, 8, 9]])
    text = differences.unequal_parameters("optimizer.0", ["a", "b", "c"], rows, 1, 0.25, CALLED)
    assert "parameter 'b' must be the same on all ranks, but those of rank 1 differ from those of ranks 0, 2" in text
    assert ", by up to 0.25. 2 of 3 parameters differ. " in text
    assert "by up to" not in differences.unequal_parameters("optimizer.0", ["a", "b", "c"], rows, 1, np.nan, CALLED)


@pytest.mark.parametrize("far, kinds, raises", [
    (1e-6, ("old", "new"), False), (1e-6, ("old", "old"), True), (0.5, ("old", "new"), True), (np.nan, ("old", "new"), True),
])  # fmt: skip
def test_processors_of_different_kinds_may_round_differently(far, kinds, raises, caplog):
    """One rank warns, and there is no further comparison; what is more than rounding, in any parameter, is an error."""

    def on_rank(rank):
        values = [("a", np.ones(3)), ("b", np.ones(3) + rank * 1e-9), ("c", np.arange(3.0) + (far if rank else 0.0))]
        replica = ComparedReplica(dict, lambda: values, Forms(checks.digest, np.copy, lambda: kinds[rank]), CALLED)
        replica.note_step()
        replica.tell(comes_alike=True)
        differences = Differences(Session(rt.global_process_set), "optimizer.0.used", "optimizer.0")
        judging = differences.judge_parameters(replica)
        try:
            while True:
                next(judging).wait()
        except StopIteration as end:
            return end.value
        except MismatchError as problem:
            return str(problem)

    with World(2) as world, caplog.at_level("WARNING", "ringtrain"):
        found = world.run(on_rank)
    if raises:
        assert found[0] == found[1] and f"parameter '{'b' if kinds[0] == kinds[1] else 'c'}' must be" in found[0]
    else:
        assert found == [False, False]
        assert len(caplog.records) == 1 and "2 parameters differ between ranks by up to 1e-06" in caplog.text
        assert "round differently (new; old)" in caplog.text


def test_a_replica_that_is_not_compared_asks_for_nothing():
    rank = Rank()
    rank.replica.compares = False
    rank.now = 1e6
    told = [rank.round() for _ in range(5)]
    assert all(each.parameters is None and not each.asks for each in told) and told[-1].settings is not None
