"""Callbacks of ``ringtrain.keras``: what they make the same on all ranks, and what they refuse."""

import logging

import keras
import keras_runs as runs
import numpy as np
import pytest
import tensorflow as tf

import ringtrain as rt
import ringtrain.keras as hvd
from ringtrain.keras.drift import fingerprint, first_difference
from ringtrain.keras.fitting import arranged
from ringtrain.keras.variables import slots_of
from ringtrain.testing import World


@pytest.fixture
def two():
    """Ranks as threads of this process."""
    with World(2, stall_abort_seconds=60) as opened:
        yield opened


def compiled(rank, optimizer=None, distribute=True, model=None, **compiling):
    """An eager model of this rank's own weights; eager, because tracing is what takes the time of these tests."""
    model = model or runs.dense_model(seed=rank)
    optimizer = optimizer or keras.optimizers.SGD(0.05)
    compiling = {"run_eagerly": True, **compiling}
    model.compile(hvd.DistributedOptimizer(optimizer) if distribute else optimizer, "mse", **compiling)
    return model


def on_each(two, body):
    """The texts of the errors that all ranks end in; they must be the same."""

    def catching(rank):
        with pytest.raises(Exception) as caught:
            body(rank)
        return str(caught.value)

    texts = two.run(catching)
    assert len(set(texts)) == 1, texts
    return texts[0]


# ---- fit: one writer of each file, one decision to stop ----


class Interrupted(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def test_one_rank_writes_each_file_and_all_resume(two, tmp_path):
    def body(rank):
        model, ends = compiled(rank), [Interrupted()]
        writes = [
            keras.callbacks.BackupAndRestore(tmp_path / "backup"),
            keras.callbacks.CSVLogger(tmp_path / "log.csv", append=True),
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", "loss", save_best_only=True),
            keras.callbacks.ModelCheckpoint(tmp_path / f"own{rank}.weights.h5", save_weights_only=True),
        ]
        with pytest.raises(KeyboardInterrupt):
            runs.fit(model, rank, 2, callbacks=[*runs.start_callbacks(), *writes, *ends], epochs=3)
        again = compiled(rank)
        trained = runs.fit(again, rank, 2, callbacks=[*runs.start_callbacks(), *writes], epochs=3)
        assert len(trained.history["loss"]) == 2  # the first epoch is not trained again
        return trained

    runs.assert_same_bits(two.run(body))
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.keras", "log.csv", "own0.weights.h5", "own1.weights.h5"
    ]  # fmt: skip
    keras.models.load_model(tmp_path / "best.keras")


def test_what_is_of_other_places_or_classes_writes_on_every_rank(two, tmp_path):
    """A class of the user's own may have operations of all ranks within."""

    class Mine(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            hvd.allreduce(np.ones(1), name="mine")

    def body(rank):
        given = [Mine(tmp_path / "a.keras"), keras.callbacks.TensorBoard(tmp_path), keras.callbacks.EarlyStopping()]
        return [
            type(each).__name__
            for each in arranged(given, keras.callbacks.Callback, rt.global_process_set, keras.Model())
        ]

    expected = ["Mine", "TensorBoard", "EarlyStopping", "EpochEndHooks"]
    assert two.run(body) == [expected, [each for each in expected if each != "TensorBoard"]]
    two.run(
        lambda rank: runs.fit(compiled(rank), rank, 2, callbacks=[*runs.start_callbacks(), Mine(tmp_path / "a.keras")])
    )


def test_what_decides_before_metrics_are_averaged_is_refused(two):
    def body(rank):
        early = [keras.callbacks.ReduceLROnPlateau("loss")] if rank == 1 else []
        runs.fit(compiled(rank), rank, 2, callbacks=[*early, *runs.start_callbacks()])

    assert on_each(two, body).startswith(
        "fit 'ReduceLROnPlateau': expected MetricAverageCallback before it in callbacks, but found it behind on rank 1"
    )


def test_ranks_that_stop_at_different_epochs_are_told_at_once(two):
    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = hvd.rank() == 1

    assert on_each(two, lambda rank: runs.fit(compiled(rank), rank, 2, callbacks=[Stops()], epochs=2)).startswith(
        "fit 'stop_training': it must be the same on all ranks at the end of epoch 1, but stop_training is false on rank 0 "
        "and true on rank 1."
    )


GRAPHS = {"jit_compile": False, "steps_per_execution": 1}


@pytest.mark.parametrize(
    "stops, compiling",
    [
        pytest.param(runs.STOPS, {"run_eagerly": True}, id="eager"),
        pytest.param(runs.STOPS[2:4], GRAPHS, id="graphs"),  # each is traced on each rank
        pytest.param(runs.STOPS, GRAPHS, id="all in graphs", marks=pytest.mark.long),
    ],
)
def test_all_ranks_stop_where_one_stops_within_an_epoch(stops, compiling):
    runs.check_stops_within_an_epoch(stops, **compiling)


# ---- BroadcastGlobalVariablesCallback ----


@pytest.mark.parametrize("how, first", [("initial_epoch", 2), ("initial_epoch", 4), ("BackupAndRestore", 2)])
def test_ranks_that_begin_at_different_epochs_are_refused(two, how, first, tmp_path):
    """Also where a callback behind ours moves the beginning, as rank 0 alone resumes; or where no epoch is left to it."""

    def body(rank):
        model = compiled(rank)
        start = runs.start_callbacks()
        given = {"initial_epoch": first * (rank == 0)} if how == "initial_epoch" else {}
        if how == "BackupAndRestore" and rank == 0:
            keeps = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
            alone = runs.dense_model(seed=0)
            alone.compile("sgd", "mse")
            alone.fit(runs.X, runs.Y, batch_size=24, epochs=2, verbose=0, callbacks=[keeps])
            start.append(keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False))
        hvd.barrier()
        model.fit(runs.X, runs.Y, batch_size=24, epochs=4, verbose=0, callbacks=start, **given)

    assert (
        f"fit 'initial_epoch': the first epoch must be the same on all ranks, but initial_epoch is {first}"
        in on_each(two, body)
    )


