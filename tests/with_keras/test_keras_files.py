"""Files of models with a distributed optimizer: they name the user's optimizer, and a run resumes from them."""

import copy
import pickle
import subprocess
import sys

import keras
import keras_runs as runs
import numpy as np
import pytest

import ringtrain.keras as hvd
from ringtrain.keras.optimizer import reduction_of
from ringtrain.testing import World

# What a user's own module has; the files are loaded in a process that has this and Keras, and no ringtrain.
CLASSES = """
import keras

@keras.saving.register_keras_serializable("mine", "Slow")
class Registered(keras.optimizers.SGD):
    def __init__(self, learning_rate=0.01, patience=1, **further):
        super().__init__(learning_rate, **further)
        self.patience = patience

    def get_config(self):
        return super().get_config() | {"patience": self.patience}

class Unregistered(keras.optimizers.SGD):
    pass
"""
LOAD = """
import sys
sys.modules["ringtrain"] = None
import numpy as np
import tensorflow as tf

exported, data, *files = sys.argv[1:]
model = tf.saved_model.load(exported)
np.save(data, model.serve(np.load(data)))

from its_classes import Registered, Unregistered
import keras

for path in files:
    optimizer = keras.models.load_model(path, custom_objects={"Unregistered": Unregistered}).optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    print(type(optimizer).__name__, getattr(optimizer, "patience", 0))
    if path.endswith(".keras"):  # Keras loads no optimizer's state of a Sequential from .h5
        assert int(optimizer.iterations) == 1, optimizer.iterations
"""


@pytest.fixture
def two():
    """Ranks as threads of this process; names that differ are told early."""
    with World(2, stall_abort_seconds=30.0) as opened:
        yield opened


@pytest.fixture
def its_classes(tmp_path, monkeypatch):
    """The user's module."""
    (tmp_path / "its_classes.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    import its_classes

    yield its_classes
    sys.modules.pop("its_classes")


def compiled(optimizer, seed=0):
    model = runs.dense_model(seed)
    model.compile(optimizer, keras.losses.MeanSquaredError(), run_eagerly=True)  # names of losses fail in Keras' .h5
    return model


def test_a_run_resumes_where_one_rank_loads_and_the_others_make_a_new_model(two, tmp_path):
    """Horovod's idiom. A loaded Sequential has other paths than a new one, and a rank may have made more models."""
    path = tmp_path / "begun.keras"

    def body(rank):
        begun = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), rank)
        runs.fit(begun, rank, 2, callbacks=runs.start_callbacks())
        if rank == 0:
            begun.save(path)
            model = hvd.load_model(path)
            assert {variable.path for variable in model.variables} != {variable.path for variable in begun.variables}
        else:
            keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
            hvd.DistributedOptimizer(keras.optimizers.SGD())
            model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), 7)
        runs.fit(begun, rank, 2, callbacks=runs.start_callbacks())
        runs.fit(model, rank, 2, callbacks=[*runs.start_callbacks(), hvd.callbacks.MovingStatisticsAverageCallback()])
        return runs.trained(begun), runs.trained(model)

    (uninterrupted, resumed), (_, other) = two.run(body)
    runs.assert_same_bits([uninterrupted, resumed, other])


def test_files_and_exports_load_without_ringtrain(two, tmp_path, its_classes):
    """In one process: files of the user's own optimizers, and an exported model. A clone has nothing of ringtrain, either."""
    made = {
        "registered": (lambda: its_classes.Registered(0.5, 4), "Registered 4"),
        "unregistered": (lambda: its_classes.Unregistered(0.5, momentum=0.5), "Unregistered 0"),
        "scaled": (lambda: keras.optimizers.LossScaleOptimizer(its_classes.Registered(0.5, 4)), "Registered 4"),
    }
    files = {tmp_path / f"{name}{ending}": name for name in made for ending in (".keras", ".h5")}

    def body(rank):
        for name, (make, _) in made.items():
            model = compiled(hvd.DistributedOptimizer(make()), rank)
            model.train_on_batch(runs.X[:6], runs.Y[:6])
            for path in [path for path in files if rank == 0 and files[path] == name]:
                model.save(path)
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        np.testing.assert_array_equal(clone.predict(runs.X[:4], verbose=0), model.predict(runs.X[:4], verbose=0))
        if rank == 0:
            model.export(tmp_path / "exported", verbose=False)
        return model.predict(runs.X[:4], verbose=0)

    expected, _ = two.run(body)
    data = tmp_path / "x.npy"
    np.save(data, runs.X[:4])
    load = [sys.executable, "-c", LOAD, str(tmp_path / "exported"), str(data), *map(str, files)]
    loaded = subprocess.run(load, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert loaded.stdout.splitlines() == [made[name][1] for name in files.values()], loaded.stderr[-3000:]
    np.testing.assert_allclose(np.load(data), expected, rtol=1e-6)


def test_load_model_takes_what_horovods_scripts_pass(two, tmp_path, its_classes):
    path = tmp_path / "model.keras"

    def body(rank):
        if rank == 0:
            compiled(hvd.DistributedOptimizer(its_classes.Unregistered(0.5))).save(path)
        hvd.allgather([rank])
        by_class = hvd.load_model(path, custom_optimizers=[its_classes.Unregistered], compression=hvd.Compression.fp16)
        assert reduction_of(by_class.optimizer).settings.compression is hvd.Compression.fp16
        made = {"Unregistered": lambda **config: hvd.DistributedOptimizer(its_classes.Unregistered(**config), groups=2)}
        by_function = hvd.load_model(path, custom_objects=made).optimizer
        assert reduction_of(by_function).settings.groups == 2 and isinstance(by_function, its_classes.Unregistered)
        assert float(by_function.learning_rate) == 0.5

    two.run(body)


def test_a_registered_class_stays_the_users(two, its_classes):
    def body(rank):
        wrapped = hvd.DistributedOptimizer(its_classes.Registered(0.5, 3))
        assert keras.saving.get_registered_name(type(wrapped)) == "mine>Slow"
        assert keras.saving.get_registered_object("mine>Slow") is its_classes.Registered
        serialized = keras.saving.serialize_keras_object(wrapped)
        assert serialized == keras.saving.serialize_keras_object(its_classes.Registered(0.5, 3, name=wrapped.name))
        assert type(keras.saving.deserialize_keras_object(serialized)) is its_classes.Registered
        again = type(wrapped).from_config(wrapped.get_config())
        assert again.patience == 3 and reduction_of(again) is not None
        for other in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
            assert type(other) is its_classes.Registered and other.patience == 3

    two.run(body)
