"""The operations for TensorFlow: eager and in graphs, dense and sparse, named and not, with gradients."""

import numpy as np
import pytest
import tensorflow as tf

import ringtrain
import ringtrain.tensorflow as hvd
from ringtrain.testing import World

MAXIMA = [
    "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "bool",
]  # fmt: skip
SUMS = ["complex64", "complex128"]
MOVED_ONLY = ["float8_e4m3fn", "float8_e5m2"]


@pytest.fixture
def three():
    """Three ranks as threads of this process; test_tensorflow_launched.py has ranks as processes."""
    with World(3) as opened:
        yield opened


@pytest.fixture(params=["eager", "graph"])
def mode(request):
    """Runs a function as it is, or as a ``tf.function``."""
    return (lambda function: function) if request.param == "eager" else tf.function


# ---- results ----


def cast(array, dtype):
    """TensorFlow makes floats of 8 bits of others only."""
    return tf.cast(array.astype(np.float32) if dtype in MOVED_ONLY else array, dtype)


@pytest.mark.parametrize("dtype", MAXIMA + SUMS + MOVED_ONLY)
def test_every_dtype(three, mode, dtype):
    values = [np.array([[0, 1], [rank, 1]]) for rank in range(3)]

    def body(rank):
        mine = cast(values[rank], dtype)
        thrice = cast(np.repeat(values[rank], 3, 0), dtype)
        moved = mode(lambda x, y: (hvd.allgather(x), hvd.broadcast(x, 1), hvd.alltoall(y)))(mine, thrice)
        assert all(result.dtype == mine.dtype for result in moved)
        assert np.array_equal(moved[0], cast(np.concatenate(values), dtype))
        assert np.array_equal(moved[1], cast(values[1], dtype))
        assert np.array_equal(
            moved[2], cast(np.concatenate([np.repeat(each, 3, 0)[2 * rank :][:2] for each in values]), dtype)
        )
        if dtype in MOVED_ONLY:
            with pytest.raises(tf.errors.InvalidArgumentError, match="Cast to bfloat16 or float32 first"):
                mode(lambda x: hvd.allreduce(x, op=hvd.Sum, name="refused"))(mine)
        if dtype in SUMS:
            turned = tf.cast(1 + 1j, dtype) * mine
            total, mean = mode(lambda x: (hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x)))(turned)
            assert np.array_equal(total, (1 + 1j) * np.sum(values, 0)) and total.dtype == mine.dtype
            assert np.allclose(mean, (1 + 1j) * np.mean(values, 0))
        if dtype in MAXIMA:
            reduced, rows = mode(lambda x: (hvd.allreduce(x, op=hvd.Max), hvd.reducescatter(x, op=hvd.Max)))(mine)
            assert np.array_equal(reduced, tf.cast(np.max(values, 0), dtype)) and reduced.dtype == mine.dtype
            assert np.array_equal(rows, reduced[rank : rank + 1]) and rows.dtype == mine.dtype

    three.run(body)


@pytest.mark.parametrize("op, expected", [(None, 2), (hvd.Sum, 6), (hvd.Min, 1), (hvd.Max, 3), (hvd.Product, 6)])
def test_every_reduction(three, mode, op, expected):
    for results in three.run(lambda rank: mode(lambda x: hvd.allreduce(x, op=op))(tf.constant(rank + 1.0))):
        assert results == expected


def test_factors_have_double_precision(three):
    """TensorFlow's own float attributes would give 1.00000003."""
    mine = tf.constant([3.0], tf.float64)
    assert [float(each[0]) for each in three.run(lambda _: hvd.allreduce(mine, prescale_factor=1.0 / 3.0))] == [1.0] * 3


def test_groups(three, mode):
    """Dtypes may differ within a group; an empty group is an empty list; sparse tensors travel beside the others."""

    def body(rank):
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([3, 2]))
        first, second, third = mode(
            lambda: hvd.grouped_allreduce([tf.constant(rank), slices, tf.constant([1.5])], op=hvd.Sum)
        )()
        assert first == 3 and third == 4.5 and np.array_equal(tf.convert_to_tensor(second), np.ones((3, 2)))
        gathered = mode(lambda: hvd.grouped_allgather([tf.fill([rank, 2], rank), tf.constant([True])]))()
        assert np.array_equal(gathered[0], [[1, 1], [2, 2], [2, 2]]) and gathered[1].shape == 3
        rows = mode(lambda: hvd.grouped_reducescatter([tf.range(4.0), tf.range(3)]))()
        assert np.array_equal(rows[0], [[0, 1], [2], [3]][rank]) and np.array_equal(rows[1], [rank])
        assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []

    three.run(body)


