"""One semantics for missing gradients in PyTorch and TensorFlow: the table of ``missing_gradients`` in every adapter.

Keras on PyTorch and the legacy Keras 2 are held to the same table by ``with_keras/torch_keras_run.py`` and
``with_keras/legacy_keras_run.py``, in processes of their own.
"""

import missing_gradients as table
import pytest
from modes import in_mode

from ringtrain.testing import World

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


@pytest.fixture
def two():
    """Two ranks as threads, with a short deadline: nothing here may wait for it."""
    with World(table.RANKS, stall_abort_seconds=20) as opened:
        yield opened


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"groups": 1}, {"groups": 2, "gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("steps", [table.CHANGING, table.STEADY * 2], ids=["changing", "steady"])
def test_pytorch(two, steps, settings, passes):
    import torch

    import ringtrain.torch as hvd

    def body(rank):
        weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(table.COUNT)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0, weight_decay=table.WEIGHT_DECAY),
            backward_passes_per_step=passes,
            **in_mode(settings),
        )
        for step in steps:
            for own in table.passes_of(step, rank, passes):
                sum(
                    factor * weight for factor, weight in zip(own, weights, strict=True) if factor is not None
                ).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [weight.item() for weight in weights]

    assert two.run(body) == [table.expected(steps, passes)] * table.RANKS


def descend(tf, gradients, weights):
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is not None:
            weight.assign_sub(gradient + table.WEIGHT_DECAY * weight)


def loss_of(tf, own, weights):
    used = [factor * weight for factor, weight in zip(own, weights, strict=True) if factor is not None]
    return tf.reduce_sum(tf.add_n(used))


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("of", ["tape", "optimizer of TensorFlow 1"])
def test_tensorflow(two, of, groups, in_graph):
    import tensorflow as tf

    import ringtrain.tensorflow as hvd

    steps = table.STEADY if in_graph else table.CHANGING

    def body(rank):
        weights = [tf.Variable([1.0]) for _ in range(table.COUNT)]
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), groups=groups)

        def step(own):
            if of == "tape":
                with tf.GradientTape() as tape:
                    loss = loss_of(tf, own, weights)
                gradients = hvd.DistributedGradientTape(tape, groups=groups).gradient(loss, weights)
            else:
                gradients = [
                    gradient for gradient, _ in optimizer.compute_gradients(lambda: loss_of(tf, own, weights), weights)
                ]
            descend(tf, gradients, weights)

        own_of_steps = [table.passes_of(step, rank, 1)[0] for step in steps]
        if in_graph:
            own = own_of_steps[0]
            graph = tf.function(lambda: step(own))
            for _ in steps:
                graph()
        else:
            for own in own_of_steps:
                step(own)
        return [float(weight[0]) for weight in weights]

    assert two.run(body) == [table.expected(steps)] * table.RANKS


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("passes", [1, 2])
def test_keras_on_tensorflow(two, passes, in_graph):
    import missing_gradients_in_keras

    steps = table.STEADY if in_graph else table.CHANGING
    found = two.run(missing_gradients_in_keras.weights_after, steps, passes, in_graph)
    assert found == [table.expected(steps, passes)] * table.RANKS


def test_the_table_tells_zeros_from_none_and_has_each_case():
    for step in table.CHANGING:
        kinds = {tuple(gradient is not None for gradient in gradients) for gradients in step}
        assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    zeros = [[tuple(gradient or 0.0 for gradient in gradients) for gradients in step] for step in table.CHANGING]
    assert table.expected(zeros) != table.expected(table.CHANGING)
