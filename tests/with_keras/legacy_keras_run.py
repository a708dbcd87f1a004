"""What test_keras_legacy.py runs in a process with TF_USE_LEGACY_KERAS=1; it prints "trained" if all is well.

Its argument is the part that is run.
"""

import contextlib
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile

import keras_drift
import missing_gradients as table
import numpy as np
import tensorflow as tf
import tf_keras

import ringtrain as rt
import ringtrain.tensorflow as rt_tensorflow
import ringtrain.tensorflow.keras as hvd
from ringtrain.keras.optimizer import reduction_of
from ringtrain.keras.variables import build_optimizer, slots_of, variables_of_optimizer
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


def rows_of(rank):
    return np.concatenate([np.arange(start, start + 12)[rank::2] for start in range(0, 48, 12)])


def distributed(rank, make, settings, model_of, **compiling):
    model = model_of(rank)
    model.compile(hvd.DistributedOptimizer(make(), **settings), "mse", **compiling)
    size = 6 // settings.get("backward_passes_per_step", 1)
    history = model.fit(
        X[rows_of(rank)],
        Y[rows_of(rank)],
        batch_size=size,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), MetricAverageCallback()],
    ).history
    return model.get_weights(), history, int(model.optimizer.iterations)


def equals_one_process(world, make, settings=None, model_of=model_of, plain_model_of=model_of, **compiling):
    (weights, history, updates), (others, same, _) = world.run(
        lambda rank: distributed(rank, make, settings or {}, model_of, **compiling)
    )
    assert history == same and updates == 8, (history, same, updates)
    model = plain_model_of(0)
    model.compile(make(), "mse", **compiling)
    model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    for mine, theirs, oracle in zip(weights, others, model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(mine, oracle, rtol=2e-5, atol=5e-6)


def normalizing_model_of(seed, layer=rt_tensorflow.SyncBatchNormalization):
    tf_keras.mixed_precision.set_global_policy("float32")
    model = tf_keras.Sequential(
        [
            tf_keras.layers.Dense(6, input_shape=(5,)),
            layer(),
            tf_keras.layers.Activation("tanh"),
            tf_keras.layers.Dense(1),
        ]
    )
    weights = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(weights.normal(size=variable.shape))
    return model


def plainly_normalizing_model_of(seed):
    return normalizing_model_of(seed, tf_keras.layers.BatchNormalization)


def overflow(rank, outside, passes, make, eager):
    model = model_of(rank, "mixed_float16")
    optimizer = make(0.05)
    if not outside:  # else compile() puts it around the distributed optimizer
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=64.0)
    model.compile(hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes), "mse", run_eagerly=eager)
    x = X.copy()
    if rank == 1:
        x[6:9] = 1e38
    model.fit(
        x[:24],
        Y[:24],
        batch_size=6 // passes,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    return model.get_weights(), float(model.optimizer.loss_scale)


def synchronizes(rank, make):
    weight = tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(make(1.0))

    @tf.function
    def step():
        pairs = optimizer.synchronize([(tf.constant([6.0, 0.0] if rank == 0 else [0.0, 8.0]), weight)])
        clipped, _ = tf.clip_by_global_norm([pairs[0][0]], 1.0)
        with optimizer.skip_synchronize():
            optimizer.apply_gradients([(clipped[0], weight)])

    step()
    return weight.numpy().tolist()


def accumulates_before_it_sends(rank, make):
    weight = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(make(1.0), backward_passes_per_step=3)

    @tf.function
    def step():
        optimizer.apply_gradients([(tf.constant([1.0 + rank]), weight)])

    values = []
    for index in range(6):
        before = rt.counters()["operations"]
        step()
        assert int(optimizer._agg_helper.counter.numpy()) == (index + 1) % 3  # as Horovod's own tests ask
        if index == 0:
            rt.barrier()  # while they trace, the ranks agree which gradients there are
        values.append((float(weight[0]), index > 0 and rt.counters()["operations"] > before))
    assert int(optimizer.iterations) == 2
    return values


def keeps_local(rank, make, eager):
    shared, own, other = (tf.Variable([0.0]) for _ in range(3))
    layer = tf_keras.layers.Dense(1, use_bias=False)
    layer.build((None, 1))
    layer.kernel.assign([[0.0]])
    optimizer = hvd.PartialDistributedOptimizer(make(1.0), local_layers=layer)
    optimizer.register_local_var(own)
    scaling = tf_keras.mixed_precision.LossScaleOptimizer(make(1.0), initial_scale=1.0)
    unscaled = hvd.DistributedOptimizer(scaling, scale_local_gradients=False)
    unscaled.register_local_var(other)
    gradient = tf.constant([2.0 + 2 * rank])

    def step():
        optimizer.apply_gradients([(gradient, shared), (gradient, own), (gradient[None], layer.kernel)])
        unscaled.apply_gradients([(gradient, other)])

    (step if eager else tf.function(step))()
    kept = make(0.1, momentum=0.5)
    build_optimizer(kept, [shared, own])
    assert [each.name for each in slots_of(kept, [own])] == [each.name for each in variables_of_optimizer(kept)[-1:]]
    return [float(variable.numpy().item()) for variable in (shared, own, layer.kernel, other)]


def skips_together(rank, make):
    shared, own = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(make(1.0), initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(optimizer)
    optimizer.register_local_var(own)
    optimizer.apply_gradients([(tf.constant([4.0]), shared), (tf.constant([np.inf if rank else 4.0]), own)])
    return float(shared.numpy().item()), float(own.numpy().item()), float(optimizer.loss_scale)


def lacks_gradients(rank, make, scaled, eager):
    variables = [tf.Variable([1.0]) for _ in range(4)]
    optimizer = make(1.0)
    if scaled:
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer)
    own = [tf.constant([2.0]), None, None, None]
    own[1 + rank] = tf.constant([4.0])

    def loss():
        return sum(
            tf.reduce_sum(gradient * variable)
            for gradient, variable in zip(own, variables, strict=True)
            if gradient is not None
        )

    def step():
        with tf.GradientTape() as tape:
            value = loss()
        optimizer.minimize(value, variables, tape=tape)

    step = step if eager else tf.function(step)
    for _ in range(2):
        step()
    return [float(variable[0]) for variable in variables]


def weights_after_missing_gradients(rank, steps, passes, eager):
    """The table of missing_gradients; a graph is traced once for each pass, and the steps must be alike."""
    variables = [tf.Variable([1.0]) for _ in range(table.COUNT)]
    plain = tf_keras.optimizers.SGD(1.0, weight_decay=table.WEIGHT_DECAY)
    optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=passes)
    optimizer.build(variables)

    def take(own):
        gradients = [None if each is None else tf.constant([each]) for each in own]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    graphs = {}
    for step in steps:
        for number, own in enumerate(table.passes_of(step, rank, passes)):
            if eager:
                take(own)
            else:
                graphs.setdefault(number, tf.function(lambda own=own: take(own)))()
    return [float(variable[0]) for variable in variables]


