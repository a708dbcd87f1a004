"""Adasum in TensorFlow: operations, tapes, and TensorFlow 1's optimizers, whose steps are combined."""

import numpy as np
import pytest
import tensorflow as tf
from adasum_reference import reference
from modes import in_mode

import ringtrain.tensorflow as hvd
from ringtrain.testing import World

v1 = tf.compat.v1
RANKS = 3
GENERATOR = np.random.RandomState(3)
GIVEN = [[GENERATOR.standard_normal(shape) for shape in ((5,), (3, 4))] for _ in range(RANKS)]
EXPECTED = [reference([mine[index] for mine in GIVEN]).reshape(GIVEN[0][index].shape) for index in range(2)]
MAKE = {
    "GradientDescent": lambda: v1.train.GradientDescentOptimizer(0.25),
    "Adam": lambda: v1.train.AdamOptimizer(0.1),
}


@pytest.fixture
def three():
    """Three ranks as threads of this process."""
    with World(RANKS) as opened:
        yield opened


@pytest.mark.parametrize("in_graph", [False, True])
def test_operations(three, in_graph):
    def body(rank):
        def step(first, second):
            alone = hvd.allreduce(first, op=hvd.Adasum, name="alone")
            return alone, *hvd.grouped_allreduce([first, second], op=hvd.Adasum, name="group")

        return [each.numpy() for each in (tf.function(step) if in_graph else step)(*map(tf.constant, GIVEN[rank]))]

    for results in three.run(body):
        for found, expected in zip(results, [EXPECTED[0], *EXPECTED], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_a_tape_reduces_dense_gradients(three):
    def body(rank):
        variables = [tf.Variable(tf.zeros_like(value)) for value in GIVEN[rank]]
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(variable * value) for variable, value in zip(variables, GIVEN[rank], strict=True))
        found = hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, variables)
        with tf.GradientTape() as tape:
            rows = tf.gather(variables[1], [rank])
        with pytest.raises(NotImplementedError, match="tf.IndexedSlices need op Average or Sum"):
            hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(rows, variables[1])
        return [gradient.numpy() for gradient in found]

    for results in three.run(body):
        for found, expected in zip(results, EXPECTED, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_a_backward_pass_through_it_is_refused(three):
    def body(rank):
        x = tf.Variable([1.0, 2.0])
        with tf.GradientTape() as tape:
            y = hvd.allreduce(x, op=hvd.Adasum, name="x")
        with pytest.raises(NotImplementedError, match="gradients need op Average or Sum, but it is Adasum"):
            tape.gradient(y, x)

    three.run(body)


def session_of(rank, make, wrap, steps, resources=True, starts=None):
    """Values of two variables after each of some steps with a rank's own gradients, which depend on the step before."""
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [
            v1.get_variable(f"v{index}", initializer=tf.constant(value), use_resource=resources)
            for index, value in enumerate(starts or [np.ones_like(value) for value in GIVEN[rank]])
        ]
        loss = sum(
            tf.reduce_sum(tf.square(variable - value)) for variable, value in zip(variables, GIVEN[rank], strict=True)
        )
        count = v1.train.get_or_create_global_step()
        step = wrap(make()).minimize(loss, global_step=count)
        session.run(v1.global_variables_initializer())
        values = []
        for _ in range(steps):
            session.run(step)
            values.append(session.run(variables))
        assert session.run(count) == steps
        return values


@pytest.mark.parametrize("kind, resources", [("GradientDescent", True), ("GradientDescent", False), ("Adam", True)])
def test_an_optimizers_steps_are_combined(three, kind, resources):
    """A session's step; the first is each rank's own step from the same start, combined by hand."""

    def wrap(optimizer):
        return hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)

    alone = [session_of(rank, MAKE[kind], lambda optimizer: optimizer, 1, resources)[0] for rank in range(RANKS)]
    found = three.run(lambda rank: session_of(rank, MAKE[kind], wrap, 3, resources))
    for values in found:
        assert all(
            np.array_equal(*pair) for step in range(3) for pair in zip(values[step], found[0][step], strict=True)
        )
    for index in range(2):
        start = np.ones_like(GIVEN[0][index])
        expected = start + reference([mine[index] - start for mine in alone]).reshape(start.shape)
        np.testing.assert_allclose(found[0][0][index], expected, rtol=1e-12, atol=1e-13)
    second = [
        session_of(rank, MAKE["GradientDescent"], lambda optimizer: optimizer, 1, starts=found[0][0])[0]
        for rank in range(RANKS)
    ]
    if kind == "GradientDescent":  # has no state, so the second step can be made by hand, too
        for index in range(2):
            start = found[0][0][index]
            expected = start + reference([mine[index] - start for mine in second]).reshape(start.shape)
            np.testing.assert_allclose(found[0][1][index], expected, rtol=1e-12, atol=1e-13)


def test_an_optimizer_in_eager_mode(three):
    def body(rank):
        variables = [tf.Variable(np.ones_like(value)) for value in GIVEN[rank]]
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.25), op=hvd.Adasum)
        optimizer.apply_gradients(zip([tf.constant(value) for value in GIVEN[rank]], variables, strict=True))
        return [variable.numpy() for variable in variables]

    for results in three.run(body):
        for found, expected in zip(results, EXPECTED, strict=True):
            np.testing.assert_allclose(found, 1 - 0.25 * expected, rtol=1e-12, atol=1e-13)


def test_what_is_refused(three):
    def body(rank):
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.25), op=hvd.Adasum)
        with pytest.raises(ValueError, match="expected a plain optimizer but found one that is distributed already"):
            hvd.DistributedOptimizer(optimizer)
        for arguments, kind, text in [
            ({"backward_passes_per_step": 2}, ValueError, "backward_passes_per_step must be 1 with op=Adasum"),
            (
                {"average_aggregated_gradients": True},
                ValueError,
                "average_aggregated_gradients must be False with op=Adasum",
            ),
            (
                {"gradient_predivide_factor": 2.0},
                ValueError,
                "gradient_predivide_factor needs op=Average, but op is Adasum",
            ),
        ]:
            with pytest.raises(kind, match=text):
                hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.25), op=hvd.Adasum, **in_mode(arguments))
        with pytest.raises(ValueError, match=r"op must be Average \(0\) or Sum \(1\), but is 2"):
            hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), op=hvd.Adasum)
        with pytest.raises(NotImplementedError, match="tf.IndexedSlices need op Average or Sum"):
            hvd.allreduce(
                tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([2, 2])), op=hvd.Adasum, name="x"
            )

    three.run(body)
