"""``DistributedOptimizer`` for Keras: it stays the user's optimizer, reduces when it should, and says what is wrong."""

import copy
import itertools
import pickle
import threading

import keras
import keras_runs as runs
import numpy as np
import pytest
import tensorflow as tf
from modes import in_mode

import ringtrain as rt
import ringtrain.keras as hvd
from ringtrain.errors import UnsupportedError
from ringtrain.keras.optimizer import hoist, reduction_of
from ringtrain.testing import World


def variables(*values):
    return [keras.Variable(np.array(value, "float32"), name=f"v{place}") for place, value in enumerate(values)]


def both_modes(function):
    return {"eager": function, "graph": tf.function(function)}


# ---- the user's optimizer stays the user's optimizer ----


def test_object_class_name_and_state_are_kept(two):
    def body(rank):
        optimizer = keras.optimizers.Adam(0.5, name="mine")
        weights = variables([1.0, 2.0])
        optimizer.apply([np.ones(2, "float32")], weights)
        slots = [variable.numpy() for variable in optimizer.variables]
        wrapped = hvd.DistributedOptimizer(optimizer)
        assert wrapped is optimizer and isinstance(wrapped, keras.optimizers.Adam)
        assert (type(wrapped).__name__, type(wrapped).__qualname__) == ("Adam", "Adam")
        assert int(wrapped.iterations) == 1 and wrapped.name == "mine"
        for before, after in zip(slots, wrapped.variables, strict=True):
            np.testing.assert_array_equal(before, after.numpy())
        wrapped.apply([np.full(2, float(rank), "float32")], weights)
        return int(wrapped.iterations), weights[0].numpy().tolist()

    (iterations, one), (_, other) = two.run(body)
    assert iterations == 2 and one == other


def test_config_is_the_plain_ones_and_makes_a_distributed_one(two):
    def body(rank):
        plain = keras.optimizers.SGD(0.5, momentum=0.5, name="sgd")
        expected = keras.saving.serialize_keras_object(plain)
        wrapped = hvd.DistributedOptimizer(plain, op=rt.Sum, backward_passes_per_step=2)
        assert keras.saving.serialize_keras_object(wrapped)["config"] == expected["config"]
        assert keras.saving.serialize_keras_object(wrapped)["module"] == expected["module"] == "keras.optimizers"
        again = type(wrapped).from_config(wrapped.get_config())
        assert reduction_of(again).settings == reduction_of(wrapped).settings
        assert reduction_of(again).prefix != reduction_of(wrapped).prefix
        assert reduction_of(keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(wrapped))) is None

    two.run(body)


def test_pickles_and_copies_are_plain(two):
    def body(rank):
        plain = keras.optimizers.Adam(0.25)
        wrapped = hvd.DistributedOptimizer(plain)
        for other in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
            assert type(other) is keras.optimizers.Adam and reduction_of(other) is None
            assert other.get_config() == wrapped.get_config()

    two.run(body)


def test_float8_is_not_accumulated():
    def body(rank):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        (maximum,) = variables([1.0])
        maximum.overwrite_with_gradient = True
        optimizer.apply([np.array([2.0], "float32")], [maximum])

    with World(1) as world, pytest.raises(NotImplementedError, match="backward_passes_per_step must be 1 with float8"):
        world.run(body)


def test_wrapping_again_takes_the_new_settings(two):
    def body(rank):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        hvd.DistributedOptimizer(optimizer, op=rt.Sum)
        weights = variables([0.0])
        optimizer.apply([np.array([1.0 + rank], "float32")], weights)
        assert type(optimizer).__bases__[1] is keras.optimizers.SGD
        return float(weights[0].numpy()[0])

    assert two.run(body) == [-3.0, -3.0]


