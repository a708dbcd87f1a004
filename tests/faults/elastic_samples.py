"""Loops whose samples a BatchSampler deals, in each framework; test_elastic_samples.py runs it on the ranks of a job.

Number n of a vector is trained on sample n alone, towards a value of its own, so that what a step changes tells which
samples are in it and what each weighs: of B samples each moves its number by 1 / B of the way.
FRAME is numpy, tape or fit; LOADERS are threads that read ahead; PASSES are batches of an update. In numpy, BOUNDS are what a
sampler is told of its shares, by slot.
"""

import json
import os
import time

import elastic_faults
import numpy as np

import ringtrain as rt
import ringtrain.elastic

SAMPLES, EPOCHS = int(os.environ["SAMPLES"]), int(os.environ["EPOCHS"])
batch = {"batch_size": int(os.environ["BATCH"]), "drop_last": "DROPS" in os.environ}
loaders, passes = int(os.environ.get("LOADERS", "0")), int(os.environ.get("PASSES", "1"))
slot, targets = elastic_faults.slot, 1.0 + np.arange(SAMPLES) / SAMPLES
rows = np.eye(SAMPLES)


def tell(step, before, after):
    """What a step has moved, and how far on its way, by rank and sample."""
    moved = (after - before) / (targets - before)
    parts = {int(place): round(float(moved[place]), 6) for place in np.flatnonzero(after != before)}
    print("applied", step, rt.rank(), json.dumps(parts), flush=True)


def load(indices):
    """Rows and targets of samples."""
    assert len(indices) and indices.dtype == np.int64
    time.sleep(float(os.environ.get("SLOW", 0)) * len(indices) * 2 ** (2 - int(slot)))  # that of slot 2 is the fastest
    return rows[indices], targets[indices, None]


def in_numpy():
    """The way to the targets, by hand."""
    rt.init()
    sampler = rt.elastic.BatchSampler(rows, **batch, **json.loads(os.environ.get("BOUNDS", "{}")).get(str(slot), {}))
    state = rt.elastic.State(weights=np.zeros(SAMPLES), sampler=sampler)
    state.on_change(lambda old, new: print("change", old, new, flush=True))
    for _ in state.epochs(EPOCHS):
        for x, y in sampler.loading(load, loaders):
            elastic_faults.await_joiners(state.step)
            step, before = state.step, state.weights.copy()
            print("brings", step, rt.rank(), x.argmax(axis=1).tolist(), flush=True)
            elastic_faults.strike(step, "begun")
            way = x.T @ (y[:, 0] - x @ state.weights) / len(x)
            state.weights += state.allreduce(way, "way")
            tell(step, before, state.weights)
            elastic_faults.strike(step, "released")
    return state, state.weights


def with_a_tape():
    """TensorFlow, in a graph or eager."""
    import tensorflow as tf

    import ringtrain.tensorflow as hvd

    hvd.init()
    weights = tf.Variable(tf.zeros([SAMPLES, 1], tf.float64))
    sampler = hvd.elastic.BatchSampler(SAMPLES, **batch)
    state = hvd.elastic.State(weights=weights, sampler=sampler)

    def step_on(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights - y)) / 2.0
        tape = hvd.DistributedGradientTape(tape, op=getattr(hvd, os.environ.get("OP", "Average")))
        weights.assign_sub(tape.gradient(loss, weights))

    signature = [tf.TensorSpec([None, SAMPLES], tf.float64), tf.TensorSpec([None, 1], tf.float64)]
    train_on = step_on if "EAGER" in os.environ else tf.function(step_on, input_signature=signature)
    for _ in state.epochs(EPOCHS):
        for x, y in sampler.loading(load, loaders):
            elastic_faults.await_joiners(state.step)
            step, before = state.step, weights.numpy()[:, 0]
            elastic_faults.strike(step, "begun")
            train_on(tf.constant(x), tf.constant(y))
            tell(step, before, weights.numpy()[:, 0])
            elastic_faults.strike(step, "released")
    return state, weights.numpy()[:, 0]


def in_fit():
    """Keras, on either backend."""
    import keras

    import ringtrain.keras as hvd

    class Steps(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            print("epoch", epoch, elastic.state.batch, hvd.size(), flush=True)

        def on_train_batch_begin(self, batch, logs=None):
            elastic_faults.await_joiners(elastic.state.step)
            self.step, self.before = elastic.state.step, values()
            elastic_faults.strike(self.step, "begun")

        def on_train_batch_end(self, batch, logs=None):
            tell(self.step, self.before, values())
            elastic_faults.strike(self.step, "released")

    def values():
        return keras.ops.convert_to_numpy(layer.kernel).astype(np.float64)[:, 0]

    keras.config.set_floatx("float64")
    hvd.init()
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((SAMPLES,)), layer])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), backward_passes_per_step=passes)
    model.compile(optimizer, "mse", run_eagerly="EAGER" in os.environ)
    sampler = hvd.elastic.BatchSampler(rows, **batch)
    elastic = hvd.elastic.Elastic(model, sampler=sampler)
    data = hvd.elastic.batches(sampler, load, loaders)
    callbacks = [elastic, hvd.callbacks.MetricAverageCallback(), Steps()]
    model.fit(data, epochs=EPOCHS, initial_epoch=elastic.epoch, callbacks=callbacks, verbose=0)
    return elastic.state, values()


state, end = {"numpy": in_numpy, "tape": with_a_tape, "fit": in_fit}[os.environ["FRAME"]]()
assert (state.epoch, state.batch) == (EPOCHS, 0)
print("end", state.step, json.dumps(end.tolist()), flush=True)
