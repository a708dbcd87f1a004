"""Keras' fit on many ranks: the data, the optimizer and the callbacks are all that changes.

ringtrainrun -np 2 python docs/examples/keras_fit.py
KERAS_BACKEND=torch ringtrainrun -np 2 python docs/examples/keras_fit.py      # or jax
"""

import keras
import numpy as np

import ringtrain as rt
import ringtrain.keras as hvd


def main() -> None:
    hvd.init()
    x, y = make_samples(1000)
    mine = rt.shard(len(x), "truncate", seed=1)  # this rank's share, as many samples on all ranks

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    rate = 0.01 * hvd.size()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)), "mse", metrics=["mae"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # start alike
        hvd.callbacks.MetricAverageCallback(),  # the metrics of all ranks
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
        keras.callbacks.EarlyStopping("loss", patience=3),  # decides alike on all ranks
    ]
    history = model.fit(x[mine], y[mine], batch_size=25, epochs=8, callbacks=callbacks, verbose=0).history

    if hvd.rank() == 0:
        for epoch, (loss, error) in enumerate(zip(history["loss"], history["mae"], strict=True)):
            print(f"epoch {epoch}: loss {loss:.4f}, mean absolute error {error:.4f}")
    hvd.shutdown()


def make_samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The same on all ranks: vectors of eight numbers, and what is to be learnt of each."""
    x = np.random.default_rng(1).uniform(-1, 1, size=(count, 8)).astype("float32")
    return x, np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]


if __name__ == "__main__":
    main()
