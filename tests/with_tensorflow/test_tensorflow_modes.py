"""Each pair that the table of modes excludes raises its sentence: those of TensorFlow and Keras."""

import re

import keras
import pytest
import tensorflow as tf

import ringtrain as rt
import ringtrain.keras as hvd_keras
import ringtrain.tensorflow as hvd
from ringtrain._training.needs import NEEDS, TRAITS
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.testing import World

MODES = {
    "LocalSteps": rt.LocalSteps(2), "OneStepLate": rt.OneStepLate(), "ShardedStep": rt.ShardedStep(),
    "gradient_as_bucket_view": rt.Synchronous(gradient_as_bucket_view=True),
    "named_buffers": rt.LocalSteps(2, named_buffers=[("mean", tf.zeros(1))]),
}  # fmt: skip


def is_of_a_tape(column):
    hvd.DistributedGradientTape(tf.GradientTape(), mode=MODES[column])


def is_of_tensorflow_1(column):
    hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), mode=MODES[column])


def is_of_keras(column):
    hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), mode=MODES[column])


def has_local_layers(column):
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=layer, mode=MODES[column])


def has_groups(column):
    hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.powersgd(), groups=2)


def model_of(optimizer):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def is_kept_in_a_keras_state(column):
    model = model_of(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), mode=MODES[column]))
    hvd_keras.elastic.KerasState(model)


def survives(column):
    powersgd = hvd.Compression.powersgd()
    model = model_of(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), compression=powersgd))
    hvd_keras.elastic.Elastic(model, sampler=rt.elastic.BatchSampler(4, batch_size=1))


def has_float8_layers(column):
    weight, scale = keras.Variable([1.0]), keras.Variable([1.0])
    scale.overwrite_with_gradient = True
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), mode=MODES[column])
    optimizer.build([weight, scale])
    optimizer.apply([tf.ones(1), tf.ones(1)], [weight, scale])


def weighs_exact_steps(column):
    modes = rt.Synchronous(), rt.OneStepLate(), rt.LocalSteps(every=2, warmup=2)
    made = [hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), mode=mode) for mode in modes]
    for each in made[1:]:
        with pytest.raises(UnsupportedError):
            each.count_samples(3)
    made[0].count_samples(3)


PAIRS = {
    ("gradient_as_bucket_view", "keras"): is_of_keras,
    ("gradient_as_bucket_view", "tape"): is_of_a_tape,
    ("gradient_as_bucket_view", "tf1"): is_of_tensorflow_1,
    ("named_buffers", "keras"): is_of_keras,
    ("LocalSteps", "KerasState"): is_kept_in_a_keras_state,
    ("LocalSteps", "tape"): is_of_a_tape,
    ("LocalSteps", "tf1"): is_of_tensorflow_1,
    ("OneStepLate", "local layers"): has_local_layers,
    ("OneStepLate", "float8"): has_float8_layers,
    ("OneStepLate", "KerasState"): is_kept_in_a_keras_state,
    ("OneStepLate", "tf1"): is_of_tensorflow_1,
    ("ShardedStep", "keras"): is_of_keras,
    ("ShardedStep", "tape"): is_of_a_tape,
    ("ShardedStep", "tf1"): is_of_tensorflow_1,
    ("count_samples", "exact steps of Keras"): weighs_exact_steps,
    ("Compression.powersgd", "survives on the host"): survives,
    ("Compression.powersgd", "groups on the host"): has_groups,
}


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_a_pair_that_cannot_be_raises_its_sentence(pair):
    column, key = pair
    kind = InvalidArgumentError if TRAITS[key].is_argument else UnsupportedError
    found = f"{column} cannot be used with {TRAITS[key].words}: {NEEDS[column][key]}. Leave one of them out."

    def on_rank(rank):
        with pytest.raises(kind, match=re.escape(found)):
            PAIRS[pair](column)

    with World(2, stall_abort_seconds=60) as world:
        world.run(on_rank)
