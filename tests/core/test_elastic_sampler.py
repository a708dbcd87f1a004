"""``BatchSampler`` in jobs that are not elastic; tests/faults/test_elastic_samples.py has those that are."""

import contextlib
import gc
import threading
import time
import weakref

import numpy as np
import pytest

import ringtrain as rt
import ringtrain.elastic
import ringtrain.torch as hvd
from ringtrain._runtime.context import current
from ringtrain._training import step_guard
from ringtrain._training.sharding import order as order_of
from ringtrain.elastic import followed
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.testing import World

COUNT = 11


def epochs_of(sampler, epochs=2, state=None):
    """The indices of each step, by epoch."""
    state = state or rt.elastic.State(sampler=sampler)
    return [[indices.tolist() for indices in sampler] for _ in state.epochs(epochs)], state


def test_each_sample_of_an_epoch_is_in_one_step_and_weighs_the_same():
    """Also where shares differ, and where a batch has fewer samples than there are ranks."""
    values = np.arange(COUNT) ** 2.0

    def train(_rank):
        sampler = rt.elastic.BatchSampler(COUNT, batch_size=3, seed=5)
        state = rt.elastic.State(sampler=sampler, sums=0.0)
        means, drawn = [], []
        for _ in state.epochs(2):
            for indices in sampler:
                assert len(sampler) == sampler.batches_left + state.batch + 1 == 2 and indices.dtype == np.int64
                means.append(float(state.allreduce(values[indices].mean(), "mean")))
                drawn.append(indices.tolist())
            assert len(sampler) == state.batch == 2 and sampler.batches_left == 0
        return means, drawn, (state.epoch, state.batch, state.step)

    with World(3) as world:
        (means, first, counts), (_, second, _), (_, third, _) = world.run(train)
    assert counts == (2, 0, 4)
    for epoch in range(2):
        order = order_of(COUNT, 5, epoch)
        assert means[2 * epoch : 2 * epoch + 2] == pytest.approx([values[order[:9]].mean(), values[order[9:]].mean()])
    assert sorted(first[0] + second[0] + third[0]) == sorted(order_of(COUNT, 5, 0)[:9].tolist())
    assert first[1] == third[1] != second[1]  # two samples are left for three ranks


def test_behind_its_world_nobody_follows_a_state():
    """As a fit of one process does not; and what leads to its context, as a model does, ends with it."""

    def train(_rank):
        sampler = rt.elastic.BatchSampler(COUNT, batch_size=3)
        state = rt.elastic.State(sampler=sampler, context=current())
        assert followed.followed() is state
        return state

    with World(1) as world:
        (state,) = world.run(train)
    assert followed.followed() is None
    refer = weakref.ref(state)
    del state, world
    gc.collect()
    assert refer() is None


def test_drop_last_and_the_order_as_it_is():
    def train(_rank):
        sampler = rt.elastic.BatchSampler(range(COUNT), 4, shuffle=False, drop_last=True)
        assert len(sampler) == 2 and bool(sampler)
        return epochs_of(sampler, 1)[0]

    with World(1) as world:
        assert world.run(train) == [[[[0, 1, 2, 3], [4, 5, 6, 7]]]]


def test_what_workers_make_ahead_comes_in_order_and_their_errors_too():
    lock, threads = threading.Lock(), set()

    def load(indices):
        with lock:
            threads.add(threading.get_ident())
        time.sleep(0.01 * (indices[0] % 2))
        if 9 in indices:
            raise ValueError("sample 9 is broken")
        return indices.tolist()

    def train(_rank):
        sampler = rt.elastic.BatchSampler(COUNT, 1, shuffle=False)
        state, seen = rt.elastic.State(sampler=sampler), []
        with pytest.raises(ValueError, match="sample 9 is broken"):
            for _ in state.epochs(1):
                for batch in sampler.loading(load, workers=3):
                    seen += batch
        return seen

    with World(1) as world:
        assert world.run(train) == [list(range(9))]
    assert 1 < len(threads) <= 3 and threading.get_ident() not in threads


def test_a_loop_that_breaks_goes_on_in_the_next_one_and_a_second_pass_is_refused():
    def train(workers):
        sampler = rt.elastic.BatchSampler(6, 2, shuffle=False)
        state, seen = rt.elastic.State(sampler=sampler), []
        for _ in state.epochs(1):
            for batch in sampler.loading(list, workers):
                seen.append(batch)
                break
            seen += sampler.loading(list, workers)
            with pytest.raises(InvalidArgumentError, match="expected one pass over the samples of epoch 0 but found"):
                next(iter(sampler))
        assert state.step == 3
        return seen

    for workers in 0, 2:
        with World(1) as world:
            assert world.run(lambda _, workers=workers: train(workers)) == [[[0, 1], [2, 3], [4, 5]]]


