"""Process sets: membership, operations within them, their identity, and what goes wrong."""

import threading

import numpy as np
import pytest
from refusals import said_alike
from worlds import World, sizes

import ringtrain as rt
from ringtrain._binding._native import lib
from ringtrain._runtime.context import current
from ringtrain.errors import InvalidArgumentError, MismatchError


def test_global_set(world):
    def on_rank(rank):
        everyone = rt.global_process_set
        assert everyone.process_set_id == 0 and everyone.ranks == list(range(rt.size()))
        assert everyone.size() == rt.size() and everyone.rank() == rank and everyone.included()
        assert rt.remove_process_set(everyone) is False

    world.run(on_rank)


def test_even_and_odd_ranks_work_side_by_side(world):
    def on_rank(rank):
        sets = [rt.add_process_set(rt.ProcessSet(range(start, rt.size(), 2))) for start in range(min(2, rt.size()))]
        mine = sets[rank % 2]
        members = list(range(rank % 2, rt.size(), 2))
        assert mine.included() and mine.rank() == members.index(rank) and mine.size() == len(members)
        for turn in range(5):
            x = np.full(1000, rank + turn, np.float32)
            assert rt.allreduce(x, "same name", rt.Sum, process_set=mine)[0] == sum(members) + turn * len(members)
            assert rt.allgather(np.array([rank]), "rows", mine).tolist() == members
            assert rt.broadcast(np.array([rank]), members[-1], "from the last", mine)[0] == members[-1]
        rows = rt.alltoall(np.arange(len(members)) + 10 * rank, name="all", process_set=mine)
        assert rows.tolist() == [10 * other + mine.rank() for other in members]
        assert rt.reducescatter(np.ones(2 * len(members)), "cut", rt.Sum, mine).tolist() == [len(members)] * 2
        assert rt.broadcast_object({"root": rank}, members[0], process_set=mine) == {"root": members[0]}
        assert rt.allgather_object(rank, process_set=mine) == members
        rt.barrier(mine)
        assert rt.allreduce(np.ones(1), "world", rt.Sum)[0] == rt.size()

    world.run(on_rank)


@pytest.mark.parametrize("size", [size for size in sizes() if size >= 4])
def test_set_across_hosts(size):
    """Members on both of two simulated hosts, unevenly."""
    layout = f"2+{size - 2}"

    def on_rank(rank):
        part = rt.add_process_set([0, 2, 3])
        if part.included():
            assert rt.allreduce(np.full(5000, float(rank)), "part", rt.Sum, process_set=part)[17] == 5
        rt.barrier()

    with World(size, layout) as world:
        world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_remove_and_add_again(world):
    def on_rank(rank):
        for _ in range(10):
            pair = rt.add_process_set([0, 1])
            if pair.included():
                assert rt.allreduce(np.ones(1), "x", rt.Sum, process_set=pair)[0] == 2
            assert rt.remove_process_set(pair) is True
            assert pair.process_set_id is None and pair.included() is None and pair.rank() is None
            assert rt.remove_process_set(pair) is False
            with pytest.raises(InvalidArgumentError, match="registered"):
                rt.allreduce(np.ones(1), "x", process_set=pair)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_only_members_may_take_part(world):
    def on_rank(rank):
        first = rt.add_process_set([0])
        if rank == 0:
            assert rt.allreduce(np.ones(1), "mine", rt.Sum, process_set=first)[0] == 1
        else:
            with pytest.raises(InvalidArgumentError, match=f"rank {rank} is not in process set"):
                rt.allreduce(np.ones(1), "mine", rt.Sum, process_set=first)
            with pytest.raises(ValueError, match=f"rank {rank} is not"):
                first.rank()
        rt.barrier()

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_root_outside_of_the_set(world):
    def on_rank(rank):
        first = rt.add_process_set([0])
        if rank == 0:
            with pytest.raises(InvalidArgumentError, match="root"):
                rt.broadcast(np.ones(1), 1, "x", first)
        rt.barrier()

    world.run(on_rank)


