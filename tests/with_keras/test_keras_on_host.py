"""``OneStepLate`` and PowerSGD of Keras' optimizers: what is applied when, what is lost and made up for, and what is saved."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from modes import in_mode

import ringtrain as rt
import ringtrain.keras as hvd
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.testing import World

STEPS, RATE, MOMENTUM = 5, 0.125, 0.5


# ---- one step late ----


def data(rank, step):
    """Whole numbers: float64 holds all sums of a few steps exactly."""
    drawn = np.random.default_rng(10 * step + rank)
    return drawn.integers(-2, 3, (4, 3)).astype(np.float64), drawn.integers(-2, 3, (4, 2)).astype(np.float64)


def start():
    return np.arange(6.0).reshape(3, 2) / 4


def gradient(weights, rank, step):
    x, y = data(rank, step)
    return x.T @ (x @ weights - y) / 8


def by_hand(ranks, steps=range(STEPS), drop=(), weights=None, flushes=True):
    """One process that applies the mean gradient of the step before."""
    weights = start() if weights is None else weights
    moment, left = np.zeros_like(weights), None
    for step in [*steps, None]:
        late, left = left, None
        if step is not None and step not in drop:
            left = sum(gradient(weights, rank, step) for rank in range(ranks)) / ranks
        if late is not None and (step is not None or flushes):
            moment = MOMENTUM * moment - RATE * late
            weights = weights + moment
    return weights


class Late:
    """A rank that trains by hand."""

    def __init__(self, graph=False, scaled=False, **arguments):
        self.weights = keras.Variable(start(), dtype="float64", name="weights")
        optimizer = keras.optimizers.SGD(RATE, MOMENTUM)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0, dynamic_growth_steps=2)
        self.optimizer = hvd.DistributedOptimizer(optimizer, **in_mode({"late": True, **arguments}))
        self.run = tf.function(self.step) if graph else self.step

    def step(self, x, y, factor):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(tf.square(x @ self.weights.value - y)) / 16
            if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
                loss = self.optimizer.scale_loss(loss)
        self.optimizer.apply([tape.gradient(loss, self.weights.value)], [self.weights])

    def train(self, rank, steps=range(STEPS), overflows=()):
        for step in steps:
            x, y = data(rank, step)
            factor = np.inf if (rank, step) in overflows else 1.0
            self.run(tf.constant(x), tf.constant(y), tf.constant(factor, tf.float64))
        return np.array(self.weights.numpy())


@pytest.mark.parametrize(
    "graph, compression",
    [(False, None), (True, None), pytest.param(False, hvd.Compression.int8, marks=pytest.mark.long)],
)
def test_ranks_are_one_process_with_the_same_rule(graph, compression):
    """Bit for bit, on sums that are exact; small tensors are not rounded. The last gradients come with flush()."""

    def on_rank(rank):
        late = Late(graph, compression=compression)
        before = late.train(rank)
        steps = int(late.optimizer.iterations.numpy())
        late.optimizer.flush()
        late.optimizer.flush()  # nothing is left
        return before, np.array(late.weights.numpy()), steps, int(late.optimizer.iterations.numpy())

    with World(2, "1+1", stall_abort_seconds=60) as world:
        for before, after, steps, all_steps in world.run(on_rank):
            assert np.array_equal(before, by_hand(2, flushes=False)) and np.array_equal(after, by_hand(2))
            assert (steps, all_steps) == (STEPS - 1, STEPS)  # the first has applied nothing


@pytest.mark.long
def test_sums_over_passes_and_a_world_of_one():
    def on_rank(rank, size):
        late = Late(backward_passes_per_step=2)
        late.train(rank, [0, 1, 2, 3])
        late.optimizer.flush()
        return np.array(late.weights.numpy()).tobytes()

    with World(2, "1+1", stall_abort_seconds=60) as world:
        assert len(set(world.run(on_rank, 2))) == 1
    with World(1) as world:
        plain = world.run(lambda rank: Late().train(rank))[0]
    assert np.array_equal(plain, by_hand(1, flushes=False))


@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_moving_averages_at_the_end_of_a_fit_are_of_the_last_gradients_too(scaled):
    """Keras puts them into the model before callbacks hear of the end: what came late was applied to them."""
    averages = {"use_ema": True, "ema_momentum": 0.75}

    def on_rank(rank):
        late, seen = Late(), []
        optimizer = keras.optimizers.SGD(RATE, MOMENTUM, **averages)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)
        late.optimizer = hvd.DistributedOptimizer(optimizer, **in_mode({"late": True}))
        late.train(rank)
        late.optimizer.finalize_variable_values([late.weights])
        inner = getattr(late.optimizer, "inner_optimizer", late.optimizer)
        seen.append(np.array(inner._model_variables_moving_average[0].numpy()))
        late.optimizer.flush()  # nothing is left
        return np.array(late.weights.numpy()), *seen, int(late.optimizer.iterations.numpy())

    with World(2, "1+1", stall_abort_seconds=60) as world:
        for model, average, steps in world.run(on_rank):
            assert steps == STEPS and np.array_equal(model, average) and not np.array_equal(model, start())


def test_an_overflow_is_dropped_where_it_arrives():
    """By all ranks, one step later; gradients of steps with other scales are not mixed up."""

    def on_rank(rank):
        late = Late(scaled=True)
        late.train(rank, overflows={(1, 2)})
        late.optimizer.flush()
        return np.array(late.weights.numpy()), float(late.optimizer.dynamic_scale.numpy())

    with World(2, "1+1", stall_abort_seconds=60) as world:
        for found, scale in world.run(on_rank):
            assert np.array_equal(found, by_hand(2, drop={2}))
            assert scale == 2048  # doubled after two good steps, halved, and doubled


@pytest.mark.long
def test_what_is_on_its_way_is_saved_and_loaded():
    """In a world of another size, too: what is applied next is the same."""

    def first(rank):
        late = Late()
        late.train(rank, range(3))
        return late.optimizer.delayed_state(), late.weights.numpy(), [each.numpy() for each in late.optimizer.variables]

    def second(rank, states):
        late = Late()
        late.optimizer.build([late.weights])
        state, weights, variables = states[0]
        late.weights.assign(weights)
        for variable, value in zip(late.optimizer.variables, variables, strict=True):
            variable.assign(value)
        late.optimizer.load_delayed_state(state)
        late.optimizer.flush()
        with pytest.raises(InvalidArgumentError, match=r"load_delayed_state '0.other': .* shape \(1,\) but found none"):
            late.optimizer.load_delayed_state({"0.other": np.zeros(1)})
        with pytest.raises(InvalidArgumentError, match="must be a mapping from names to gradients, but is a int"):
            late.optimizer.load_delayed_state(3)
        return np.array(late.weights.numpy())

    with World(2, "1+1", stall_abort_seconds=60) as world:
        states = world.run(first)
    with World(3, "1+1+1", stall_abort_seconds=60) as world:
        for found in world.run(second, states):
            assert np.array_equal(found, by_hand(2, range(3)))


@pytest.mark.long
def test_fit_applies_the_last_gradients():
    def on_rank(rank):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False, dtype="float64")])
        model.layers[0].kernel.assign(start())
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), mode=hvd.OneStepLate()), "mse", run_eagerly=True
        )
        x, y = (np.concatenate(parts) for parts in zip(*(data(rank, step) for step in range(3)), strict=True))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
        return int(model.optimizer.iterations.numpy()), model.layers[0].kernel.numpy().tobytes()

    with World(2, "1+1", stall_abort_seconds=60) as world:
        found = world.run(on_rank)
    assert len(set(found)) == 1 and found[0][0] == 3


@pytest.mark.parametrize("arguments, found", [
    ({"late": True, "groups": 2}, "OneStepLate cannot be used with groups"),
    ({"late": True, "compression": hvd.Compression.powersgd()}, "OneStepLate cannot be used with Compression.powersgd"),
    ({"groups": 2, "compression": hvd.Compression.powersgd()}, "Compression.powersgd cannot be used with groups"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(arguments, found):
    with World(1), pytest.raises(InvalidArgumentError, match=found):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **in_mode(arguments))


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@pytest.mark.parametrize("way", [{"late": True}, {"every": 2}], ids=str)
def test_compressions_of_the_package_are_taken(way, compression):
    with World(1) as world:
        world.run(lambda _: hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=compression, **in_mode(way)))


@pytest.mark.parametrize(
    "way, found",
    [({"late": True}, "OneStepLate .* a compression class"), ({"every": 2}, "LocalSteps .* a compression class")],
)
def test_a_compression_of_ones_own_is_not(way, found):
    class Own(hvd.Compression.none):
        pass

    with World(1), pytest.raises(InvalidArgumentError, match=found):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=Own, **in_mode(way))


# ---- PowerSGD ----

SHAPE = (24, 40)


def unlike(rank, step):
    """A part that changes, and one that is the rank's own."""
    own = np.random.default_rng(rank).standard_normal(SHAPE) * 2
    return (np.random.default_rng(1000 * step + rank + 10).standard_normal(SHAPE) + own).astype(np.float32)


