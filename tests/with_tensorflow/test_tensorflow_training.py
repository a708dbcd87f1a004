"""What a TensorFlow training loop uses: tapes, variables, objects, SyncBatchNormalization; and releases."""

import inspect
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from modes import in_mode

import ringtrain
import ringtrain.tensorflow as hvd
from ringtrain.tensorflow import library
from ringtrain.tensorflow.gradients import GradientReduction


def operations_of(body):
    """How many operations the current rank does in ``body()``."""
    before = ringtrain.counters()["operations"]
    body()
    return ringtrain.counters()["operations"] - before


# ---- tapes ----


def regression(rank, rows):
    """A small regression: the rows of all ranks in turn, their weights and their targets."""
    generator = np.random.RandomState(7)
    x, y = generator.rand(rows, 3).astype("f"), generator.rand(rows).astype("f")
    return (x, y) if rank is None else (x[rank::2], y[rank::2])


def descend(rank, wrap, in_graph, steps=5):
    """Weights after some steps of gradient descent on a rank's rows, or on all of them for rank None."""
    x, y = regression(rank, 8)
    weights, bias = tf.Variable([[0.1], [0.2], [0.3]], name="weights"), tf.Variable([0.0], name="bias")

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.squeeze(x @ weights, 1) + bias - y))
        return wrap(tape).gradient(loss, {"w": weights, "b": [bias]})

    step = tf.function(step) if in_graph else step
    for _ in range(steps):
        gradients = step()
        weights.assign_sub(0.1 * gradients["w"])
        bias.assign_sub(0.1 * gradients["b"][0])
    return np.append(weights.numpy(), bias.numpy())


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("groups", [None, 1, "all"])
def test_two_ranks_learn_what_one_process_learns(two, in_graph, groups):
    """And a tape that is not wrapped does not, on the same data: the comparison has teeth."""
    alone = descend(None, lambda tape: tape, in_graph)
    options = {"num_groups": 1} if groups == 1 else {"groups": [[]] if groups == "all" else None}
    results = two.run(
        lambda rank: descend(rank, lambda tape: hvd.DistributedGradientTape(tape, **in_mode(options)), in_graph)
    )
    assert np.array_equal(*results) and np.allclose(results[0], alone, atol=1e-6)
    apart = two.run(lambda rank: descend(rank, lambda tape: tape, in_graph))
    assert not np.allclose(apart[0], apart[1], atol=1e-4)


def test_a_tape_stays_the_users_object(two):
    def body(rank):
        tape = tf.GradientTape(persistent=True)
        assert hvd.DistributedGradientTape(tape, op=hvd.Sum) is tape and isinstance(tape, tf.GradientTape)
        used, unused = tf.Variable(2.0), tf.Variable(3.0)
        with tape:
            loss = used * float(rank + 1)
        assert float(tape.gradient(loss, used)) == 3.0
        gradients = tape.gradient(loss, (used, unused))
        assert isinstance(gradients, tuple) and float(gradients[0]) == 3.0 and gradients[1] is None
        assert tape.gradient(loss, [unused], unconnected_gradients=tf.UnconnectedGradients.ZERO) == [0.0]
        assert [float(each) for each in tape.gradient(loss, [used, used], use_generic_names=True)] == [3.0, 3.0]

    two.run(body)


@pytest.mark.parametrize("in_graph, operations", [(False, 1), (True, 3)])
def test_gradients_travel_together_in_eager_mode_and_apart_in_a_graph(two, in_graph, operations):
    """In a graph each leaves while backpropagation goes on; with groups, as the groups say.

    Beside these there is one operation that says which gradients there are: in each eager step, and in a graph's
    tracing.
    """

    def body(rank):
        variables = [tf.Variable(tf.ones([2]), name=f"v{index}") for index in range(3)]

        def step(**options):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in variables])
            return hvd.DistributedGradientTape(
                tape, mode=hvd.Synchronous(replicas=replicas), **in_mode(options)
            ).gradient(loss, variables)

        replicas = "differ"

        def count(**options):
            function = tf.function(step) if in_graph else step
            function(**options)
            return operations_of(lambda: function(**options)) - (not in_graph)

        assert count() == operations
        assert count(groups=2) == 2 and count(groups=[[variables[0], variables[2]]]) == 2 and count(num_groups=1) == 1
        replicas = "equal"
        assert count() == operations + 1  # by which ranks find that they step alike

    two.run(body)