def test_bad_sets_are_refused_alike(world):
    def on_rank(rank):
        texts = []
        for ranks in ([0, rt.size()], [-1], [0, 0], []):
            with pytest.raises(ValueError) as raised:
                rt.add_process_set(ranks)
            texts.append(str(raised.value))
        assert said_alike(rt.allgather_object(texts))
        assert rt.add_process_set([0]).process_set_id > 0

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_ranks_that_add_different_sets(world):
    def on_rank(rank):
        with pytest.raises(MismatchError, match="add_process_set"):
            rt.add_process_set([0] if rank == 0 else [0, 1])
        assert rt.add_process_set([0, 1]).size() == 2

    world.run(on_rank)


def test_arguments_are_checked_before_anything_is_sent():
    with pytest.raises(ValueError, match="sequence of ranks"):
        rt.ProcessSet(5)
    with pytest.raises(ValueError, match="sequence of ranks"):
        rt.ProcessSet(["first"])
    assert rt.ProcessSet([2, 0]).ranks == [0, 2]
    assert rt.ProcessSet([1]).process_set_id is None and rt.ProcessSet([1]).size() is None


def test_registering_twice_is_refused(world):
    def on_rank(rank):
        first = rt.add_process_set([0])
        with pytest.raises(ValueError, match="unregistered"):
            rt.add_process_set(first)

    world.run(on_rank)


def test_no_process_set_at_all(world):
    def on_rank(rank):
        with pytest.raises(ValueError, match="expected a ProcessSet"):
            rt.allreduce(np.ones(1), process_set="all")

    world.run(on_rank)


@pytest.mark.on_threads("a world of three")
def test_a_stall_names_its_process_set(caplog):
    told = threading.Event()

    def on_rank(rank):
        pair = rt.add_process_set([0, 2])
        if rank == 0:
            with pytest.raises(
                rt.RingtrainError,
                match=f"allreduce 'x' of process set {pair.process_set_id}: waiting .* missing rank 2",
            ):
                rt.allreduce(np.ones(1), "x", process_set=pair)
            assert current().suspects(lib.RT_MISSING) == [2]
            told.set()
        assert told.wait(30)

    with World(3, stall_warning_seconds=0.2, stall_abort_seconds=1) as world:
        world.run(on_rank)
    assert "allreduce 'x' of process set 1: waiting" in caplog.text


@pytest.mark.least_ranks(2)
def test_equal_sets_are_two_sets(world):
    def on_rank(rank):
        first, second = rt.add_process_set([0, 1]), rt.add_process_set([1, 0])
        everyone = rt.add_process_set(range(rt.size()))
        assert len({first.process_set_id, second.process_set_id, everyone.process_set_id, 0}) == 4
        if first.included():
            for each in (first, second):
                assert rt.allreduce(np.ones(1), "same name", rt.Sum, process_set=each)[0] == 2

    world.run(on_rank)


@pytest.mark.parametrize("size", sizes(2))
def test_equal_sets_are_refused_where_that_is_asked_for(size):
    """Horovod's rule; a set that was removed may come again."""

    def on_rank(rank):
        first = rt.add_process_set([0, 1]) if size > 2 else rt.add_process_set([0])
        for ranks, existing in ((first.ranks[::-1], first.process_set_id), (range(rt.size()), 0)):
            with pytest.raises(
                InvalidArgumentError, match=f"but process set {existing} has .* too. Use that one"
            ) as caught:
                rt.add_process_set(ranks)
            assert isinstance(caught.value, ValueError)
            assert said_alike(rt.allgather_object(str(caught.value)))
        assert rt.remove_process_set(first)
        again = rt.add_process_set(first.ranks)
        assert again.process_set_id is not None
        rt.barrier()

    with World(size, equal_process_sets="refuse") as world:
        world.run(on_rank)


def test_sets_tell_their_communicator(world):
    def on_rank(rank):
        assert rt.global_process_set.mpi_comm is None and rt.ProcessSet([0]).mpi_comm is None
        assert str(rt.ProcessSet([0])) == "ProcessSet(process_set_id=None, ranks=[0], mpi_comm=None)"

    world.run(on_rank)
