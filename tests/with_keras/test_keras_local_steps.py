"""``LocalSteps(every=H)`` of Keras: ranks that train alone for H updates, against all of them in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_runs import GLOBAL_BATCH, STEPS, X, Y, dense_model, share_of, start_callbacks
from modes import in_mode

import ringtrain as rt
import ringtrain.keras as hvd
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.testing import World

RATE = 0.05


def gradients(weights, x, y):
    """Of the mean square of a linear model, in float64."""
    error = x @ weights - y
    return 2 * x.T @ error / error.size


def start():
    return np.random.default_rng(5).standard_normal((5, 2))


def by_hand(groups, every, outer=None, warmup=0, steps=STEPS, samples=lambda worker, step: 1):
    """The common copy after each synchronisation; ``groups``: the ranks of each worker."""
    ranks = sum(map(len, groups))
    common, m, seen = start(), np.zeros((5, 2)), []
    workers, weights = [common.copy() for _ in groups], np.zeros(len(groups))
    for step in range(steps):
        for number, group in enumerate(groups):
            taking = range(ranks) if step < warmup else group
            parts = [(share_of(rank, ranks, X), share_of(rank, ranks, Y)) for rank in taking]
            rows = slice(step * GLOBAL_BATCH // ranks, (step + 1) * GLOBAL_BATCH // ranks)
            workers[number] -= RATE * np.mean([gradients(workers[number], x[rows], y[rows]) for x, y in parts], axis=0)
            weights[number] += samples(number, step)
        if step < warmup:
            common, weights = workers[0].copy(), np.zeros(len(groups))
        elif (step + 1 - warmup) % every == 0:
            change = (
                sum(weight * (common - each) for weight, each in zip(weights, workers, strict=True)) / weights.sum()
            )
            m = (outer.momentum if outer else 0) * m + change
            common = common - (change if outer is None else outer.rate * (change + outer.momentum * m))
            workers, weights = [common.copy() for _ in groups], np.zeros(len(groups))
            seen.append(common)
    return seen


def train(rank, ranks, graph, make=None, samples=None, steps=STEPS, **arguments):
    """The weights after each synchronisation, in a training loop of the user's own."""
    weights = keras.Variable(start(), dtype="float64", name="weights")
    optimizer = hvd.DistributedOptimizer((make or keras.optimizers.SGD)(RATE), **in_mode(arguments))
    x, y = (share_of(rank, ranks, data).astype(np.float64) for data in (X, Y))
    size = GLOBAL_BATCH // ranks

    def step(x, y, count):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights.value - y))
        if samples is not None:
            optimizer.count_samples(count)
        optimizer.apply([tape.gradient(loss, weights.value)], [weights])

    run, seen, before = tf.function(step) if graph else step, [], rt.counters()["synchronisations"]
    for number in range(steps):
        rows = slice(number * size, (number + 1) * size)
        count = 0 if samples is None else samples(rank, number)
        run(tf.constant(x[rows]), tf.constant(y[rows]), tf.constant(count))
        now = rt.counters()["synchronisations"]
        if now > before:
            seen.append(np.array(weights.numpy()))
        before = now
    return seen


# Two ranks at most in graphs: those of one process share TensorFlow's threads, of which each blocks one that averages.
METHODS = {
    "local SGD": ("1+1+1", [[0], [1], [2]], {"every": 2}, False),
    "DiLoCo": ("2+1", [[0], [1], [2]], {"every": 3, "outer": hvd.Outer(0.7, 0.9)}, False),
    "hosts": ("2+1", [[0, 1], [2]], {"every": 2, "within": "host"}, False),
    "sites": ("1|1+1", [[0], [1, 2]], {"every": 2, "within": "site"}, False),
    "post-local": ("1+1", [[0], [1]], {"every": 2, "warmup": 2}, False),
    "post-local in a graph": (None, [[0], [1]], {"every": 2, "warmup": 2}, True),
    "DiLoCo in a graph": ("1+1", [[0], [1]], {"every": 2, "outer": hvd.Outer(0.7, 0.9)}, True),
    "one host in a graph": (None, [[0, 1]], {"every": 2, "within": "host"}, True),
}  # fmt: skip


