"""Ranks whose variables part are told so by tapes and by optimizers of TensorFlow 1; what only looks like it is let be."""

import functools
import time

import drifts
import numpy as np
import pytest
import tensorflow as tf
from modes import in_mode

import ringtrain as rt
import ringtrain.tensorflow as hvd
from ringtrain._training.drift import Words, digest_of
from ringtrain._training.session import Session
from ringtrain._training.watch import Watch
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.tensorflow import watching

TOLD = (MismatchError, tf.errors.InvalidArgumentError)
refused = functools.partial(drifts.refused, TOLD)


def trains(traced, begins_at, between=lambda step, variables: None, steps=5, **arguments):
    """Steps of a loop with one tape each, on a batch of each rank's own."""
    variables = [tf.Variable([begins_at, 1.0], name="weights"), tf.Variable(0.0, name="bias")]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tensordot(x, variables[0], 1) + variables[1]) ** 2)
        tape = hvd.DistributedGradientTape(tape, **in_mode(arguments))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)

    run = tf.function(step) if traced else step
    for number in range(steps):
        between(number, variables)
        run(tf.constant([[1.0, float(rt.rank())], [0.5, -1.0]]))
    return [variable.numpy().tolist() for variable in variables]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_variables_that_begin_apart_are_told(two, traced):
    text = refused(two, lambda rank: trains(traced, float(rank), steps=21))
    assert (
        "parameter 'weights:0' must be the same on all ranks, but those of rank 0 and of rank 1 differ, by up to "
        in text
    )
    assert 'give DistributedGradientTape a mode with replicas="differ"' in text


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_an_assignment_on_one_rank_is_told(two, compared_always, traced):
    def assigns(step, variables):
        if step == 3 and rt.rank():
            variables[1].assign_add(0.25)

    assert "parameter 'bias:0'" in (text := refused(two, lambda rank: trains(traced, 1.0, assigns))) and "0.25" in text


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("arguments", [{}, {"groups": 1}, {"late": True}], ids=str)
def test_all_is_well(two, compared_always, traced, arguments):
    first, second = two.run(lambda rank: trains(traced, 1.0, **arguments))
    assert first == second


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_a_broadcast_after_the_first_step_is_in_time(two, traced):
    def broadcasts(step, variables):
        if step == 1:
            hvd.broadcast_variables(variables, 0)

    first, second = two.run(lambda rank: trains(traced, float(rank), broadcasts, steps=22))
    assert first == second


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_who_means_it_says_so(two, compared_always, traced):
    two.run(lambda rank: trains(traced, float(rank), replicas="differ"))


def test_local_sources_may_differ(two, compared_always):
    def body(rank):
        own, shared = tf.Variable(float(rank)), tf.Variable(1.0)
        for _ in range(5):
            with tf.GradientTape() as tape:
                loss = own * shared
            tape = hvd.DistributedGradientTape(tape)
            tape.register_local_source(own)
            for variable, gradient in zip((own, shared), tape.gradient(loss, [own, shared]), strict=True):
                variable.assign_sub(0.1 * gradient)

    two.run(body)


def test_a_rank_that_has_joined_is_no_false_alarm(two, compared_always):
    def body(rank):
        trains(False, 1.0, steps=4 - rank)
        hvd.join()

    two.run(body)


@pytest.mark.parametrize("rate", [None, 0.1, 3.0], ids=str)
def test_a_row_of_a_graph_is_that_of_the_host(two, rate):
    """In each step, whatever was asked for, and whatever the schedule of the looks says."""

    def changes(step, each, now):
        if step in (15, 16):
            each.ask(always=True)
        elif step in (20, 25):
            each.mute(step == 20)
        elif step in (30, 33):
            each.schedule.due = now + (1e9 if step == 30 else -1.0)
        elif step == 36:
            each.enter_world()

    def body(rank):
        in_graph, on_host = (Watch(Session(rt.global_process_set), "model", Words("broadcast()")) for _ in range(2))
        settings = {"momentum": 0.9}
        graph = tf.function(lambda: watching._row(in_graph, settings, [] if rate is None else [tf.constant(rate)]))
        said = set()
        for step in range(40):
            for each in (in_graph, on_host):
                changes(step, each, time.monotonic())
            row = graph().numpy()
            assert row.tolist() == on_host.row(settings, rate).tolist(), step
            assert bool(watching.ops.ringtrain_is_quiet(row)) == on_host.is_quiet(row)
            said.add((bool(row[:-1].any()), bool(row[-1])))
        return said

    assert two.run(body) == [{(True, True), (True, False), (False, False)}] * 2


def test_a_graph_finds_what_differs_in_a_maximum():
    """In whichever byte, or that a rank asks for a look; a maximum in which nobody says anything is quiet."""
    own = np.array([digest_of({"momentum": 0.9}), 7], np.uint64).view(np.uint8)
    alike = np.concatenate([own, ~own, np.zeros(1, np.uint8)])
    assert watching.ops.ringtrain_is_quiet(alike) and watching.ops.ringtrain_is_quiet(np.zeros_like(alike))
    for place in range(alike.size):
        most = alike.copy()
        most[place] ^= 1
        assert not watching.ops.ringtrain_is_quiet(most), place


