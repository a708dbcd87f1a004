"""What test_keras_jax_backend.py runs in a process with KERAS_BACKEND=jax; it prints "trained" if all is well."""

import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import keras
import keras_drift
import keras_runs as runs
import numpy as np

import ringtrain as rt
import ringtrain.keras as hvd
from ringtrain._training.needs import NEEDS, TRAITS
from ringtrain.errors import RingtrainError
from ringtrain.testing import World

# Ranks in one process share XLA's threads, and a program that waits for another rank holds one: each rank runs its own.
jax.config.update("jax_cpu_enable_async_dispatch", False)
assert keras.backend.backend() == "jax"

ALL = sys.argv[1:] != ["short"]  # else what each run tries
SHORT = (
    "check_compression",
    "check_drift",
    "check_files",
    "check_fit",
    "check_loop",
    "check_pairs",
    "check_scaled_losses",
)
AVERAGE = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
EAGER = {"run_eagerly": True}


def check_fit():
    """Ranks equal one process with the batches of all, in programs and without."""
    for size, make, factor, compiling, settings in [
        (2, lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.5), 1, {}, {}),
        (2, lambda: keras.optimizers.AdamW(0.02, global_clipnorm=0.5), 1, {}, {**AVERAGE, "compression": hvd.Compression.bf16}),
        (2, lambda: keras.optimizers.SGD(0.05, momentum=0.9), 1, EAGER, {}),
        (3, lambda: keras.optimizers.SGD(0.05, momentum=0.9), 3, {}, {"op": rt.Sum, "groups": 2}),
        (2, lambda: keras.optimizers.SGD(0.05), 1, {}, {"gradient_predivide_factor": 4.0}),
        (2, lambda: keras.optimizers.SGD(0.05, momentum=0.9), 2, EAGER, {"backward_passes_per_step": 2}),
        (2, lambda: keras.optimizers.Adam(0.02), 1, {"steps_per_execution": 4}, AVERAGE),
        (2, lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)), 1, {}, {}),
    ][slice(None) if ALL else slice(1, 2)]:  # fmt: skip
        ranks = runs.distributed_runs(size, make, compiling, **settings)
        runs.assert_same_bits(ranks)
        runs.assert_close(ranks[0], runs.oracle_run(make, factor), 2e-5, 5e-6)


def check_loop():
    """The loop of Keras' guide for JAX: values in and out of a compiled step, with passes that are added up or without."""

    def loss_of(model, trainable, others, x, y):
        predicted, others = model.stateless_call(trainable, others, x, training=True)
        return jnp.mean((predicted - y) ** 2), others

    def trains(rank, make, passes, distributes, clips=False):
        model, optimizer = runs.dense_model(seed=rank), make()
        if distributes:
            how = {**AVERAGE, "backward_passes_per_step": passes}
            optimizer = hvd.DistributedOptimizer(optimizer, **how)
            hvd.broadcast_variables(model.variables, root_rank=0)
        optimizer.build(model.trainable_variables)

        @jax.jit
        def step(trainable, others, kept, x, y):
            gradients, others = jax.grad(lambda *given: loss_of(model, *given, x, y), has_aux=True)(trainable, others)
            if clips:
                pairs = list(zip(gradients, model.trainable_variables, strict=True))
                pairs = optimizer.synchronize(pairs) if distributes else pairs
                gradients = [0.5 * jnp.tanh(each) for each, _ in pairs]
                if distributes:
                    with optimizer.skip_synchronize():
                        return (*optimizer.stateless_apply(kept, gradients, trainable), others)
            return (*optimizer.stateless_apply(kept, gradients, trainable), others)

        state = [
            [each.value for each in some]
            for some in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        ]
        size = 2 if distributes else 1
        x, y = (
            runs.share_of(rank, size, data).reshape(-1, runs.GLOBAL_BATCH // size // passes, data.shape[1])
            for data in (runs.X, runs.Y)
        )
        for batch in zip(x, y, strict=True):
            trainable, kept, others = step(*state, *batch)
            state = [trainable, others, kept]
        return [np.asarray(each) for each in state[0]]

    def make():
        return keras.optimizers.SGD(0.05, momentum=0.9)

    for passes, clips in ((3, False), (1, True), *([(1, False)] if ALL else [])):
        with World(2) as world:
            one, other = world.run(trains, make, passes, True, clips)
        for mine, theirs, alone in zip(one, other, trains(0, make, 1, False, clips), strict=True):
            np.testing.assert_array_equal(mine, theirs)
            np.testing.assert_allclose(mine, alone, 2e-5, 5e-6)


def check_scaled_losses():
    """A LossScaleOptimizer around, within, and where compile() puts it: ranks skip together what is not finite on one."""

    def overflow(rank, outside, passes, compiling):
        model = runs.dense_model(seed=rank)
        inner = keras.optimizers.SGD(0.05)
        how = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
        optimizer = keras.optimizers.LossScaleOptimizer(
            hvd.DistributedOptimizer(inner, **how) if outside else inner, initial_scale=64.0
        )
        model.compile(optimizer if outside else hvd.DistributedOptimizer(optimizer, **how), "mse", **compiling)
        x = runs.share_of(rank, 2, runs.X).copy()
        if rank == 1:
            x[6:9] = np.inf
        model.fit(
            x,
            runs.share_of(rank, 2, runs.Y),
            batch_size=6 // passes,
            shuffle=False,
            verbose=0,
            callbacks=runs.start_callbacks(),
        )
        return runs.trained(model), float(model.optimizer.dynamic_scale), int(model.optimizer.iterations)

    for outside, passes, compiling in ((True, 1, {}), (False, 1, {}), (True, 2, {}), (False, 2, EAGER))[
        : None if ALL else 1
    ]:
        with World(2) as world:
            (one, scale, steps), (other, same, _) = world.run(overflow, outside, passes, compiling)
        runs.assert_same_bits([one, other])
        assert scale == same == 32.0 and steps == 5, (scale, steps)
        assert all(np.isfinite(weight).all() for weight in one.weights)


def lacks_gradients(rank, passes, groups):
    weights = [keras.Variable(np.ones(1, "float32")) for _ in range(4)]
    settings = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
    if groups:
        settings["groups"] = [weights[:3]]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.5), **settings)
    own = [jnp.array([2.0]), None, None, None]
    own[1 + rank] = jnp.array([4.0])
    for _ in range(2 * passes):
        optimizer.apply(own, weights)
    return [weight.numpy().item() for weight in weights]


