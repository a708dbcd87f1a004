"""Graphs and sessions of TensorFlow 1, in which nothing runs that no session is asked for."""

import numpy as np
import pytest
import tensorflow as tf
from modes import in_mode

import ringtrain.tensorflow as hvd
from ringtrain.testing import World

v1 = tf.compat.v1


@pytest.fixture
def two():
    """Two ranks as threads, with a short deadline."""
    with World(2, stall_abort_seconds=60) as opened:
        yield opened


def in_a_session(body):
    """Runs ``body(rank, session)`` while a graph of its own is built."""

    def on_rank(rank):
        with tf.Graph().as_default(), v1.Session() as session:
            return body(rank, session)

    return on_rank


def initialized(session, *variables):
    session.run(v1.variables_initializer(variables))
    return variables


def initialize(session):
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])


# ---- variables ----


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_broadcast_in_place(two, use_resource):
    """What it returns are the new values; a session that computes one of them has assigned to all."""

    def body(rank, session):
        made = [v1.Variable([rank + 1.0, start], use_resource=use_resource) for start in (2.0, 3.0)]
        first, second = initialized(session, *made)
        values = hvd.broadcast_([first, second], root_rank=1, name="both")
        assert session.run(values[0]).tolist() == [2.0, 2.0]
        return [session.run(each).tolist() for each in (first, second)]

    assert two.run(in_a_session(body)) == [[[2.0, 2.0], [2.0, 3.0]]] * 2


@pytest.mark.parametrize("arguments", [{}, {"inplace": True}])
def test_broadcast_variables_returns_an_operation(two, arguments):
    def body(rank, session):
        (variable,) = initialized(session, v1.Variable(rank + 1.0))
        operation, nothing = hvd.broadcast_variables([variable], 0, **arguments), hvd.broadcast_variables([], 0)
        before = session.run(variable)
        session.run([operation, nothing])
        return before, session.run(variable)

    assert two.run(in_a_session(body)) == [(1.0, 1.0), (2.0, 1.0)]


def test_barrier_returns_an_operation(two):
    def body(rank, session):
        return session.run(hvd.barrier())

    assert two.run(in_a_session(body)) == [None, None]


def test_objects_need_no_session(two):
    def body(rank, session):
        return (
            hvd.broadcast_object(rank, 1, session),
            hvd.broadcast_object_fn(1, session)(rank),
            hvd.allgather_object(rank),
        )

    assert two.run(in_a_session(body)) == [(1, 1, [0, 1])] * 2


# ---- gradients ----


def test_gradient_of_broadcast(two):
    """Also on the ranks whose gradient is zero: a session would skip what they need not, and the root would wait."""

    def body(rank, session):
        (variable,) = initialized(session, v1.Variable([2.0, 3.0]))
        loss = tf.reduce_sum(hvd.broadcast(variable, 1) * (rank + 1.0))
        return session.run(tf.gradients(loss, variable)[0]).tolist()

    assert two.run(in_a_session(body)) == [[0.0, 0.0], [1.5, 1.5]]


@pytest.mark.parametrize("operation, expected", [
    (lambda x: hvd.allreduce(x, op=hvd.Sum), [3.0, 3.0]),
    (lambda x: hvd.allgather(x), [1.5, 1.5]),
    (lambda x: hvd.alltoall(x), [1.0, 2.0]),
    (lambda x: hvd.reducescatter(x, op=hvd.Sum), [2.0, 4.0]),
])  # fmt: skip
def test_gradients_of_the_other_operations(two, operation, expected):
    def body(rank, session):
        (variable,) = initialized(session, v1.Variable([2.0, 3.0]))
        loss = tf.reduce_sum(operation(variable) * (rank + 1.0))
        return session.run(tf.gradients(loss, variable)[0]).tolist()

    assert two.run(in_a_session(body)) == [expected] * 2


# ---- optimizers ----


def test_an_optimizer(two):
    def body(rank, session):
        weight, unused = v1.Variable(1.0), v1.Variable(1.0)
        optimizer = v1.train.GradientDescentOptimizer(0.5)
        assert hvd.DistributedOptimizer(optimizer, name="mine") is optimizer
        train = optimizer.minimize(weight * weight * (rank + 1.0))
        with pytest.raises(ValueError, match="expected a plain optimizer but found one that is distributed already"):
            hvd.DistributedOptimizer(optimizer)
        initialize(session)
        session.run(train)
        return session.run([weight, unused])

    assert two.run(in_a_session(body)) == [[1.0 - 0.5 * 3.0, 1.0]] * 2


@pytest.mark.parametrize("average", [False, True])
def test_accumulated_passes(two, average):
    """Every third run updates, by the sum of three runs' gradients; against one process with all of them."""

    def body(rank, session):
        weight, bias = v1.Variable([1.0, 2.0]), v1.Variable(0.0)
        rows = v1.placeholder(tf.float32, [2])
        step = v1.train.create_global_step()
        optimizer = hvd.DistributedOptimizer(
            v1.train.MomentumOptimizer(0.1, 0.9), backward_passes_per_step=3, average_aggregated_gradients=average
        )
        train = optimizer.minimize(tf.reduce_sum(weight * weight * rows) + bias, global_step=step)
        initialize(session)
        found = []
        for number in range(6):
            session.run(train, {rows: [number + rank, 1.0]})
            found.append(session.run([weight, bias, step]))
        return [(*each[0].tolist(), float(each[1]), int(each[2])) for each in found]

    weight, bias, momentum, expected = np.array([1.0, 2.0]), 0.0, np.zeros(3), []
    for number in range(6):
        if number % 3 == 2:
            factors = sum(np.array([each + 0.5, 1.0]) for each in range(number - 2, number + 1))
            share = 3.0 if average else 1.0
            momentum = 0.9 * momentum + np.append(2 * weight * factors, 3.0) / share
            weight, bias = weight - 0.1 * momentum[:2], bias - 0.1 * momentum[2]
        expected.append((*weight, bias, number + 1))
    first, second = two.run(in_a_session(body))
    assert first == second and np.allclose(first, expected, rtol=1e-5)


