"""Names that ranks match TensorFlow's operations by: unique within a function, and alike though ranks differ in counters."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.tensorflow as hvd
from ringtrain.tensorflow import names, util
from ringtrain.testing import World


@pytest.fixture
def two():
    """Two ranks as threads, with a short deadline: what ranks name differently shall not take ten minutes."""
    with World(2, stall_abort_seconds=60) as opened:
        yield opened


def identities(function, *arguments):
    """The identities of a traced function's operations, of its branches and loops too."""
    graph = function.get_concrete_function(*arguments).graph
    nodes = [
        *graph.as_graph_def().node,
        *(node for each in graph.as_graph_def().library.function for node in each.node_def),
    ]
    return sorted(node.attr["tensor_name"].s.decode() for node in nodes if "tensor_name" in node.attr)


# ---- within one function ----


def test_two_broadcasts_in_one_function(two):
    """Horovod's examples for TensorFlow 2 do that with the variables of the model and of the optimizer."""

    def body(rank):
        model, optimizer = [tf.Variable([1.0 + rank])], [tf.Variable(5 * rank), tf.Variable(2.0 + rank)]

        @tf.function
        def start():
            hvd.broadcast_variables(model, root_rank=0)
            hvd.broadcast_variables(optimizer, root_rank=1)

        start()
        return [variable.numpy().tolist() for variable in model + optimizer]

    assert two.run(body) == [[[1.0], 5, 3.0]] * 2


def test_every_operation_twice_in_one_function(two):
    """Also within a condition's branches and a loop, which TensorFlow traces as graphs of their own."""

    def body(rank):
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([3, 2]))

        def each(x):
            return [
                hvd.allreduce(x), hvd.allgather(x), hvd.alltoall(x), hvd.reducescatter(x), hvd.broadcast(x, 1),
                *hvd.grouped_allreduce([x, x]), *hvd.grouped_allgather([x, x]), *hvd.grouped_reducescatter([x, x]),
                tf.convert_to_tensor(hvd.allreduce(slices)), hvd.allreduce(x, ignore_name_scope=True),
            ]  # fmt: skip

        @tf.function
        def step(x):
            hvd.barrier()
            inside = tf.cond(tf.reduce_sum(x) > 0.0, lambda: each(x), lambda: each(x))
            for _ in tf.range(2):
                x += hvd.allreduce(x)
            hvd.barrier()
            return each(x), each(x), inside

        step(tf.ones([2]))
        claimed = identities(step, tf.ones([2]))
        assert len(set(claimed)) == len(claimed) > 40
        return claimed

    assert len(set(map(tuple, two.run(body)))) == 1


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_batch_normalization_twice(two, in_graph):
    """One layer on two inputs, as siamese networks have it; forwards and backwards, against one process."""
    values = np.random.RandomState(1).rand(8, 3).astype("f")

    def train(kind, values):
        layer = kind()
        layer.build((None, 3))

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x, training=True) ** 3 - layer(x[::-1] ** 2, training=True) ** 3)
            return tape.gradient(loss, x)

        return (tf.function(step) if in_graph else step)(tf.constant(values)).numpy()

    def body(rank):
        for _ in range(rank):
            hvd.SyncBatchNormalization()  # one more on rank 1: Keras counts its layers
        return train(hvd.SyncBatchNormalization, values[4 * rank :][:4])

    whole = train(keras.layers.BatchNormalization, np.concatenate([values[:4], values[4:]]))
    assert np.allclose(np.concatenate(two.run(body)), whole, rtol=1e-3, atol=1e-3)


def test_functions_that_call_each_other(two):
    """Rank 1 has traced the inner one before, alone; its names must not hang on that."""

    def body(rank):
        inner = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))

        @tf.function
        def outer(x):
            return inner(x) + hvd.allreduce(x, op=hvd.Sum)

        if rank == 1:
            inner.get_concrete_function(tf.constant(1.0))
        return float(outer(tf.constant(1.0)))

    assert two.run(body) == [4.0, 4.0]


def test_a_name_of_the_user_stays():
    def body(_):
        step = tf.function(lambda x: (hvd.allreduce(x, name="loss_1"), hvd.broadcast(x, 0, name="model_2/x")))
        assert identities(step, tf.constant(1.0)) == ["loss_1", "model_2/x"]

    with World(1) as world:
        world.run(body)


# ---- among ranks ----


def model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])