def computes(rank):
    assert float(hvd.allreduce(float(rank))) == 0.5 and np.asarray(hvd.allgather([rank])).tolist() == [0, 1]
    return np.asarray(hvd.broadcast(np.arange(2.0), 1)).tolist()


def local_steps(rank, compiling, statistics):
    model = runs.dense_model(seed=rank)
    if statistics:
        layers = [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(2)]
        model = runs.with_weights_of(keras.Sequential(layers), rank)
    mode = hvd.LocalSteps(every=3, outer=hvd.Outer(0.7, 0.9))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), mode=mode), "mse", **compiling)
    return runs.fit(model, rank, 2, callbacks=runs.start_callbacks())


def check_local_steps():
    for compiling in ({}, EAGER):
        with World(2) as world:
            one, other = world.run(local_steps, compiling, False)
        runs.assert_same_bits([one, other])
        for mine, theirs in zip(one.weights, local_steps_by_hand(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        with World(2) as world:
            runs.assert_same_bits(world.run(local_steps, compiling, True))  # the moving statistics too


def local_steps_by_hand():
    common, m = runs.dense_model(seed=0).get_weights(), [0.0] * 4
    for part in range(2):
        changes = []
        for rank in range(2):
            model = runs.dense_model()
            model.set_weights(common)
            model.compile(keras.optimizers.SGD(0.05), "mse")
            x, y = (runs.share_of(rank, 2, data)[18 * part :][:18] for data in (runs.X, runs.Y))
            model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
            changes.append([before - after for before, after in zip(common, model.get_weights(), strict=True)])
        change = [(one + other) / 2 for one, other in zip(*changes, strict=True)]
        m = [0.9 * old + new for old, new in zip(m, change, strict=True)]
        common = [x - 0.7 * (new + 0.9 * old) for x, new, old in zip(common, change, m, strict=True)]
    return common


def late(rank, flushes):
    weights = keras.Variable(np.ones((2, 3), "float32"), name="w")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5), mode=hvd.OneStepLate())
    for step in range(3):
        optimizer.apply([jnp.full((2, 3), float(rank + step))], [weights])
    if flushes:
        optimizer.flush()
    return keras.ops.convert_to_numpy(weights)


def late_in_fit(rank, compiling):
    model = runs.dense_model(seed=rank)
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), mode=hvd.OneStepLate()), "mse", **compiling
    )
    return runs.fit(model, rank, 2, callbacks=runs.start_callbacks(), epochs=2)


