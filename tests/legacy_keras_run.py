"""What test_keras_legacy.py runs in a process with TF_USE_LEGACY_KERAS=1; it prints "trained" if all is well."""

import numpy as np
import tensorflow as tf
import tf_keras

import ringtrain as rt
import ringtrain.tensorflow.keras as hvd
from ringtrain.tensorflow.keras.callbacks import MetricAverageCallback
from ringtrain.testing import World

assert tf.keras.Model is tf_keras.Model
random = np.random.default_rng(0)
X = random.normal(size=(48, 5)).astype("float32")
Y = X.sum(1, keepdims=True)


def model_of(seed, dtype="float32"):
    tf_keras.mixed_precision.set_global_policy(dtype)
    model = tf_keras.Sequential([tf_keras.layers.Dense(6, "tanh", input_shape=(5,)), tf_keras.layers.Dense(1)])
    weights = np.random.default_rng(seed)
    model.set_weights([0.5 * weights.normal(size=weight.shape) for weight in model.get_weights()])
    return model


def distributed(rank, make, **compiling):
    model = model_of(rank)
    model.compile(hvd.DistributedOptimizer(make()), "mse", **compiling)
    rows = np.concatenate([np.arange(start, start + 12)[rank::2] for start in range(0, 48, 12)])
    history = model.fit(X[rows], Y[rows], batch_size=6, epochs=2, shuffle=False, verbose=0,
                        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]).history
    return model.get_weights(), history


def equals_one_process(world, make, **compiling):
    (weights, history), (others, same) = world.run(lambda rank: distributed(rank, make, **compiling))
    assert history == same
    model = model_of(0)
    model.compile(make(), "mse", **compiling)
    model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    for mine, theirs, oracle in zip(weights, others, model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(mine, oracle, rtol=2e-5, atol=5e-6)


def overflow(rank, outside):
    model = model_of(rank, "mixed_float16")
    optimizer = tf_keras.optimizers.SGD(0.05)
    if not outside:  # else compile() puts it around the distributed optimizer
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=64.0)
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    x = X.copy()
    if rank == 1:
        x[6:12] = 1e38
    model.fit(x[:24], Y[:24], batch_size=6, shuffle=False, verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    return model.get_weights(), float(model.optimizer.loss_scale)


def synchronizes(rank):
    weight = tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
    optimizer.build([weight])

    @tf.function
    def step():
        pairs = optimizer.synchronize([(tf.constant([6.0, 0.0] if rank == 0 else [0.0, 8.0]), weight)])
        clipped, _ = tf.clip_by_global_norm([pairs[0][0]], 1.0)
        with optimizer.skip_synchronize():
            optimizer.apply_gradients([(clipped[0], weight)])

    step()
    return weight.numpy().tolist()


with World(2) as world:
    equals_one_process(world, lambda: tf_keras.optimizers.Adam(0.02))
    equals_one_process(world, lambda: tf_keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.05), run_eagerly=True)
    for outside in (False, True):
        (weights, scale), (others, same) = world.run(overflow, outside)
        assert scale == same
        for mine, theirs in zip(weights, others, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    one, other = world.run(synchronizes)
    assert one == other and np.allclose(one, [-0.6, -0.8])
for wrong, text in [(lambda: tf_keras.optimizers.legacy.SGD(), "optimizers.legacy.SGD"), (lambda: "sgd", "builtins.str")]:
    try:
        hvd.DistributedOptimizer(wrong())
    except rt.RingtrainError as error:
        assert text in str(error)
    else:
        raise AssertionError(text)
print("trained")