def test_alltoall_with_splits(three, mode):
    def body(rank):
        rows, received = mode(lambda x: hvd.alltoall(x, [0, 1, 2]))(tf.range(3) + 10 * rank)
        assert received.dtype == tf.int32 and list(received) == [rank] * 3
        assert list(rows) == [[], [0, 10, 20], [1, 2, 11, 12, 21, 22]][rank]

    three.run(body)


def test_empty_and_scalar_tensors(three, mode):
    def body(rank):
        assert mode(lambda: hvd.allreduce(tf.zeros([0, 3])))().shape == (0, 3)
        assert mode(lambda: hvd.allgather(tf.zeros([0, 3])))().shape == (0, 3)
        assert mode(lambda: hvd.broadcast(tf.constant(rank), 2))() == 2

    three.run(body)


def test_static_shapes_survive(three):
    def body(rank):
        spec = tf.TensorSpec([6, None], tf.float32)
        shapes = []

        @tf.function(input_signature=[spec])
        def trace(x):
            results = [
                hvd.allreduce(x),
                hvd.broadcast(x, 0),
                hvd.allgather(x),
                hvd.reducescatter(x),
                *hvd.alltoall(x, [2, 2, 2]),
            ]
            shapes.extend(result.shape.as_list() for result in results)
            return results

        trace.get_concrete_function()
        assert shapes == [[6, None], [6, None], [None, None], [None, None], [None, None], [None]]

    three.run(body)


def test_inputs_are_never_written(three):
    """TensorFlow may give a temporary's memory to the result, but not that of a tensor someone still has."""

    def body(rank):
        mine = tf.constant([1.0, 2.0])

        @tf.function
        def both(x):
            y = x * 2.0
            return hvd.allreduce(y, op=hvd.Sum), y

        reduced, kept = both(mine)
        assert list(hvd.allreduce(mine, op=hvd.Sum)) == [3.0, 6.0] and list(mine) == [1.0, 2.0]
        assert list(reduced) == [6.0, 12.0] and list(kept) == [2.0, 4.0]

    three.run(body)


def test_a_temporary_gives_its_memory_to_the_result(three):
    """Nothing is copied and nothing allocated: the operation works in place where TensorFlow lets it."""

    def body(rank):
        addresses = []

        def note(array):
            addresses.append(array.__array_interface__["data"][0])
            return np.int32(0)

        @tf.function
        def step(x):
            y = x * 2.0
            with tf.control_dependencies([tf.numpy_function(note, [y], tf.int32)]):
                z = hvd.allreduce(y, name="z")
            return tf.numpy_function(note, [z], tf.int32)

        step(tf.ones([1 << 16]))
        return addresses

    assert all(before == after for before, after in three.run(body))


# ---- graphs ----


def test_constants_are_reduced_whenever_the_graph_runs(three):
    """Constant folding must not run an operation ahead of its time, and only once."""

    def body(rank):
        reduce = tf.function(lambda: hvd.allreduce(tf.constant([1.0]) + tf.constant([1.0]), op=hvd.Sum))
        reduce()
        before = ringtrain.counters()["operations"]
        assert [float(reduce()[0]) for _ in range(3)] == [6.0] * 3
        assert ringtrain.counters()["operations"] == before + 3

    three.run(body)


def test_a_result_that_one_rank_leaves_unused_is_computed_there_too(three):
    """Pruning must not drop an operation that the others wait for."""

    def body(rank):
        @tf.function
        def step(x):
            total = hvd.allreduce(x, op=hvd.Sum, name="total")
            everyone = hvd.allgather(x[None], name="everyone")
            return (total, everyone) if rank == 0 else x

        result = step(tf.constant(1.0))
        assert rank != 0 or (result[0] == 3.0 and result[1].shape == 3)

    three.run(body)


