"""A TensorFlow program for two ranks, run under the launcher by test_tensorflow_launched.py; says what it found.

In order: both ranks train alike; graphs outlive a world; one rank fails, and the other one's graph raises that cause.
"""

import atexit
import sys
import time

import tensorflow as tf
from mpi4py import MPI

import ringtrain.tensorflow as hvd
from ringtrain.tensorflow import watching

sum_of_ranks = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum_of_ranks"))


def train() -> float:
    """A weight after some steps on this rank's own data."""
    weight = tf.Variable(float(hvd.rank()))
    hvd.broadcast_variables([weight], root_rank=0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.square(weight - (hvd.rank() + 1.0))
        weight.assign_sub(0.25 * hvd.DistributedGradientTape(tape).gradient(loss, weight))

    for _ in range(8):
        step()
    return float(weight)


def ask_a_graph_of_an_ended_world() -> None:
    """It raises, until there is a world again."""
    assert sum_of_ranks(tf.constant(1.0)) == 2.0
    hvd.shutdown()
    try:
        sum_of_ranks(tf.constant(1.0))
    except tf.errors.UnknownError as error:
        assert "call init() to start again" in error.message
    else:
        raise AssertionError("a graph went on without a world")
    hvd.init()
    assert sum_of_ranks(tf.constant(2.0)) == 4.0
    assert [watch.schedule.steps for watch in watching._of_graphs] == [
        0
    ]  # of `train`, which has made some in the first world


def lose_a_rank() -> None:
    MPI.COMM_WORLD.Barrier()  # or the cause would reach rank 0 before it has seen the end of its last operation
    if hvd.rank() == 1:
        atexit.register(time.sleep, 5.0)  # or the launcher would end rank 0 while it speaks
        raise LookupError("this batch is broken")
    try:
        sum_of_ranks(tf.constant(1.0))
    except tf.errors.UnknownError as error:
        assert "LookupError: this batch is broken" in error.message, error.message
        print("rank 0 raised the cause", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    hvd.init()
    assert hvd.size() == 2 and hvd.mpi_enabled()
    print(f"weight {train()}", flush=True)
    ask_a_graph_of_an_ended_world()
    lose_a_rank()
