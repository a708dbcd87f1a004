"""Planted drift in graphs whose steps survive a change of the world, and then one in a plain graph, which ends the program.

test_keras_drift.py runs it on two ranks.
"""

import functools

import keras
import keras_drift as planted
import tensorflow as tf
from test_keras_drift import elastic_trains

import ringtrain as rt
import ringtrain.keras as hvd
import ringtrain.tensorflow
from ringtrain._runtime.objects import allgather_object


def tape_trains(rank, traced, act=None):
    """Steps with a tape."""
    weights, sampler = tf.Variable([1.0, 2.0], name="weights"), rt.elastic.BatchSampler(12, batch_size=1)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * x)
        tape = ringtrain.tensorflow.DistributedGradientTape(tape)
        weights.assign_sub(0.1 * tape.gradient(loss, [weights])[0])

    for _ in rt.elastic.State(weights=weights, sampler=sampler).epochs(1):
        for number, _ in enumerate(sampler):
            if act is not None and number == 2 and planted.is_last():
                weights.assign_add([0.0, 0.25])
            step(tf.constant([1.0, float(rank)]))
    return [weights.numpy()]


def fits(rank, traced, act=None):
    """As ``fit`` does it."""
    return planted.fits(keras, hvd, rank, act, survives=True)


def told(body):
    """What a rank is told; "" if nothing."""
    try:
        body()
    except (rt.errors.MismatchError, tf.errors.InvalidArgumentError) as problem:
        text = str(problem)
        return text[text.index("step '") :].split("\n")[0]
    return ""


hvd.init()
with planted.compared_always():
    for trains in (tape_trains, elastic_trains, fits):
        one, other = allgather_object(trains(rt.rank(), True))
        assert all((mine == theirs).all() for mine, theirs in zip(one, other, strict=True)), trains
        for name, cause in planted.CAUSES.items():
            if trains is tape_trains and name == "rate":  # a tape knows none
                continue
            one, other = allgather_object(told(functools.partial(trains, rt.rank(), True, cause.act)))
            assert one == other and cause.words in one, (trains, name, one, other)
print("all told", flush=True)

weights = tf.Variable([1.0, float(rt.rank())])


@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * weights)
    weights.assign_sub(0.01 * ringtrain.tensorflow.DistributedGradientTape(tape).gradient(loss, [weights])[0])


def train():
    for _ in range(30):
        step()


train()