@tf_keras.saving.register_keras_serializable("mine", "Slow")
class Registered(tf_keras.optimizers.SGD):
    pass


class Unregistered(tf_keras.optimizers.SGD):
    pass


def clips_what_it_computes(rank, make, eager, skips):
    """As in Horovod compute_gradients returns those of all ranks: between it and apply_gradients these are clipped."""
    weights = tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(make(1.0), op=rt.Sum)
    is_older = isinstance(optimizer, older.Optimizer)  # where Horovod's own tests call what these hide
    compute = optimizer._compute_gradients if is_older else optimizer.compute_gradients
    taken_as_it_is = (
        {"experimental_aggregate_gradients": not skips} if is_older else {"skip_gradients_aggregation": skips}
    )

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * x)
        (pair,) = compute(loss, [weights], tape=tape)
        clipped = tf.clip_by_norm(pair[0], 1.0)
        optimizer.apply_gradients([(clipped, weights)], **taken_as_it_is)
        return pair[0]

    x = tf.constant([3.0, 0.0] if rank == 0 else [0.0, 4.0])
    found = (step if eager else tf.function(step))(x)
    with tf.GradientTape() as tape:  # by hand: these are reduced when they are applied
        loss = tf.reduce_sum(weights * x)
    optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
    return found.numpy().tolist(), weights.numpy().tolist()