class Matrices:
    """A rank whose gradients are given."""

    def __init__(self, graph=False, scaled=False, start_after=1, rank=2, **arguments):
        self.weight = keras.Variable(np.zeros(SHAPE, np.float32), name="w")
        self.vector = keras.Variable(np.zeros(8, np.float32), name="v")
        optimizer = keras.optimizers.SGD(1.0)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
        compression = hvd.Compression.powersgd(rank=rank, start_after=start_after)
        self.optimizer = hvd.DistributedOptimizer(optimizer, compression=compression, **in_mode(arguments))
        self.run = tf.function(self.apply) if graph else self.apply

    def apply(self, matrix, vector):
        self.optimizer.apply([matrix, vector], [self.weight, self.vector])

    def step(self, rank, step, scale=1.0):
        self.run(tf.constant(unlike(rank, step) * scale), tf.fill([8], float(rank + step) * scale))
        return np.array(self.weight.numpy())


def check_law(delivered, kept, ranks, steps):
    exact = sum(unlike(rank, step).astype(np.float64) for rank in range(ranks) for step in range(steps)) / ranks
    gap, lost = (np.linalg.norm(delivered + each - exact) for each in (kept, 0))
    assert gap < 1e-6 * np.linalg.norm(exact) < 1e-3 * lost


