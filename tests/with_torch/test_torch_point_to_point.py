"""``send`` and ``recv`` of the backend "ringtrain", as torch's functions call them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from ringtrain._runtime import context
from ringtrain.errors import MismatchError
from ringtrain.errors import TimeoutError as RingtrainTimeout
from ringtrain.torch.distributed.process_group import RingtrainProcessGroup

pytestmark = pytest.mark.least_ranks(2)
DTYPES = [torch.float32, torch.complex64, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.bfloat16]


def group(seconds: float = 60) -> RingtrainProcessGroup:
    return RingtrainProcessGroup(context.current(), "0", timedelta(seconds=seconds))


def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank sends: numbers that its neighbours do not."""
    count = torch.Size(shape).numel()
    return (
        ((torch.arange(count) + rank) % 2 if dtype is torch.bool else torch.arange(count) % 50 + rank)
        .to(dtype)
        .view(shape)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (), (3, 4), (100, 700)], ids=str)
def test_around_the_ring(world, dtype, shape):
    def on_rank(rank):
        ours, size = group(), world.size
        found = torch.zeros(shape).to(dtype)
        sent = ours.send([of(rank, *shape, dtype=dtype)], (rank + 1) % size, 3)
        work = ours.recv([found], (rank - 1) % size, 3)
        assert work.wait() and sent.wait() and work._source_rank() == (rank - 1) % size
        wanted = of((rank - 1) % size, *shape, dtype=dtype)
        assert torch.equal(found.view(torch.uint8) if shape else found, wanted.view(torch.uint8) if shape else wanted)
        assert work.result()[0] is found

    world.run(on_rank)


def test_tensors_that_are_not_contiguous(world):
    def on_rank(rank):
        ours = group()
        if rank == 0:
            ours.send([of(5, 40, 60).t()[::2]], 1, 0).wait()
        if rank == 1:
            room = torch.zeros(30, 80)
            ours.recv([room[:, ::2]], 0, 0).wait()
            assert torch.equal(room[:, ::2], of(5, 40, 60).t()[::2]) and not room[:, 1::2].any()

    world.run(on_rank)


def test_any_source_tells_whose_it_was(world):
    def on_rank(rank):
        ours = group()
        if rank > 0:
            ours.send([of(rank, 5)], 0, 2).wait()
            return
        senders = []
        for _ in range(world.size - 1):
            found = torch.zeros(5)
            work = ours.recv_anysource([found], 2)
            work.wait()
            senders.append(work._source_rank())
            assert torch.equal(found, of(senders[-1], 5))
        assert sorted(senders) == list(range(1, world.size))

    world.run(on_rank)


def test_a_recv_that_nobody_sends_for_ends_at_its_deadline(world):
    def on_rank(rank):
        if rank == 0:
            with pytest.raises(RingtrainTimeout, match="Timed out after 0.2 s"):
                group(0.2).recv([torch.zeros(3)], 1, 0).wait()

    world.run(on_rank)


def test_numbers_of_collectives_are_not_those_of_sends(world):
    """Ranks that have sent other counts of tensors agree on collectives all the same."""

    def on_rank(rank):
        ours = group()
        for _ in range(3):
            if rank == 0:
                ours.send([torch.ones(2)], 1, 0).wait()
            if rank == 1:
                ours.recv([torch.ones(2)], 0, 0).wait()
        total = torch.ones(4)
        ours.allreduce([total]).wait()
        assert total.tolist() == [world.size] * 4

    world.run(on_rank)


def test_groups_of_one_world_keep_theirs_apart(world):
    def on_rank(rank):
        one, other = group(), group()
        if rank == 0:
            for ours, number in ((other, 2.0), (one, 1.0)):
                ours.send([torch.full((3,), number)], 1, 0).wait()
        if rank == 1:
            for ours, number in ((one, 1.0), (other, 2.0)):
                found = torch.zeros(3)
                ours.recv([found], 0, 0).wait()
                assert found[0] == number

    world.run(on_rank)


def test_another_size_is_refused(world):
    def on_rank(rank):
        ours = group()
        with pytest.raises(MismatchError, match=r"sends float32\[50000\], where room is for float32\[50001\]"):
            if rank == 0:
                ours.send([torch.zeros(50_000)], 1, 0).wait()
            elif rank == 1:
                ours.recv([torch.zeros(50_001)], 0, 0).wait()
            else:
                raise MismatchError("sends float32[50000], where room is for float32[50001]")

    world.run(on_rank)