def test_ranks_may_build_their_graphs_in_any_order(three):
    def body(rank):
        names = ["a", "b", "c", "d"] if rank == 0 else ["d", "c", "b", "a"]
        step = tf.function(lambda x: {name: hvd.allreduce(x + ord(name), op=hvd.Sum, name=name) for name in names})
        for _ in range(2):
            assert {name: float(value) for name, value in step(tf.constant(0.0)).items()} == {
                name: 3.0 * ord(name) for name in names
            }

    three.run(body)


def test_unnamed_operations_on_one_tensor_are_several(three):
    def body(rank):
        step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(x, op=hvd.Max))
        return float(step(tf.constant(float(rank))))

    assert three.run(body) == [3.0 + 2.0] * 3


def test_a_name_without_its_scope(three):
    def body(rank):
        names = []

        @tf.function
        def step(x):
            with tf.name_scope("outer" if rank == 0 else "other"):
                y = tf.identity(x, name="y")
            result = hvd.allreduce(y, ignore_name_scope=True)
            names.extend(
                op.get_attr("tensor_name") for op in result.graph.get_operations() if op.type == "RingtrainAllreduce"
            )
            return result

        assert step(tf.constant(1.0)) == 1.0
        return names

    assert three.run(body) == [[b"step/allreduce.y_0"]] * 3


def test_a_long_name_is_not_cut(three):
    long = "n" * 700

    def body(rank):
        step = tf.function(lambda x: (hvd.allreduce(x, name=long + "1"), hvd.allreduce(x, name=long + "2")))
        assert step(tf.constant(1.0)) == (1.0, 1.0)

    three.run(body)


def test_a_graph_of_tensorflow_1():
    def body(rank):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.get_variable("v", initializer=[1.0 + rank])
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
            assert hvd.DistributedOptimizer(optimizer) is optimizer
            train = optimizer.minimize(tf.reduce_sum(variable * variable) * (rank + 1.0))
            hook = hvd.BroadcastGlobalVariablesHook(0)
            hook.begin()
            session.run(tf.compat.v1.global_variables_initializer())
            hook.after_create_session(session, None)
            session.run(train)
            return float(session.run(variable)[0])

    with World(2) as world:
        assert world.run(body) == [1.0 - 0.5 * (2.0 + 4.0) / 2] * 2
    with pytest.raises(RuntimeError, match="broadcast_global_variables: expected a graph"):
        hvd.broadcast_global_variables(0)


def test_the_world_is_asked_when_the_graph_runs(three):
    def body(rank):
        odd = hvd.add_process_set([1, 2])
        ask = tf.function(
            lambda: [
                hvd.size_op(),
                hvd.rank_op(),
                hvd.local_rank_op(),
                hvd.local_size_op(),
                hvd.size_op(odd.process_set_id),
                hvd.process_set_included_op(odd.process_set_id),
                hvd.process_set_included_op(99),
            ]
        )
        assert [int(answer) for answer in ask()] == [3, rank, rank, 3, 2, int(rank > 0), -2]
        hvd.remove_process_set(odd)
        assert int(ask()[4]) == -2

    three.run(body)


# ---- sparse ----


@pytest.mark.parametrize("op, divisor", [(hvd.Sum, 1), (hvd.Average, 3)])
def test_indexed_slices(three, mode, op, divisor):
    """Rows of all ranks, each index once: 0 and 3 come from every rank, and 3 twice from each."""

    def body(rank):
        rows = tf.constant([[1.0, 1.0], [2.0, 0.0], [2.0, 0.0]]) * (rank + 1)
        slices = tf.IndexedSlices(rows, tf.constant([0, 3, 3], tf.int64), tf.constant([5, 2], tf.int64))
        result = mode(lambda: hvd.allreduce(slices, op=op, name="rows"))()
        assert isinstance(result, tf.IndexedSlices) and sorted(result.indices.numpy()) == [0, 3]
        dense = np.zeros((5, 2), np.float32)
        dense[0], dense[3] = [6, 6], [24, 0]
        assert np.allclose(tf.convert_to_tensor(result), dense / divisor)

    three.run(body)