def factored(rank, compiled):
    weights = keras.Variable(np.zeros((24, 40), "float32"), name="w")
    how = hvd.Compression.powersgd(rank=2, start_after=1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=how)
    optimizer.build([weights])
    step = jax.jit(lambda kept, gradient, value: optimizer.stateless_apply(kept, [gradient], [value]))
    for number in range(8):
        gradient = jnp.asarray(drawn(rank, number))
        if not compiled:
            optimizer.apply([gradient], [weights])
            continue
        (value,), kept = step([each.value for each in optimizer.variables], gradient, weights.value)
        weights.assign(value)
        for variable, value in zip(optimizer.variables, kept, strict=True):
            variable.assign(value)
    return keras.ops.convert_to_numpy(weights), optimizer.compression_state()["0.w/0"]["residual"]


def drawn(rank, step):
    return np.random.default_rng(10 * step + rank).standard_normal((24, 40)).astype(np.float32)


def check_what_is_reduced_on_the_host():
    """OneStepLate, and factors of low rank."""
    with World(2, "1+1") as world:
        for flushes, expected in (
            (False, 1 - 0.25 - 0.875),
            (True, 1 - 0.25 - 0.875 - 1.6875),
        ):  # momentum sums .5, 1.5, 2.5
            assert all((found == np.float32(expected)).all() for found in world.run(late, flushes))
        for compiled in (False, True):
            (one, kept), (other, _) = world.run(factored, compiled)
            assert one.tobytes() == other.tobytes()
            exact = sum(drawn(rank, step).astype(np.float64) for rank in range(2) for step in range(8)) / 2
            gap, lost = (
                np.linalg.norm(-one.astype(np.float64) + kept - exact),
                np.linalg.norm(-one.astype(np.float64) - exact),
            )
            assert gap < 1e-6 * np.linalg.norm(exact) < 1e-3 * lost, (gap, lost)
    found = []
    for compiling in ({}, EAGER):
        with World(2) as world:
            one, other = world.run(late_in_fit, compiling)
        runs.assert_same_bits([one, other])
        found.append(one)
    runs.assert_close(*found)


def in_int8(rank, feedback, compiled):
    """The sum of updates with gradients of one value beside large ones, which eight bits lose without feedback."""
    weights = keras.Variable(np.zeros(8192, "float32"), name="w")
    how = hvd.Compression.int8 if feedback else hvd.Compression.int8.without_feedback
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=how)
    optimizer.build([weights])
    gradient = jnp.full(8192, 0.3).at[::2].set(100.0)
    step = jax.jit(lambda kept, value: optimizer.stateless_apply(kept, [gradient], [value]))
    for _ in range(8):
        if not compiled:
            optimizer.apply([gradient], [weights])
            continue
        (value,), kept = step([each.value for each in optimizer.variables], weights.value)
        weights.assign(value)
        for variable, value in zip(optimizer.variables, kept, strict=True):
            variable.assign(value)
    return -np.asarray(weights.value)[1] / 8


def check_compression():
    for compiled in (False, True):
        with World(2, "1+1") as world:
            for feedback in (True, False):
                found = world.run(in_int8, feedback, compiled)
                assert found[0] == found[1] and (abs(found[0] - 0.3) < 0.05) == feedback, found