def test_it_goes_on_from_its_state():
    def train(_rank):
        whole, _ = epochs_of(rt.elastic.BatchSampler(COUNT, 3))
        sampler = rt.elastic.BatchSampler(COUNT, 3)
        state = rt.elastic.State(sampler=sampler)
        loop = state.epochs(2)
        next(loop)
        batches = iter(sampler)
        seen = [next(batches).tolist(), next(batches).tolist()]
        state.end_step()
        kept = sampler.state_dict()
        again = rt.elastic.BatchSampler(COUNT, 3)
        again.load_state_dict(kept)
        rest, state = epochs_of(again, 2, rt.elastic.State(sampler=again, epoch=0, batch=2, step=2))
        assert (state.step, [seen + rest[0], rest[1]]) == (8, whole)

    with World(1) as world:
        world.run(train)


def test_one_that_no_state_has_deals_a_pass():
    def read(_rank):
        sampler = rt.elastic.BatchSampler(5, 1, shuffle=False)
        return [[indices.tolist() for indices in sampler] for _ in range(2)]

    with World(2) as world:
        assert world.run(read) == [[[[0], [2], [4]]] * 2, [[[1], [3], [4]]] * 2]


@pytest.mark.parametrize(
    "arguments, kind, words",
    [
        (("many", 2), InvalidArgumentError, ""),
        ((2.5, 2), TypeError, "samples must be a whole number, but is 2.5"),
        ((4, "2"), TypeError, "batch_size must be a whole number, but is '2'"),
        ((4, 2, True, None), TypeError, "seed must be a whole number, but is None"),
        ((0, 2), InvalidArgumentError, "must be 1 at least, but are 0 and 2"),
        ((4, 0), InvalidArgumentError, "must be 1 at least, but are 4 and 0"),
        ((4, 5, True, 0, True), InvalidArgumentError, "one whole batch at least, which is 5 samples .* there are 4"),
    ],
)
def test_what_no_sampler_can_be(arguments, kind, words):
    def make(_rank):
        if not words:  # a text has a length, and so is a data set
            assert len(rt.elastic.BatchSampler(*arguments)) == 2
            return
        with pytest.raises(kind, match=words):
            rt.elastic.BatchSampler(*arguments)

    with World(1) as world:
        world.run(make)


def test_what_a_state_refuses_of_samplers():
    def check(_rank):
        sampler = rt.elastic.BatchSampler(4, 2)
        with pytest.raises(InvalidArgumentError, match="elastic.State must have one BatchSampler, .* but has 2"):
            rt.elastic.State(sampler=sampler, other=rt.elastic.BatchSampler(4, 2))
        state = rt.elastic.State(sampler=sampler)
        with pytest.raises(InvalidArgumentError, match="steps of a state with a sampler must be its draws"):
            next(state.steps(2))
        with pytest.raises(InvalidArgumentError, match="its sampler must be read in the loop over epochs"):
            next(iter(sampler))
        with pytest.raises(InvalidArgumentError, match="workers must be 0 at least, but is -1"):
            sampler.loading(list, -1)

    with World(1) as world:
        world.run(check)


@pytest.mark.parametrize("name", ["epoch", "batch", "step"])
@pytest.mark.parametrize("value", ["3", 2.0, None, True])
def test_progress_of_another_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=f"elastic.State: {name} must be a whole number, but is "):
        rt.elastic.State(**{name: value})
    with pytest.raises(InvalidArgumentError, match=f"elastic.State: {name} must be 0 at least, but is -1"):
        rt.elastic.State(**{name: -1})
    assert getattr(rt.elastic.State(**{name: np.int64(3)}), name) == 3


def test_ranks_with_different_batch_sizes_are_told_at_once():
    def train(rank):
        sampler = rt.elastic.BatchSampler(8, 2 + rank)
        with pytest.raises(
            MismatchError, match="rank 1 must have .* but sampler 0 is BatchSampler of 8 .* 3 in a batch"
        ):
            epochs_of(sampler)

    with World(2) as world:
        world.run(train)


@pytest.mark.parametrize("kind", ["BatchSampler", "ElasticSampler"])
def test_a_sampler_that_the_state_of_a_loop_does_not_have_is_refused_there(kind):
    """What a lost rank has drawn of it would be in no step; with a sampler of the state's beside it, it reads other data."""

    class Steps:
        def __init__(self, deals):
            self.deals = deals

    def read(_):
        sampler = rt.elastic.BatchSampler(6, 2) if kind == "BatchSampler" else hvd.elastic.ElasticSampler(range(6))
        for deals in True, False:
            steps = Steps(deals)
            step_guard.enter(steps)
            try:
                with (
                    contextlib.nullcontext()
                    if deals
                    else pytest.raises(InvalidArgumentError, match="of this loop must have")
                ):
                    list(sampler)
            finally:
                step_guard.leave(steps)

    with World(1) as world:
        world.run(read)
