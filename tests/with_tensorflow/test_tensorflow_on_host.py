"""Tapes with PowerSGD and ``OneStepLate``: what they return, in graphs and eager."""

import numpy as np
import pytest
import tensorflow as tf
from modes import in_mode

import ringtrain.tensorflow as hvd
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.testing import World

SHAPE = (24, 40)


def gradient(rank, step):
    """Whole numbers, whose means are exact."""
    return np.random.default_rng(100 * step + rank).integers(-8, 9, SHAPE).astype(np.float32)


class Taped:
    """A rank whose gradients are given."""

    def __init__(self, graph, **arguments):
        self.weight, self.vector = tf.Variable(tf.zeros(SHAPE)), tf.Variable(tf.zeros(8))
        self.arguments = arguments
        self.run = tf.function(self.step) if graph else self.step

    @property
    def variables(self):
        return [self.weight, self.vector]

    def step(self, matrix, number):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.weight * matrix) + tf.reduce_sum(self.vector) * number
        return hvd.DistributedGradientTape(tape, **in_mode(self.arguments)).gradient(loss, self.variables)

    def take(self, rank, step):
        return [each.numpy() for each in self.run(tf.constant(gradient(rank, step)), tf.constant(float(rank + step)))]


@pytest.mark.parametrize("graph", [pytest.param(False, marks=pytest.mark.long), True], ids=["eager", "graph"])
def test_a_late_tape_returns_the_gradients_of_the_step_before(graph):
    def on_rank(rank):
        taped = Taped(graph, late=True)
        late = [taped.take(rank, step) for step in range(4)]
        last = [each.numpy() for each in hvd.late_gradients(taped.variables)]
        assert hvd.late_gradients(taped.variables) == [None, None]
        return [*late, last]

    with World(2, "1+1", stall_abort_seconds=60) as world:
        for found in world.run(on_rank):
            assert not found[0][0].any() and not found[0][1].any()
            for step in range(4):
                assert np.array_equal(found[step + 1][0], (gradient(0, step) + gradient(1, step)) / 2)
                assert np.array_equal(found[step + 1][1], np.full(8, step + 0.5))


@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "graph"])
def test_what_a_tape_delivers_with_powersgd_is_all_but_the_last_loss(graph):
    """The first is exact; then less is delivered, and made up for: far from the sum of all, it would grow with the steps."""

    def on_rank(rank):
        taped = Taped(graph, compression=hvd.Compression.powersgd(rank=4, start_after=1))
        return [taped.take(rank, step) for step in range(24)]

    with World(2, "1+1", stall_abort_seconds=60) as world:
        first, other = world.run(on_rank)
    assert all(
        a.tobytes() == b.tobytes() for one, two in zip(first, other, strict=True) for a, b in zip(one, two, strict=True)
    )
    exact = [(gradient(0, step) + gradient(1, step)) / 2 for step in range(24)]
    assert np.array_equal(first[0][0], exact[0]) and not np.array_equal(first[1][0], exact[1])
    gaps = [np.linalg.norm(sum(found[0] for found in first[:count]) - sum(exact[:count])) for count in range(2, 25)]
    without = np.linalg.norm([np.linalg.norm(exact[step] - first[step][0]) for step in range(1, 24)])
    assert np.linalg.matrix_rank(first[5][0]) == 4 and max(gaps[12:]) < without
    assert all(np.array_equal(found[1], np.full(8, step + 0.5)) for step, found in enumerate(first))


def test_what_a_tape_cannot_do_is_refused():
    with World(1):
        for arguments, found in [
            ({"late": True, "op": hvd.Adasum}, "DistributedGradientTape: OneStepLate cannot be used with op=Adasum"),
            (
                {"compression": hvd.Compression.powersgd(), "groups": 2},
                "DistributedGradientTape: Compression.powersgd cannot be used with groups",
            ),
        ]:
            with pytest.raises(InvalidArgumentError, match=found):
                hvd.DistributedGradientTape(tf.GradientTape(), **in_mode(arguments))
        with pytest.raises(
            UnsupportedError, match=r"OneStepLate cannot be used with an optimizer of tf.compat.v1.train"
        ):
            hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), mode=hvd.OneStepLate())
    table = tf.Variable(tf.zeros((4, 2)))

    def sparse(rank):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank]))
        with pytest.raises(UnsupportedError, match="gradients must be dense with OneStepLate"):
            hvd.DistributedGradientTape(tape, mode=hvd.OneStepLate()).gradient(loss, [table])

    with World(2, "1+1", stall_abort_seconds=60) as world:
        world.run(sparse)