def test_callbacks_leave_a_rank_alone_that_is_outside_of_the_process_set():
    """All ranks pass the same ones; two train together, and the third as it does without."""

    def body(rank):
        pair = rt.add_process_set([1, 2])
        model = runs.dense_model(seed=rank)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=pair), "mse", run_eagerly=True)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(1), hvd.callbacks.MetricAverageCallback(process_set=pair),
            hvd.callbacks.MovingStatisticsAverageCallback(process_set=pair),
        ]  # fmt: skip
        return runs.fit(model, max(rank - 1, 0), 2, callbacks=callbacks)

    with World(3, stall_abort_seconds=60) as world:
        alone, one, other = world.run(body)
    runs.assert_same_bits([one, other])
    model = compiled(0, distribute=False)
    runs.assert_same_bits([alone, runs.fit(model, 0, 2)])


def test_weights_and_optimizer_state_come_from_the_root(two):
    def body(rank):
        model = compiled(rank, keras.optimizers.Adam(0.02))
        model.optimizer.build(model.trainable_variables)
        for variable in model.optimizer.variables:
            variable.assign(keras.ops.ones_like(variable) * (rank + 1))

        class Looks(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                self.seen = runs.trained(self.model)

        looks, start = Looks(), hvd.callbacks.BroadcastGlobalVariablesCallback(1)
        runs.fit(model, rank, 2, callbacks=[start, looks])
        return looks.seen

    seen = two.run(body)
    runs.assert_same_bits(seen)
    assert all((value == 2).all() for value in seen[0].state)
    np.testing.assert_array_equal(seen[0].weights[0], runs.dense_model(seed=1).get_weights()[0])


def test_a_model_that_its_first_batch_builds_gets_the_roots_variables_after_it(two):
    def body(rank):
        layer = keras.layers.Dense(2, kernel_initializer=keras.initializers.RandomNormal(seed=rank + 1))
        model = compiled(rank, keras.optimizers.Adam(0.02), model=keras.Sequential([layer]))
        assert not model.built
        runs.fit(model, rank, 2, callbacks=runs.start_callbacks())
        return runs.trained(model)

    seen = two.run(body)
    runs.assert_same_bits(seen)
    assert int(seen[0].state[0]) == int(seen[1].state[0]) > 1


def test_different_models_are_refused(two):
    def body(rank):
        layers = [keras.Input((5,)), keras.layers.Dense(6 + rank), keras.layers.Dense(2)]
        runs.fit(compiled(rank, model=keras.Sequential(layers)), rank, 2, callbacks=runs.start_callbacks())

    text = on_each(two, body)
    assert "(5, 6)" in text and "on rank 0 and (5, 7)" in text and "kernel" in text


def test_different_numbers_of_steps_are_refused_before_the_first(two):
    def body(rank):
        rows = slice(0, 12 + 6 * rank)
        compiled(rank).fit(runs.X[rows], runs.Y[rows], batch_size=6, verbose=0, callbacks=runs.start_callbacks())

    text = on_each(two, body)
    assert text.startswith("fit 'steps': expected the same number on all ranks, but found 2 on rank 0 and 3 on rank 1")


def test_different_numbers_of_epochs_are_refused_with_advice_of_their_own(two):
    def body(rank):
        compiled(rank).fit(
            runs.X[:6], runs.Y[:6], batch_size=6, epochs=2 + rank, verbose=0, callbacks=runs.start_callbacks()
        )

    assert on_each(two, body) == (
        "fit 'epochs': expected the same number on all ranks, but found 2 on rank 0 and 3 on rank 1. Pass one number of "
        "epochs everywhere."
    )


def test_unknown_numbers_of_steps_are_warned_of_once(two, caplog):
    def body(rank):
        data = tf.data.Dataset.from_tensor_slices((runs.X, runs.Y)).batch(6).filter(lambda x, y: True)
        compiled(rank).fit(data, verbose=0, callbacks=runs.start_callbacks())

    with caplog.at_level(logging.WARNING, "ringtrain"):
        two.run(body)
    assert len([record for record in caplog.records if "how many steps" in record.message]) == 1


def test_jit_compile_is_switched_off_with_one_line_also_where_keras_chose_it(two, caplog):
    def body(rank):
        model = compiled(rank, run_eagerly=False, jit_compile=True)
        runs.fit(model, rank, 2, callbacks=runs.start_callbacks())
        return model.jit_compile

    with caplog.at_level(logging.WARNING, "ringtrain"):
        assert two.run(body) == [False, False]
    assert len([record for record in caplog.records if "jit_compile" in record.message]) == 1


@pytest.mark.parametrize("jit_compile", [True, "auto"])
def test_jit_compile_is_switched_off_without_a_callback_too(two, caplog, monkeypatch, jit_compile):
    if jit_compile == "auto":  # True for Keras where there is something else than a processor
        device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [device])

    def body(rank):
        model = compiled(0, run_eagerly=False, jit_compile=jit_compile)
        assert model.jit_compile
        runs.fit(model, rank, 2)
        runs.fit(model, rank, 2)
        return runs.trained(model)

    with caplog.at_level(logging.WARNING, "ringtrain"):
        runs.assert_same_bits(two.run(body))
    assert len([record for record in caplog.records if "jit_compile" in record.message]) == 1