@pytest.mark.parametrize(
    "method",
    [pytest.param(each, marks=pytest.mark.long if each in ("DiLoCo", "post-local") else ()) for each in METHODS],
)
def test_ranks_are_the_oracle(method):
    layout, groups, arguments, graph = METHODS[method]
    ranks = sum(map(len, groups))
    settings = {name: value for name, value in arguments.items() if name != "within"}
    expected = by_hand(groups, samples=lambda worker, step: len(groups[worker]), **settings)
    with World(ranks, layout, stall_abort_seconds=60) as world:
        found = world.run(lambda rank: train(rank, ranks, graph, **arguments))
    for seen in found:
        np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-8)  # Keras' learning rate is a float32
        assert np.array(seen).tobytes() == np.array(found[0]).tobytes()


def streaming_by_hand(every, overlap, merge):
    """Of two ranks, the weights of each after every update: one fragment that travels."""
    common, workers, seen, on_the_way = start(), [start(), start()], [], {}
    for step in range(STEPS):
        for rank, x in enumerate(workers):
            rows = slice(step * GLOBAL_BATCH // 2, (step + 1) * GLOBAL_BATCH // 2)
            x -= RATE * gradients(x, share_of(rank, 2, X)[rows], share_of(rank, 2, Y)[rows])
        if step in on_the_way:
            sent = on_the_way.pop(step)
            common = sum(sent) / 2
            workers = [
                (x + common) / 2 if merge == "half" else x + (common - was)
                for x, was in zip(workers, sent, strict=True)
            ]
        if (step + 1) % every == 0:
            on_the_way[step + overlap] = [x.copy() for x in workers]
        seen.append([x.copy() for x in workers])
    return seen


@pytest.mark.parametrize("graph, merge", [pytest.param(False, "half", marks=pytest.mark.long), (True, "additive")])
def test_what_travels_while_training_goes_on(graph, merge):
    def on_rank(rank):
        weights = keras.Variable(start(), dtype="float64", name="weights")
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(RATE), mode=hvd.LocalSteps(every=2, overlap=1, merge=merge)
        )
        x, y = (share_of(rank, 2, data).astype(np.float64) for data in (X, Y))

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weights.value - y))
            optimizer.apply([tape.gradient(loss, weights.value)], [weights])

        run, seen, size = tf.function(step) if graph else step, [], GLOBAL_BATCH // 2
        for number in range(STEPS):
            run(
                tf.constant(x[number * size : (number + 1) * size]), tf.constant(y[number * size : (number + 1) * size])
            )
            seen.append(np.array(weights.numpy()))
        optimizer.synchronize()
        return seen, weights.numpy().tobytes()

    expected = streaming_by_hand(2, 1, merge)
    with World(2, "1+1", stall_abort_seconds=60) as world:
        found = world.run(on_rank)
    for rank, (seen, last) in enumerate(found):
        np.testing.assert_allclose(seen, [each[rank] for each in expected], rtol=1e-6, atol=1e-8)
        assert last == found[0][1]


@pytest.mark.parametrize("graph", [pytest.param(False, marks=pytest.mark.long), True], ids=["eager", "graph"])
def test_workers_weigh_as_much_as_their_samples(graph):
    def samples(rank, step):
        return (5, 0)[rank] + step % 2

    expected = by_hand([[0], [1]], 3, samples=samples)
    with World(2, stall_abort_seconds=60) as world:
        found = world.run(lambda rank: train(rank, 2, graph, samples=samples, every=3))
    np.testing.assert_allclose(found[1], expected, rtol=1e-6, atol=1e-8)
    assert not np.allclose(expected, by_hand([[0], [1]], 3), rtol=1e-4)


def test_tf_keras_of_keras_3_takes_the_same_arguments():
    import ringtrain.tensorflow.keras as of_tensorflow

    def on_rank(rank):
        weights = keras.Variable([0.0, 0.0], dtype="float64", name="weights")
        optimizer = of_tensorflow.DistributedOptimizer(
            tf.keras.optimizers.SGD(1.0),
            mode=hvd.LocalSteps(every=2, outer=rt.Outer(0.5, 0.0)),
            compression=of_tensorflow.Compression.int8,
        )
        for _ in range(2):
            optimizer.apply([tf.constant([1.0, 2.0 + 2 * rank], tf.float64)], [weights])
        return weights.numpy().tolist()

    with World(2, stall_abort_seconds=60) as world:
        assert world.run(on_rank) == [[-1.0, -3.0]] * 2


def test_averaging_each_update_is_the_exact_run():
    with World(2, stall_abort_seconds=60) as world:
        found = world.run(lambda rank: train(rank, 2, True, every=1))
    np.testing.assert_allclose(found[0], by_hand([[0, 1]], 1), rtol=1e-6, atol=1e-9)


