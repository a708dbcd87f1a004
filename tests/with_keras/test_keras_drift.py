"""Ranks that train apart with Keras are told so, eager and in graphs; what only looks like it is let be."""

import functools
import pathlib
import subprocess
import sys

import drifts
import keras
import keras_drift as planted
import numpy as np
import pytest
import tensorflow as tf
from environments import rank_environment, ringtrainrun
from modes import in_mode

import ringtrain.keras as hvd
from ringtrain._training import drift
from ringtrain._training.watch import Watch
from ringtrain.elastic import BatchSampler, State
from ringtrain.errors import InvalidArgumentError, MismatchError

pytestmark = pytest.mark.timeout(700)
refused = functools.partial(drifts.refused, (MismatchError, tf.errors.InvalidArgumentError))


def network(seed=1):
    drawn = [keras.initializers.GlorotUniform(seed=seed + place) for place in range(2)]  # ranks share Keras' own seed
    hidden = keras.layers.Dense(4, activation="tanh", kernel_initializer=drawn[0])
    return keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(1, kernel_initializer=drawn[1])])


def step_of(model, optimizer, traced):
    """A step of a loop that a user writes."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    return tf.function(step) if traced else step


@pytest.fixture
def asked(monkeypatch):
    """The calls of the host for a row, and no looks but the first."""
    monkeypatch.setattr(drift, "PERIOD", float("inf"))
    calls, row = [], Watch.row
    monkeypatch.setattr(Watch, "row", lambda self, *said: calls.append(said) or row(self, *said))
    return calls


def elastic_trains(rank, traced, act=None):
    """As ``trains``, in steps that survive."""
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build(model.trainable_variables)
    step, sampler = step_of(model, optimizer, traced), BatchSampler(8, batch_size=1)
    for _ in State(model=model, optimizer=optimizer, sampler=sampler).epochs(1):
        for number, _ in enumerate(sampler):
            if act is not None and number == 2 and planted.is_last():
                act(model, optimizer)
            step(*planted.data(rank))
    return [value.numpy() for value in model.trainable_variables]


def trains(
    rank, traced, make=lambda: keras.optimizers.SGD(0.1, momentum=0.9), act=None, seed=1, steps=4, at=2, **arguments
):
    model = network(seed)
    optimizer = hvd.DistributedOptimizer(make(), **in_mode(arguments))
    optimizer.build(model.trainable_variables)
    step = step_of(model, optimizer, traced)
    for number in range(steps):
        if act is not None and number == at and planted.is_last():
            act(model, optimizer)
        step(*planted.data(rank))
    return [value.numpy() for value in model.trainable_variables]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("cause", planted.CAUSES.values(), ids=planted.CAUSES)
def test_a_planted_cause_is_told(two, compared_always, traced, cause):
    assert cause.words in refused(two, lambda rank: trains(rank, traced, act=cause.act))


@pytest.mark.parametrize("cause", planted.CAUSES.values(), ids=planted.CAUSES)
def test_steps_of_an_elastic_state_are_told(two, compared_always, cause):
    one, other = two.run(lambda rank: elastic_trains(rank, False))
    assert all((mine == theirs).all() for mine, theirs in zip(one, other, strict=True))
    assert cause.words in refused(two, lambda rank: elastic_trains(rank, False, cause.act))


@pytest.mark.parametrize("scheduled", [False, True], ids=["a variable", "a schedule"])
def test_another_rate_is_told_by_a_graph_that_asks_no_host(two, asked, scheduled):
    def changes(model, optimizer):
        if scheduled:
            optimizer.iterations.assign_add(8)
        else:
            optimizer.learning_rate = 0.05

    def make():
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 8, 0.5) if scheduled else 0.1
        return keras.optimizers.SGD(rate)

    text = refused(two, lambda rank: trains(rank, True, make, changes, at=30, steps=31))
    assert "learning_rate must be the same on all ranks, but is 0." in text and not asked


@pytest.fixture(scope="module")
def launched():
    """One start for both checks, as imports take seconds."""
    script = pathlib.Path(__file__).with_name("keras_surviving_drift.py")
    line = ringtrainrun("tcp", 2, sys.executable, str(script))
    environment = rank_environment(TF_CPP_MIN_LOG_LEVEL="3")
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.tcp
def test_steps_of_an_elastic_state_are_told_in_graphs(launched):
    """Which call the host in a thread of TensorFlow's, where a rank must be a process."""
    assert launched.stdout.count("all told") == 2, launched.stdout + launched.stderr


