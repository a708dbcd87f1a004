"""Ranks that train apart with optax are told so, in programs and outside; what only looks like it is let be."""

from __future__ import annotations

import functools

import drifts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import in_mode

import ringtrain as rt
import ringtrain.jax as hvd
from ringtrain._training import drift, watch
from ringtrain.errors import InvalidArgumentError, MismatchError, RingtrainError
from ringtrain.testing import World

jax.config.update("jax_cpu_enable_async_dispatch", False)  # as in test_jax.py
refused = functools.partial(drifts.refused, (MismatchError, jax.errors.JaxRuntimeError))
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["at once", "in a program"])


def loss_of(parameters, x):
    return jnp.mean((x @ parameters["weights"] + parameters["bias"]) ** 2)


def trains(rank, compiled, begins_at=1.0, between=lambda step, *state: state, steps=5, make=None, gives=True, **named):
    """Steps on batches of each rank's own; returns the parameters."""
    optimizer = hvd.DistributedGradientTransformation(optax.adam(0.1) if make is None else make(), **in_mode(named))
    parameters = {"weights": jnp.full((2,), begins_at), "bias": jnp.zeros(())}
    state = optimizer.init(parameters)

    def step(parameters, state, x):
        gradients = jax.grad(loss_of)(parameters, x)
        updates, state = optimizer.update(gradients, state, *([parameters] if gives else []))
        return optax.apply_updates(parameters, updates), state

    run = jax.jit(step) if compiled else step
    for number in range(steps):
        parameters, state = between(number, parameters, state)
        parameters, state = run(parameters, state, jnp.array([[1.0, float(rank)], [0.5, -1.0]]))
    return jax.tree.map(lambda each: np.asarray(each).tolist(), parameters)


@COMPILED
def test_parameters_that_begin_apart_are_told(two, compiled):
    text = refused(two, lambda rank: trains(rank, compiled, float(rank)))
    assert "parameter '['weights']' must be the same on all ranks, but those of rank 0 and of rank 1 differ" in text
    assert (
        "Call broadcast_parameters() on all ranks, from one that is right, or give DistributedGradientTransformation a mode "
        in text
    )


@COMPILED
def test_updates_without_parameters_are_warned_of_once(two, compiled, caplog):
    two.run(lambda rank: trains(rank, compiled, gives=False))
    assert [message[:66] for message in caplog.messages] == [
        "DistributedGradientTransformation: update() got no parameters, so "
    ]
    caplog.clear()
    two.run(lambda rank: trains(rank, compiled))
    assert not caplog.messages


@COMPILED
@pytest.mark.parametrize("begins_apart", [False, True])
@pytest.mark.filterwarnings("error:Casting complex values")
def test_complex_parameters_with_an_injected_rate(two, compared_always, compiled, begins_apart):
    """optax makes that rate complex, too."""

    def body(rank):
        optimizer = hvd.DistributedGradientTransformation(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
        parameters = {"z": jnp.full((2,), 1.0 + 2j + 3j * rank * begins_apart)}
        state = optimizer.init(parameters)
        run = jax.jit(optimizer.update) if compiled else optimizer.update
        for _ in range(3):
            updates, state = run({"z": jnp.full((2,), 1j * (rank + 1))}, state, parameters)
            parameters = optax.apply_updates(parameters, updates)
        return np.asarray(parameters["z"]).tolist()

    if begins_apart:
        text = refused(two, body)
        assert "parameter '['z']'" in text and "differ, by up to 3." in text
    else:
        np.testing.assert_allclose(two.run(body), [[1 + 1.55j] * 2] * 2, rtol=1e-6)


@COMPILED
def test_a_change_on_one_rank_is_told(two, compared_always, compiled):
    def body(rank):
        def changes(step, parameters, state):
            return {**parameters, "bias": parameters["bias"] + 0.25 * (rank and step == 3)}, state

        trains(rank, compiled, between=changes)

    text = refused(two, body)
    assert "parameter '['bias']'" in text and "by up to 0.25" in text


@COMPILED
def test_another_rate_is_told(two, compiled):
    def body(rank):
        def changes(step, parameters, state):
            if rank and step == 2:
                state.hyperparams["learning_rate"] = jnp.float32(0.05)
            return parameters, state

        trains(rank, compiled, between=changes, make=lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))

    assert "learning_rate must be the same on all ranks, but is 0.1 on rank 0 and 0.05 on rank 1" in refused(two, body)


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("setting", ["average_aggregated_gradients", "backward_passes_per_step"])
def test_other_sums_of_passes_are_told(two, compiled, setting):
    """Half as long a step on a rank gave all ranks a wrong one."""
    of_rank_1 = {"average_aggregated_gradients": True, "backward_passes_per_step": 3}

    def body(rank):
        given = {"backward_passes_per_step": 2} | ({setting: of_rank_1[setting]} if rank else {})
        trains(rank, compiled, steps=12, **given)

    text = refused(two, body)
    assert f"{setting} must be the same on all ranks, but is" in text