def fitted(rank, ranks, epochs=2, model=dense_model, **arguments):
    """A model that ``fit`` trains, and what evaluating it after each epoch gives."""
    network = model(seed=rank)
    network.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **in_mode(arguments)), "mse")
    history = network.fit(
        share_of(rank, ranks, X), share_of(rank, ranks, Y), batch_size=GLOBAL_BATCH // ranks, epochs=epochs, shuffle=False,
        verbose=0, callbacks=start_callbacks()[:1], validation_data=(X[:9], Y[:9]),
    )  # fmt: skip
    return [np.array(each) for each in network.get_weights()], history.history["val_loss"], rt.counters()


def test_fit_evaluates_the_same_model_on_all_ranks():
    with World(2, "1+1", stall_abort_seconds=60) as world:
        (first, losses, counters), (second, others, _) = world.run(lambda rank: fitted(rank, 2, every=4))
    assert losses == others and losses[1] < losses[0]
    assert {each.tobytes() for each in first} == {each.tobytes() for each in second}
    assert counters["local_steps"] == 12
    # In each epoch of 6 updates one after the fourth, one before validation, and one, of nothing, after that.
    assert counters["synchronisations"] == 6


def test_fit_averages_what_keras_puts_into_the_model_at_its_end():
    """Moving averages, which are a worker's own; after one update they are the weights."""

    def on_rank(rank, size, **arguments):
        model = dense_model(seed=rank)
        optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
        model.compile(hvd.DistributedOptimizer(optimizer, **in_mode(arguments)), "mse", run_eagerly=True)
        rows = slice(rank, None, 2) if size == 2 else slice(None)
        model.fit(X[rows], Y[rows], batch_size=len(X[rows]), epochs=1, verbose=0, callbacks=start_callbacks()[:1])
        return np.concatenate([np.array(each).ravel() for each in model.get_weights()])

    with World(2, stall_abort_seconds=60) as world:
        one, other = world.run(lambda rank: on_rank(rank, 2, every=4))
    assert one.tobytes() == other.tobytes()
    with World(1) as world:
        (exact,) = world.run(on_rank, 1)
    np.testing.assert_allclose(one, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eagerly", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_outer_optimizer_leaves_layers_that_were_frozen_between_two_fits(eagerly):
    """Its momentum went on moving them."""

    def on_rank(rank):
        drawn = np.random.default_rng(rank)
        x = drawn.standard_normal((16, 4)).astype(np.float32)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        mode = hvd.LocalSteps(every=2, outer=hvd.Outer(0.7, 0.9))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), mode=mode)
        seen = []
        for learns in (True, False, False, True):
            model.layers[0].trainable = learns
            model.compile(optimizer, "mse", run_eagerly=eagerly)
            model.fit(x, x.sum(1), batch_size=4, shuffle=False, verbose=0, callbacks=start_callbacks())
            seen.append([np.array(layer.kernel.numpy()) for layer in model.layers])
        return seen

    with World(2) as world:
        seen, others = world.run(on_rank)
    for ours, theirs in zip(seen, others, strict=True):
        assert all(map(np.array_equal, ours, theirs))
    frozen, other = zip(*seen, strict=True)
    assert np.array_equal(frozen[0], frozen[1]) and np.array_equal(frozen[1], frozen[2])
    assert not np.array_equal(frozen[2], frozen[3]) and not np.array_equal(other[0], other[1])


def test_fit_averages_moving_statistics():
    def with_norm(seed):
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1), keras.layers.Dense(2)]
        )
        for variable in model.trainable_variables:
            variable.assign(np.random.default_rng(seed).standard_normal(variable.shape))
        return model

    def on_rank(rank):
        made = []
        weights, _, _ = fitted(
            rank, 2, model=lambda seed: made.append(with_norm(seed)) or made[0], every=4, outer=hvd.Outer()
        )
        return weights, [each.numpy().tolist() for each in made[0].variables if "seed" in each.name]

    with World(2, stall_abort_seconds=60) as world:
        (first, seeds), (second, others) = world.run(on_rank)
    assert len(seeds) == 1 and seeds != others  # of dropout
    for mine, theirs in zip(first, second, strict=True):
        if mine.dtype == np.float32:  # not the seeds
            assert mine.tobytes() == theirs.tobytes()
    assert (
        len([each for each in first if each.shape == (5,) and not np.isin(each, (0, 1)).all()]) == 4
    )  # all have moved