def test_local_sources(two):
    def body(rank):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        layer.build((None, 1))
        own, shared = layer.trainable_weights[0].value, tf.Variable(1.0)

        def gradients(**options):
            with tf.GradientTape() as tape:
                loss = (tf.reduce_sum(own) + shared) * (rank + 1.0)
            tape = hvd.PartialDistributedGradientTape(tape, **in_mode(options))
            tape.register_local_source(own)
            return tape.get_local_and_global_gradients(loss, [own, shared])

        (local,), (reduced,) = gradients()
        assert local[0] is own and float(local[1][0, 0]) == (rank + 1) / 2
        assert reduced[0] is shared and float(reduced[1]) == 1.5
        assert float(gradients(scale_local_gradients=False)[0][0][1][0, 0]) == rank + 1

    two.run(body)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_an_embeddings_gradient(two, in_graph):
    """Sparse by default, dense if asked for, and right in both forms."""

    def body(rank):
        table = tf.Variable(tf.ones([5, 2]), name="table")

        def step(as_dense):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, [0, rank + 1, 0])) * 2.0
            return hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense).gradient(loss, table)

        for as_dense in (False, True):
            gradient = (tf.function(step) if in_graph else step)(as_dense)
            assert isinstance(gradient, tf.Tensor if as_dense else tf.IndexedSlices)
            assert np.array_equal(tf.convert_to_tensor(gradient)[:, 0], [4, 1, 1, 0, 0])

    two.run(body)


def test_predivision_changes_nothing_but_the_order(two):
    def body(rank):
        reduction = GradientReduction("test", predivide=4.0)
        return float(reduction.reduce([tf.constant(3.0 + rank)], ["g"], [tf.Variable(0.0)])[0])

    assert two.run(body) == [3.5, 3.5]


TWICE = tf.Variable(0.0)


@pytest.mark.parametrize("arguments, text", [
    ({"op": hvd.Max}, "op must be Average"),
    ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor needs op=Average"),
    ({"gradient_predivide_factor": 0.0}, "must be above 0"),
    ({"groups": "every"}, "groups must be an int or lists of variables"),
    ({"groups": 0}, "groups must be at least 1, but is 0"),
    ({"num_groups": -1}, "groups must be at least 1, but is -1"),
    ({"groups": [[TWICE], [TWICE]]}, "groups must hold each variable once, but group 1 holds one twice"),
])  # fmt: skip
def test_bad_arguments_of_a_tape(arguments, text):
    with pytest.raises(ValueError, match=f"DistributedGradientTape: .*{text}"):
        hvd.DistributedGradientTape(tf.GradientTape(), **in_mode(arguments))


def test_a_tape_is_wrapped_once():
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    for wrong in (tape, object()):
        with pytest.raises(ValueError, match="tape must be a tf.GradientTape, but is|expected a plain tape but found"):
            hvd.DistributedGradientTape(wrong)


def test_two_tapes_in_one_graph(two):
    """Of two models with equal names, as a GAN has them: their gradients are in flight together."""

    def body(rank):
        first, second = tf.Variable(1.0 + rank, name="kernel"), tf.Variable(3.0, name="kernel")

        @tf.function
        def step():
            with tf.GradientTape() as one, tf.GradientTape() as other:
                losses = first * first, second * (rank + 1.0)
            tapes = hvd.DistributedGradientTape(one), hvd.DistributedGradientTape(other)
            return [tape.gradient(loss, of) for tape, loss, of in zip(tapes, losses, (first, second), strict=True)]

        return [float(gradient) for gradient in step()]

    assert two.run(body) == [[3.0, 1.5]] * 2


# ---- variables and objects ----


@pytest.mark.parametrize("sent", ["broadcast", "synced", "with seeds"])
def test_seeds_of_random_layers_stay_each_ranks_own(two, sent):
    """Or all ranks would drop the same units, after a broadcast of ``model.variables``."""

    def body(rank):
        layer, weights = keras.layers.Dropout(0.5, seed=10 + rank), tf.Variable([float(rank)])
        variables = [*layer.variables, weights]
        if sent == "synced":
            hvd.elastic.TensorFlowState(variables).sync()
        else:
            hvd.broadcast_variables(variables, 0, seeds=sent == "with seeds")
        return weights.numpy().tolist(), layer.variables[0].numpy().tolist()

    (first, seed), (second, other) = two.run(body)
    assert first == second == [0.0] and (seed == other) is (sent == "with seeds")