def test_files_load_without_ringtrain_and_load_model_wraps_again(two, tmp_path):
    def body(rank):
        model = runs.dense_model(seed=rank)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), "mse")
        runs.fit(model, rank, 2, callbacks=runs.start_callbacks())
        path = tmp_path / f"{rank}.keras"
        model.save(path)
        plain, loaded = keras.models.load_model(path), hvd.load_model(path)
        assert type(plain.optimizer) is keras.optimizers.Adam and reduction_of(loaded.optimizer) is not None
        for one, other in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        runs.fit(model, rank, 2, callbacks=runs.start_callbacks())
        runs.fit(loaded, rank, 2, callbacks=runs.start_callbacks())
        return runs.trained(model), runs.trained(loaded)

    (uninterrupted, resumed), (_, other) = two.run(body)
    runs.assert_same_bits([uninterrupted, resumed, other])


def test_a_world_of_one_and_ranks_outside_of_the_set_stay_as_they_are():
    def body(rank):
        only_first = rt.add_process_set([0])
        return [_one_step(rank, process_set) for process_set in (only_first, rt.global_process_set)]

    with World(2) as world:
        assert world.run(body) == [[-1.0, -1.5], [-2.0, -1.5]]


def _one_step(rank, process_set):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=process_set)
    weights = variables([0.0])
    optimizer.apply([np.array([1.0 + rank], "float32")], weights)
    return float(weights[0].numpy()[0])


# ---- what travels, and when ----


def test_no_byte_travels_before_the_boundary(two):
    def body(rank):
        for mode in ("eager", "graph"):
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=3)
            weights = variables([0.0, 0.0], [[0.0]])
            optimizer.build(weights)
            gradients = [tf.constant([1.0 + rank, 2.0]), tf.constant([[4.0]])]
            step = both_modes(lambda: optimizer.apply(gradients, weights))[mode]
            counts, values = [], []
            for _ in range(6):
                step()
                counts.append(rt.counters()["operations"])
                values.append(float(weights[0].numpy()[0]))
            assert values == [0.0, 0.0, -4.5, -4.5, -4.5, -9.0], mode
            moved = [after > before for before, after in itertools.pairwise(counts)]
            assert moved == [False, True, False, False, True], mode
            assert int(optimizer.iterations) == 2

    two.run(body)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("settings", [{}, {"sparse_as_dense": True}, {"backward_passes_per_step": 2}], ids=str)
def test_sparse_gradients(two, mode, settings):
    passes = settings.get("backward_passes_per_step", 1)

    def body(rank):
        table = variables(np.zeros((4, 2)))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **in_mode(settings))
        optimizer.build(table)
        gradient = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([0, 0] if rank == 0 else [0, 3]), tf.constant([4, 2]))
        step = both_modes(lambda: optimizer.apply([gradient], table))[mode]
        for _ in range(passes):
            step()
        return table[0].numpy()[:, 0].tolist()

    expected = [-1.5 * passes, 0.0, 0.0, -0.5 * passes]
    assert two.run(body) == [expected, expected]


BATCH = np.array([[1, 1, 2], [1, 0, 0]])  # of ids; a row for each rank


def table():
    return variables(np.ones((4, 2)))[0]


def with_two_updates(rows, optimizer, ids, as_it_comes=lambda gradient: gradient):
    """The table, whose gradient is sparse and has an id more than once."""
    optimizer.build([rows])
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(rows.value, ids.reshape(-1)) ** 2)
        gradient = tape.gradient(loss, rows.value)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply([as_it_comes(gradient)], [rows])
    return rows.numpy()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "RMSprop"])