def follows_a_schedule(rank, make, eager):
    """The rates of epochs that warm up and then fall, and what is trained with them."""
    model = model_of(rank)
    model.compile(hvd.DistributedOptimizer(make(0.04, momentum=0.9)), "mse", run_eagerly=eager)
    rates = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(0.04, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(0.04, multiplier=0.1, start_epoch=2),
    ]
    rows = rows_of(rank)
    history = model.fit(X[rows], Y[rows], batch_size=6, epochs=4, shuffle=False, verbose=0, callbacks=rates)
    return history.history["lr"], model.get_weights()


def trains_what_is_saved(rank):
    """Models with wrapped optimizers; ``legacy_keras_load.py`` loads their files where there is no ringtrain."""
    models = []
    for _place, optimizer in enumerate([
        Registered(0.5, momentum=0.5), Unregistered(0.5, momentum=0.5), tf_keras.optimizers.legacy.Adam(0.5),
        tf_keras.mixed_precision.LossScaleOptimizer(Registered(0.5), initial_scale=8.0)]):  # fmt: skip
        model = model_of(rank)
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        model.fit(X[:6], Y[:6], batch_size=6, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        assert type(type(inner).from_config(inner.get_config())).__name__ == type(inner).__name__
        assert reduction_of(type(inner).from_config(inner.get_config())) is not None
        models.append(model)
    return models


def compiled_without_a_callback(rank):
    model = model_of(0)
    model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.05)), "mse", jit_compile=True)
    model.train_on_batch(X[rows_of(rank)], Y[rows_of(rank)])
    assert not model.jit_compile
    return model.get_weights()


def resumes(rank, folder):
    """Horovod's idiom: rank 0 loads, the others make a new model; one that has made more models than rank 0."""
    if rank == 0:
        model = hvd.load_model(f"{folder}/0.keras")
    else:
        model_of(7)
        model = model_of(1)
        model.compile(hvd.DistributedOptimizer(Registered(0.5, momentum=0.5)), "mse")
    model.fit(
        X[rows_of(rank)],
        Y[rows_of(rank)],
        batch_size=6,
        verbose=0,
        shuffle=False,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    return model.get_weights() + [variable.numpy() for variable in model.optimizer.variables]


def writes_and_goes_on(rank, folder):
    """Two fits of which the first ends after an epoch; the files are given on all ranks."""

    class Interrupts(tf_keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    trained = []
    for ends in ([Interrupts()], []):
        model = model_of(rank)
        model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.05)), "mse", run_eagerly=True)
        writes = [
            tf_keras.callbacks.BackupAndRestore(f"{folder}/backup"),
            tf_keras.callbacks.CSVLogger(f"{folder}/log.csv", append=True),
            tf_keras.callbacks.ModelCheckpoint(f"{folder}/last.h5"),
        ]
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        with contextlib.suppress(KeyboardInterrupt):
            history = model.fit(X[rows_of(rank)], Y[rows_of(rank)], 6, 3, 0, [start, *writes, *ends], shuffle=False)
            trained.append(len(history.history["loss"]))
    assert trained == [2], trained  # the first epoch is not trained again
    return model.get_weights()


class StopsBehind(tf_keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.model.stop_training = True


def stops_within_an_epoch(rank, behind, make):
    model = model_of(rank)
    model.compile(hvd.DistributedOptimizer(make()), "mse", run_eagerly=True)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), StopsBehind(behind[rank])]
    model.fit(X[rows_of(rank)], Y[rows_of(rank)], 6, epochs=2, verbose=0, callbacks=callbacks)
    return model.get_weights(), int(model.optimizer.iterations)