def test_broadcast_variables(two, monkeypatch):
    """Of every dtype, TensorFlow's and Keras' in one list, in as many operations as their bytes ask for."""
    monkeypatch.setattr("ringtrain.tensorflow.functions._GROUP_BYTES", 16)

    def body(rank):
        variables = [
            tf.Variable([rank, rank]),
            tf.Variable("text"),
            keras.Variable([1.0 + rank] * 4),
            tf.Variable(rank == 1),
            tf.Variable(tf.cast([rank], tf.bfloat16)),
            tf.Variable(tf.cast([rank], tf.uint16)),
        ]
        assert operations_of(lambda: hvd.broadcast_variables([*variables, variables[0]], root_rank=1)) == 2
        values = [np.array(variable.numpy()).tolist() for variable in variables]
        assert values == [[1, 1], b"text", [2.0] * 4, True, [1.0], [1]]
        again = tf.function(lambda: hvd.broadcast_variables(variables[:1], root_rank=0))
        again()
        assert variables[0].numpy().tolist() == [1, 1]

    two.run(body)


def test_what_is_no_variable_is_refused(two):
    with pytest.raises(ValueError, match="expected variables but found a int"):
        two.run(lambda _: hvd.broadcast_variables([3], 0))


def test_objects(two):
    def body(rank):
        assert hvd.broadcast_object({"epoch": rank}, 1, name="state") == {"epoch": 1}
        assert hvd.broadcast_object_fn(1)([rank]) == [1]
        assert hvd.allgather_object((rank, "x")) == [(0, "x"), (1, "x")]

    two.run(body)


# ---- batch normalisation ----


@pytest.mark.parametrize("shape, axis", [((3,), -1), ((4, 2), 1)])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_sync_batch_normalization_equals_one_process(two, shape, axis, in_graph):
    """Outputs, gradients and moving statistics, with batches of different sizes."""
    batches = [np.random.RandomState(rank).rand(3 + rank, *shape).astype("f") * (rank + 1) + 100 for rank in range(2)]

    def train(kind, batch):
        layer = kind(axis=axis, beta_initializer="ones")
        layer.build((None, *shape))

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y**3)
            return y, *tape.gradient(loss, [x, layer.gamma.value])

        results = (tf.function(step) if in_graph else step)(tf.constant(batch))
        return [result.numpy() for result in (*results, layer.moving_mean.value, layer.moving_variance.value)]

    whole = train(keras.layers.BatchNormalization, np.concatenate(batches))
    apart = two.run(lambda rank: train(hvd.SyncBatchNormalization, batches[rank]))
    together = [np.concatenate(pair) for pair in zip(*(each[:2] for each in apart), strict=True)]
    together += [apart[0][2] + apart[1][2], apart[0][3], apart[0][4]]
    for result, expected in zip(together, whole, strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-3, atol=2e-3)
    assert np.array_equal(apart[0][4], apart[1][4])


def test_sync_batch_normalization_with_a_mask(two):
    def body(rank):
        layer = hvd.SyncBatchNormalization(momentum=0.0)
        layer.build((None, 2, 1))
        layer(tf.constant([[[1.0 + 4 * rank], [1000.0]]]), training=True, mask=tf.constant([[True, False]]))
        return float(layer.moving_mean.value[0]), float(layer.moving_variance.value[0])

    assert two.run(body) == [(3.0, 4.0)] * 2


def test_what_sync_batch_normalization_refuses():
    for wrong in (True, None):
        with pytest.raises(ValueError, match="fused must be False"):
            hvd.SyncBatchNormalization(fused=wrong)
    with pytest.raises(NotImplementedError, match="renorm must be False"):
        hvd.SyncBatchNormalization(renorm=True)


# ---- names that scripts for Horovod use ----

OF_DENSE, FACTORS = "device_dense compression op", "prescale_factor postscale_factor"
REDUCTION = f"average device_dense device_sparse compression op {FACTORS}"
GROUPS = "gradient_predivide_factor num_groups groups process_set"
TAPE = f"gradtape device_dense device_sparse compression sparse_as_dense op {GROUPS}"