def test_an_id_that_comes_twice_counts_as_in_a_dense_gradient(kind, ranks):
    """Keras alone squares each of its rows, and adds the squares up."""
    make = getattr(keras.optimizers, kind)
    expected = with_two_updates(table(), make(0.1), BATCH, tf.convert_to_tensor)
    assert np.abs(with_two_updates(table(), make(0.1), BATCH) - expected).max() > 1e-3

    def body(rank):
        return with_two_updates(table(), hvd.DistributedOptimizer(make(0.1)), np.split(BATCH, ranks)[rank])

    with World(ranks) as world:
        for found in world.run(body):
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_id_that_comes_twice_in_a_gradient_that_stays_on_its_rank(two):
    def body(rank):
        expected = with_two_updates(table(), keras.optimizers.Adagrad(0.1), BATCH[rank], tf.convert_to_tensor)
        optimizer, own = hvd.DistributedOptimizer(keras.optimizers.Adagrad(0.1), scale_local_gradients=False), table()
        optimizer.register_local_var(own)
        return expected, with_two_updates(own, optimizer, BATCH[rank])

    for expected, found in two.run(body):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_layer_that_no_rank_uses_any_more_stays(two, passes):
    """In a fit whose graph is made anew; momentum went on moving what had gradients in the one before."""

    class Detour(keras.Model):
        goes_there = True

        def __init__(self):
            super().__init__()
            self.first, self.last = keras.layers.Dense(4), keras.layers.Dense(1)

        def build(self, shape):
            for layer in (self.first, self.last):
                layer.build((None, 4))
            self.built = True

        def call(self, x):
            return self.last(self.first(x) if self.goes_there else x)

    def on_rank(rank):
        x = np.random.default_rng(rank).standard_normal((16, 4)).astype(np.float32)
        model, moved = Detour(), []
        model.build((None, 4))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), backward_passes_per_step=passes)
        for model.goes_there in (True, False, False):
            model.compile(optimizer, "mse")
            before = model.first.get_weights()[0]
            model.fit(x, x.sum(1), batch_size=4, shuffle=False, verbose=0, callbacks=runs.start_callbacks())
            moved.append(float(np.abs(model.first.get_weights()[0] - before).max()))
        return moved

    for moved in two.run(on_rank):
        assert moved[0] > 0 and moved[1:] == [0, 0], moved


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_gradients_that_no_rank_has_stay_none(two):
    def body(rank):
        weights = variables([1.0], [1.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.5))
        optimizer.apply([np.array([1.0], "float32"), None], weights)
        return [float(weight.numpy()[0]) for weight in weights]

    assert two.run(body) == [[-0.5, 1.0]] * 2


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_gradient_that_some_ranks_lack_counts_zeros(two, mode, passes):
    def body(rank):
        weights = variables([1.0], [1.0], [1.0], [1.0])
        settings = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.5), **in_mode(settings))
        optimizer.build(weights)
        own = [tf.constant([2.0]), None, None, None]
        own[1 + rank] = tf.constant([4.0])
        step = both_modes(lambda: optimizer.apply(own, weights))[mode]
        for _ in range(2 * passes):
            step()
        return [float(weight.numpy()[0]) for weight in weights]

    # Each of two updates: half of the weight, less the average. Nobody has the last one, which stays.
    assert two.run(body) == [[-2.75, -2.75, -2.75, 1.0]] * 2


def test_two_optimizers_and_a_rank_with_more_models_do_not_mix_names_up(two):
    def body(rank):
        if rank == 1:
            runs.dense_model()  # Keras counts further here: dense_2 where the other rank has dense
        models = [runs.dense_model(seed=rank) for _ in range(2)]
        for model in models:
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
            runs.fit(model, rank, 2, callbacks=runs.start_callbacks())
        return [runs.trained(model) for model in models]

    for ranks in zip(*two.run(body), strict=True):
        runs.assert_same_bits(list(ranks))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_local_layers_keep_their_gradients(two, mode):
    def body(rank):
        shared, own = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
        for layer in (shared, own):
            layer.build((None, 1))
            layer.kernel.assign([[0.0]])
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=own)
        optimizer.build([shared.kernel, own.kernel])
        gradient = tf.constant([[2.0 + 2 * rank]])
        both_modes(lambda: optimizer.apply([gradient, gradient], [shared.kernel, own.kernel]))[mode]()
        return shared.kernel.numpy().item(), own.kernel.numpy().item()

    assert two.run(body) == [(-3.0, -1.0), (-3.0, -2.0)]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_overflow_of_a_local_gradient_skips_the_step_on_all_ranks(two, mode):
    def body(rank):
        shared, own = variables([1.0], [1.0])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
        optimizer = hvd.DistributedOptimizer(optimizer)
        optimizer.register_local_var(own)
        optimizer.build([shared, own])
        gradients = tf.Variable([4.0, 4.0])
        step = both_modes(lambda: optimizer.apply([gradients[:1], gradients[1:]], [shared, own]))[mode]
        gradients.assign([4.0, np.inf if rank else 4.0])
        step()
        skipped = float(shared.numpy().item()), float(own.numpy().item()), float(optimizer.dynamic_scale)
        gradients.assign([4.0, 4.0])
        step()
        return skipped, float(shared.numpy().item()), float(own.numpy().item())

    assert two.run(body) == [((1.0, 1.0, 2.0), -1.0, 0.0)] * 2


