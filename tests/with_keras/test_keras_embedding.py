"""``ShardedEmbedding`` on Keras: ranks train as one process with ``keras.layers.Embedding``."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")

import ringtrain as rt
import ringtrain.keras as hvd
from ringtrain.testing import World

ROWS, WIDTH, RANKS = 13, 4, 2
OPTIMIZERS = {
    "sgd": (lambda: hvd.layers.SGD(lr=0.5), lambda: keras.optimizers.SGD(0.5)),
    "adagrad": (
        lambda: hvd.layers.Adagrad(lr=0.1, initial_accumulator_value=0.1),
        lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.1),
    ),
}
IDS = np.array([[[1, 5], [5, 5], [12, 0]], [[5, 2], [1, 1], [7, 8]]])  # rank, sample, place
WANTED = np.array([[0.0, 1.0, 0.5], [1.0, 0.0, 0.25]])


def first(rows):
    return np.sin(rows[:, None] * 1.7 + np.arange(WIDTH))


class Plain(keras.layers.Layer):
    """An embedding whose gradient is dense: Keras' own Adagrad on TensorFlow squares each of a row's before they add up."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=(ROWS, WIDTH), initializer="zeros", name="table")

    def call(self, ids):
        return keras.ops.matmul(keras.ops.one_hot(ids, ROWS), self.table)

    def compute_output_shape(self, input_shape):
        return (*input_shape, WIDTH)


def head(embedding, optimizer):
    """A dense part that stays as it is: with another optimizer for each part, both processes must know which is whose."""
    sums = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), embedding, keras.layers.Flatten(), sums])
    model.compile(optimizer, "mse")
    return model


def whole(table):
    rows = np.empty((ROWS, WIDTH), np.float32)
    for part, ids in rt.allgather_object((table.rows(), table.dealing.ids_of(table.rank))):
        rows[ids] = part
    return rows


@pytest.mark.parametrize("kind", ["sgd", pytest.param("adagrad", marks=pytest.mark.long)])
def test_ranks_train_as_one_process(kind, tmp_path):
    ours, theirs = OPTIMIZERS[kind]
    plain = Plain()
    model = head(plain, theirs())
    plain.set_weights([first(np.arange(ROWS))])
    for _ in range(3):
        model.train_on_batch(IDS.reshape(-1, 2), WANTED.reshape(-1))
    expected = np.asarray(plain.get_weights()[0])

    def on_rank(rank):
        layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, ours(), initializer=first, name="words")
        model = head(layer, hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
        assert np.asarray(model.predict_on_batch(IDS[rank])).shape == (3, 1)
        for _ in range(3):
            model.train_on_batch(IDS[rank], WANTED[rank])
        layer.save_table(tmp_path)
        return whole(layer.table)

    with World(RANKS) as world:
        for found in world.run(on_rank):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(expected, first(np.arange(ROWS)), atol=1e-3)

    def on_three(rank):
        layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, ours(), name="words", dealing="blocks")
        layer.load_table(tmp_path)
        return whole(layer.table)

    with World(3) as world:
        np.testing.assert_allclose(world.run(on_three)[2], expected, rtol=1e-5, atol=1e-6)


def test_arguments_that_cannot_be():
    with World(1) as world:

        def on_rank(rank):
            with pytest.raises(rt.errors.InvalidArgumentError, match="optimizer must be a RowOptimizer or one of"):
                hvd.layers.ShardedEmbedding(5, 2, optimizer="adam").build()
            with pytest.raises(rt.errors.UnsupportedError, match="must not be mixed_float16"):
                hvd.layers.ShardedEmbedding(5, 2, dtype="mixed_float16")

        world.run(on_rank)


SETTINGS = {
    "scale the loss": lambda: {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))},
    "scale the loss by a constant": lambda: {"optimizer": keras.optimizers.SGD(0.5, loss_scale_factor=4.0)},
    "clip gradients": lambda: {"optimizer": keras.optimizers.SGD(0.5, global_clipnorm=1.0)},
    "clip gradients of a variable": lambda: {"optimizer": keras.optimizers.SGD(0.5, clipnorm=1.0)},
    "clip gradients by value": lambda: {"optimizer": keras.optimizers.SGD(0.5, clipvalue=1.0)},
    "accumulate gradients": lambda: {"optimizer": keras.optimizers.SGD(0.5), "backward_passes_per_step": 2},
    "accumulate gradients by Keras": lambda: {"optimizer": keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)},
}


REFUSED = [(what, True) for what in SETTINGS]
REFUSED += [(what, False) for what, given in SETTINGS.items() if len(given()) == 1]  # others are DistributedOptimizer's


@pytest.mark.parametrize("what, distributed", REFUSED)
def test_what_gradients_of_rows_would_escape_is_refused(what, distributed):
    """Before any row is changed, whether the optimizer is ours or not."""

    def on_rank(rank):
        given = SETTINGS[what]()
        layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, "sgd", initializer=first, name="words")
        optimizer = hvd.DistributedOptimizer(**given) if distributed else given["optimizer"]
        model = head(layer, optimizer)
        words = " ".join(what.split()[:2])
        with pytest.raises(rt.errors.UnsupportedError, match=f"'words': the model's optimizer must not {words}"):
            model.train_on_batch(IDS[0], WANTED[0])
        assert np.array_equal(whole(layer.table), first(np.arange(ROWS)).astype(np.float32))
        anchor = model.trainable_variables[0]
        if distributed:  # a loop of one's own, without fit
            with pytest.raises(rt.errors.UnsupportedError, match=f"must not {words}"):
                optimizer.apply([keras.ops.zeros(())], [anchor])

    with World(1) as world:
        world.run(on_rank)
