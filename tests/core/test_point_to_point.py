"""Sends and receives: on one host and between hosts, in all sizes, orders and ends."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

import ringtrain as rt
from ringtrain.errors import ClosedError, InvalidArgumentError, MismatchError, PeerLostError
from ringtrain.testing import World

# Nothing, what travels in its offer, what does not, one chunk of a stream within a host, and many.
SIZES = [0, 1, 8192, 8193, 64 << 10, (3 << 20) + 5]
LAYOUTS = ["3", "1+1+1", "2+1"]


@pytest.fixture(params=LAYOUTS)
def three(request):
    with World(3, request.param) as world:
        yield world


def pattern(size: int, seed: int) -> np.ndarray:
    return (np.arange(size) * 7 + seed).astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_around_the_ring(three: World, size: int) -> None:
    """All send first, which nobody waits for."""

    def run(rank: int) -> None:
        sent, found = pattern(size, rank), np.zeros(size, np.uint8)
        rt.send(sent, (rank + 1) % 3)
        sent.fill(0)  # its memory is the sender's again
        assert rt.receive(found, (rank + 2) % 3) == (rank + 2) % 3
        assert np.array_equal(found, pattern(size, (rank + 2) % 3))

    three.run(run)


def test_many_at_once_in_both_directions(three: World) -> None:
    """Each rank sends to each other one, in an order of its own; receives are posted before, between and behind."""

    def run(rank: int) -> None:
        source = random.Random(rank)
        acts = [(kind, other, tag) for kind in ("send", "receive") for other in range(3) for tag in range(20)]
        source.shuffle(acts)
        found, handles = {}, []
        for kind, other, tag in acts:
            if other == rank:
                continue
            size = SIZES[tag % len(SIZES)] % 300_000
            if kind == "send":
                handles.append(rt.send_async(pattern(size, rank + tag), other, tag))
            else:
                found[other, tag] = np.zeros(size, np.uint8)
                handles.append(rt.receive_async(found[other, tag], other, tag))
        for handle in handles:
            handle.wait(60)
        assert len(found) == 40
        for (other, tag), values in found.items():
            assert np.array_equal(values, pattern(values.size, other + tag)), (other, tag)

    three.run(run)


def test_any_source_and_shapes_that_differ(three: World) -> None:
    def run(rank: int) -> None:
        if rank > 0:
            rt.send(np.full((2, 3), rank, np.float32), 0, tag=-5)
            return
        found = [np.zeros(6, np.float32) for _ in range(2)]
        senders = [rt.receive(each, None, tag=-5) for each in found]
        assert sorted(senders) == [1, 2]
        assert all((each == sender).all() for each, sender in zip(found, senders, strict=True))

    three.run(run)


def test_what_is_strided_is_sent_and_received(three: World) -> None:
    def run(rank: int) -> None:
        if rank == 0:
            rt.send(np.arange(200.0).reshape(10, 20)[::2, ::3], 2)
        if rank == 2:
            room = np.zeros((10, 14))
            assert rt.receive(room[::2, ::2], 0) == 0
            assert np.array_equal(room[::2, ::2], np.arange(200.0).reshape(10, 20)[::2, ::3])
            assert not room[1::2].any()

    three.run(run)


def test_process_sets_and_collectives_go_on_beside(three: World) -> None:
    def run(rank: int) -> None:
        ends = rt.add_process_set([0, 2])
        total = rt.allreduce_async(np.ones(100_000), op=rt.Sum, name="beside")
        if rank != 1:
            handle = rt.send_async(np.full(100_000, float(rank)), 2 - rank, process_set=ends)
            other = np.zeros(100_000)
            assert rt.receive(other, 2 - rank, process_set=ends) == 2 - rank
            assert (other == 2 - rank).all()
            handle.wait()
        assert (total.wait() == 3).all()
        rt.remove_process_set(ends)

    three.run(run)


@pytest.mark.parametrize("size", [10, 100_000])
def test_another_size_or_dtype_is_told(three: World, size: int) -> None:
    """On both ranks in the same words, unless the sender was done; the next ones are not concerned."""
    told = {}

    def run(rank: int) -> None:
        for room in (np.zeros(size + 1, np.float32), np.zeros(size, np.int32)):
            try:
                if rank == 0:
                    rt.send(np.ones(size, np.float32), 1)
                if rank == 1:
                    rt.receive(room, 0)
            except MismatchError as problem:
                told.setdefault(str(problem).partition(": ")[2], set()).add(rank)
        if rank == 0:
            rt.send(np.ones(size, np.float32), 1)
        if rank == 1:
            room = np.zeros(size, np.float32)
            rt.receive(room, 0)
            assert room.all()

    three.run(run)
    assert list(told) == [
        f"the tensor must be of one dtype and as large on both ranks, but rank 0 sends float32[{size}], where room is for "
        f"{room} (tag 0). Are sends and receives in the same order?"
        for room in (f"float32[{size + 1}]", f"int32[{size}]")
    ]
    assert all(ranks == ({1} if size == 10 else {0, 1}) for ranks in told.values())


def test_bad_arguments_are_this_ranks_alone(three: World) -> None:
    def run(rank: int) -> None:
        array = np.zeros(3)
        with pytest.raises(InvalidArgumentError, match=rf"the other rank must be another one, but is {rank}"):
            rt.send(array, rank)
        with pytest.raises(InvalidArgumentError, match=r"the source must be in \[0, 3\), got 7"):
            rt.receive(array, 7)
        with pytest.raises(InvalidArgumentError, match="tag"):
            rt.send(array, (rank + 1) % 3, tag=1.5)
        array.flags.writeable = False
        with pytest.raises(InvalidArgumentError, match="read-only"):
            rt.receive(array, (rank + 1) % 3)
        assert rt.allreduce(np.ones(1), op=rt.Sum, name="after") == 3

    three.run(run)


@pytest.mark.parametrize("size", [10, 100_000])
def test_who_waits_for_a_rank_that_leaves_is_told(size: int) -> None:
    """It has sent what it had to, and what came before its end is received behind it."""
    with World(2, shutdown_timeout_seconds=60) as world:

        def run(rank: int) -> None:
            if rank == 1:
                handle = rt.send_async(pattern(10, 3), 0)
                handle.wait()
                world.contexts[1].close()
                return
            room = np.zeros(10, np.uint8)
            rt.receive(room, 1)
            assert np.array_equal(room, pattern(10, 3))
            with pytest.raises(ClosedError, match=r"rank 1 has called shutdown\(\), and sends no more"):
                rt.receive(np.zeros(size, np.uint8), 1)
            with pytest.raises(ClosedError, match=r"every other rank has called shutdown\(\)"):
                rt.receive(np.zeros(size, np.uint8))
            world.contexts[0].close()

        world.run(run)


def test_they_are_in_timelines_counters_and_statistics(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        rt.start_timeline(str(tmp_path / "trace.json"))
        for size in (10, 100_000):
            if rank == 0:
                rt.send(pattern(size, 0), 1)
            else:
                rt.receive(np.zeros(size, np.uint8), 0)
        rt.stop_timeline()
        assert rt.counters()["operations"] >= 2 and rt.counters()["bytes"] >= 100_010

    with World(2) as world:
        world.run(run)
    for file, operation in (("trace.json", "send"), ("trace.json.1", "receive")):
        spans = [each for each in json.loads((tmp_path / file).read_text()) if each.get("name") == operation]
        assert [each["args"]["bytes"] for each in spans] == [10, 100_000]


def test_an_abort_ends_what_waits() -> None:
    with World(2) as world:

        def run(rank: int) -> None:
            if rank == 1:
                raise LookupError("planted")
            with pytest.raises(PeerLostError, match="planted"):
                rt.receive(np.zeros(5), 1)

        with pytest.raises(LookupError, match="planted"):
            world.run(run)


def test_a_wait_has_a_deadline(three: World) -> None:
    def run(rank: int) -> None:
        room = np.zeros(4)
        if rank == 0:
            handle = rt.receive_async(room, 1)
            with pytest.raises(rt.errors.TimeoutError):
                handle.wait(0.05)
        rt.barrier()
        if rank == 1:
            rt.send(np.ones(4), 0)
        if rank == 0:
            handle.wait(60)
            assert room.all()

    three.run(run)
