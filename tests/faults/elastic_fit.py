"""``fit`` whose steps survive, on TensorFlow or PyTorch; test_elastic_frameworks.py runs it on the ranks of a job.

Contributions depend on slot, step and the weights. With PLAN it takes the steps of a plan in a job of a fixed size instead.
A weight's gradient has two terms: TensorFlow adds three in one graph in an order that changes from step to step, and with it
the last bits, on one rank alone.
STOPS is the slot and step behind which one rank stops the training.
PASSES is how many batches make an update; the contributions are those of its last batch.
"""

import hashlib
import json
import os

import elastic_faults
import keras
import numpy as np

import ringtrain.keras as hvd

SLOTS, EPOCHS, STEPS = 8, 2, 12
slot = elastic_faults.slot
plan = json.loads(open(os.environ["PLAN"]).read()) if "PLAN" in os.environ else None
hvd.init()


class Task(keras.layers.Layer):
    """Its result has the gradients that the step is to have, whatever the input is; nobody uses ``idle``."""

    def build(self, shape):
        initial = "ones" if slot == 0 else "zeros"
        self.weights_ = self.add_weight(shape=(257,), initializer=initial, name="weights")
        self.tags = self.add_weight(shape=(SLOTS,), initializer="zeros", name="tags")
        self.idle = self.add_weight(shape=(3,), initializer="ones", name="idle")
        self.drawn = self.add_weight(shape=(257,), initializer="zeros", name="drawn", trainable=False)
        self.tag = self.add_weight(shape=(SLOTS,), initializer="zeros", name="tag", trainable=False)

    def call(self, inputs):
        ops = keras.ops
        value = ops.sum(self.weights_ * self.drawn + 0.05 * ops.square(self.weights_)) + ops.sum(self.tags * self.tag)
        return value + 0.0 * inputs


class Steps(keras.callbacks.Callback):
    """Makes each step what the plan or the slot says, and tells whose contributions are in it."""

    def __init__(self, state):
        super().__init__()
        self.state, self.first = state, first

    def on_epoch_begin(self, epoch, logs=None):
        if self.state is not None:
            print("epoch", epoch, self.state.batch, hvd.size(), flush=True)

    def on_train_batch_begin(self, batch, logs=None):
        if self.state is not None:
            elastic_faults.await_joiners(self.state.step)
        self.step = self.first + batch if self.state is None else self.state.step
        contributor = slot if plan is None else plan[batch][hvd.rank()]
        drawn = np.random.default_rng([self.step, contributor]).standard_normal(257)
        task.drawn.assign(drawn.astype(np.float32))
        task.tag.assign(np.eye(SLOTS, dtype=np.float32)[contributor])
        for variable in (task.tags, optimizer.momentums[1]):
            variable.assign(np.zeros(SLOTS, np.float32))
        elastic_faults.strike(self.step, "begun")

    def on_train_batch_end(self, batch, logs=None):
        elastic_faults.strike(self.step, "released")
        slots = np.flatnonzero(keras.ops.convert_to_numpy(task.tags)).tolist()
        print("applied", self.step, hvd.rank(), slot, *slots, flush=True)
        if os.environ.get("STOPS") == f"{slot}/{self.step}":
            self.model.stop_training = True


def values():
    """All that the end depends on."""
    return [keras.ops.convert_to_numpy(each) for each in (task.weights_, task.idle, *optimizer.variables)]


task = Task()
inputs = keras.Input((1,))
model = keras.Model(inputs, task(inputs))
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))
model.compile(optimizer, loss=lambda truth, found: keras.ops.mean(found), run_eagerly="EAGER" in os.environ)
optimizer.build(model.trainable_variables)
rows = np.zeros((STEPS, 1), np.float32)
first = 0
if plan is None:
    elastic = hvd.elastic.Elastic(model)
    elastic.state.on_change(lambda old, new: print("change", old, new, flush=True))
    callbacks = [elastic, hvd.callbacks.MetricAverageCallback(), Steps(elastic.state)]
    history = model.fit(
        rows, rows, batch_size=1, epochs=EPOCHS, initial_epoch=elastic.epoch, callbacks=callbacks, verbose=0
    )
    assert "STOPS" in os.environ or (elastic.state.epoch == EPOCHS and elastic.state.step == EPOCHS * STEPS)
    done = elastic.state.step
else:
    saved = elastic_faults.folder / "saved.npz"
    kept_of = [task.weights_, task.idle, *optimizer.variables]
    callbacks = []
    if saved.exists():
        kept = np.load(saved)
        first = int(kept["first"])
        for place, variable in enumerate(kept_of):
            variable.assign(kept[str(place)])
    else:
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0, check_replicas=False)]
    count = len(plan)
    rows = np.zeros((count, 1), np.float32)
    model.fit(rows, rows, batch_size=1, callbacks=[*callbacks, Steps(None)], verbose=0)
    done = first + count
    if hvd.rank() == 0:
        np.savez(saved, first=done, **{str(place): value for place, value in enumerate(values())})
print("end", done, hashlib.sha256(b"".join(value.tobytes() for value in values())).hexdigest(), flush=True)