def test_a_rate_that_changes_after_hundreds_of_steps_is_told(two):
    """The program has long ceased to call the host in each step."""

    def body(rank):
        def changes(step, parameters, state):
            if rank and step == 300:
                state.hyperparams["learning_rate"] = jnp.float32(0.05)
            return parameters, state

        make = lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)  # noqa: E731
        trains(rank, True, between=changes, make=make, steps=310)

    assert "learning_rate must be the same on all ranks, but is 0.1 on rank 0 and 0.05 on rank 1" in refused(two, body)


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
def test_most_steps_of_a_program_do_not_call_the_host(two, monkeypatch, scheduled):
    asked = []
    row = watch.Watch.row
    monkeypatch.setattr(watch.Watch, "row", lambda self, *given: asked.append(1) or row(self, *given))
    monkeypatch.setattr(drift, "PERIOD", float("inf"))
    monkeypatch.setattr(watch, "_REST", 3600.0)  # however slow this machine is: at most twice as many steps as before
    rate = optax.linear_schedule(0.1, 0.01, 100) if scheduled else 0.1
    two.run(lambda rank: trains(rank, True, make=lambda: optax.inject_hyperparams(optax.sgd)(rate), steps=100))
    assert 2 * 2 <= len(asked) <= 2 * 15


@COMPILED
def test_the_state_is_compared_where_there_are_no_parameters(two, compared_always, compiled):
    assert "mu['" in refused(two, lambda rank: trains(rank, compiled, between=_other_moments(rank), gives=False))


def _other_moments(rank):
    def changes(step, parameters, state):
        return parameters, jax.tree.map(moved, state) if step == 2 else state

    def moved(each):
        return each + 0.5 * rank if jnp.issubdtype(each.dtype, jnp.floating) else each

    return changes


@COMPILED
@pytest.mark.parametrize(
    "make", [None, lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))], ids=["adam", "chain"]
)
def test_all_is_well(two, compared_always, compiled, make):
    first, second = two.run(lambda rank: trains(rank, compiled, make=make))
    assert first == second


@COMPILED
def test_who_means_it_says_so(two, compared_always, compiled):
    two.run(lambda rank: trains(rank, compiled, float(rank), replicas="differ"))


def test_steps_in_a_loop_of_a_program(two, compared_always):
    """And a derivative of all of them."""

    def body(rank):
        optimizer = hvd.DistributedGradientTransformation(optax.sgd(0.1))
        x = jnp.array([[1.0, float(rank)], [0.5, -1.0]])

        def trained(parameters):
            def step(carried, _):
                gradients = jax.grad(loss_of)(carried[0], x)
                updates, state = optimizer.update(gradients, carried[1], carried[0])
                return (optax.apply_updates(carried[0], updates), state), None

            return jax.lax.scan(step, (parameters, optimizer.init(parameters)), length=3)[0][0]

        start = {"weights": jnp.ones((2,)), "bias": jnp.zeros(())}
        ended = jax.jit(trained)(start)
        slope = jax.jit(jax.grad(lambda parameters: loss_of(trained(parameters), x)))(start)
        return np.asarray(ended["weights"]).tolist(), bool(jnp.isfinite(slope["weights"]).all())

    (first, finite), (second, _) = two.run(body)
    assert first == second and finite


