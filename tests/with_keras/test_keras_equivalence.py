"""Ranks that train a Keras model together equal one process with plain Keras on their batches in one.

Each rank starts from weights of its own and reads data of its own, so that a missing broadcast or average shows.
"""

import keras
import keras_runs as runs
import pytest

import ringtrain as rt
import ringtrain.keras as hvd

OPTIMIZERS = {
    "SGD": lambda **extra: keras.optimizers.SGD(0.05, **extra),
    "SGD-momentum": lambda **extra: keras.optimizers.SGD(0.05, momentum=0.9, **extra),
    "SGD-nesterov": lambda **extra: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, **extra),
    "RMSprop": lambda **extra: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True, **extra),
    "Adam": lambda **extra: keras.optimizers.Adam(0.02, **extra),
    "Adam-amsgrad": lambda **extra: keras.optimizers.Adam(0.02, amsgrad=True, **extra),
    "AdamW": lambda **extra: keras.optimizers.AdamW(0.02, **{"weight_decay": 0.1, **extra}),
    "Adadelta": lambda **extra: keras.optimizers.Adadelta(1.0, **extra),
    "Adagrad": lambda **extra: keras.optimizers.Adagrad(0.1, **extra),
    "Adamax": lambda **extra: keras.optimizers.Adamax(0.02, **extra),
    "Adafactor": lambda **extra: keras.optimizers.Adafactor(0.05, **extra),
    "Nadam": lambda **extra: keras.optimizers.Nadam(0.02, **extra),
    "Ftrl": lambda **extra: keras.optimizers.Ftrl(0.1, **extra),
    "Lion": lambda **extra: keras.optimizers.Lion(0.005, **extra),
    "Lamb": lambda **extra: keras.optimizers.Lamb(0.02, **extra),
    "Muon": lambda **extra: keras.optimizers.Muon(0.02, **extra),
    "ScheduleFreeAdamW": lambda **extra: keras.optimizers.ScheduleFreeAdamW(0.02, **extra),
}
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)

AVERAGING = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}

# name: arguments of the optimizer, of compile, of DistributedOptimizer, and the oracle's factor on gradients (None:
# size)
SETTINGS = {
    "graph": ({}, {}, {}, 1),
    "eager": ({}, {"run_eagerly": True}, {}, 1),
    "several steps per execution": ({}, {"steps_per_execution": 4}, {}, 1),
    "jit_compile": ({}, {"jit_compile": True}, {}, 1),
    "clipnorm": ({"clipnorm": 0.05}, {}, {}, 1),
    "global_clipnorm": ({"global_clipnorm": 0.05}, {}, {}, 1),
    "clipvalue": ({"clipvalue": 0.01}, {"run_eagerly": True}, {}, 1),
    "weight decay": ({"weight_decay": 0.1}, {}, {}, 1),
    "moving average": (AVERAGING, {}, {}, 1),
    "clipping, decay and average": ({"global_clipnorm": 0.05, "weight_decay": 0.1, **AVERAGING}, {}, {}, 1),
    "sum": ({}, {"run_eagerly": True}, {"op": rt.Sum}, None),
    "predivided": ({}, {}, {"gradient_predivide_factor": 4.0}, 1),
    "groups": ({}, {}, {"groups": 2}, 1),
    "predivided groups": ({}, {}, {"gradient_predivide_factor": 4.0, "groups": 2}, 1),
    "groups, eager": ({}, {"run_eagerly": True}, {"groups": 2}, 1),
    "bfloat16 on the way": ({}, {}, {"compression": hvd.Compression.bf16}, 1),
    "float16 on the way, eager": ({}, {"run_eagerly": True}, {"compression": hvd.Compression.fp16}, 1),
    "accumulated average": (
        {}, {}, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 1),
    "accumulated sum, eager": ({}, {"run_eagerly": True}, {"backward_passes_per_step": 2}, 2),
    "accumulated, several steps per execution": (
        {"clipnorm": 0.05}, {"steps_per_execution": 4},
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 1),
}  # fmt: skip
# Two roundings to 8 or 11 bits a step; then Adam's division by a small square root.
LOSSY = {"bfloat16 on the way": 0.05, "float16 on the way, eager": 0.005}
# A setting for each optimizer that is not as Adam or SGD is, an optimizer for each setting that is in no other one; the rest is
# for bin/test --long. A graph is traced on each rank: what does not exclude each other is in one.
CHOSEN = {
    "eager": ["Adafactor", "Ftrl", "Lamb", "Muon", "ScheduleFreeAdamW"],
    "several steps per execution": ["RMSprop"],
    "jit_compile": ["SGD"],
    "clipvalue": ["SGD-nesterov"],
    "clipping, decay and average": ["AdamW"],
    "sum": ["SGD-momentum"],
    "predivided groups": ["SGD-momentum"],  # sees the factor, which Adam's steps and clipping hide
    "groups, eager": ["Adam-amsgrad"],
    "bfloat16 on the way": ["SGD"],
    "float16 on the way, eager": ["SGD-momentum"],
    "accumulated average": ["SGD-momentum"],
    "accumulated sum, eager": ["SGD-momentum"],
    "accumulated, several steps per execution": ["Adam"],  # with clipnorm
}
MATRIX = [(optimizer, setting) for setting in SETTINGS for optimizer in OPTIMIZERS]


def case(number, size):
    optimizer, setting = MATRIX[number]
    in_ci = optimizer in CHOSEN.get(setting, ()) and size == (3 if setting in ("sum", "clipvalue") else 2)
    return pytest.param(size, optimizer, setting, marks=[] if in_ci else pytest.mark.long)


@pytest.mark.parametrize("size, optimizer, setting", [case(number, n) for number in range(len(MATRIX)) for n in (2, 3)])
def test_ranks_equal_one_process(size, optimizer, setting):
    extra, compiling, settings, factor = SETTINGS[setting]

    def make():
        return OPTIMIZERS[optimizer](**extra)

    ranks = runs.distributed_runs(size, make, compiling, **settings)
    runs.assert_same_bits(ranks)
    oracle = runs.oracle_run(make, size if factor is None else factor)
    tolerance = LOSSY.get(setting, 2e-5)
    runs.assert_close(ranks[0], oracle, tolerance, tolerance / 4)
    assert type(ranks[0].optimizer).__name__ == type(oracle.optimizer).__name__
    assert int(ranks[0].optimizer.iterations) == int(oracle.optimizer.iterations) == runs.STEPS


def test_every_optimizer_of_keras_is_here():
    abstract = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}
    known = {name for name in dir(keras.optimizers) if isinstance(getattr(keras.optimizers, name), type)} - abstract
    assert known == {name.split("-")[0] for name in OPTIMIZERS}
    assert {name for names in CHOSEN.values() for name in names} < set(OPTIMIZERS)