def test_a_loss_scale_that_skips_on_one_rank_keeps_the_ranks_together():
    def on_rank(rank, graph):
        weights = keras.Variable(start(), dtype="float32")
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=1024.0)
        optimizer = hvd.DistributedOptimizer(scaled, mode=hvd.LocalSteps(every=3))

        def step(factor):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(factor * (rank + 1) * tf.reduce_sum(weights.value))
            optimizer.apply([tape.gradient(loss, weights.value)], [weights])

        run = tf.function(step) if graph else step
        for number in range(3):
            run(tf.constant(np.inf if (rank, number) == (1, 1) else 1.0, tf.float32))
        return weights.numpy() - start()

    with World(2, stall_abort_seconds=60) as world:
        for graph in (False, True):
            found = world.run(on_rank, graph)
            assert found[0].tobytes() == found[1].tobytes()
            # three steps of 1 on one rank, two of 2 on the other, weighed 3 to 2
            np.testing.assert_allclose(found[0], -RATE * (3 * 3 + 2 * 4) / 5, rtol=1e-4)


def test_uneven_data_and_state():
    def on_rank(rank):
        weights = keras.Variable(np.zeros(3), dtype="float64")
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), mode=hvd.LocalSteps(every=2, outer=hvd.Outer(0.5, 0.5))
        )
        for _ in range(4 - 2 * rank):
            optimizer.apply([tf.ones(3, tf.float64) * (rank + 1)], [weights])
        optimizer.join()
        state = optimizer.local_steps_state()
        other = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), mode=hvd.LocalSteps(every=2, outer=hvd.Outer(0.5, 0.5))
        )
        other.load_local_steps_state(state)
        with pytest.raises(InvalidArgumentError, match="is a dict without 'counters'. Load the one that"):
            other.load_local_steps_state({"0.weights": np.zeros(3)})
        for _ in range(2):
            other.apply([tf.ones(3, tf.float64)], [weights])
        return weights.numpy().tolist()

    common, m = 0.0, 0.0
    for change in (3.0, 2.0, 2.0):
        m = 0.5 * m + change
        common -= 0.5 * (change + 0.5 * m)
    with World(2, stall_abort_seconds=60) as world:
        assert world.run(on_rank) == [[pytest.approx(common)] * 3] * 2


def test_other_arguments_on_a_rank_are_one_error_on_all():
    def in_a_loop(rank):
        with pytest.raises(MismatchError) as told:
            train(rank, 2, False, every=2 + rank)
        return str(told.value)

    def in_fit(rank):
        with pytest.raises(MismatchError) as told:
            fitted(rank, 2, **({"every": 4} if rank else {}))
        return str(told.value)

    with World(2, stall_abort_seconds=60) as world:
        first, second = world.run(in_a_loop)
        assert first == second and "every must be the same on all ranks, but is 2 on rank 0 and 3 on rank 1" in first
        first, second = world.run(in_fit)
        assert (
            first == second
            and "fit: arguments of DistributedOptimizer must be the same on all ranks, but mode is" in first
        )


@pytest.mark.parametrize(
    "setting, in_fit",
    [
        pytest.param("average_aggregated_gradients", True, marks=pytest.mark.long),
        ("average_aggregated_gradients", False),
        ("backward_passes_per_step", True),
        pytest.param("backward_passes_per_step", False, marks=pytest.mark.long),
    ],
)
def test_other_sums_of_passes_on_a_rank_are_one_error_on_all(setting, in_fit):
    of_rank_1 = {"average_aggregated_gradients": True, "backward_passes_per_step": 3}

    def on_rank(rank):
        given = {"backward_passes_per_step": 2} | ({setting: of_rank_1[setting]} if rank else {})
        with pytest.raises(MismatchError) as told:
            if in_fit:
                fitted(rank, 2, **given)
            else:
                train(rank, 2, False, **given)
        return str(told.value)

    with World(2, stall_abort_seconds=60) as world:
        first, second = world.run(on_rank)
    assert first == second and f"{setting} " in first and "must be the same on all ranks, but" in first


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_ranks_that_step_with_other_settings_are_told_where_they_average(graph):
    words = "learning_rate must be the same on all ranks, but is 0.05 on rank 0 and 0.1 on rank 1"

    def other_rate(rank, **arguments):
        return train(rank, 2, graph, lambda rate: keras.optimizers.SGD(rate * (1 + rank)), every=2, **arguments)

    def on_rank(rank):
        with pytest.raises((MismatchError, tf.errors.OpError)) as told:  # a graph raises the text of one
            other_rate(rank)
        assert words in str(told.value)

    with World(2, stall_abort_seconds=60) as world:
        world.run(on_rank)
        world.run(lambda rank: other_rate(rank, replicas="differ"))