def freezes(rank, make, passes):
    """How far the first layer's kernel moves: trained, and frozen for two fits with the same optimizer."""
    model = model_of(rank)
    optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=passes)
    x, y = X[rows_of(rank)], Y[rows_of(rank)]
    moved = []
    for learns in (True, False, False):
        model.layers[0].trainable = learns
        model.compile(optimizer, "mse")
        before = model.layers[0].get_weights()[0]
        start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if learns else []
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=start)
        moved.append(float(np.abs(model.layers[0].get_weights()[0] - before).max()))
    return moved


def scale_grows(rank, make, eager):
    """A weight after each pass of a loss whose gradient is 1, while the loss scale doubles within each update."""
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(1,))]
    )
    scaling = tf_keras.mixed_precision.LossScaleOptimizer(make(1.0), initial_scale=256.0, dynamic_growth_steps=1)
    optimizer = hvd.DistributedOptimizer(scaling, backward_passes_per_step=2, average_aggregated_gradients=True)
    model.compile(optimizer, lambda wanted, found: tf.reduce_mean(found - wanted, -1), run_eagerly=eager)
    seen = []
    for _ in range(6):
        model.train_on_batch(np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32))
        seen.append(model.get_weights()[0].item())
    return seen, float(optimizer.loss_scale)


def same(ranks):
    for others in ranks[1:]:
        for mine, theirs in zip(ranks[0], others, strict=True):
            np.testing.assert_array_equal(mine, theirs)


current, older = tf_keras.optimizers, tf_keras.optimizers.legacy
accumulated = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}


def check_fit(world):
    equals_one_process(world, lambda: current.SGD(0.05, momentum=0.9, global_clipnorm=0.05), run_eagerly=True)
    equals_one_process(world, lambda: current.SGD(0.05, momentum=0.9), accumulated)
    equals_one_process(world, lambda: older.SGD(0.05, momentum=0.9, clipnorm=0.05), {"groups": 2})
    equals_one_process(
        world,
        lambda: older.SGD(0.05, momentum=0.9),
        model_of=normalizing_model_of,
        plain_model_of=plainly_normalizing_model_of,
    )
    same(world.run(compiled_without_a_callback))


def check_steps(world, make):
    """Of present optimizers, what has the same path in a graph of its own above runs without one: a graph takes long to trace."""
    is_older = make is older.SGD
    for outside, passes, eager in ((False, 1, False), (True, 1, not is_older), (False, 2, not is_older)):
        (weights, scale), (others, other_scale) = world.run(overflow, outside, passes, make, eager)
        assert scale == other_scale
        same([weights, others])
    one, other = world.run(synchronizes, make)
    assert one == other and np.allclose(one, [-0.6, -0.8])
    expected = [(0.0, False), (0.0, False), (-4.5, True), (-4.5, False), (-4.5, False), (-9.0, True)]
    assert world.run(accumulates_before_it_sends, make) == [expected] * 2
    for eager in (False, True):
        assert world.run(skips_together, make) == [(1.0, 1.0, 2.0)] * 2
        assert world.run(keeps_local, make, eager) == [[-3.0, -1.0, -1.0, -2.0], [-3.0, -2.0, -2.0, -4.0]]
        for scaled in (False, True) if eager or is_older else (True,):
            assert world.run(lacks_gradients, make, scaled, eager) == [[-3.0, -3.0, -3.0, 1.0]] * 2


def check_computed_gradients(world):
    graphs = [(current.SGD, False, True), (older.SGD, False, False)]
    for make, eager, skips in [*itertools.product((current.SGD, older.SGD), (True,), (True, False)), *graphs]:
        for found, weights in world.run(clips_what_it_computes, make, eager, skips):
            assert found == [3.0, 4.0] and np.allclose(weights, [-0.6 - 3.0, -0.8 - 4.0]), (make, eager, skips, weights)


