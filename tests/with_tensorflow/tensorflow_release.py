"""What must hold in every release of TensorFlow that the library of operations serves; prints the release when it does.

test_tensorflow_library.py runs this as a program, since it needs a process with one thread for TensorFlow's operations.
"""

import time

import numpy as np
import tensorflow as tf

import ringtrain.tensorflow as hvd
from ringtrain.testing import World

MANY = 200


def many_in_flight(rank: int) -> None:
    """With one thread for all operations of both ranks, and each rank in an order of its own."""
    order = range(MANY) if rank == 0 else reversed(range(MANY))

    @tf.function
    def step(x):
        return [hvd.allreduce(x + float(index), op=hvd.Sum, name=f"gradient.{index}") for index in order]

    for repetition in range(3):
        values = sorted(float(value[0]) for value in step(tf.fill([100], float(repetition))))
        assert values == [2.0 * (index + repetition) for index in range(MANY)]


def results_are_allocated_late(rank: int) -> None:
    """When the size is known, which is long after the kernel has returned."""
    for wrap in (lambda function: function, tf.function):
        rows = wrap(lambda: hvd.allgather(tf.fill([rank + 1, 3], rank), name="rows"))()
        assert np.array_equal(rows, [[0] * 3, [1] * 3, [1] * 3])
        received = wrap(lambda: hvd.alltoall(tf.range(3), [1, 2], name="exchange"))()
        assert received[1].numpy().tolist() == [[1, 1], [2, 2]][rank]


def failures_come_late(rank: int) -> None:
    """From the core's thread, after the kernel has returned."""
    for wrap in (lambda function: function, tf.function):
        try:
            wrap(lambda: hvd.allreduce(tf.zeros([rank + 1]), name="late"))()
        except tf.errors.FailedPreconditionError as error:
            assert "allreduce 'late': shape must be the same on all ranks" in error.message
        else:
            raise AssertionError("a mismatch passed unseen")


def memory_is_handed_on(rank: int) -> None:
    """A temporary's memory becomes the result's, and large results stay right while others are made."""

    @tf.function
    def step(x):
        return [hvd.allreduce(x * float(index), op=hvd.Sum, name=f"large.{index}") for index in range(4)]

    for _ in range(3):
        for index, result in enumerate(step(tf.ones([1 << 18]))):
            assert np.all(result == 2.0 * index)


def gradients_flow(rank: int) -> None:
    weights = tf.Variable(tf.ones([4, 2]))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(weights, [rank])) + tf.reduce_sum(hvd.allreduce(weights * (rank + 1.0)))
        return hvd.DistributedGradientTape(tape, sparse_as_dense=True).gradient(loss, weights)

    assert np.array_equal(step()[:, 0], [2.0, 2.0, 1.5, 1.5])


def an_abort_reaches_the_graph(rank: int) -> None:
    if rank == 1:
        time.sleep(0.2)
        raise KeyError("the cause")
    try:
        tf.function(lambda x: hvd.allreduce(x, name="never"))(tf.constant(1.0))
    except tf.errors.UnknownError as error:
        assert "rank 1 raised KeyError: 'the cause'" in error.message
        return
    raise AssertionError("the operation of a lost rank ended well")


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with World(2) as world:
        for check in (
            many_in_flight,
            results_are_allocated_late,
            failures_come_late,
            memory_is_handed_on,
            gradients_flow,
        ):
            world.run(check)
    try:
        with World(2) as world:
            world.run(an_abort_reaches_the_graph)
    except KeyError:
        print(tf.__version__)
