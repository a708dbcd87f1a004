"""Compression that makes up for what it has lost, below Keras: an update that a loss scale skips leaves no trace."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain._runtime import error_feedback
from ringtrain._runtime.context import current
from ringtrain.testing import World

STEPS = 6


def batch(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng(100 * step + rank).standard_normal((8, 64)).astype(np.float32)


def train(rank: int, graph: bool, steps: list[int], overflows: dict[int, int]) -> bytes:
    """Parameters after those steps; in some the loss overflows on one rank."""
    start = np.random.default_rng(0).standard_normal((64, 80)).astype(np.float32) / 10
    weights = [keras.Variable(start), keras.Variable(start.T.copy())]
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=1024.0)
    optimizer = hvd.DistributedOptimizer(scaled, compression=hvd.Compression.int4)

    def step(x, factor):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_mean(tf.square(tf.tanh(x @ weights[0].value) @ weights[1].value - x))
            loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(loss, [each.value for each in weights]), weights)

    run = tf.function(step) if graph else step
    for number in steps:
        factor = np.inf if overflows.get(number) == rank else 1.0
        run(tf.constant(batch(rank, number)), tf.constant(factor, tf.float32))
        scaled.dynamic_scale.assign(1024.0)
    assert error_feedback.sizes(current(), 0, "optimizer.").keys()
    return b"".join(each.numpy().tobytes() for each in weights)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_an_update_that_is_skipped_leaves_no_trace(graph):
    """Its bits are those of a run without that batch, whichever rank the overflow was on."""
    with World(3, "2+1") as world:
        for overflows in (
            [{0: 2, 3: 0, 5: 1}] if graph else ({0: 2}, {2: 1, 3: 0}, {5: 1})
        ):  # a graph takes long to trace
            skipped = world.run(train, graph, list(range(STEPS)), overflows)
            assert len(set(skipped)) == 1
            left = [step for step in range(STEPS) if step not in overflows]
            assert skipped == world.run(train, graph, left, {})


def gradient(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng(1000 * step + rank).standard_normal((64, 80)).astype(np.float32)


def add_up(rank: int, steps: range, state: dict | None = None) -> tuple[np.ndarray, dict]:
    """What the updates of these steps have delivered, and what is kept then."""
    total = keras.Variable(np.zeros((64, 80), np.float32), name="w")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.Compression.int4)
    optimizer.build([total])
    if state is not None:
        optimizer.load_compression_state(state)
    for step in steps:
        optimizer.apply([tf.constant(gradient(rank, step))], [total])
    return -total.numpy().astype(np.float64), optimizer.compression_state()


def test_another_world_goes_on_with_what_was_lost():
    """Of other hosts: what both have delivered, and what is kept at the end, are the exact means."""
    with World(3, "2+1") as world:
        (before, state), *others = world.run(add_up, range(5))
        assert all(np.array_equal(before, other) for other, _ in others)
    with World(2, "1+1") as world:
        (after, kept), _ = world.run(add_up, range(5, 9), state)
    exact = sum(np.mean([gradient(rank, step) for rank in range(3)], axis=0) for step in range(5))
    exact += sum(np.mean([gradient(rank, step) for rank in range(2)], axis=0) for step in range(5, 9))
    (parts,) = kept.values()
    lost = sum(part.reshape(64, 80) for part in parts.values())
    assert np.linalg.norm(before + after + lost - exact) < 1e-5 * np.linalg.norm(exact) < np.linalg.norm(lost) / 100
