"""``fit`` with callbacks that remember; test_elastic_joiners.py runs it on the ranks of a job, of which one dies and comes back."""

import os

import elastic_faults
import keras
import numpy as np

import ringtrain.keras as hvd

STEPS, EPOCHS = 8, 5
hvd.init()


class Steps(keras.callbacks.Callback):
    """Lets faults strike, counts epochs, and tells the rate of each step."""

    def __init__(self, state):
        super().__init__()
        self.state, self.ended = state, 0

    def on_train_batch_begin(self, batch, logs=None):
        elastic_faults.await_joiners(self.state.step)
        elastic_faults.strike(self.state.step, "begun")

    def on_train_batch_end(self, batch, logs=None):
        print("rate", self.state.step, float(model.optimizer.learning_rate), flush=True)

    def on_epoch_end(self, epoch, logs=None):
        self.ended += 1
        logs["loss"] = 1.0  # which never becomes better


keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), "mse")
elastic = hvd.elastic.Elastic(model)
steps = Steps(elastic.state)
stopping = keras.callbacks.EarlyStopping("loss", patience=3)
path = os.path.join(elastic_faults.folder, "epoch-{epoch}.weights.h5")
callbacks = [
    hvd.callbacks.MetricAverageCallback(),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    steps,
    hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=2)
    if "WARMUP" in os.environ
    else keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2),
    stopping,
    keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
    keras.callbacks.CSVLogger(elastic_faults.folder / "log.csv"),
    elastic,
]
x = np.random.default_rng(elastic_faults.slot).normal(size=(STEPS, 3)).astype("float32")
model.fit(x, x[:, :1], batch_size=1, epochs=EPOCHS, initial_epoch=elastic.epoch, callbacks=callbacks, verbose=0)
saved = sorted(each.name for each in elastic_faults.folder.glob("epoch-*"))
logged = [line.partition(",")[0] for line in (elastic_faults.folder / "log.csv").read_text().splitlines()]
print(
    "end",
    elastic.state.epoch,
    elastic.state.step,
    steps.ended,
    stopping.wait,
    [float(each.sum()) for each in model.get_weights()],
    saved,
    logged,
)