def test_a_world_of_one_and_plain_optimizers_stay_compiled():
    def body(rank):
        for optimizer in (keras.optimizers.SGD(0.05), hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))):
            model = compiled(0, optimizer, distribute=False, run_eagerly=False, jit_compile=True)
            model.train_on_batch(runs.X[:6], runs.Y[:6])
            assert model.jit_compile

    with World(1) as world:
        world.run(body)


def test_a_users_own_compiled_step_is_told_what_to_leave_out(two):
    def body(rank):
        weight = keras.Variable(np.zeros(1, "float32"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([weight])
        tf.function(lambda: optimizer.apply([tf.constant([1.0])], [weight]), jit_compile=True)()

    assert "expected a function without jit_compile but found one with it" in on_each(two, body)


def test_gradients_that_are_not_averaged_are_found_after_the_first_update(two):
    def body(rank):
        runs.fit(compiled(rank, distribute=False), rank, 2, callbacks=runs.start_callbacks())

    text = on_each(two, body)
    assert text.startswith("first update of 'sequential") and "gradients are not averaged" in text


def test_the_guard_waits_for_an_update_and_can_be_switched_off(two):
    def body(rank):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=3)
        model = runs.dense_model(seed=rank)
        model.compile(optimizer, "mse", run_eagerly=True)
        runs.fit(model, rank, 2, 3, callbacks=runs.start_callbacks())
        unchecked = hvd.callbacks.BroadcastGlobalVariablesCallback(0, check_replicas=False)
        plain = compiled(rank, distribute=False)
        runs.fit(plain, rank, 2, callbacks=[unchecked])
        return plain.get_weights()[0]

    one, other = two.run(body)
    assert not np.array_equal(one, other)


def test_fingerprints_tell_other_data_from_other_rounding():
    random = np.random.default_rng(1)
    update = random.normal(size=(40, 30))
    rounded = update.astype(np.float32).astype(np.float64)
    sign = np.sign(update)  # what Adam's first update is: of one norm on all ranks
    flipped = sign.copy()
    flipped[0, :20] *= -1

    def of(after):
        return fingerprint(np.zeros_like(update), after)

    assert first_difference([of(update)], [of(rounded)]) is None
    assert first_difference([of(sign)] * 2, [of(sign), of(flipped)]) == 1
    assert first_difference([of(update)], [of(update * 1.01)]) == 0


def test_local_variables_stay_local(two):
    """With their momentum, also where fit begins again."""

    def body(rank):
        model = runs.dense_model(seed=rank)
        own = model.layers[-1]
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), local_layers=[own])
        model.compile(optimizer, "mse", run_eagerly=True)
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=own.trainable_variables)
        runs.fit(model, rank, 2, callbacks=[start])
        before = [np.array(each.numpy()) for each in optimizer.momentums]
        begun = []
        look = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: begun.extend(np.array(each.numpy()) for each in optimizer.momentums)
        )
        runs.fit(model, rank, 2, callbacks=[start, look])
        assert all(np.array_equal(*pair) for pair in zip(before, begun, strict=True))
        return [*model.get_weights(), *begun]

    one, other = two.run(body)
    assert [np.array_equal(*pair) for pair in zip(one, other, strict=True)] == [True, True, False, False] * 2


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adam", "Adafactor", "Muon", "Ftrl", "ScheduleFreeAdamW"])
def test_what_an_optimizer_keeps_for_a_variable_is_found(name):
    variables = [keras.Variable(np.ones((2, 3)), name=each) for each in ("one", "other")]
    optimizer = getattr(keras.optimizers, name)(use_ema=True)
    optimizer.build(variables)
    found = {variable.path for variable in slots_of(optimizer, variables[1:])}
    assert found == {each.path for each in optimizer.variables if "other" in each.path} != set()
    assert slots_of(keras.optimizers.LossScaleOptimizer(optimizer), variables[1:])