def check_schedules(world):
    """Older optimizers follow them in a graph as the present ones do without."""
    (rates, expected), _ = world.run(follows_a_schedule, current.SGD, True)
    for found, weights in world.run(follows_a_schedule, older.SGD, False):
        assert np.allclose(found, rates) and np.allclose(rates, [0.03, 0.04, 0.04, 0.004]), (found, rates)
        for one, other in zip(weights, expected, strict=True):
            assert np.allclose(one, other, rtol=1e-5, atol=1e-7)


def check_missing_gradients(world):
    for steps, eager in ((table.CHANGING, True), (table.STEADY, False)):
        for passes in (1, 2):
            found = world.run(weights_after_missing_gradients, steps, passes, eager)
            assert found == [table.expected(steps, passes)] * 2, (eager, passes, found)


def check_files(world):
    with tempfile.TemporaryDirectory() as folder:
        for place, model in enumerate(world.run(trains_what_is_saved)[0]):
            for ending in (
                ".keras",
                ".h5",
                "",
            ):  # here: in a thread tf_keras writes HDF5 for .keras once it has written a file
                model.save(f"{folder}/{place}{ending}")
        same(world.run(resumes, folder))
        same(world.run(writes_and_goes_on, folder))
        with open(f"{folder}/log.csv") as log:
            assert len(log.readlines()) == 1 + 3
        assert not [name for _, _, names in os.walk(f"{folder}/backup") for name in names]
        load = [sys.executable, str(pathlib.Path(__file__).with_name("legacy_keras_load.py")), folder]
        subprocess.run(load, check=True, timeout=240)


def check_stops(world):
    """As keras_runs.check_stops_within_an_epoch."""
    for make in (lambda: current.SGD(0.05), lambda: older.SGD(0.05)):
        for behind, taken in [((0, None), 2), ((None, 1), 3), ((1, 1), 2)]:
            weights, steps = zip(*world.run(stops_within_an_epoch, behind, make), strict=True)
            same(weights)
            assert set(steps) == {taken}, (behind, steps)


def check_frozen_layers(world, make, each=(1, 2)):
    """They stay, as with plain tf_keras; momentum went on moving what had gradients in the fit before."""
    for passes in each:
        for moved in world.run(freezes, make, passes):
            assert moved[0] > 0 and moved[1:] == [0, 0], moved


def check_growing_scales(world, make, modes=(False, True)):
    for eager in modes:
        for seen, scale in world.run(scale_grows, make, eager):
            assert seen == [0, -1, -1, -2, -2, -3] and scale == 2.0**14, (seen, scale)


def check_what_is_no_optimizer(world):
    try:
        hvd.DistributedOptimizer("sgd")
    except rt.RingtrainError as error:
        assert "builtins.str" in str(error)
    else:
        raise AssertionError("a text was taken for an optimizer")


def check_further_fits(world):
    equals_one_process(world, lambda: current.Adam(0.02), jit_compile=True)
    equals_one_process(world, lambda: older.Adam(0.02), accumulated, run_eagerly=True)


PARTS = {
    "fit": [check_fit],
    "further fits": [check_further_fits],
    "steps": [
        lambda world: check_steps(world, current.SGD),
        check_missing_gradients,
        check_computed_gradients,
        check_schedules,
        lambda world: check_frozen_layers(world, lambda: current.SGD(0.05, momentum=0.9), [1]),
        lambda world: check_growing_scales(world, current.SGD, [False]),
    ],
    "older steps": [
        lambda world: check_steps(world, older.SGD),
        lambda world: check_frozen_layers(world, lambda: older.Adam(0.05)),
        lambda world: check_growing_scales(world, older.SGD),
    ],
    "files": [check_files, check_stops, check_what_is_no_optimizer, lambda _: keras_drift.check(tf_keras, hvd)],
}
if __name__ == "__main__":
    with World(2) as world:
        for part in sys.argv[1:]:
            for check in PARTS[part]:
                check(world)
    print("trained")
