"""The short way of a named allreduce that comes again: the same results and the same errors as the general way."""

import threading
import time

import numpy as np
import pytest
from worlds import World, sizes

import ringtrain as rt
from ringtrain import errors
from ringtrain._binding._native import lib
from ringtrain._runtime import context, operations

threads_only = pytest.mark.on_threads("looks at the ranks of one process")


def warm_up(name, array, times=3, **terms):
    """Has the name come so often that the next call with such an array takes the short way."""
    for _ in range(times):
        rt.allreduce_(array.copy(), name, **terms)
        rt.allreduce(array, name + ".fresh", **terms)


def went_the_general_way(monkeypatch, call):
    """Whether the call does not take the short way, and what it returned."""
    general, called = operations._reduce, []
    monkeypatch.setattr(operations, "_reduce", lambda *given, **named: called.append(1) or general(*given, **named))
    value = call()
    monkeypatch.undo()
    return bool(called), value


def test_every_call_of_a_name_sums_what_it_is_given():
    def work(rank, size):
        for step in range(6):
            array = np.arange(5, dtype=np.float32) * (rank + 1) + step
            expected = np.arange(5, dtype=np.float32) * (size * (size + 1) / 2) + size * step
            fresh = rt.allreduce(array, "fresh", op=rt.Sum)
            assert fresh is not array and fresh.tolist() == expected.tolist()
            assert rt.allreduce_(array, "placed", op=rt.Sum) is array
            assert array.tolist() == expected.tolist()
            assert rt.allreduce_(np.float64([rank]).reshape(()), "nothing long", op=rt.Max) == size - 1

    for size in sizes():
        with World(size) as world:
            world.run(work, size)


@threads_only
def test_a_name_that_comes_again_takes_the_short_way(monkeypatch):
    with World(1) as world:

        def work(_rank):
            array = np.ones(4, np.float32)
            warm_up("x", array)
            for name, call in (("x", rt.allreduce_), ("x.fresh", rt.allreduce)):
                general, value = went_the_general_way(monkeypatch, lambda name=name, call=call: call(array, name))
                assert not general and value.tolist() == [1, 1, 1, 1]

        world.run(work)


@threads_only
@pytest.mark.parametrize(
    "change",
    [
        {"tensor": np.ones(5, np.float32)},
        {"tensor": np.ones((2, 2), np.float32)},
        {"tensor": np.ones(4, np.float64)},
        {"tensor": np.ones(8, np.float32)[::2]},
        {"tensor": np.ones(4, ">f4")},
        {"op": rt.Sum},
        {"prescale_factor": 2.0},
        {"postscale_factor": -0.0},
        {"weight": 1},
        {"compression": rt.Compression.fp16},
    ],
    ids=str,
)
def test_what_differs_takes_the_general_way(monkeypatch, change):
    with World(1) as world:

        def work(_rank):
            array = np.ones(4, np.float32)
            warm_up("x", array)
            given = {"tensor": array, **change}
            general, value = went_the_general_way(monkeypatch, lambda: rt.allreduce(name="x.fresh", **given))
            assert general
            factor = given.get("prescale_factor", 1.0) * given.get("postscale_factor", 1.0)
            assert value.tolist() == (given["tensor"] * factor).tolist()
            assert rt.allreduce(array, "x.fresh").tolist() == [1, 1, 1, 1]

        world.run(work)


@pytest.mark.parametrize(
    "bad", [{"prescale_factor": "1.0"}, {"op": True}, {"compression": 0}, {"tensor": "read-only"}], ids=str
)
def test_what_is_refused_once_is_refused_again(bad):
    def work(_rank):
        array = np.ones(4, np.float32)
        warm_up("x", array, op=rt.Sum)
        given = {"tensor": array, "op": rt.Sum, **bad}
        if given["tensor"] is not array:
            given["tensor"] = array.copy()
            given["tensor"].flags.writeable = False
        with pytest.raises(errors.InvalidArgumentError):
            rt.allreduce_(name="x", **given)
        assert rt.allreduce_(array, "x", op=rt.Sum)[0] == rt.size()

    for size in sizes()[:2]:
        with World(size) as world:
            world.run(work)


def test_ranks_that_differ_hear_the_same_words():
    def work(rank):
        warm_up("x", np.ones(4, np.float32))
        array = np.ones(4 + rank, np.float32)  # the short way on rank 0 alone
        with pytest.raises(errors.MismatchError) as problem:
            rt.allreduce_(array, "x")
        warm_up("x", np.ones(4, np.float32))
        return str(problem.value)

    for size in sizes(2)[:1]:
        with World(size) as world:
            assert len(set(world.run(work))) == 1


def test_a_late_rank_is_awaited():
    def work(rank):
        array = np.ones(4, np.float32)
        warm_up("x", array)
        time.sleep(0.25 * rank)  # more than a slice of a wait
        assert rt.allreduce_(array, "x").tolist() == [1, 1, 1, 1]
        assert rt.allreduce_(array, "x").tolist() == [1, 1, 1, 1]

    for size in sizes(2)[:1]:
        with World(size) as world:
            world.run(work)


@threads_only
def test_an_interrupted_wait_leaves_its_memory_to_the_context(monkeypatch):
    with World(2) as world:
        met = threading.Barrier(2)

        def work(rank):
            array = np.ones(1000, np.float32)
            warm_up("x", array)
            if rank == 0:
                from ringtrain._runtime import repeats

                class Interrupted:
                    def __getattr__(self, name):
                        return getattr(lib, name)

                    def rt_wait(self, *_):
                        raise KeyboardInterrupt

                monkeypatch.setattr(repeats, "lib", Interrupted())
                with pytest.raises(KeyboardInterrupt):
                    rt.allreduce(array, "x.fresh")
                monkeypatch.undo()
                assert len(context.current()._orphans) == 1
            met.wait(20)
            if rank == 1:
                assert rt.allreduce(array, "x.fresh").tolist() == [1] * 1000
            met.wait(20)
            warm_up("x", array)
            assert not context.current()._orphans

        world.run(work)
