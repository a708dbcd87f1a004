"""``elastic.State`` with values in jobs that are not elastic; tests/faults/test_elastic_frameworks.py has those that are."""

import numpy as np
import pytest

import ringtrain as rt
import ringtrain.elastic
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.testing import World


def test_all_ranks_begin_with_the_state_of_rank_0_and_take_the_same_steps():
    def train(rank):
        weights = np.full(3, float(rank))
        state = rt.elastic.State(weights=weights, note=f"of {rank}")
        seen = []
        for epoch in state.epochs(2):
            for batch in state.steps(3):
                state.weights += state.allreduce(np.full(3, rank + 1.0), "gradient")
                seen.append((epoch, batch, state.step))
        assert state.weights is weights and state.note == "of 0"
        return seen, weights.tolist(), (state.epoch, state.batch, state.step)

    with World(2) as world:
        (first, second) = world.run(train)
    assert first == second
    assert first == ([(e, b, 3 * e + b) for e in range(2) for b in range(3)], [9.0] * 3, (2, 0, 6))


def test_it_goes_on_where_a_checkpoint_says():
    def train(_rank):
        state = rt.elastic.State(epoch=1, batch=2, step=7)
        return [(epoch, batch, state.step) for epoch in state.epochs(3) for batch in state.steps(4)]

    with World(1) as world:
        (seen,) = world.run(train)
    assert seen == [(1, 2, 7), (1, 3, 8), (2, 0, 9), (2, 1, 10), (2, 2, 11), (2, 3, 12)]


def test_an_array_of_another_shape_takes_the_place_of_ones_own():
    def train(rank):
        state = rt.elastic.State(weights=np.arange(rank + 2.0))
        return [state.weights.tolist() for _ in state.steps(1)]

    with World(2) as world:
        assert world.run(train) == [[[0.0, 1.0]]] * 2


def loop_twice(state, name):
    loop = getattr(state, name)
    assert list(loop(2)) == [0, 1]
    for again in (state.epochs, state.steps):
        with pytest.raises(
            InvalidArgumentError, match="expected one loop over all epochs, or one fit, but found another"
        ):
            next(again(3))


def test_what_it_refuses():
    with pytest.raises(InvalidArgumentError, match="names must not be those of its methods, or private, but epochs is"):
        rt.elastic.State(epochs=3)
    state = rt.elastic.State(weights=np.zeros(3))
    assert isinstance(state, rt.elastic.TransparentState)
    for call in (state.commit, state.save, state.restore, state.check_host_updates):
        with pytest.raises(UnsupportedError, match="commit: elastic.State with values loses no step"):
            call()
    for loop in ("epochs", "steps"):
        with World(1) as world:
            world.run(lambda _: loop_twice(rt.elastic.State(note=1), loop))
    assert type(rt.elastic.State()) is rt.elastic.State