def test_an_unknown_word_is_refused():
    with pytest.raises(InvalidArgumentError, match="Synchronous: replicas must be"):
        hvd.DistributedGradientTransformation(optax.sgd(0.1), mode=hvd.Synchronous(replicas="same"))
    for given in ("adam", optax.adam, None):
        with pytest.raises(InvalidArgumentError, match="must be given a transformation of optax, such as"):
            hvd.DistributedGradientTransformation(given)


@COMPILED
def test_a_derivative_by_the_rate(two, compiled):
    """Of steps that a program differentiates nothing on the host has one."""

    def body(rank):
        optimizer = hvd.DistributedGradientTransformation(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))

        def outer(rate, weights):
            state = optimizer.init(weights)
            state.hyperparams["learning_rate"] = rate
            for _ in range(3):
                updates, state = optimizer.update(2 * weights, state, weights)
                weights = optax.apply_updates(weights, updates)
            return jnp.sum(weights**2)

        slope = jax.grad(outer)
        return float((jax.jit(slope) if compiled else slope)(jnp.float32(0.1), jnp.ones(3)))

    first, second = two.run(body)
    assert first == second == pytest.approx(-12 * 3 * 0.8**5, rel=1e-4)


@COMPILED
def test_what_is_no_array_among_the_parameters_is_let_be(two, compared_always, compiled):
    def body(rank):
        optimizer = hvd.DistributedGradientTransformation(optax.sgd(0.1))
        weights = jnp.ones(3)
        state = optimizer.init({"w": weights})

        def step(weights, state):
            parameters = {"w": weights, "activation": jax.nn.relu, "key": jax.random.key(0)}
            updates, state = optimizer.update({"w": weights}, state, parameters)
            return weights + updates["w"], state

        run = jax.jit(step) if compiled else step
        for _ in range(3):
            weights, state = run(weights, state)
        return np.asarray(weights).tolist()

    first, second = two.run(body)
    assert first == second


@COMPILED
def test_updates_of_many_at_once_are_let_be(two, compared_always, compiled):
    """Under ``jax.vmap`` a value is that of many."""

    def body(rank):
        optimizer = hvd.DistributedGradientTransformation(optax.sgd(0.1))
        weights = jnp.ones((3, 4))
        state = jax.vmap(optimizer.init)(weights)
        update = jax.vmap(optimizer.update)
        run = jax.jit(update) if compiled else update
        for _ in range(3):
            updates, state = run(weights * (rank + 1), state, weights)
            weights = optax.apply_updates(weights, updates)
        return np.asarray(weights).tolist()

    first, second = two.run(body)
    assert first == second


@COMPILED
def test_a_rank_that_has_joined_is_no_false_alarm(two, compared_always, compiled):
    """Averages are then of those that go on, as the rank that went furthest has them."""

    def body(rank):
        found = trains(rank, compiled, steps=3 + 2 * rank)
        return found, hvd.join()

    (_, last), (found, _) = two.run(body)
    parameters, optimizer = {"weights": jnp.full((2,), 1.0), "bias": jnp.zeros(())}, optax.adam(0.1)
    state = optimizer.init(parameters)
    for step in range(5):
        ranks = (0, 1) if step < 3 else (1,)
        each = [jax.grad(loss_of)(parameters, jnp.array([[1.0, float(rank)], [0.5, -1.0]])) for rank in ranks]
        updates, state = optimizer.update(jax.tree.map(lambda *own: sum(own) / len(own), *each), state)
        parameters = optax.apply_updates(parameters, updates)
    assert last == 1
    for name, expected in parameters.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5)


@pytest.mark.parametrize("inits", [False, True], ids=["made", "with a state"])
def test_a_transformation_that_never_updates_is_told_at_the_end(caplog, inits):
    """As where a script calls the update of the optimizer that it has wrapped."""

    def body(rank):
        own = optax.sgd(0.1)
        averaged = hvd.DistributedGradientTransformation(own, name="of the model")
        state = averaged.init(jnp.ones(2)) if inits else own.init(jnp.ones(2))
        own.update(jnp.ones(2) * rank, state)
        trains(rank, compiled=True, steps=2)  # which is another one

    with World(2) as world:
        world.run(body)
        assert not caplog.messages
    told = (
        "DistributedGradientTransformation 'of the model': its update was never called, so it has reduced no gradients"
    )
    assert [message.startswith(told) for message in caplog.messages] == [True, True]