def test_the_norm_of_all_gradients_is_refused_where_some_are_a_ranks_own(two):
    def body(rank):
        shared, own = variables([1.0], [1.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=0.5))
        optimizer.register_local_var(own)
        with pytest.raises(UnsupportedError, match="global_clipnorm must be None with variables whose gradients stay"):
            optimizer.apply([tf.ones([1]), tf.ones([1])], [shared, own])

    two.run(body)


def test_several_optimizers_in_one(two):
    def body(rank):
        model = runs.dense_model(seed=rank)
        by_name = {model.layers[0].kernel.path: keras.optimizers.Adam(0.02)}
        several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.05), by_name))
        model.compile(hvd.DistributedOptimizer(several), "mse", run_eagerly=True)
        return runs.fit(model, rank, 2, callbacks=runs.start_callbacks())

    runs.assert_same_bits(two.run(body))


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_maxima_of_float8_are_those_of_all_ranks(two):
    def body(rank):
        model = runs.dense_model(seed=rank)
        model.quantize("float8")
        runs.with_weights_of(model, rank)
        for variable in model.trainable_variables:
            if "scale" in variable.path or "amax" in variable.path:
                variable.assign(keras.ops.ones_like(variable))
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        x, y = runs.share_of(rank, 2, runs.X) * (1 + rank), runs.share_of(rank, 2, runs.Y)
        model.fit(x, y, batch_size=6, shuffle=False, verbose=0, callbacks=runs.start_callbacks())
        return runs.trained(model), float(np.max(model.layers[0].inputs_amax_history.numpy())), np.abs(x).max()

    (one, maximum, own), (other, _, largest) = two.run(body)
    runs.assert_same_bits([one, other])
    assert maximum == pytest.approx(largest) and maximum > own


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_maximum_that_only_some_ranks_have(two, mode):
    """A float8 layer that one rank's branch does not reach, and one that nobody's does."""

    def body(rank):
        weights = variables([1.0], [1.0], [1.0])
        for maximum in weights[1:]:
            maximum.overwrite_with_gradient = True
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(weights)
        own = [tf.constant([2.0]), tf.constant([5.0]) if rank == 0 else None, None]
        both_modes(lambda: optimizer.apply(own, weights))[mode]()
        return [float(weight.numpy()[0]) for weight in weights]

    assert two.run(body) == [[-1.0, 5.0, 1.0]] * 2


@pytest.mark.parametrize("passes", [1, 2])
def test_a_living_optimizer_goes_on_in_a_new_world(passes):
    """After ``shutdown()`` and ``init()``, with a missing gradient on each side."""

    def make(rank):
        weights = variables([1.0], [1.0])
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=passes), weights

    living = [None, None]

    def body(rank):
        living[rank] = living[rank] or make(rank)
        optimizer, weights = living[rank]
        for _ in range(passes):
            optimizer.apply([tf.constant([2.0]), tf.constant([4.0]) if rank else None], weights)
        return [float(weight.numpy()[0]) for weight in weights]

    for world_number in (1, 2):
        with World(2, stall_abort_seconds=60) as world:
            assert world.run(body) == [[1.0 - 2.0 * passes * world_number] * 2] * 2


