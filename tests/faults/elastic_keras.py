"""A script for Horovod's elastic Keras, with its import line changed, whose result tells how many batches were applied.

The gradient of rank r is r + 1, for any weight, so each batch moves the weight by the learning rate times the mean over the
ranks: all sums are exact. test_elastic_frames.py runs it on the ranks of a job; slot and batch of the fault come from the
environment.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np

if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
    import tf_keras as keras

    import ringtrain.tensorflow.keras as hvd
else:
    import keras

    import ringtrain.keras as hvd
import ringtrain as rt

EPOCHS, STEPS, ROWS, RATE = 4, 12, 2, 2.0**-6
PASSES = int(os.environ.get("PASSES", "1"))
slot, mark = os.environ.get("RINGTRAIN_RANK", "0"), Path(os.environ["TMPDIR"], "struck")

hvd.init()


class Idle(keras.layers.Layer):
    """Has a weight that nobody uses: its gradient is None on all ranks, also on one that joins, and so it stays."""

    def build(self, shape):
        self.idle = self.add_weight(shape=(3,), initializer="ones", name="idle")

    def call(self, inputs):
        return inputs


class Count(keras.callbacks.Callback):
    """What the weight must come to."""

    def on_train_batch_end(self, batch, logs=None):
        state.done += 1
        state.moved += (hvd.size() + 1) / 2 / PASSES


class Fault(keras.callbacks.Callback):
    """Kills this rank once; and waits until another one has joined."""

    def on_train_batch_begin(self, batch, logs=None):
        if state.done == int(os.environ.get("AT", "-1")) and slot == os.environ.get("SLOT") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while state.done == 30 and hvd.size() < int(os.environ.get("JOINED", "1")):
            state.check_host_updates()
            time.sleep(0.05)


inputs = keras.Input((1,))
dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros" if slot == "0" else "ones")
model = keras.Model(inputs, Idle()(dense(inputs)))
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(RATE, weight_decay=None), backward_passes_per_step=PASSES, average_aggregated_gradients=True
)
model.compile(optimizer, loss=lambda truth, found: keras.ops.mean(found) if hasattr(keras, "ops") else found)

state = hvd.elastic.KerasState(model, batch=0, epoch=0, done=0, moved=0.0)
state.register_reset_callbacks([lambda: print(f"reset to {hvd.size()} at {state.done}", flush=True)])
callbacks = [
    hvd.elastic.CommitStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
    Count(),
    Fault(),
]


@hvd.elastic.run
def train(state):
    print(f"world of {hvd.size()} at {state.done}", flush=True)
    while os.environ.get("ALONE") and state.done == 0 and hvd.size() == 2:
        if slot == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        state.check_host_updates()
    x = np.full((STEPS * ROWS, 1), hvd.rank() + 1.0, "float32")
    state.model.fit(x, x, batch_size=ROWS, shuffle=False, epochs=EPOCHS - state.epoch, callbacks=callbacks, verbose=0)
    rt.check_replicas([("kernel", np.array(dense.kernel.numpy()))])


train(state)
weight, applied = float(dense.kernel.numpy().item()), int(optimizer.iterations.numpy())
print("end", state.epoch, state.batch, state.done, applied, weight == -RATE * state.moved, weight, flush=True)