def check_process_sets():
    """Two of three ranks train together, the third by itself."""

    def trains(rank):
        pair = rt.add_process_set([0, 2])
        model = runs.dense_model(seed=rank)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=pair), "mse")
        return runs.fit(model, (rank + 1) // 2, 2, callbacks=runs.start_callbacks()[:1])

    with World(3) as world:
        one, alone, other = world.run(trains)
    runs.assert_same_bits([one, other][:2]) if one.history == other.history else None
    for mine, theirs in zip(one.weights, other.weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    runs.assert_close(one, runs.oracle_run(lambda: keras.optimizers.SGD(0.05)), 2e-5, 5e-6)
    assert any((mine != theirs).any() for mine, theirs in zip(one.weights, alone.weights, strict=True))


def check_drift():
    keras_drift.check(keras, hvd)


def warmed_up(rank):
    """Each batch has a rate of its own."""
    model = runs.dense_model(seed=rank)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=2)
    return runs.fit(model, rank, 2, callbacks=[*runs.start_callbacks(), warmup], epochs=2)


def warmed_up_alone():
    rates = [0.05 * ((step / runs.STEPS + 1 / runs.STEPS) / 2 + 1) / 2 for step in range(2 * runs.STEPS)]
    model = runs.dense_model(seed=0)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    x, y = (data.reshape(-1, runs.GLOBAL_BATCH, data.shape[1]) for data in (runs.X, runs.Y))
    for step, rate in enumerate(rates):
        old = float(optimizer.learning_rate)
        optimizer.learning_rate = rate
        for momentum in optimizer.momentums:
            momentum.assign(momentum * (rate / old))
        model.train_on_batch(x[step % runs.STEPS], y[step % runs.STEPS])
    return runs.trained(model)


def check_callbacks_between_batches():
    with World(2) as world:
        one, other = world.run(warmed_up)
    runs.assert_same_bits([one, other])
    runs.assert_close(one, warmed_up_alone(), 2e-5, 5e-6)


def check_small_things():
    for passes in (1, 2):
        for groups in (False, True):
            with World(2) as world:
                assert world.run(lacks_gradients, passes, groups) == [[-2.75, -2.75, -2.75, 1.0]] * 2
    with World(2) as world:
        assert world.run(computes) == [[0.0, 1.0]] * 2


def files(rank, folder):
    """A file has what Keras makes of the optimizer without ringtrain; a sum that is begun starts anew."""
    model = runs.dense_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02), backward_passes_per_step=2)
    model.compile(optimizer, "mse")
    for _ in range(3):  # an update, and a sum that is begun
        model.train_on_batch(runs.X[:6], runs.Y[:6])
    path = folder / f"{rank}.keras"
    model.save(path)
    plain, again = keras.models.load_model(path), hvd.load_model(path, backward_passes_per_step=2)
    assert len(plain.optimizer.variables) == len(optimizer.variables) - 5 == len(again.optimizer.variables) - 5
    for mine, *theirs in zip(optimizer.variables, plain.optimizer.variables, again.optimizer.variables, strict=False):
        for each in theirs:
            np.testing.assert_array_equal(mine.numpy(), each.numpy())
    return path


def check_files():
    with tempfile.TemporaryDirectory() as folder, World(2) as world:
        world.run(files, pathlib.Path(folder))


# ---- what there is not on this backend ----


class Halved:
    @staticmethod
    def compress(tensor):
        return tensor / 2, None

    @staticmethod
    def decompress(tensor, context):
        return tensor * 2


def compiled_model():
    model = runs.dense_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    return model


def survives(hvd=hvd):
    model = compiled_model()
    for _ in hvd.elastic.State(
        model=model, optimizer=model.optimizer, sampler=hvd.elastic.BatchSampler(4, batch_size=1)
    ).epochs(1):
        model.train_on_batch(runs.X[:4], runs.Y[:4])


PAIRS = {
    ("KERAS_BACKEND=jax", "own compression"): lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=Halved),
    ("KERAS_BACKEND=jax", "ShardedEmbedding"): lambda: hvd.layers.ShardedEmbedding(4, 2)(np.zeros((1, 1), int)),
    ("KERAS_BACKEND=jax", "KerasState"): lambda: hvd.elastic.KerasState(compiled_model()),
    ("KERAS_BACKEND=jax", "elastic.State"): survives,
    ("KERAS_BACKEND=jax", "survives on the host"): lambda: hvd.elastic.Elastic(
        compiled_model(), sampler=hvd.elastic.BatchSampler(4, batch_size=1)
    ),
}  # fmt: skip


def check_pairs():
    def refused(rank, act, words):
        try:
            act()
        except RingtrainError as problem:
            assert words in str(problem), problem
        else:
            raise AssertionError(words)

    for (column, key), act in PAIRS.items():
        with World(2) as world:
            world.run(refused, act, f"{column} cannot be used with {TRAITS[key].words}: {NEEDS[column][key]}.")


def check_page():
    """The loop of docs/jax.md."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "project"))
    from test_docs import blocks, run_on_two_ranks  # which imports PyTorch

    ranks = run_on_two_ranks(blocks("jax.md", "python")[1], page="jax.md")
    for mine, theirs in zip(*(each["model"].get_weights() for each in ranks), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert int(ranks[0]["optimizer"].iterations) == 20


def check_drawn_scripts():
    """Some of tests/fuzz/test_fuzz_keras.py, in floats of 64 bits: the last of the checks."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "fuzz"))
    from training.with_keras import FUZZER, LANGUAGE

    FUZZER.hold([seed for seed in range(20) if len(LANGUAGE.drawn(seed).turns) == 1][:2])


CHECKS = [each for name, each in sorted(globals().items()) if name.startswith("check_") and callable(each)]

if __name__ == "__main__":
    for check in sorted(CHECKS, key=lambda each: each is check_drawn_scripts):
        if check.__name__ in (sys.argv[1:] or [check.__name__] if ALL else SHORT):
            check()
            print(check.__name__, flush=True)
    print("trained")
