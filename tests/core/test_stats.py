"""stats(): the rank that comes last is found, with the operation in which it was most."""

import time

import numpy as np
import pytest
from worlds import World, sizes

import ringtrain as rt


@pytest.mark.least_ranks(2)
def test_the_slow_rank_is_found(world):
    def on_rank(rank):
        slow = rt.size() - 1
        for name, seconds in (("a", 0.05), ("b", 0.8), ("a", 0.05)):
            submitted = [] if rank == slow else [rt.allreduce_async(np.ones(3), name)]
            rt.barrier()  # after which all the others' submissions are there, however busy the machine
            if rank == slow:
                time.sleep(seconds)
                submitted = [rt.allreduce_async(np.ones(3), name)]
            rt.synchronize(submitted[0])
        found = rt.stats()
        assert found.counters["operations"] >= 3
        if rank == slow:
            return
        assert found.waiting_seconds > 0.1
        if rank > 0:
            assert found.late == []
            return
        assert [each.seconds for each in found.late] == sorted((each.seconds for each in found.late), reverse=True)
        waited_for = next(
            each for each in found.late if each.rank == slow
        )  # at a barrier another may have been the last
        assert waited_for.times >= 3 and waited_for.name == "b"
        assert 0 < waited_for.longest <= waited_for.seconds

    world.run(on_rank)


def test_ranks_of_one_are_never_late(world):
    if world.size == 1:
        assert world.run(lambda rank: (rt.allreduce(np.ones(3)), rt.stats().late)[1]) == [[]]


def traffic_of(call):
    """What the call adds to the traffic of this rank."""
    rt.barrier()
    before = rt.stats()
    call()
    return rt.stats().since(before)


def test_traffic_is_counted_by_operation_and_size(world):
    """Bytes, and those that a link must carry, as NCCL's tests have them; groups and batches count as what was submitted."""
    others = (world.size - 1) / world.size

    def on_rank(rank):
        size = rt.size()

        def some():
            for _ in range(3):
                rt.allreduce(np.ones(1024, np.float32), "a")
            rt.grouped_allreduce([np.ones(1024, np.float32), np.ones(1024, np.float32)], "two")
            rt.allgather(np.ones((rank + 1, 10)), "rows")
            rt.broadcast(np.ones(3, np.uint8), 0, "b")
            rt.reducescatter(np.ones((size, 5)), "r")
            rt.alltoall(np.ones((size, 5)), name="all")
            rt.barrier()

        grown = traffic_of(some)
        found = {(each.operation, each.least_bytes): each for each in grown.traffic}
        gathered = size * (size + 1) // 2 * 80
        expected = {
            ("allreduce", 4096): (3, 3 * 4096, 2 * others),
            ("allreduce", 8192): (1, 8192, 2 * others),
            ("allgather", 1 << gathered.bit_length() - 1): (1, gathered, others),
            ("broadcast", 2): (1, 3, 1.0 if size > 1 else 0.0),
            ("reducescatter", 1 << (40 * size).bit_length() - 1): (1, 40 * size, others),
            ("alltoall", 1 << (40 * size).bit_length() - 1): (1, 40 * size, others),
        }
        assert found.keys() == expected.keys()
        for key, (operations, size_bytes, share) in expected.items():
            each = found[key]
            assert (each.operations, each.bytes) == (operations, size_bytes), key
            assert abs(each.link_bytes - size_bytes * share) <= operations, key
            assert each.least_bytes <= size_bytes / operations <= each.most_bytes
            assert each.seconds > 0 and each.waiting_seconds > 0
            assert each.algorithm_bandwidth == each.bytes / each.seconds
            assert each.bus_bandwidth == each.link_bytes / each.seconds
        assert grown.counters["operations"] >= 9

    world.run(on_rank)


@pytest.mark.parametrize("size", sizes(least=2)[:2])
def test_times_of_fused_operations_add_up_to_that_of_their_batches(size):
    """However many are in a batch, and though two batches are under way at a time."""

    def on_rank(rank):
        def many():
            for handle in [rt.allreduce_async(np.ones(1000), f"t{i}") for i in range(60)]:
                rt.synchronize(handle)

        begin = time.perf_counter()
        grown = traffic_of(many)
        assert sum(each.operations for each in grown.traffic) == 60
        assert 0 < sum(each.seconds for each in grown.traffic) <= time.perf_counter() - begin

    with World(size) as world:
        world.run(on_rank)


def test_the_table(world):
    def on_rank(rank):
        rt.allreduce(np.ones(1024, np.float32), "x")
        head, row, *rest = str(rt.stats()).splitlines()
        assert head.split() == "operation size count total time mean waiting algbw busbw".split()
        assert row.startswith("allreduce  4 KiB      1  4 KiB") and row.count("B/s") == 2
        assert rest[0].startswith("waited ")

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_since_leaves_out_who_was_late_before(world):
    def on_rank(rank):
        handle = rt.allreduce_async(np.ones(3), "x") if rank == 0 else None
        rt.barrier()
        rt.synchronize(handle or rt.allreduce_async(np.ones(3), "x"))
        now = rt.stats()
        assert now.since(now).late == now.since(now).traffic == []
        assert set(now.since(now).counters.values()) == {0}

    world.run(on_rank)