def gradients_of(network, rank, in_graph, wrap=hvd.DistributedGradientTape):
    """The reduced gradients of a model, in a function of the user's own or in eager mode."""

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(network(x))
        return wrap(tape).gradient(loss, network.trainable_variables)

    return [each.numpy() for each in (tf.function(step) if in_graph else step)(tf.ones([4, 3]) * (rank + 1.0))]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_rank_that_has_built_one_model_more(two, in_graph):
    def body(rank):
        for _ in range(rank):
            model()
        network = model()
        for variable in network.variables:
            variable.assign(tf.ones(variable.shape))
        return gradients_of(network, rank, in_graph)

    first, second = two.run(body)
    for gradient, other in zip(first, second, strict=True):
        assert np.array_equal(gradient, other)
    assert np.allclose(first[0], 1.5)


def test_a_loaded_model_beside_a_new_one(two, tmp_path):
    """Horovod's idiom to resume: rank 0 loads, the others build; paths then differ in their beginnings."""
    model().save(tmp_path / "model.keras")

    def body(rank):
        network = keras.models.load_model(tmp_path / "model.keras") if rank == 0 else model()
        hvd.broadcast_variables(network.variables, root_rank=0)
        return gradients_of(network, rank, True)

    first, second = two.run(body)
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def test_a_gan(two):
    """Two tapes over two models in one function, also where a rank traces it once more, for a batch of another size."""

    def body(rank):
        for _ in range(rank):
            model()
        generator, discriminator = model(), model()
        for variable in generator.variables + discriminator.variables:
            variable.assign(tf.ones(variable.shape))

        @tf.function
        def step(x):
            with tf.GradientTape() as of_generator, tf.GradientTape() as of_discriminator:
                losses = tf.reduce_mean(generator(x)), 2.0 * tf.reduce_mean(discriminator(x))
            return [
                hvd.DistributedGradientTape(tape).gradient(loss, network.trainable_variables)
                for tape, loss, network in zip(
                    (of_generator, of_discriminator), losses, (generator, discriminator), strict=True
                )
            ]

        found = []
        for rows in (4, 4, 4 if rank == 0 else 2):
            gradients = step(tf.ones([rows, 3]) * (rank + 1.0))
            found.append([float(of_one[0][0, 0]) for of_one in gradients])
        assert step.experimental_get_tracing_count() == rank + 1
        return found

    assert two.run(body) == [[[1.5, 3.0]] * 3] * 2


def test_what_a_gradient_is_called():
    with World(1) as world:

        def body(_):
            first, second = keras.layers.Dense(1), keras.layers.Dense(1)
            first.build((None, 1))
            second.build((None, 1))
            sources = [*first.trainable_variables, second.kernel, tf.Variable(1.0, name="scale_3"), tf.constant(1.0)]
            return names.of_gradients("grad", sources)

        (found,) = world.run(body)
    assert found == ["grad.0.dense/kernel", "grad.1.dense/bias", "grad.2.dense/kernel", "grad.3.scale", "grad.4.source"]


@pytest.mark.parametrize("given, kept", [
    ("model_1/dense_2/kernel:0", "model/dense/kernel:0"),
    ("conv2d_12", "conv2d"),
    ("block1_conv1", "block1_conv1"),
    ("a_1b/c_2_3", "a_1b/c_2"),
])  # fmt: skip
def test_counters_are_left_out(given, kept):
    assert names.without_counters(given) == kept


def test_a_name_without_its_scope_has_no_counter(two):
    def body(rank):
        @tf.function
        def step(x):
            with tf.name_scope(f"tower_{rank}"):
                y = tf.identity(tf.identity(x, name="y") if rank else x, name="y")
            return hvd.allreduce(y, ignore_name_scope=True)

        assert step(tf.constant(1.0 + rank)) == 1.5
        return [re.sub(r"_\d", "", each) for each in identities(step, tf.constant(1.0))]

    two.run(body)


def test_names_of_horovods_utilities():
    """As Horovod's own tests and programs after it use them."""
    assert hvd._executing_eagerly is util._executing_eagerly and util._executing_eagerly()
    seen = []

    @util._make_subgraph
    def graph():
        seen.append(util._executing_eagerly())
        return tf.constant(3)

    assert graph() == 3 and seen == [False]
    variables = [tf.Variable(1.0), [tf.Variable(2.0)]]
    references = util.vars_to_refs(variables)
    found = util.refs_to_vars(references)
    assert hash(references) and found[0] is variables[0] and found[1][0] is variables[1][0]
    calls = []
    cached = util._cache(lambda value: calls.append(value) or 2 * value)
    assert cached(4) == cached(4) == 8 and calls == [4]