def test_a_transformation_that_need_not_update_is_not_told(caplog):
    """Outside of its process set, in a world that has failed, or of one rank; and where a world before this one has updated."""
    lasting: list[object] = [None] * 3

    def first(rank):
        lasting[rank] = hvd.DistributedGradientTransformation(optax.sgd(0.1), process_set=rt.add_process_set([0, 1]))
        if rank < 2:
            lasting[rank].update(jnp.ones(2), lasting[rank].init(jnp.ones(2)))

    def later(rank):
        lasting[rank].init(jnp.ones(2))

    def failing(rank):
        hvd.DistributedGradientTransformation(optax.sgd(0.1))
        if rank:
            raise OSError("disk")
        with pytest.raises(rt.RingtrainError):
            rt.barrier()

    for size, body in ((3, first), (2, later), (1, lambda rank: hvd.DistributedGradientTransformation(optax.sgd(0.1)))):
        with World(size) as world:
            world.run(body)
    with pytest.raises(OSError, match="disk"), World(2) as world:
        world.run(failing)
    assert not [message for message in caplog.messages if "never called" in message]


@COMPILED
def test_ranks_without_the_transformation_are_named(compiled):
    """Not at once, since a rank may be late; and no other operation hides it."""
    told = r"gradients\S*: waiting \S+ s: submitted by rank 0; missing rank 1"
    with (
        World(2, stall_abort_seconds=1) as world,
        pytest.raises((RingtrainError, jax.errors.JaxRuntimeError), match=told),
    ):
        world.run(lambda rank: rank or trains(rank, compiled))


def test_a_loop_without_any_transformation_compares_its_parameters_itself(two):
    def body(rank):
        parameters = {"weights": jnp.ones(2), "bias": jnp.zeros(())}
        for _ in range(3):
            rt.check_replicas(parameters, every=2)
            gradients = jax.grad(loss_of)(parameters, jnp.array([[1.0, float(rank)]]))
            parameters = jax.tree.map(lambda each, gradient: each - 0.1 * gradient, parameters, gradients)

    with pytest.raises(MismatchError, match="check_replicas 'bias': the bits must be the same on all ranks"):
        two.run(body)


def test_what_is_lost_of_one_models_gradients_is_not_made_up_for_in_anothers():
    def body(rank):
        own = np.random.default_rng(rank).normal(size=(4, 2, 64, 64)).astype(np.float32) * [[[[1000.0]], [[1.0]]]]
        both = [
            hvd.DistributedGradientTransformation(optax.sgd(-1.0), compression=hvd.Compression.int8) for _ in range(2)
        ]
        states = [each.init(jnp.zeros((64, 64))) for each in both]
        found = [
            [
                np.asarray(each.update(jnp.float32(given), state)[0])
                for each, state, given in zip(both, states, step, strict=True)
            ]
            for step in own
        ]
        return np.array(found), own

    with World(2, "1+1") as world:
        (found, one), (_, two) = world.run(body)
    assert np.abs(found - (one + two) / 2)[:, 1].max() < 0.1


@pytest.mark.parametrize("frozen", ["bias", "weights"])
def test_an_array_that_one_rank_does_not_train_is_named(two, frozen):
    """Outside of programs, of whose gradients the core says how many there are."""

    def body(rank):
        optimizer = hvd.DistributedGradientTransformation(optax.sgd(0.1))
        model = {"weights": jnp.ones((2,)), "bias": jnp.zeros(())}
        own = {name: each for name, each in model.items() if rank == 0 or name != frozen}
        gradients = jax.grad(lambda own: loss_of({**model, **own}, jnp.ones((2, 2))))(own)
        optimizer.update(gradients, optimizer.init(own), own)

    shape = [2] if frozen == "weights" else []
    assert f"but '['{frozen}']' of shape {shape} is trained on rank 0 and not on rank 1. Freeze" in refused(two, body)
