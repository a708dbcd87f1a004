"""Gradients that are None on some ranks: zeros where another rank has one, None where nobody has."""

import numpy as np
import pytest
import tensorflow as tf

import ringtrain
import ringtrain.tensorflow as hvd
from ringtrain.errors import MismatchError
from ringtrain.testing import World


@pytest.fixture
def two():
    """Two ranks as threads, with a short deadline: nothing here may wait for it."""
    with World(2, stall_abort_seconds=60) as opened:
        yield opened


def heads():
    """A trunk, two heads and what nobody uses."""
    return [tf.Variable(tf.ones([2]), name=name) for name in ("trunk", "left", "right", "unused")]


def loss_of(variables, task, factor):
    trunk, left, right, _ = variables
    return factor * tf.reduce_sum(trunk * (left if task == "left" else right))


def values(gradients):
    return [None if each is None else tf.convert_to_tensor(each).numpy().tolist() for each in gradients]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("groups", [None, 1])
def test_ranks_with_different_tasks(two, in_graph, groups):
    """As one process has it whose batch holds both tasks."""

    def body(rank):
        variables = heads()

        def step(task):
            with tf.GradientTape() as tape:
                loss = loss_of(variables, task, 2.0 * (rank + 1))
            return hvd.DistributedGradientTape(tape, groups=groups).gradient(loss, variables)

        step = tf.function(step) if in_graph else step
        tasks = ["left", "right", "left"] if rank == 0 else ["right", "right", "right"]
        return [values(step(task)) for task in tasks]

    first, second = two.run(body)
    assert first == second
    differing = [[3.0] * 2, [1.0] * 2, [2.0] * 2, None]
    both_right = [[3.0] * 2, [0.0] * 2 if in_graph else None, [3.0] * 2, None]  # rank 0 traces again, alone
    assert first == [differing, both_right, differing]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_rows_of_an_embedding_that_one_rank_lacks(two, in_graph):
    def body(rank):
        table, bias = tf.Variable(tf.ones([4, 2]), name="table"), tf.Variable(1.0, name="bias")

        def step():
            with tf.GradientTape() as tape:
                loss = (
                    bias * 1.0 if rank == 1 else bias + tf.reduce_sum(tf.gather(table, tf.constant([1, 3], tf.int64)))
                )
            return hvd.DistributedGradientTape(tape).gradient(loss, [table, bias])

        rows, _ = (tf.function(step) if in_graph else step)()
        assert isinstance(rows, tf.IndexedSlices)
        return tf.convert_to_tensor(rows).numpy()[:, 0].tolist()

    assert two.run(body) == [[0.0, 0.5, 0.0, 0.5]] * 2


def test_nothing_is_waited_for_where_no_gradient_is_missing(two):
    """In a graph not one operation more in any step; a rank may trace such a function alone and go on."""

    def body(rank):
        variables = heads()[:2]

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[0] * variables[1]) * tf.reduce_sum(x)
            return hvd.DistributedGradientTape(tape, mode=hvd.Synchronous(replicas="differ")).gradient(loss, variables)

        if rank == 0:
            step.get_concrete_function(tf.ones([1]))
        hvd.barrier()
        step(tf.ones([2]))
        hvd.barrier()
        before = ringtrain.counters()["operations"]
        step(tf.ones([2 if rank else 3]))
        return ringtrain.counters()["operations"] - before

    assert two.run(body) == [2, 2]


def test_a_rank_that_traces_again_alone_and_has_what_nobody_had(two):
    """The others' graphs cannot take it in: all ranks are told, at once, and what to do."""

    def body(rank):
        variables = heads()

        @tf.function
        def step(task):
            with tf.GradientTape() as tape:
                loss = loss_of(variables, task, 1.0)
            return hvd.DistributedGradientTape(tape).gradient(loss, variables)

        assert values(step("left"))[2] is None
        with pytest.raises(tf.errors.InvalidArgumentError, match="gradients: those that are None") as caught:
            step("right" if rank == 0 else "left")
        assert "unconnected_gradients" in caught.value.message and "grad.2.right" in caught.value.message
        assert float(hvd.allreduce(tf.constant(rank + 1.0))) == 1.5  # the world is well
        hvd.barrier()

    two.run(body)


