"""Files of ``Elastic``: a ``fit`` goes on from the newest one; and callbacks that write do so on rank 0, whichever that is."""

import keras
import numpy as np
import pytest

import ringtrain.keras as hvd
from ringtrain.errors import UnsupportedError
from ringtrain.keras.elastic import callbacks as of_fit
from ringtrain.testing import World


class Died(Exception):
    """As a job whose hosts are gone."""


def fitted(folder, every, deals, stop=None):
    """The end of a training with dropout, and callbacks that remember and set the rate."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    x = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)
    sampler = hvd.elastic.BatchSampler(len(x), 2) if deals else None
    elastic, seen = hvd.elastic.Elastic(model, sampler=sampler), []

    def load(indices):
        return x[indices], x[indices, :1]

    def note(batch, logs):
        seen.append((elastic.state.epoch, elastic.state.step, round(float(model.optimizer.learning_rate), 6)))
        if elastic.state.step == stop:
            raise Died

    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    given = [
        elastic,
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        plateau,
        keras.callbacks.LambdaCallback(on_train_batch_end=note),
    ]
    resumed = elastic.resume(folder)
    elastic.save_every(folder, **every)
    data = (hvd.elastic.batches(sampler, load),) if deals else (x, x[:, :1], 2)
    try:
        model.fit(*data, shuffle=False, epochs=3, initial_epoch=elastic.epoch, callbacks=given, verbose=0)
    except Died:
        return resumed, seen
    return resumed, seen, plateau.wait, [each.tolist() for each in model.get_weights()]


@pytest.mark.parametrize(
    "every, stop, begins, deals",
    [({"epochs": 1}, 8, 6, False), ({"epochs": 1}, 8, 6, True), ({"steps": 4}, 11, 8, True)],
)
def test_a_fit_goes_on_from_its_newest_file(every, stop, begins, deals, tmp_path):
    """At the beginning of an epoch, which callbacks begin, and in the midst of one, which they do not begin once more."""

    def run(name, **stops):
        with World(1) as world:
            (end,) = world.run(lambda _: fitted(tmp_path / name, every, deals, **stops))
        return end

    whole = run("whole")
    assert run("cut", stop=stop) == (False, whole[1][:stop])
    assert run("cut") == (True, whole[1][begins:], *whole[2:])


class Log(keras.callbacks.CSVLogger):
    """A user's own kind."""


def test_what_writes_a_log_runs_on_rank_0_whichever_that_comes_to_be(tmp_path, monkeypatch):
    """The file goes on that another process has begun, and nothing is written before."""

    class Rank:
        rank = 1

    class State:
        epoch, step, taken = 4, 40, None

    monkeypatch.setattr(of_fit, "current", lambda: Rank)
    log = Log(tmp_path / "log.csv")
    (tmp_path / "log.csv").write_text("epoch,loss\n3,0.5\n")
    assert of_fit.writes_a_log(log) and not of_fit.writes_a_log(keras.callbacks.EarlyStopping())
    callback = of_fit.on_first_rank(log, State, keras.callbacks.Callback)
    callback.set_params({}), callback.set_model(keras.Sequential()), callback.on_train_begin()
    callback.on_epoch_end(3, {"loss": 0.5})
    assert log.csv_file is None
    Rank.rank = 0
    callback.on_epoch_end(4, {"loss": 0.25}), callback.on_train_end()
    assert [line[:6] for line in (tmp_path / "log.csv").read_text().splitlines()] == ["epoch,", "3,0.5", "4,0.25"]


def test_backups_of_each_rank_are_refused(tmp_path):
    def check(_rank):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        elastic = hvd.elastic.Elastic(model, sampler=hvd.elastic.BatchSampler(2, 1))
        callbacks = [elastic, keras.callbacks.BackupAndRestore(tmp_path)]
        with pytest.raises(UnsupportedError, match=r"'BackupAndRestore': an elastic job .* use save_every and resume"):
            model.fit(np.ones((2, 1)), np.ones((2, 1)), callbacks=callbacks, verbose=0)

    with World(1) as world:
        world.run(check)