def test_a_function_is_traced_once(two):
    """A tf.function that makes a variable has a second tracing."""

    def body(rank):
        weights, traced = tf.Variable([1.0, 2.0]), []

        @tf.function
        def step():
            traced.append(rank)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights * weights)
            weights.assign_sub(0.1 * hvd.DistributedGradientTape(tape).gradient(loss, [weights])[0])

        for _ in range(3):
            step()
        return len(traced)

    assert two.run(body) == [1, 1]


def test_an_unknown_word_is_refused():
    with pytest.raises(InvalidArgumentError, match="Synchronous: replicas must be"):
        hvd.DistributedGradientTape(tf.GradientTape(), mode=hvd.Synchronous(replicas="same"))


def test_a_session_is_told(two, compared_always):
    """And not by variables that are alike."""
    v1 = tf.compat.v1

    def run(rank, begins_at):
        with tf.Graph().as_default(), v1.Session() as session:
            weights = v1.get_variable("weights", initializer=tf.constant([begins_at, 1.0]), use_resource=True)
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
            update = optimizer.minimize(tf.reduce_sum(weights * float(rank + 1)))
            session.run(v1.global_variables_initializer())
            for _ in range(4):
                session.run(update)
            return session.run(weights).tolist()

    first, second = two.run(lambda rank: run(rank, 1.0))
    assert first == second and "parameter 'weights:0'" in refused(two, lambda rank: run(rank, float(rank)))


def test_steps_in_a_loop_of_a_graph(two, compared_always):
    """A step's row has the name of the one before, so it must not go before that is through."""

    def body(rank):
        weights = tf.Variable([1.0, 2.0])

        @tf.function
        def trains():
            for _ in tf.range(20):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weights * weights) * float(rank + 1)
                tape = hvd.DistributedGradientTape(tape)
                weights.assign_sub(0.1 * tape.gradient(loss, [weights])[0])

        trains()
        return weights.numpy().tolist()

    first, second = two.run(body)
    assert first == second


def test_several_updates_before_the_broadcast_are_no_false_alarm(two):
    """As a critic makes five in each step."""

    def body(rank):
        weights = tf.Variable([float(rank), 1.0])
        for step in range(6):
            for _ in range(5):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weights * weights)
                weights.assign_sub(0.1 * hvd.DistributedGradientTape(tape).gradient(loss, [weights])[0])
            if step == 0:
                hvd.broadcast_variables([weights], 0)
        return weights.numpy().tolist()

    first, second = two.run(body)
    assert first == second


def adasum_steps(rank, traced, begins_at, steps=5):
    """Those of an optimizer of TensorFlow 1, by an optimizer of each rank's own gradients."""
    weights = tf.Variable([begins_at, 1.0], name="weights")
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), op=hvd.Adasum)

    def step():
        optimizer.apply_gradients([(tf.constant([1.0 + rank, 0.5]), weights)])

    run = tf.function(step) if traced else step
    for number in range(steps):
        if number == 3 and begins_at == 1.0 and rank:
            weights.assign_add([0.25, 0.0])
        before = weights.numpy().tolist()
        try:
            run()
        except TOLD:
            assert traced or weights.numpy().tolist() == before
            raise
    return before


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_adasum_of_an_optimizer_of_tensorflow_1_is_told(two, compared_always, traced):
    first, second = two.run(lambda rank: adasum_steps(rank, traced, 2.0))
    assert first == second
    text = refused(two, lambda rank: adasum_steps(rank, traced, 1.0))
    assert "parameter 'weights:0'" in text and "by up to 0.25" in text


@pytest.mark.parametrize("drifts", [False, True], ids=["alike", "apart"])
def test_steps_of_an_elastic_state_are_told(two, compared_always, drifts):
    """In graphs ``test_keras_drift`` has them."""

    def body(rank):
        weights = tf.Variable([1.0, 2.0], name="weights")

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights * x)
            weights.assign_sub(0.1 * hvd.DistributedGradientTape(tape).gradient(loss, [weights])[0])

        sampler = hvd.elastic.BatchSampler(12, batch_size=1)
        for _ in hvd.elastic.State(weights=weights, sampler=sampler).epochs(1):
            for place, _ in enumerate(sampler):
                if drifts and rank and place == 2:
                    weights.assign_add([0.0, 0.25])
                step(tf.constant([1.0, float(rank)]))
        return weights.numpy().tolist()

    if drifts:
        text = refused(two, body)
        assert "parameter 'weights:0'" in text and "by up to 0.25" in text
    else:
        first, second = two.run(body)
        assert first == second


@pytest.mark.parametrize(
    "frozen, traced", [(0, False), (1, False), (1, True)], ids=["the first, eager", "eager", "in a graph"]
)
def test_a_variable_that_one_rank_does_not_train_is_named_in_the_first_step(two, traced, frozen):
    """Before its gradient is waited for; of a graph, when it is traced."""

    def body(rank):
        variables = [tf.Variable([1.0, 2.0], name="first/weights"), tf.Variable([1.0, 2.0, 3.0], name="second/weights")]
        own = [each for place, each in enumerate(variables) if rank == 0 or place != frozen]

        def step():
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(each * each) for each in variables])
            hvd.DistributedGradientTape(tape).gradient(loss, own)

        (tf.function(step) if traced else step)()

    name, shape = [("first", [2]), ("second", [3])][frozen]
    named = f"but '{name}/weights:0' of shape {shape} is trained on rank 0 and not on rank 1. Freeze"
    assert named in drifts.refused((Exception,), two, body)  # what TensorFlow makes of one that tracing has met