def two_models(in_graph, **arguments):
    """Steps of two models whose gradients are called alike, in turn: what each has got back in each."""

    def step_of(weight):
        def step(matrix):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * matrix)
            return hvd.DistributedGradientTape(tape, **in_mode(arguments)).gradient(loss, [weight])[0]

        return tf.function(step) if in_graph else step

    def on_rank(rank):
        steps = [step_of(tf.Variable(tf.zeros((64, 64)), name="weight")) for _ in range(2)]
        drawn = np.random.default_rng(rank).normal(size=(4, 2, 64, 64)).astype(np.float32) * [[[[1000.0]], [[1.0]]]]
        found = [
            [step(tf.constant(matrix, tf.float32)).numpy() for step, matrix in zip(steps, each, strict=True)]
            for each in drawn
        ]
        return np.array(found), drawn

    with World(2, "1+1", stall_abort_seconds=60) as world:
        (found, one), (_, two) = world.run(on_rank)
    return found, (one + two) / 2


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_what_is_lost_of_one_models_gradients_is_not_made_up_for_in_anothers(in_graph):
    """Of a thousand times its size, say, as a discriminator's in a generator's."""
    found, exact = two_models(in_graph, compression=hvd.Compression.int8)
    assert np.abs(found - exact)[:, 1].max() < 0.1


def test_late_gradients_of_two_models_travel_side_by_side():
    found, exact = two_models(True, late=True)
    assert not found[0].any() and np.allclose(found[1:], exact[:-1], atol=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [{"late": True}, {"compression": hvd.Compression.powersgd()}],
    ids=["OneStepLate", "Compression.powersgd"],
)
def test_tensors_have_nothing_that_is_kept(two, arguments):
    def on_rank(rank):
        tensor = tf.ones((8, 8))
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = tf.reduce_sum(tensor * tensor)
        tape = hvd.DistributedGradientTape(tape, **in_mode(arguments))
        with pytest.raises(
            InvalidArgumentError, match="sources must be variables with (OneStepLate|Compression.powersgd)"
        ):
            tape.gradient(loss, [tensor])

    two.run(on_rank)


def test_a_late_step_that_lacks_a_gradient_of_the_one_before_is_refused(two):
    """It would be applied whenever a step has the same ones again."""

    def on_rank(rank):
        variables = [tf.Variable([1.0]), tf.Variable([2.0])]

        def step(used):
            with tf.GradientTape() as tape:
                loss = sum(tf.reduce_sum(each) for each in used)
            return hvd.DistributedGradientTape(tape, mode=hvd.OneStepLate()).gradient(loss, variables)

        step(variables)
        with pytest.raises(InvalidArgumentError, match="gradients must be those of the same variables in each step"):
            step(variables[1:])
        assert step(variables[1:])[0] is None and step(variables[1:])[1].numpy() == [1.0]
        assert [each if each is None else each.numpy() for each in hvd.late_gradients(variables)] == [None, [1.0]]

    two.run(on_rank)


def test_powersgd_compresses_for_tapes_of_one_step_each_where_not_each_has_all_gradients(two):
    def on_rank(rank):
        weights = [tf.Variable(tf.zeros(SHAPE)) for _ in range(2)]

        def step(number):
            with tf.GradientTape() as tape:
                loss = sum(tf.reduce_sum(each * gradient(rank, number)) for each in weights[: 1 + number % 2])
            powersgd = hvd.Compression.powersgd(rank=1, start_after=3)
            return hvd.DistributedGradientTape(tape, compression=powersgd).gradient(loss, weights)[0].numpy()

        return [np.linalg.matrix_rank(step(number)) for number in range(6)]

    for ranks in two.run(on_rank):
        assert min(ranks[:3]) > 1 and ranks[3:] == [1, 1, 1]
