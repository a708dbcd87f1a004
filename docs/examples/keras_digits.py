"""A small convolutional network on scikit-learn's digits: Keras' fit, and a loop of one's own with the tape.

    pip install scikit-learn      # the data
    ringtrainrun -np 2 python docs/examples/keras_digits.py --epochs 6 --folder .
    ringtrainrun -np 2 python docs/examples/keras_digits.py --epochs 6 --resume epoch-03.keras
    ringtrainrun -np 2 python docs/examples/keras_digits.py --loop --epochs 3

A run that resumes ends with the same bits as one that was never interrupted: the file holds the optimizer's state, and
what it does not hold, the order of the data and the state of dropout, follows from the number of the epoch.
"""

import argparse
import hashlib
import math

import keras
import numpy as np
import sklearn.datasets
import tensorflow as tf

import ringtrain as rt
import ringtrain.tensorflow.keras as hvd
from ringtrain.tensorflow import DistributedGradientTape

BATCH = 32  # of each rank
LEARNING_RATE = 0.002  # for one rank


def main() -> None:
    options = parse_options()
    hvd.init()
    keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()
    model = keras.models.load_model(options.resume) if options.resume else make_model()
    if options.loop:
        train_in_a_loop(model, options.epochs)
    else:
        train_with_fit(model, options)
    correct = np.mean(model.predict(TEST[0], verbose=0).argmax(1) == TEST[1])
    if hvd.rank() == 0:
        print(f"test accuracy {correct:.3f}")
        print(f"bits after {options.epochs} epochs: {bits_of(model)}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", help="where a file is saved after every epoch")
    parser.add_argument("--resume", help="such a file")
    parser.add_argument("--loop", action="store_true", help="train with tf.GradientTape instead of fit")
    return parser.parse_args()


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training and test data: images [n, 8, 8, 1] from 0 to 1, labels [n]."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    return (images[:1440], labels[:1440]), (images[1440:], labels[1440:])


TRAINING, TEST = digits()


def share_of(epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's share of the training data, in an order of its own for each epoch."""
    chosen = rt.shard(len(TRAINING[0]), "truncate", seed=1, epoch=epoch)
    return TRAINING[0][chosen], TRAINING[1][chosen]


def make_model() -> keras.Model:
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.ReLU(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(LEARNING_RATE * hvd.size()), loss, metrics=["accuracy"])
    return model


def train_with_fit(model: keras.Model, options: argparse.Namespace) -> None:
    hvd.DistributedOptimizer(model.optimizer)  # also after loading: files know nothing of ranks
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(LEARNING_RATE * hvd.size(), warmup_epochs=2),
        hvd.callbacks.MovingStatisticsAverageCallback(),
        hvd.callbacks.MetricAverageCallback(),  # what follows sees the same metrics on all ranks
    ]
    if options.folder:  # on all ranks, of which one writes
        callbacks.append(keras.callbacks.ModelCheckpoint(options.folder + "/epoch-{epoch:02d}.keras"))
    first = int(model.optimizer.iterations) // math.ceil(len(share_of(0)[0]) / BATCH)
    for epoch in range(first, options.epochs):
        set_dropout_seeds(model, epoch)
        history = model.fit(
            *share_of(epoch), batch_size=BATCH, shuffle=False, initial_epoch=epoch, epochs=epoch + 1, verbose=0,
            validation_data=[part[hvd.rank() :: hvd.size()] for part in TEST], callbacks=callbacks,
        ).history  # fmt: skip
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {history['loss'][0]:.4f}, accuracy {history['val_accuracy'][0]:.3f}")


def set_dropout_seeds(model: keras.Model, epoch: int) -> None:
    """Ranks drop different units, since they start from the seed of rank 0 and shift it; files do not hold it."""
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.seed_generator.state.assign([1, 1_000_000 * epoch])


def train_in_a_loop(model: keras.Model, epochs: int) -> None:
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables + model.optimizer.variables, root_rank=0)

    @tf.function(reduce_retracing=True)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(epochs):
        batches = tf.data.Dataset.from_tensor_slices(share_of(epoch)).batch(BATCH)
        losses = [step(images, labels) for images, labels in batches]
        mean = hvd.allreduce(np.mean(losses), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f}")


def bits_of(model: keras.Model) -> str:
    """A hash of the weights and of the optimizer's state."""
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return hashlib.sha256(b"".join(np.array(variable.numpy()).tobytes() for variable in variables)).hexdigest()[:16]


if __name__ == "__main__":
    main()