def test_indexed_slices_refuse_other_reductions(three):
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    for arguments in ({"op": hvd.Max}, {"prescale_factor": 2.0}):
        with pytest.raises(NotImplementedError, match="tf.IndexedSlices need op Average or Sum and no factors"):
            three.run(lambda _: hvd.allreduce(slices, **arguments))


# ---- compression ----


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.int8])
def test_compression_concerns_what_travels_between_hosts(compression):
    """A third has no exact 16 bits, and is no 127th of 1: the difference shows that it was compressed, and all ranks have the same bits."""
    third = tf.concat([tf.fill([4999], 1.0 / 3.0), [1.0]], axis=0)
    for layout, compressed in ((None, False), ("1+1", True)):
        with World(2, layout) as world:
            results = world.run(lambda _: hvd.allreduce(third, compression=compression).numpy())
        assert np.array_equal(*results) and results[0].dtype == np.float32
        assert np.array_equal(results[0], third) is not compressed
        assert np.allclose(results[0], third, atol=1e-2)


def test_a_compressor_of_the_users_own(three):
    class Halves(hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            return tensor / 2, "halved"

        @staticmethod
        def decompress(tensor, context):
            assert context == "halved"
            return tensor * 2

    assert three.run(lambda rank: float(hvd.allreduce(tf.constant(rank + 1.0), compression=Halves))) == [2.0] * 3


# ---- gradients ----


def gradient_of(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
        weights = tf.reshape(tf.range(1.0, tf.cast(tf.size(y), tf.float32) + 1.0), tf.shape(y))
        loss = tf.reduce_sum(y * weights)
    return tape.gradient(loss, x)


@pytest.mark.parametrize("op, factor", [(hvd.Average, 1.0), (hvd.Sum, 3.0)])
def test_gradient_of_allreduce(three, mode, op, factor):
    def body(rank):
        x = tf.constant([1.0, 2.0]) * rank
        return mode(lambda: gradient_of(lambda v: hvd.allreduce(v, op=op, prescale_factor=0.5), x))()

    for gradient in three.run(body):
        assert np.allclose(gradient, np.array([1.0, 2.0]) * factor * 0.5)


def test_gradients_of_the_other_operations(three, mode):
    """Each against what its definition gives by hand; rank r contributes r + 1 rows to the allgather."""

    def body(rank):
        def gradient(function, x):
            return mode(lambda: gradient_of(function, x))().numpy().tolist()

        weights = [[1], [2, 3], [4, 5, 6]][rank]
        assert gradient(lambda v: hvd.allgather(v, name="g"), tf.ones([rank + 1])) == weights
        assert gradient(lambda v: hvd.broadcast(v, 1, name="b"), tf.ones([2])) == ([1, 2] if rank == 1 else [0, 0])
        assert gradient(lambda v: hvd.alltoall(v, name="a"), tf.ones([3])) == [rank + 1] * 3
        assert gradient(lambda v: hvd.reducescatter(v, op=hvd.Sum, name="r"), tf.ones([3])) == [3, 3, 3]

    three.run(body)


def test_other_reductions_have_no_gradient(three):
    with pytest.raises(
        NotImplementedError, match="backward of allreduce 'x': gradients need op Average or Sum, but it is Max"
    ):
        three.run(lambda _: gradient_of(lambda v: hvd.allreduce(v, op=hvd.Max, name="x"), tf.ones([2])))


# ---- without tensors ----


def test_join(three):
    """Ranks that have run out of data take part in the others' allreduces; the average is over those that have some."""

    def body(rank):
        means = [float(hvd.allreduce(tf.constant(float(rank)), name="mean")) for _ in range(rank + 1)]
        return means, int(hvd.join())

    assert three.run(body) == [([1.0], 2), ([1.0, 1.5], 2), ([1.0, 1.5, 2.0], 2)]


def test_barrier_and_process_sets(three, mode):
    def body(rank):
        outer = hvd.add_process_set([0, 2])
        if outer.included():
            assert mode(lambda x: hvd.allreduce(x, process_set=outer))(tf.constant(float(rank))) == 1.0
            assert mode(lambda x: hvd.broadcast(x, 2, process_set=outer))(tf.constant(float(rank))) == 2.0
            mode(lambda: hvd.barrier(outer))()
        hvd.barrier()

    three.run(body)