def test_dropout_draws_differently_on_each_rank_and_the_same_in_each_run(two):
    def body(rank):
        layers = [keras.Input((50,)), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(2)]
        model = compiled(rank, model=runs.with_weights_of(keras.Sequential(layers), rank))
        drawn = []
        for _ in range(2):
            model.layers[0].seed_generator.state.assign([3, 0])
            model.fit(np.ones((6, 50)), np.zeros((6, 2)), verbose=0, callbacks=runs.start_callbacks())
            drawn.append(np.array(model.layers[0](np.ones((4, 50), "float32"), training=True)))
        np.testing.assert_array_equal(*drawn)
        return drawn[0]

    one, other = two.run(body)
    assert not np.array_equal(one, other)


# ---- metrics and statistics ----


def test_metrics_are_averages_and_later_callbacks_decide_alike(two):
    def body(rank):
        model = compiled(rank, metrics=["mae"])
        own = []
        keeps = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.append(dict(logs)))
        stops = keras.callbacks.EarlyStopping("val_loss", min_delta=100.0, patience=1)
        start, average = runs.start_callbacks()
        x, y = runs.share_of(rank, 2, runs.X), runs.share_of(rank, 2, runs.Y)
        history = model.fit(
            x, y, batch_size=6, epochs=5, verbose=0, validation_data=(x, y), callbacks=[keeps, start, average, stops]
        ).history
        return own, history

    (own, history), (other, same) = two.run(body)
    assert history == same and len(history["loss"]) == 2
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    for name, values in history.items():
        assert own[0][name] != other[0][name]
        assert values[0] == pytest.approx((own[0][name] + other[0][name]) / 2)


def test_ranks_with_more_samples_count_more(two):
    def body(rank):
        average = hvd.callbacks.MetricAverageCallback(samples=10 + 20 * rank, validation_samples=5 * rank)
        logs = {"loss": 3.0 * rank, "val_loss": float(rank) if rank else float("nan"), "rate": 0.5}
        average.on_epoch_end(0, logs)
        return logs

    for logs in two.run(body):
        assert logs == {"loss": pytest.approx(2.25), "val_loss": 1.0, "rate": 0.5}


def test_different_metrics_are_refused(two):
    def body(rank):
        runs.fit(compiled(rank, metrics=["mae"] if rank else []), rank, 2, callbacks=runs.start_callbacks())

    assert "['loss'] on rank 0 and ['loss', 'mae'] on rank 1" in on_each(two, body)


