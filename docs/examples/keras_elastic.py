"""Keras' fit that goes on when ranks die, and admits others while it runs: each sample of an epoch is in one step.

    ringtrainrun --elastic -np 1:2 python docs/examples/keras_elastic.py --folder checkpoints
    ringtrainrun -np 2 python docs/examples/keras_elastic.py                # the same script as an ordinary job

It runs on TensorFlow, and with KERAS_BACKEND=torch on PyTorch. To see it go on, kill one of its ranks: each line has
the number of ranks. A job that is started again continues from the newest file in the folder.
"""

import argparse

import keras
import numpy as np

import ringtrain.keras as hvd


def main() -> None:
    options = parse_options()
    x, y = make_samples(1600, seed=1)
    others_x, others_y = make_samples(400, seed=2)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)])

    hvd.init()  # others wait for a joining rank from here on, so the model is made before
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    sampler = hvd.elastic.BatchSampler(len(x), batch_size=32)
    data = hvd.elastic.batches(sampler, lambda indices: (x[indices], y[indices]))
    of_others = hvd.elastic.BatchSampler(len(others_x), batch_size=100)  # which no state has: dealt anew in each epoch
    validation = hvd.elastic.batches(of_others, lambda indices: (others_x[indices], others_y[indices]))

    elastic = hvd.elastic.Elastic(model, sampler=sampler)
    elastic.state.on_change(lambda old, new: print(f"rank {hvd.rank()}: {new} ranks go on, where {old} were"))
    if options.folder:
        elastic.resume(options.folder)
        elastic.save_every(options.folder, epochs=1)
    model.fit(
        data, epochs=options.epochs, initial_epoch=elastic.epoch, validation_data=validation, verbose=0,
        callbacks=[elastic, hvd.callbacks.MetricAverageCallback(), Report()],
    )  # fmt: skip
    hvd.shutdown()


class Report(keras.callbacks.Callback):
    """Says how an epoch went, on rank 0 of the moment; all ranks have it."""

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if hvd.rank() == 0:
            found = f"loss {logs['loss']:.4f}, of other samples {logs['val_loss']:.4f}"
            print(f"epoch {epoch}: {found}, on {hvd.size()} ranks", flush=True)


def make_samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same on all ranks: vectors of eight numbers, and what is to be learnt of each."""
    x = np.random.default_rng(seed).uniform(-1, 1, size=(count, 8)).astype("float32")
    return x, np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains while ranks come and go.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", help="of checkpoints, which all hosts have")
    return parser.parse_args()


if __name__ == "__main__":
    main()
