"""The operations for TensorFlow: eager and in graphs, dense and sparse, many in flight, in any order; and their gradients."""

import pytest

tf = pytest.importorskip("tensorflow")

import ringtrain.tensorflow as hvd  # noqa: E402
from ringtrain.testing import World  # noqa: E402

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]


@pytest.fixture
def three():
    """Ranks as threads of this process; test_tensorflow_launched.py has them as processes."""
    with World(3) as opened:
        yield opened


def both_modes(function):
    """Runs a function as it is and as a ``tf.function``."""
    return [("eager", function), ("graph", tf.function(function))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype(three, dtype):
    def body(rank):
        mine = tf.cast(tf.constant([[0, 1], [rank, 1]]), dtype)
        for mode, function in both_modes(lambda x: [hvd.allreduce(x, op=hvd.Max, name="r"), hvd.allgather(x, name="g"),
                                                    hvd.broadcast(x, 1, name="b"), hvd.alltoall(tf.repeat(x, 3, 0), name="a")]):
            reduced, gathered, sent, exchanged = function(mine)
            assert reduced.dtype == gathered.dtype == sent.dtype == exchanged.dtype == mine.dtype, mode
            assert reduced[1, 0] == tf.cast(2, dtype) and sent[1, 0] == tf.cast(1, dtype)
            assert gathered.shape == (6, 2) and gathered[2 * 2 + 1, 0] == tf.cast(2, dtype)
            assert exchanged.shape == (6, 2)
    three.run(body)
