"""What the counters say about the bytes and messages of an exchange."""

import functools
import time

import numpy as np
import pytest
from worlds import World, sizes

import ringtrain as rt
from ringtrain._binding import tables


def growth(call):
    """What the call adds to each counter of this rank."""
    rt.barrier()
    before = rt.counters()
    call()
    after = rt.counters()
    return {name: after[name] - before[name] for name in before}


@pytest.mark.parametrize("size", sizes(least=2))
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_ring_sends_no_more_than_it_must(size, dtype):
    """2(N-1)/N of the bytes, by every rank."""
    tensor = np.ones(3_000_017 // np.dtype(dtype).itemsize, dtype)

    def on_rank(rank):
        grown = growth(lambda: rt.allreduce(tensor, "large", rt.Sum))
        least = 2 * (size - 1) / size * tensor.nbytes
        assert abs(grown["wire_bytes_sent"] - least) <= 0.02 * least, (grown["wire_bytes_sent"], least)
        assert grown["operations"] == 1 and grown["bytes"] == tensor.nbytes

    with World(size, algorithm="ring") as world:
        world.run(on_rank)


@pytest.mark.parametrize("size", [size for size in sizes() if size >= 4])
def test_hosts_send_their_share_once(size):
    """Two hosts: together the ranks of one send 2(H-1)/H = 1 × the bytes, however many they are."""
    tensor = np.ones(1_000_003, np.float32)
    locals_ = [size // 2, size - size // 2]

    def on_rank(rank):
        sent = growth(lambda: rt.allreduce(tensor, "large", rt.Sum))["wire_bytes_sent"]
        by_rank = rt.allgather(np.array([sent]), "sent")
        for total in (by_rank[: locals_[0]].sum(), by_rank[locals_[0] :].sum()):
            assert abs(total - tensor.nbytes) <= 0.02 * tensor.nbytes

    with World(size, f"{locals_[0]}+{locals_[1]}") as world:
        world.run(on_rank)


def test_one_host_sends_nothing_through_the_wire(world):
    def on_rank(rank):
        grown = growth(lambda: rt.allreduce(np.ones(100_000), "t"))
        assert grown["wire_bytes_sent"] == 0
        assert (grown["shared_bytes"] > 0) == (rt.size() > 1)

    world.run(on_rank)


@pytest.mark.parametrize("size", [size for size in sizes() if size >= 2])
def test_the_time_of_a_codec_is_counted_between_hosts(size):
    """More for more elements; none without a codec, nor for what is too small for it."""

    def codec_seconds(count, compression):
        call = functools.partial(rt.allreduce, np.ones(count, np.float32), f"t{count}.{compression}")
        return growth(lambda: call(compression=compression))["codec_nanoseconds"] / 1e9

    def on_rank(rank):
        for compression in (rt.Compression.fp16, rt.Compression.int8, rt.Compression.int4):
            started = time.perf_counter()
            seconds = codec_seconds(2_000_000, compression)
            assert 2_000_000 / 1e11 < seconds < time.perf_counter() - started
        assert codec_seconds(2_000_000, rt.Compression.none) == codec_seconds(4095, rt.Compression.int8) == 0

    with World(size, "+".join(["1"] * size)) as world:
        world.run(on_rank)


def test_cache_is_used_from_the_second_time_on(world):
    def on_rank(rank):
        first = growth(lambda: rt.allreduce(np.ones(10), "again"))
        later = growth(lambda: [rt.allreduce(np.ones(10), "again") for _ in range(10)])
        assert (first["cache_hits"], first["cache_misses"]) == (0, 1)
        assert (later["cache_hits"], later["cache_misses"]) == (10, 0)

    world.run(on_rank)


def test_tensors_of_a_step_share_batches(world):
    def on_rank(rank):
        handles = [rt.allreduce_async(np.ones(100), f"g.{i}") for i in range(50)]
        grown = growth(lambda: [rt.synchronize(handle) for handle in handles])
        assert rt.counters()["operations"] >= 50 and grown["batches"] <= 50
        assert rt.counters()["fused_operations"] > 0

    world.run(on_rank)


def test_fusion_can_be_turned_off():
    def on_rank(rank):
        for handle in [rt.allreduce_async(np.ones(100), f"g.{i}") for i in range(30)]:
            rt.synchronize(handle)
        assert rt.counters()["fused_operations"] == 0

    with World(sizes()[-1], fusion_threshold_bytes=0) as world:
        world.run(on_rank)


def test_nothing_is_sent_while_nothing_is_pending(world):
    """Idle: no frame at all, and a rank wakes about once a second."""

    def on_rank(rank):
        rt.allreduce(np.ones(10), "warm up")
        deadline = (
            time.monotonic() + 60
        )  # after the last operation a rank still listens for as long as 10 ms of it take
        while True:
            start, before = time.monotonic(), rt.counters()
            time.sleep(1.0)
            after, seconds = rt.counters(), time.monotonic() - start
            frames, wakeups = (after[name] - before[name] for name in ("frames_sent", "wakeups"))
            if frames == 0 and wakeups <= 10 * seconds:
                return
            assert time.monotonic() < deadline, f"{frames} frames and {wakeups} wake-ups in {seconds:.1f} s"

    world.run(on_rank)


SYNCHRONOUS = {
    "allreduce": lambda tensor, name: rt.allreduce(tensor, name),
    "allgather": lambda tensor, name: rt.allgather(tensor, name),
    "alltoall": lambda tensor, name: rt.alltoall(tensor, name=name),
    "broadcast": lambda tensor, name: rt.broadcast(tensor, 0, name),
    "reducescatter": lambda tensor, name: rt.reducescatter(tensor, name),
}


@pytest.mark.on_threads("a world of one")
@pytest.mark.parametrize("operation", SYNCHRONOUS)
def test_a_synchronous_operation_wakes_no_thread_of_its_process(operation):
    """The waiter drives. A rank alone waits for nobody, so that it never sleeps itself."""
    times = 50

    def on_rank(rank):
        call = functools.partial(SYNCHRONOUS[operation], np.ones(64, np.float32), operation)
        call()
        assert growth(lambda: [call() for _ in range(times)])["wakeups"] < times / 5

    with World(1) as world:
        world.run(on_rank)


def test_names_are_the_tables(world):
    """And those of local steps, which the core knows nothing of."""

    def on_rank(rank):
        assert list(rt.counters()) == [*(row.name for row in tables.COUNTERS), "local_steps", "synchronisations"]
        assert all(value >= 0 for value in rt.counters().values())

    world.run(on_rank)


@pytest.mark.on_threads("counts frames of ranks in one process")
def test_a_cached_step_needs_few_frames():
    """One frame each way between coordinator and member however many tensors are ready at once."""

    def on_rank(rank):
        tensors = [np.ones(10) for _ in range(40)]
        for _ in range(3):
            rt.grouped_allreduce(tensors, "step")
        return growth(lambda: rt.grouped_allreduce(tensors, "step"))["frames_sent"]

    with World(4) as world:
        assert world.run(on_rank) == [3, 1, 1, 1]
