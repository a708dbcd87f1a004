"""Steps that repeat themselves run without negotiation, and whatever differs comes back to it."""

import threading
import time

import numpy as np
import pytest
from eventually import DEADLINE
from worlds import LAUNCHED, World, configurations, sizes

import ringtrain as rt
from ringtrain.errors import InvalidArgumentError, MismatchError

WORLDS = [each for each in configurations(least=2) if each[2] == "auto" and each[0] <= 4]
HOSTS = {None: 1, "1+1": 2, "2+1": 2, "1+1+1": 3, "2+2": 2, "1+1+1+1": 4, "1+1|1+1": 4, "1+1+1|1": 4}
WARM_UP = 12  # steps, after which a schedule must have begun


def inputs(rank: int, step: int, names: int) -> list[np.ndarray]:
    """Small integers, so that sums are exact."""
    return [np.arange(50, dtype=np.float32) % 7 + rank * (name + 1) + step for name in range(names)]


def expected(size: int, step: int, names: int) -> list[np.ndarray]:
    """The sums, as one process has them."""
    return [sum(each) for each in zip(*(inputs(rank, step, names) for rank in range(size)), strict=True)]


def run_step(rank: int, size: int, step: int, names: int = 3, order=None) -> None:
    """Submits all, waits for all, and compares."""
    tensors = inputs(rank, step, names)
    handles = {name: rt.allreduce_async(tensors[name], f"s{name}", rt.Sum) for name in order or range(names)}
    for name, sum_ in enumerate(expected(size, step, names)):
        np.testing.assert_array_equal(rt.synchronize(handles[name]), sum_)


def scheduled() -> int:
    return rt.counters()["scheduled_batches"]


def warm_up(rank: int, size: int, names: int = 3, least: int = WARM_UP) -> int:
    """Steps until the schedule runs; the number of the next step."""
    before = scheduled()
    for step in range(least):
        run_step(rank, size, step, names)
    assert scheduled() > before
    return least


@pytest.mark.parametrize("size, layout, algorithm", WORLDS, ids=str)
def test_a_steady_step_sends_no_frame_within_a_host(size, layout, algorithm):
    def window(rank, step):
        """What 20 steps add to the counters."""
        before = rt.counters()
        for more in range(20):
            run_step(rank, size, step + more)
        return {name: value - before[name] for name, value in rt.counters().items()}

    most = HOSTS[layout] - 1  # frames for each batch: to each neighbour

    def finds_a_steady_one(rank):
        """A machine that is busy with others may end a schedule in any of them."""
        windows = [window(rank, step) for step in range(6)]
        for grown in windows:
            assert grown["operations"] == 60 and grown["cache_hits"] == 60 and grown["cache_misses"] == 0
        steady = [grown for grown in windows if grown["scheduled_batches"] == grown["batches"]]
        return any(grown["frames_sent"] <= most * grown["batches"] for grown in steady)

    def on_rank(rank):
        warm_up(rank, size)
        until = time.monotonic() + DEADLINE
        while not rt.allreduce(np.array([finds_a_steady_one(rank)], np.int32), "found", rt.Min)[0]:
            assert time.monotonic() < until, "some rank has found no 20 steps without a frame within a host"

    with World(size, layout, algorithm=algorithm) as world:
        world.run(on_rank)


@pytest.mark.parametrize("size", sizes(least=2))
def test_off_negotiates_every_step(size):
    def on_rank(rank):
        for step in range(WARM_UP + 5):
            run_step(rank, size, step)
        return scheduled()

    with World(size, schedule="off") as world:
        assert not any(world.run(on_rank))


def another_name(rank, size, odd):
    result = rt.allreduce(np.full(3, rank, np.float32), "other", rt.Sum)
    np.testing.assert_array_equal(result, np.full(3, size * (size - 1) / 2, np.float32))


def another_shape(rank, size, odd):
    result = rt.allreduce(np.full(9, rank, np.float32), "s1", rt.Sum)
    np.testing.assert_array_equal(result, np.full(9, size * (size - 1) / 2, np.float32))


def mismatch(rank, size, odd):
    with pytest.raises(MismatchError, match="s1"):
        rt.allreduce(np.ones(9 if rank == odd else 50, np.float32), "s1", rt.Sum)


def refusal(rank, size, odd):
    if rank == odd:
        with pytest.raises(InvalidArgumentError):
            rt.allreduce(np.ones(50, "g"), "s1", rt.Sum)
    else:
        with pytest.raises(Exception, match="s1"):
            rt.allreduce(np.ones(50, np.float32), "s1", rt.Sum)