@pytest.mark.parametrize(
    "name, arguments",
    {
        "allreduce": f"tensor {REDUCTION} name process_set ignore_name_scope",
        "grouped_allreduce": f"tensors {REDUCTION} process_set ignore_name_scope name",
        "allgather": "tensor name ignore_name_scope process_set",
        "grouped_allgather": "tensors name ignore_name_scope process_set",
        "broadcast": "tensor root_rank name ignore_name_scope process_set",
        "broadcast_": "variables root_rank name process_set",
        "alltoall": "tensor splits name ignore_name_scope process_set",
        "reducescatter": f"tensor {OF_DENSE} name process_set ignore_name_scope {FACTORS}",
        "grouped_reducescatter": f"tensors {OF_DENSE} process_set {FACTORS}",
        "size_op": "process_set_id name",
        "process_set_included_op": "process_set_id name",
        "broadcast_variables": "variables root_rank process_set inplace",
        "broadcast_object": "obj root_rank session name process_set",
        "broadcast_object_fn": "root_rank session name process_set",
        "allgather_object": "obj session name process_set",
        "DistributedGradientTape": f"{TAPE} scale_local_gradients",
        "PartialDistributedGradientTape": f"{TAPE} local_layers scale_local_gradients",
        "DistributedOptimizer": "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
        "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups groups "
        "process_set scale_local_gradients",
    }.items(),
)
def test_arguments_stand_where_horovod_has_them(name, arguments):
    assert list(inspect.signature(getattr(hvd, name)).parameters)[: len(arguments.split())] == arguments.split()


# ---- the page ----


def test_the_program_of_the_page(two):
    """Its weights are those of one process."""
    page = (Path(__file__).parents[2] / "docs" / "tensorflow.md").read_text()
    program = compile(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], "docs/tensorflow.md", "exec")

    def body(rank):
        names = {}
        exec(program, names)
        start = names["weights"].numpy()
        for _ in range(3):
            names["step"](tf.ones([2, 4]) * (rank + 1.0), tf.ones([2, 1]))
        return start, names["weights"].numpy()

    (expected, found), (_, other) = two.run(body)
    for _ in range(3):  # the mean of the gradients 2 x (x w - 1), where a rank's x are all alike
        expected = expected - 0.01 * np.mean([2 * x * (x * expected.sum() - 1) for x in (1.0, 2.0)])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.array_equal(found, other)


# ---- releases ----


@pytest.mark.parametrize("release", ["2.20.0", "2.21.0", "2.21.3-rc1"])
def test_tested_releases_pass(release):
    library.check_release(release)


@pytest.mark.parametrize("release", ["2.19.1", "2.22.0", "3.0.0"])
def test_other_releases_are_refused_unless_the_user_insists(release):
    with pytest.raises(NotImplementedError, match=f"TensorFlow '{release}': expected one of the releases 2.20, 2.21"):
        library.check_release(release)
    library.check_release(release, any_release="1")


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_gathered_rows_have_the_sum_of_all_gradients(two, in_graph):
    """So a loss over the rows of all ranks, as a contrastive one, is that of one process once gradients are averaged."""

    def body(rank):
        weights = tf.Variable([[1.0], [2.0]], dtype=tf.float64)
        x = tf.constant([[1.0, rank], [0.5, -1.0 - rank]], tf.float64)

        def step():
            with tf.GradientTape() as tape:
                rows = hvd.gather_with_gradient(x @ weights)
                loss = tf.reduce_sum(tf.nn.softmax(tf.matmul(rows, rows, transpose_b=True)) ** 2)
            return hvd.DistributedGradientTape(tape).gradient(loss, [weights])[0]

        return (tf.function(step) if in_graph else step)().numpy(), x.numpy()

    (first, x), (second, other) = two.run(body)
    weights, whole = tf.Variable([[1.0], [2.0]], dtype=tf.float64), np.concatenate([x, other])
    with tf.GradientTape() as tape:
        rows = whole @ weights
        loss = tf.reduce_sum(tf.nn.softmax(tf.matmul(rows, rows, transpose_b=True)) ** 2)
    expected = tape.gradient(loss, weights).numpy()
    for found in (first, second):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