def test_accumulation_of_what_one_rank_lacks(two):
    def body(rank, session):
        both, one, none = (v1.Variable(1.0) for _ in range(3))
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
        train = optimizer.minimize(both * 3.0 if rank else both * one * 3.0, var_list=[both, one, none])
        initialize(session)
        for _ in range(2):
            session.run(train)
        return session.run([both, one, none])

    assert two.run(in_a_session(body)) == [[1.0 - 6.0, 1.0 - 3.0, 1.0]] * 2


def test_what_accumulation_refuses(two):
    def body(rank, session):
        table = v1.Variable([[1.0], [2.0]])
        loss = tf.reduce_sum(tf.gather(table, [1]))
        wrapped = [
            hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2, **in_mode(arguments)
            )
            for arguments in ({}, {"sparse_as_dense": True})
        ]
        with pytest.raises(ValueError, match="backward_passes_per_step above 1 needs sparse_as_dense=True"):
            wrapped[0].minimize(loss)
        wrapped[1].minimize(loss)
        with pytest.raises(ValueError, match="backward_passes_per_step must be at least 1"):
            hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=0)

    two.run(in_a_session(body))
    with pytest.raises(ValueError, match="outside of a graph for sessions"):
        hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)


@pytest.mark.parametrize("passes", [1, 2])
def test_process_sets_and_local_variables(passes):
    def body(rank, session):
        some = hvd.add_process_set([0, 2])
        shared, own = v1.Variable(0.0), v1.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), process_set=some, backward_passes_per_step=passes
        )
        optimizer.register_local_var(own)
        train = optimizer.minimize((shared + own) * (rank + 1.0))
        initialize(session)
        for _ in range(passes):
            session.run(train)
        return [-each / passes for each in session.run([shared, own])]

    with World(3, stall_abort_seconds=60) as world:
        assert world.run(in_a_session(body)) == [[2.0, 0.5], [2.0, 2.0], [2.0, 1.5]]


# ---- monitored sessions ----


@pytest.mark.parametrize("passes", [1, 2])
def test_a_monitored_session(two, passes):
    """Starts from rank 0's variables, trains, and lets local variables be initialized by itself."""

    def body(rank):
        with tf.Graph().as_default():
            weight = v1.Variable(5.0 + rank)
            step = v1.train.create_global_step()
            optimizer = v1.train.GradientDescentOptimizer(0.5)
            optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
            with tf.control_dependencies([optimizer.minimize(weight * (rank + 1.0), global_step=step)]):
                trained = weight.read_value()
            hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=4)]
            with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                while not session.should_stop():
                    found = session.run(trained)
            return found

    assert two.run(body) == [2.0, 2.0]


@pytest.mark.parametrize("ending", ["a rank's error", "shutdown"])
def test_a_monitored_session_ends_with_its_world(ending):
    """And does not make session after session, as it does for errors that a new one might repair."""
    sessions = []

    class Count(v1.train.SessionRunHook):
        def after_create_session(self, session, coord):
            sessions.append(session)
            assert len(sessions) < 5, "sessions without an end"

    def body(rank):
        if rank == 1:
            hvd.allreduce(tf.constant(1.0), name="first")
            if ending == "shutdown":
                from ringtrain._runtime import context

                context.current().close()
                return
            raise ValueError("no more data")
        with tf.Graph().as_default():
            first, second = (
                hvd.allreduce(tf.constant(1.0), name="first"),
                hvd.allreduce(tf.constant(1.0), name="second"),
            )
            with pytest.raises(tf.errors.UnknownError, match="no more data|called shutdown"):
                with v1.train.MonitoredTrainingSession(hooks=[Count()]) as session:
                    session.run(first)
                    session.run(second)
        survived.append(rank)

    survived = []
    world = World(2, stall_abort_seconds=60)
    if ending == "shutdown":
        world.run(body)
    else:
        with pytest.raises(ValueError, match="no more data"):
            world.run(body)
    assert survived == [0] and len(sessions) == 1
    world.close()


def test_eager_mode_is_refused():
    with pytest.raises(RuntimeError, match="broadcast_global_variables: expected a graph"):
        hvd.broadcast_global_variables(0)


@pytest.mark.parametrize("of_functions", [False, True], ids=["loops of version 1", "loops of functions"])
def test_iterations_of_a_loop_run_side_by_side(two, of_functions):
    """Each under a name of its own: none is in flight already, or taken for another."""
    count = 80

    def body(rank, session):
        def step(place, results):
            mine = tf.fill([50_000], tf.cast(place, tf.float32) * (rank + 1))
            return place + 1, results.write(place, tf.reduce_max(hvd.allreduce(mine, op=hvd.Sum)))

        begin = [tf.constant(0), tf.TensorArray(tf.float32, count)]
        _, results = tf.while_loop(lambda place, _: place < count, step, begin, parallel_iterations=10)
        assert session.run(results.stack()).tolist() == [3.0 * place for place in range(count)]

    (v1.enable_control_flow_v2 if of_functions else v1.disable_control_flow_v2)()
    try:
        two.run(in_a_session(body))
    finally:
        v1.enable_control_flow_v2()