@pytest.mark.parametrize("arguments, text", [
    ({"every": 0}, "local steps: every must be at least 1"),
    ({"every": 2, "warmup": -2}, "local steps: warmup must be at least 0"),
    ({"every": 2, "within": "x"}, "within must be None, 'host' or 'site'"),
    ({"every": 2, "outer": 0.5}, "outer must be None or an Outer"),
    ({"every": 2, "op": hvd.Sum}, "LocalSteps cannot be used with op=Sum"),
])  # fmt: skip
def test_arguments_that_cannot_be(arguments, text):
    def on_rank(rank):
        with pytest.raises(InvalidArgumentError, match=text):
            hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **in_mode(arguments))

    with World(1) as world:
        world.run(on_rank)


def test_scripts_that_synchronize_gradients_are_told():
    def on_rank(rank):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), mode=hvd.LocalSteps(every=2))
        weights = keras.Variable(np.zeros(3))
        with pytest.raises(InvalidArgumentError, match="synchronize: mode must not be LocalSteps"):
            optimizer.synchronize([(tf.ones(3), weights)])
        with pytest.raises(InvalidArgumentError, match="skip_synchronize: mode must not be LocalSteps"):
            with optimizer.skip_synchronize():
                pass

    with World(2) as world:
        world.run(on_rank)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_failed_synchronisation_leaves_the_common_copy(graph):
    def on_rank(rank):
        weights = keras.Variable(np.zeros(2), dtype="float64")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), mode=hvd.LocalSteps(every=2))

        def step():
            optimizer.apply([tf.ones(2, tf.float64) * (rank + 1)], [weights])

        run = tf.function(step) if graph else step
        for _ in range(3):
            run()
        if rank:
            optimizer._local_steps._period.round += 1  # planted: a synchronisation that only this rank has seen
        with pytest.raises(Exception, match="number of synchronisations so far must be the same on all ranks"):
            run()
        return weights.numpy().tolist()

    with World(2, stall_abort_seconds=60) as world:
        assert world.run(on_rank) == [[-3.0] * 2] * 2


def test_variables_that_come_after_a_graph_are_refused():
    def on_rank(rank):
        weights, more = (keras.Variable(np.zeros(2), dtype="float64") for _ in range(2))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), mode=hvd.LocalSteps(every=2))
        step = tf.function(lambda: optimizer.apply([tf.ones(2, tf.float64)], [weights]))
        step()
        optimizer.average_also([more])
        with pytest.raises(Exception, match="must be known before a graph is made, but 1 came later"):
            step()

    with World(2, stall_abort_seconds=60) as world:
        world.run(on_rank)


def test_variables_that_a_rank_keeps_to_itself_stay_its_own():
    def on_rank(rank):
        shared, own = (keras.Variable(np.zeros(2), dtype="float64") for _ in range(2))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), mode=hvd.LocalSteps(every=2))
        optimizer.register_local_var(own)
        for _ in range(2):
            optimizer.apply([tf.ones(2, tf.float64) * (rank + 1)] * 2, [shared, own])
        return shared.numpy().tolist(), own.numpy().tolist()

    with World(2) as world:
        assert world.run(on_rank) == [([-3.0] * 2, [-2.0] * 2), ([-3.0] * 2, [-4.0] * 2)]


def test_join_within_the_exact_steps_and_xla_are_refused():
    def on_rank(rank):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), mode=hvd.LocalSteps(every=2, warmup=3))
        weights = keras.Variable(np.zeros(2))
        with pytest.raises(InvalidArgumentError, match="a rank must have data for all 3 exact steps"):
            optimizer.build([weights])
            optimizer.join()
        compiled = tf.function(lambda: optimizer.apply([tf.ones(2)], [weights]), jit_compile=True)
        with pytest.raises(Exception, match="UnsupportedError: apply .*: expected a function without jit_compile"):
            compiled()

    with World(2, stall_abort_seconds=60) as world:
        world.run(on_rank)


def test_a_world_of_one_changes_nothing():
    with World(1) as world:
        assert world.run(lambda rank: train(rank, 1, True, every=2)) == [[]]