@pytest.mark.parametrize("layout, graph", [("2+1", False), pytest.param("1+1", True, marks=pytest.mark.long)])
def test_what_is_delivered_and_what_is_kept_is_all_that_was_to_be(layout, graph):
    """The law, and the same bits on all ranks."""
    ranks, steps = sum(map(int, layout.split("+"))), 12

    def on_rank(rank):
        learner, before = Matrices(graph), rt.counters()["bytes"]
        seen = [learner.step(rank, step) for step in range(steps)]
        sent = (rt.counters()["bytes"] - before) / steps
        return seen, learner.vector.numpy(), learner.optimizer.compression_state()["0.w/0"]["residual"], sent

    with World(ranks, layout, stall_abort_seconds=60) as world:
        results = world.run(on_rank)
    seen, vector, residual, sent = results[0]
    check_law(-seen[-1].astype(np.float64), residual, ranks, steps)
    assert np.array_equal(-seen[0], sum(unlike(rank, 0) for rank in range(ranks)) / np.float32(ranks))  # it was exact
    np.testing.assert_allclose(
        vector, -sum(rank + step for rank in range(ranks) for step in range(steps)) / ranks, 1e-5
    )
    for other, *_ in results[1:]:
        assert np.array(other).tobytes() == np.array(seen).tobytes()
    assert sent < 24 * 40 * 4 / 3  # two factors of rank 2, a vector and the agreement


def test_an_update_that_is_skipped_leaves_no_trace():
    """Its bits are those of a run without that batch."""

    def on_rank(rank, steps, bad):
        learner = Matrices(scaled=True)
        learner.optimizer.build([learner.weight, learner.vector])
        for step in steps:
            scale = np.inf if step in bad and rank == 1 else float(learner.optimizer.dynamic_scale.numpy())
            learner.step(rank, step, scale)
            learner.optimizer.dynamic_scale.assign(64.0)
        return learner.weight.numpy().tobytes()

    with World(2, "1+1", stall_abort_seconds=60) as world:
        skipped = world.run(on_rank, range(6), {2, 4})
        assert skipped == world.run(on_rank, [0, 1, 3, 5], set()) and len(set(skipped)) == 1


@pytest.mark.long
def test_another_world_goes_on_with_what_was_lost():
    """Of another size: the mean of what ranks have lost is delivered there; the first step in it is exact."""

    def first(rank):
        learner = Matrices()
        delivered = [learner.step(rank, step) for step in range(6)][-1]
        return learner.optimizer.compression_state(), delivered

    def second(rank, state):
        learner = Matrices()
        learner.optimizer.build([learner.weight, learner.vector])
        learner.optimizer.load_compression_state(state)
        learner.step(rank, 6)
        with pytest.raises(InvalidArgumentError, match="load_compression_state '0.w/0': expected .* but found nothing"):
            learner.optimizer.load_compression_state({})
        return -learner.weight.numpy().astype(np.float64), learner.optimizer.compression_state()["0.w/0"]["residual"]

    with World(3, "2+1", stall_abort_seconds=60) as world:
        state, delivered = world.run(first)[0]
    with World(2, "1+1", stall_abort_seconds=60) as world:
        later, kept = world.run(second, state)[0]
    exact = sum(unlike(rank, step).astype(np.float64) for rank in range(3) for step in range(6)) / 3
    exact += (unlike(0, 6).astype(np.float64) + unlike(1, 6)) / 2
    assert np.linalg.norm(later - delivered + kept - exact) < 1e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("odd", [{"rank": 1}, pytest.param({"start_after": 3}, marks=pytest.mark.long), None], ids=str)
def test_other_settings_of_powersgd_on_one_rank_are_one_error_on_all(odd):
    def on_rank(rank):
        learner = Matrices(**(odd or {} if rank else {}))
        if odd is None and rank:
            learner.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        with pytest.raises(
            (MismatchError, tf.errors.FailedPreconditionError)
        ) as told:  # TensorFlow has errors of its own
            for step in range(2):
                learner.step(rank, step)
        return str(told.value)

    with World(2, "1+1", stall_abort_seconds=60) as world:
        first, second = world.run(on_rank)
    words = "the same on all ranks"
    assert words in first and words in second and (odd is None or (first == second and "PowerSGD(rank=2" in first))


def test_another_delay_on_one_rank_is_one_error_on_all():
    def on_rank(rank):
        late = Late(late=bool(rank))
        with pytest.raises(
            (MismatchError, tf.errors.FailedPreconditionError)
        ) as told:  # TensorFlow has errors of its own
            late.train(rank, range(2))
        return str(told.value)

    with World(2, "1+1", stall_abort_seconds=60) as world:
        texts = world.run(on_rank)
    assert all("allreduce 'optimizer.0.0.weights': dtype must be the same on all ranks" in text for text in texts)