def test_moving_statistics_are_averaged_before_evaluation(two):
    def body(rank):
        layers = [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(2)]
        model = compiled(rank, model=runs.with_weights_of(keras.Sequential(layers), rank))
        normalization = model.layers[0]
        found = []

        class Keeps(keras.callbacks.Callback):
            def on_test_begin(self, logs=None):
                found.append(normalization.moving_mean.numpy())

        callbacks = [*runs.start_callbacks(), Keeps(), hvd.callbacks.MovingStatisticsAverageCallback(), Keeps()]
        x, y = runs.share_of(rank, 2, runs.X), runs.share_of(rank, 2, runs.Y)
        model.fit(x, y, batch_size=6, verbose=0, validation_data=(x, y), callbacks=callbacks)
        return found

    (own, averaged), (other, same) = two.run(body)
    assert not np.allclose(own, other)
    np.testing.assert_array_equal(averaged, same)
    np.testing.assert_allclose(averaged, (own + other) / 2, rtol=1e-6)


# ---- learning rates ----


def rates_of(callbacks, optimizer=None, epochs=3):
    """The rate of each batch, of three in an epoch, in a world of two."""
    seen = []

    class Keeps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate))

    def body(rank):
        model = runs.dense_model()
        model.compile(optimizer or keras.optimizers.SGD(0.5), "mse", run_eagerly=True)
        keeping = [Keeps()] if rank == 0 else []
        callbacks_of_rank = callbacks() + keeping
        return model.fit(runs.X[:6], runs.Y[:6], batch_size=2, epochs=epochs, verbose=0, callbacks=callbacks_of_rank)

    with World(2) as world:
        return seen, world.run(body)[0].history


def test_warmup_ends_at_the_full_rate_and_rank_0_alone_says_so(capsys):
    seen, history = rates_of(lambda: [hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2, verbose=1)])
    expected = [0.4 + 0.4 * (batch + 1) / 6 for batch in range(6)] + [0.8] * 3
    assert seen == pytest.approx(expected) and history["lr"] == pytest.approx([0.6, 0.8, 0.8])
    assert capsys.readouterr().out.count("finished gradual learning rate warmup to 0.8.") == 1


def test_schedules_multiply_between_their_epochs():
    def staircase():
        return [hvd.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=1, end_epoch=3)]

    assert rates_of(staircase, epochs=4)[0] == pytest.approx([0.5] * 3 + [0.8] * 3 + [0.4] * 6)

    def smooth():
        return [hvd.callbacks.LearningRateScheduleCallback(0.9, lambda epoch: 1 - epoch / 2, staircase=False)]

    assert rates_of(smooth, epochs=1)[0] == pytest.approx([0.9, 0.75, 0.6])


def test_momentum_is_corrected_when_the_rate_changes():
    def velocity(corrects, kind=keras.optimizers.SGD):
        with World(1) as world:
            return world.run(lambda rank: _velocity_after_two_steps(corrects, kind))[0]

    # Two updates of gradient 1 with momentum 0.5 and rates 1 and 0.1: v = -1; then v = 0.5 v (rate ratio 0.1) - 0.1.
    assert velocity(True) == pytest.approx(0.5 * -0.1 - 0.1)
    assert velocity(False) == pytest.approx(0.5 * -1.0 - 0.1)
    # Muon's has no rate in it: v = 1, then v = 0.5 v + 1.
    assert velocity(True, keras.optimizers.Muon) == pytest.approx(1.5)


def _velocity_after_two_steps(corrects, kind):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = kind(1.0, momentum=0.5)
    model.compile(optimizer, loss=lambda y, prediction: prediction, run_eagerly=True)
    schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, 0.1, momentum_correction=corrects)
    model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=2, verbose=0, callbacks=[schedule])
    return float(optimizer.momentums[0].numpy().item())


def test_an_optimizer_with_a_schedule_of_its_own_is_refused():
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))
    with pytest.raises(rt.RingtrainError, match="learning rate must be a number, but is a CosineDecay"):
        rates_of(lambda: [hvd.callbacks.LearningRateWarmupCallback(0.8)], scheduled)


# ---- files, values, names ----


def test_the_best_model_is_saved_by_rank_0(two, tmp_path):
    def body(rank):
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(tmp_path / f"best{rank}.keras"))
        runs.fit(compiled(rank), rank, 2, callbacks=[*runs.start_callbacks(), best], epochs=2)

    two.run(body)
    assert [path.name for path in tmp_path.iterdir()] == ["best0.keras"]


def test_a_best_model_without_a_place_is_refused():
    with World(1) as world, pytest.raises(ValueError, match="expected a file path but found none"):
        world.run(lambda rank: runs.fit(
            compiled(rank), 0, 1, callbacks=[hvd.callbacks.BestModelCheckpoint(monitor="loss")]))  # fmt: skip


def test_global_variables_are_refused():
    with pytest.raises(NotImplementedError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