@pytest.mark.tcp
def test_replicas_that_part_in_a_graph_are_told_in_one_sentence(launched):
    """Under the frames of the program, and without those of TensorFlow."""
    said = [line.removeprefix("[0] ") for line in launched.stderr.splitlines() if line.startswith("[0] ")]
    begin = said.index("Traceback (most recent call last):")
    frames = [place for place, line in enumerate(said) if place > begin and line.startswith("  File")]
    assert [said[place].partition(", in ")[2] for place in frames][:2] == ["<module>", "train"], launched.stderr
    assert said[frames[1] + 2].startswith("ringtrain.errors.MismatchError: step 'step/grad': parameter 'Variable:0'")
    assert "Detected at node" not in launched.stderr and "script_ops.py" not in launched.stderr, launched.stderr


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_models_that_begin_apart_are_told(two, traced):
    text = refused(two, lambda rank: trains(rank, traced, seed=rank + 1, steps=11))
    assert "must be the same on all ranks, but" in text and "no broadcast at the start" in text


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"compression": hvd.Compression.fp16}, {"compression": hvd.Compression.powersgd(rank=1)}, {"late": True},
     {"backward_passes_per_step": 2}, {"groups": 1}],
    ids=str,
)  # fmt: skip
def test_all_is_well(two, compared_always, traced, arguments):
    first, second = two.run(lambda rank: trains(rank, traced, steps=6, **arguments))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_who_means_it_says_so(two, compared_always, traced):
    two.run(lambda rank: trains(rank, traced, seed=rank + 1, act=planted.CAUSES["rate"].act, replicas="differ"))


def test_an_unknown_word_is_refused():
    with pytest.raises(InvalidArgumentError, match='replicas must be "equal" or "differ", but is \'same\''):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), mode=hvd.Synchronous(replicas="same"))


def test_fit_is_told(two):
    """By a schedule of one rank's own."""

    def body(rank):
        model = network()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        own = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.5 if epoch and rank else 1.0))
        model.fit(*planted.data(rank), epochs=3, batch_size=2, verbose=0, callbacks=[own])

    assert "learning_rate must be the same on all ranks, but is 0.1 on rank 0 and 0.05 on rank 1" in refused(two, body)


@pytest.mark.parametrize("how", ["plain", "elastic"])
def test_the_end_of_fit_is_compared(two, how):
    """What one rank does after the last step, or between two looks, whatever time has passed."""

    def body(rank):
        model = network()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        drifts = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: (
                planted.CAUSES["assignment"].act(model, None) if rank and epoch == 1 else None
            )
        )
        entry = [hvd.elastic.Elastic(model)] if how == "elastic" else []
        model.fit(*planted.data(rank), epochs=2, batch_size=2, verbose=0, callbacks=[drifts, *entry])

    assert planted.CAUSES["assignment"].words in refused(two, body)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_a_model_that_its_first_batch_makes_is_no_false_alarm(two, compared_always, steps_per_execution):
    def body(rank):
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
        begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(*planted.data(rank), epochs=4, batch_size=1, verbose=0, callbacks=[begin])
        return [value.numpy() for value in model.trainable_variables]

    first, second = two.run(body)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_schedule_is_compared_by_what_it_says(two, compared_always):
    def make():
        return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))

    two.run(lambda rank: trains(rank, True, make=make))

    def body(rank):
        rate = keras.optimizers.schedules.ExponentialDecay(0.1 * (1 + rank), 2, 0.5)
        trains(rank, True, make=lambda: keras.optimizers.Adam(rate))

    text = refused(two, body)  # in the second step
    assert "learning_rate must be the same on all ranks, but is 0.0707" in text and " on rank 0 and 0.1414" in text


def test_the_scale_of_a_loss_is_no_false_alarm(two, compared_always):
    def make():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)

    two.run(lambda rank: trains(rank, True, make=make))


def test_a_rate_that_the_callback_brings_after_the_first_batch_is_no_false_alarm(two):
    """Rank 0 goes on with a smaller one, and the model is made by its first batch."""

    def body(rank):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 if rank else 0.01)), "mse")
        begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(*planted.data(rank), batch_size=1, verbose=0, callbacks=[begin])
        return float(model.optimizer.learning_rate.numpy())

    assert two.run(body) == [pytest.approx(0.01)] * 2


def test_numbers_of_numpy_are_those_of_a_file(two):
    """One rank has its optimizer from a file, where JSON keeps no types."""

    def body(rank):
        beta = np.float32(0.9)
        trains(rank, False, make=lambda: keras.optimizers.Adam(0.1, beta_1=beta if rank else float(beta)))

    two.run(body)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_a_rank_that_has_joined_is_no_false_alarm(two, compared_always, traced):
    def body(rank):
        trains(rank, traced, steps=3 + 2 * rank)
        return hvd.join()

    assert two.run(body) == [1, 1]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_layer_that_is_frozen_on_one_rank_is_named_by_fit(two, frozen):
    planted.check_a_frozen_layer(keras, hvd, two, frozen)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_a_layer_that_is_frozen_on_one_rank_is_named_in_the_first_step(two, traced):
    """Of a loop that a user writes, when a graph is traced."""

    def body(rank):
        model = network()
        model.layers[0].trainable = not rank
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
        step_of(model, optimizer, traced)(*planted.data(rank))

    text = drifts.refused((Exception,), two, body)  # what TensorFlow makes of one that tracing has met
    assert "/kernel' of shape [3, 4]" in text and "on rank 0 and not on rank 1. Freeze" in text
