"""Local steps of tf_keras, which test_keras_legacy.py checks in a process of their own."""

import numpy as np
import tensorflow as tf
import tf_keras

import ringtrain as rt
import ringtrain.tensorflow.keras as hvd
from ringtrain.errors import UnsupportedError
from ringtrain.testing import World

STEPS, RATE = 6, 0.5
START = np.array([1.0, -2.0, 0.5])


def gradient(rank, step, weights):
    return weights - np.random.default_rng([rank, step]).standard_normal(3)


def by_hand(every, overlap=0, outer=None):
    """Of two ranks, the weights of each after every step."""
    common, m, workers, seen, on_the_way = START, 0.0, [START, START], [], {}
    for step in range(STEPS):
        workers = [x - RATE * gradient(rank, step, x) for rank, x in enumerate(workers)]
        if (step + 1) % every == 0:
            on_the_way[step + overlap] = workers
        if step in on_the_way:
            sent = on_the_way.pop(step)
            change = common - sum(sent) / 2
            m = (outer.momentum if outer else 0.0) * m + change
            common = common - (change if outer is None else outer.rate * (change + outer.momentum * m))
            workers = [x + (common - was) for x, was in zip(workers, sent, strict=True)]
        seen.append(workers)
    return seen


def train(rank, make, graph, **arguments):
    weights = tf.Variable(START)
    optimizer = hvd.DistributedOptimizer(make(RATE), mode=hvd.LocalSteps(**arguments))

    def step(target):
        optimizer.apply_gradients([(weights - target, weights)])

    run, seen = tf.function(step) if graph else step, []
    for number in range(STEPS):
        run(tf.constant(np.random.default_rng([rank, number]).standard_normal(3)))
        seen.append(weights.numpy())
    state = optimizer.local_steps_state()
    optimizer.load_local_steps_state(state)
    optimizer.join()
    return seen, weights.numpy().tobytes()


def fitted(rank, make):
    random = np.random.default_rng(rank)
    x = random.standard_normal((24, 5)).astype("float32")
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(4, input_shape=(5,)), tf_keras.layers.BatchNormalization(), tf_keras.layers.Dense(1)]
    )
    model.compile(hvd.DistributedOptimizer(make(0.05), mode=hvd.LocalSteps(every=4, fragments=2, overlap=1)), "mse")
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, x.sum(1), batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[begin])
    return [each.tobytes() for each in model.get_weights()], rt.counters()["local_steps"]


def refused(rank, make):
    """A LossScaleOptimizer would skip updates without a word."""
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(make(RATE))
    optimizer = hvd.DistributedOptimizer(optimizer, mode=hvd.LocalSteps(every=2))
    weights = tf.Variable([1.0])
    try:
        optimizer.apply_gradients([(tf.constant([1.0]), weights)])
    except UnsupportedError as error:
        return str(error)
    return "nothing"


METHODS = ({"every": 2}, {"every": 3, "outer": rt.Outer(0.5, 0.8)}, {"every": 3, "overlap": 2})


def check_all():
    """Raises AssertionError if something is wrong."""
    current, older = tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD
    with World(2, "1+1", stall_abort_seconds=60) as world:
        for make, graph, arguments in zip((current, older, current), (False, True, True), METHODS, strict=True):
            found = world.run(lambda rank: train(rank, make, graph, **arguments))
            for rank, (seen, last) in enumerate(found):
                expected = [each[rank] for each in by_hand(**arguments)]
                np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-8)  # Keras' learning rate is a float32
                assert last == found[0][1]
        (first, counted), (second, _) = world.run(fitted, older)
        assert first == second and counted >= 12, counted
        for make in (current, older):
            texts = world.run(refused, make)
            assert len(set(texts)) == 1, texts
            assert "LocalSteps must not be set within a LossScaleOptimizer of tf_keras" in texts[0], texts