def one_left_out(rank, size, odd):
    result = rt.allreduce(np.full(50, rank, np.float32), "s2", rt.Sum)  # no s0, no s1
    np.testing.assert_array_equal(result, np.full(50, size * (size - 1) / 2, np.float32))


def late(rank, size, odd):
    if rank == odd:
        time.sleep(1.5)  # the others give the schedule up meanwhile
    run_step(rank, size, 1)


def process_set(rank, size, odd):
    members = rt.add_process_set([0, size - 1])
    if rank in (0, size - 1):
        for _ in range(WARM_UP):
            np.testing.assert_array_equal(
                rt.allreduce(np.full(4, rank, np.float32), "in set", rt.Sum, process_set=members),
                np.full(4, size - 1, np.float32),
            )
    rt.remove_process_set(members)


def join(rank, size, odd):
    if rank != odd:
        with_join = rt.allreduce(np.ones(50, np.float32), "s0", rt.Sum)
        np.testing.assert_array_equal(with_join, np.full(50, size - 1, np.float32))
    rt.join()


DEVIATIONS = [another_name, another_shape, mismatch, refusal, one_left_out, late, process_set, join]


@pytest.mark.parametrize("deviation", DEVIATIONS)
@pytest.mark.parametrize(
    "size, layout",
    [
        pytest.param(size, layout, marks=pytest.mark.long if size == 4 else ())
        for size, layout in [(2, "1+1"), (3, None), (3, "2+1"), (4, "2+2")]
        if size in sizes()
    ],
)
def test_what_differs_comes_back_to_negotiation(size, layout, deviation):
    """On any rank, in the midst of a schedule; afterwards a schedule runs again."""

    def on_rank(rank):
        for odd in [size - 1] if deviation is late else range(size):
            step = warm_up(rank, size, least=WARM_UP << 2 * odd)  # schedules that end soon come later
            deviation(rank, size, odd)
            run_step(rank, size, step)

    with World(size, layout, shutdown_timeout_seconds=10) as world:
        world.run(on_rank)


@pytest.mark.parametrize("size, layout, algorithm", WORLDS, ids=str)
def test_ranks_may_submit_in_any_order(size, layout, algorithm):
    def on_rank(rank):
        for step in range(3 * WARM_UP):
            order = np.random.default_rng([rank, step]).permutation(4)
            run_step(rank, size, step, names=4, order=[int(name) for name in order])

    with World(size, layout, algorithm=algorithm) as world:
        world.run(on_rank)


@pytest.mark.parametrize("size, layout, algorithm", WORLDS, ids=str)
def test_a_synchronous_program_may_change_its_order(size, layout, algorithm):
    """Each waits for one operation before it submits the next: no promise is possible, and nobody may wait for one."""

    def on_rank(rank):
        for step in range(2 * WARM_UP):
            names = ["a", "b"] if step % WARM_UP < WARM_UP - 2 else ["b", "a"]
            for name in names:
                result = rt.allreduce(np.full(5, rank + step, np.float32), name, rt.Sum)
                np.testing.assert_array_equal(result, np.full(5, sum(range(size)) + size * step, np.float32))

    with World(size, layout, algorithm=algorithm) as world:
        started = time.monotonic()
        world.run(on_rank)
        assert time.monotonic() - started < 30


def test_who_comes_last_is_known(world):
    """Without frames the coordinator sees it by the promises."""
    if world.size == 1:
        return
    size, steps = world.size, 5
    submitted = [threading.Semaphore(0) for _ in range(steps)]

    def on_rank(rank):
        warm_up(rank, size, names=1)
        for step in range(steps):
            if rank == size - 1:
                for _ in range(0 if LAUNCHED else size - 1):
                    submitted[step].acquire()
                time.sleep(0.05)
            handle = rt.allreduce_async(inputs(rank, step, 1)[0], "s0", rt.Sum)
            submitted[step].release()
            rt.synchronize(handle)
        rt.barrier()
        return rt.stats().late if rank == 0 else None

    late = world.run(on_rank)[0]
    if late is not None:
        last = next(each for each in late if each.rank == size - 1)
        assert last.times >= 5 and last.seconds >= 0.1


@pytest.mark.parametrize("size, layout, algorithm", WORLDS, ids=str)
def test_a_world_ends_in_the_midst_of_a_schedule(size, layout, algorithm):
    """With a goodbye, which is no part of it, and without a wait for anybody's patience."""
    started = time.monotonic()
    with World(size, layout, algorithm=algorithm) as world:
        world.run(lambda rank: warm_up(rank, size) and None)
    assert time.monotonic() - started < 20