# ---- synchronize and skip_synchronize ----


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_clipping_between_synchronize_and_apply_clips_the_average(two, mode, passes):
    def body(rank):
        weights = variables([0.0, 0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=passes)
        optimizer.build(weights)
        gradient = tf.constant([6.0, 0.0] if rank == 0 else [0.0, 8.0]) / passes

        def step():
            pairs = optimizer.synchronize(zip([gradient], weights, strict=True))
            clipped, norm = tf.clip_by_global_norm([average for average, _ in pairs], 1.0)
            with optimizer.skip_synchronize():
                optimizer.apply_gradients(zip(clipped, weights, strict=True))
            return norm

        step = both_modes(step)[mode]
        before = rt.counters()["operations"]
        norms = [float(step()) for _ in range(passes)]
        assert (
            rt.counters()["operations"] == before + 3
        )  # one agrees on which gradients there are, one that ranks step alike
        assert norms[-1] == pytest.approx(5.0)
        assert int(optimizer.iterations) == 1
        return weights[0].numpy().tolist()

    one, other = two.run(body)
    assert one == other == pytest.approx([-0.6, -0.8])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_wrong_pairing_is_the_same_error_on_every_rank(two, mode):
    def body(rank):
        weights = variables([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(weights)
        gradient = tf.constant([1.0])

        def skips_without_synchronizing():
            with optimizer.skip_synchronize():
                optimizer.apply([gradient], weights)

        def reduces_twice():
            optimizer.synchronize([(gradient, weights[0])])
            optimizer.apply([gradient], weights)

        def uses_twice():
            optimizer.synchronize([(gradient, weights[0])])
            with optimizer.skip_synchronize():
                optimizer.apply([gradient], weights)
                optimizer.apply([gradient], weights)

        texts = []
        for wrong in (skips_without_synchronizing, reduces_twice, uses_twice):
            with pytest.raises(Exception) as caught:  # TensorFlow makes it one of its own while it traces
                both_modes(wrong)[mode]()
            texts.append(str(caught.value)[str(caught.value).index("apply 'optimizer") :].split("\n")[0])
            if mode == "eager" and wrong is reduces_twice:  # as a user would go on after the error
                with optimizer.skip_synchronize():
                    optimizer.apply([gradient], weights)
        return texts

    one, other = two.run(body)
    assert one == other
    assert "expected synchronize() before" in one[0] and "expected skip_synchronize()" in one[1]
    assert "expected synchronize() before" in one[2]


def test_a_dropped_update_and_a_condition_are_right_pairings(two):
    def body(rank):
        weights = variables([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(weights)

        @tf.function
        def step(gradient):
            ((average, _),) = optimizer.synchronize([(gradient, weights[0])])

            def update():
                with optimizer.skip_synchronize():
                    optimizer.apply([average], weights)

            tf.cond(tf.reduce_all(tf.math.is_finite(average)), update, lambda: None)

        step(tf.constant([1.0]))
        step(tf.constant([np.inf if rank else 1.0]))
        step(tf.constant([1.0]))
        return float(weights[0].numpy()[0]), int(optimizer.iterations)

    assert two.run(body) == [(-2.0, 2), (-2.0, 2)]


# ---- loss scaling ----


def scaled_model(rank, outside, dtype="mixed_float16", passes=1, eager=False):
    """A compiled model with a LossScaleOptimizer around or within the distributed one."""
    with_policy = keras.dtype_policies.DTypePolicy(dtype)
    layers = [keras.layers.Dense(6, "tanh", dtype=with_policy), keras.layers.Dense(2, dtype=with_policy)]
    model = runs.with_weights_of(keras.Sequential([keras.Input((5,)), *layers]), rank)
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    settings = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
    if outside:
        optimizer = keras.optimizers.LossScaleOptimizer(
            hvd.DistributedOptimizer(inner, **in_mode(settings)), initial_scale=64.0
        )
    else:
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0), **in_mode(settings)
        )
    model.compile(optimizer, "mse", run_eagerly=eager)
    return model


@pytest.mark.parametrize(
    "outside, passes, eager", [(False, 1, False), (True, 1, False), (False, 2, True), (True, 2, False)]
)
def test_an_overflow_on_one_rank_skips_the_update_on_all(two, outside, passes, eager):
    def body(rank):
        model = scaled_model(rank, outside, passes=passes, eager=eager)
        x, y = runs.share_of(rank, 2, runs.X).copy(), runs.share_of(rank, 2, runs.Y)
        if rank == 1:
            x[6:9] = 1e38  # the second batch of this rank alone
        model.fit(x, y, batch_size=6 // passes, shuffle=False, verbose=0, callbacks=runs.start_callbacks())
        optimizer = model.optimizer
        return runs.trained(model), int(optimizer.iterations), float(optimizer.dynamic_scale.numpy())

    (one, updates, scale), (other, *_) = two.run(body)
    runs.assert_same_bits([one, other])
    assert all(np.isfinite(weight).all() for weight in one.weights)
    assert (updates, scale) == (runs.STEPS - 1, 32.0)


def test_bfloat16_and_both_nestings_equal_float32(two):
    def trained(dtype, outside):
        def body(rank):
            model = scaled_model(rank, outside, dtype)
            return runs.fit(model, rank, 2, callbacks=runs.start_callbacks())

        first, second = two.run(body)
        runs.assert_same_bits([first, second])
        return first

    full = trained("float32", False)
    for weight, inside in zip(full.weights, trained("float32", True).weights, strict=True):
        np.testing.assert_array_equal(weight, inside)
    runs.assert_close(trained("mixed_bfloat16", True), full, 0.1, 0.05)
    runs.assert_close(trained("mixed_float16", True), full, 0.02, 0.01)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_loss_scale_around_the_optimizer_is_refused_where_no_callback_puts_it_right(two, mode):
    def body(rank):
        weights = variables([0.0])
        optimizer = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
        optimizer.build(weights)
        with pytest.raises(Exception, match="expected DistributedOptimizer around LossScaleOptimizer"):
            both_modes(lambda: optimizer.apply([tf.constant([1.0])], weights))[mode]()
        assert hoist(optimizer) and not hoist(optimizer)
        both_modes(lambda: optimizer.apply([tf.constant([32768.0 * (1 + rank)])], weights))[mode]()
        return float(weights[0].numpy()[0])

    assert two.run(body) == [-1.5, -1.5]


@pytest.mark.parametrize("again", ["compiled again", "of another model", "loaded and compiled again", "by itself"])
def test_an_optimizer_that_keras_has_put_a_loss_scale_around_stays_distributed(two, again, tmp_path):
    """Under mixed_float16 ``compile`` wraps the optimizer, which the user still has. One of them in graphs, which take long to trace."""
    two.run(lambda rank: is_still_distributed(rank, again, tmp_path))


def is_still_distributed(rank, again, folder):
    keras.mixed_precision.set_dtype_policy("mixed_float16")  # of this thread
    x, y = np.ones((2, 3), "float32"), np.full((2, 1), 0.25 * (1 + rank), "float32")

    def model():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])

    def trained(network):
        network.fit(x, y, batch_size=2, verbose=0)  # without a callback
        return network.trainable_variables[0].numpy().ravel().tolist()

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(2.0))
    network, eager = model(), again != "compiled again"
    network.compile(optimizer, "mse", run_eagerly=eager)
    assert isinstance(network.optimizer, keras.optimizers.LossScaleOptimizer)
    assert trained(network) == [1.5] * 3  # 2 * 2 * the mean of 0.25 and 0.5; more would overflow
    if again == "by itself":
        weights = network.trainable_variables
        optimizer.apply([tf.fill([3, 1], float(rank)), tf.zeros([1])], weights)
        assert weights[0].numpy().ravel().tolist() == [0.5] * 3
        return
    if again == "loaded and compiled again":
        network.save(folder / f"{rank}.keras")
        network = hvd.load_model(folder / f"{rank}.keras")
        optimizer = network.optimizer
    if again == "of another model":
        network, optimizer = model(), hvd.DistributedOptimizer(keras.optimizers.SGD(2.0))
        model().compile(optimizer, "mse")
    for each in network.weights:
        each.assign(np.zeros(each.shape))
    network.compile(optimizer, "mse", run_eagerly=eager)
    assert trained(network) == [1.5] * 3


def test_a_rank_that_is_alone_trains_in_mixed_precision_as_without_ringtrain():
    """The script for many ranks, with its callback."""

    def trained(wraps):
        keras.mixed_precision.set_dtype_policy("mixed_float16")  # of this thread
        network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = keras.optimizers.SGD(0.1)
        network.compile(hvd.DistributedOptimizer(optimizer) if wraps else optimizer, "mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if wraps else []
        network.fit(np.ones((2, 3)), np.full((2, 1), 0.25), batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
        network.train_on_batch(np.ones((2, 3)), np.full((2, 1), 0.25))
        return [weight.tolist() for weight in network.get_weights()]

    with World(1) as world:
        plain, found = world.run(lambda rank: (trained(False), trained(True)))[0]
    assert found == plain != [[[1.0]] * 3, [0.0]]


def test_unscaling_between_synchronize_and_apply(two):
    def body(rank):
        weights = variables([0.0])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
        )
        optimizer.build(weights)

        @tf.function
        def step(gradient):
            pairs = optimizer.synchronize([(optimizer.scale_loss(gradient), weights[0])])
            largest = tf.reduce_max(pairs[0][0]) / optimizer.dynamic_scale
            with optimizer.skip_synchronize():
                optimizer.apply_gradients(pairs)
            return largest

        found = [float(step(tf.constant([value]))) for value in (1.0 + 2 * rank, np.inf if rank else 1.0, 1.0)]
        return found[0], float(weights[0].numpy()[0]), float(optimizer.dynamic_scale.numpy())

    assert two.run(body) == [(2.0, -3.0, 2.0)] * 2


# ---- errors ----


@pytest.mark.parametrize("arguments, text", [
    ({"op": rt.Max}, "op must be Average"),
    ({"backward_passes_per_step": 0}, "backward_passes_per_step must be at least 1"),
    ({"gradient_predivide_factor": 2.0, "op": rt.Sum}, "gradient_predivide_factor needs op=Average"),
    ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be above 0"),
    ({"groups": 0}, "groups must be at least 1"),
    ({"groups": "all"}, "groups must be an int or lists of variables"),
])  # fmt: skip
def test_wrong_arguments(arguments, text):
    with World(1) as world:
        with pytest.raises(rt.RingtrainError, match=text):
            world.run(lambda rank: hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **in_mode(arguments)))
        with pytest.raises(rt.RingtrainError, match="expected a keras.optimizers.Optimizer but found a builtins.str"):
            world.run(lambda rank: hvd.DistributedOptimizer("sgd"))


def test_a_lost_rank_makes_fit_raise(two):
    begun = threading.Barrier(2)

    def body(rank):
        model = runs.dense_model(seed=rank)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")

        class Dies(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 1:
                    begun.wait(60)
                    if rank == 1:
                        raise KeyError("rank 1 dies")

        if rank == 1:
            runs.fit(model, rank, 2, callbacks=[*runs.start_callbacks(), Dies()])
        with pytest.raises(Exception, match="rank 1 raised KeyError"):
            runs.fit(model, rank, 2, callbacks=[*runs.start_callbacks(), Dies()])

    with pytest.raises(KeyError, match="rank 1 dies"):
        two.run(body)