def test_all_ranks_begin_to_use_a_variable(two):
    """A second phase of training, by an argument of the function: all trace again, and agree."""

    def body(rank):
        variables = heads()

        @tf.function
        def step(task):
            with tf.GradientTape() as tape:
                loss = loss_of(variables, task, rank + 1.0)
            return hvd.DistributedGradientTape(tape).gradient(loss, variables)

        return values(step("left")), values(step("right"))

    together, none = [1.5] * 2, None
    assert two.run(body) == [([together, together, none, none], [together, [0.0] * 2, together, none])] * 2


def test_another_model_is_agreed_on_anew(two):
    """The same function of a script over a second model, as in cross-validation."""

    def body(rank):
        found = []
        for task in ("left", "right"):
            variables = heads()

            @tf.function
            def step():
                with tf.GradientTape() as tape:
                    loss = loss_of(variables, task, 1.0)
                return hvd.DistributedGradientTape(tape).gradient(loss, variables)

            found.append([each is None for each in step()])
        return found

    assert two.run(body) == [[[False, False, True, True], [False, True, False, True]]] * 2


def test_ranks_with_different_numbers_of_variables(two):
    def body(rank):
        variables = heads()[: 2 + rank]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable) for variable in variables])
        with pytest.raises(
            MismatchError,
            match="trained must be the same on all ranks, but '.*' of shape .* is trained on rank 1 and not on rank 0",
        ):
            hvd.DistributedGradientTape(tape).gradient(loss, variables)
        hvd.barrier()

    two.run(body)


# ---- a rank outside of the process set ----


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_rank_outside_of_the_process_set_keeps_its_gradients(in_graph):
    def body(rank):
        some = hvd.add_process_set([0, 2])
        variable, local = tf.Variable([3.0], name="shared"), tf.Variable([1.0], name="own")

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable + local) * (rank + 1.0)
            tape = hvd.DistributedGradientTape(tape, process_set=some, sparse_as_dense=True)
            tape.register_local_source(local)
            return tape.gradient(loss, [variable, local])

        return [float(each[0]) for each in (tf.function(step) if in_graph else step)()]

    with World(3, stall_abort_seconds=60) as world:
        assert world.run(body) == [[2.0, 0.5], [2.0, 2.0], [2.0, 1.5]]


# ---- after ranks have joined ----


@pytest.mark.parametrize("chosen, divisors", [({}, (3, 2, 1)), ({"join_divisor": "initial"}, (3, 3, 3))])
@pytest.mark.parametrize("mode", [lambda function: function, tf.function], ids=["eager", "graph"])
def test_the_average_of_rows_counts_those_that_contribute(mode, chosen, divisors):
    """As that of a dense tensor does."""

    def body(rank):
        found = []
        for _ in range(rank + 1):
            slices = tf.IndexedSlices(tf.fill([1, 1], 6.0), tf.constant([rank]), tf.constant([3, 1]))
            rows = mode(lambda: hvd.allreduce(slices, name="rows"))()
            dense = hvd.allreduce(tf.convert_to_tensor(slices), name="dense")
            assert np.array_equal(tf.convert_to_tensor(rows), dense)
            found.append(float(dense[rank, 0]))
        hvd.join()
        return found

    expected = [6.0 / divisor for divisor in divisors]
    with World(3, stall_abort_seconds=20, **chosen) as world:
        assert world.run(body) == [expected[: rank + 1] for rank in range(3)]


def test_whole_numbers_stay_whole(two):
    def body(rank):
        slices = tf.IndexedSlices(tf.constant([[3 + 2 * rank]]), tf.constant([1]), tf.constant([2, 1]))
        rows = hvd.allreduce(slices)
        return rows.dtype, tf.convert_to_tensor(rows).numpy().tolist()

    assert two.run(body) == [(tf.int32, [[0], [4]])] * 2
