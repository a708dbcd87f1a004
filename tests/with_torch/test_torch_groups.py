"""Groups of torch tensors in place: plain ones are described all at once, and any other group means the same."""

import pytest
import torch

import ringtrain.torch as hvd
from ringtrain.testing import World

torch.set_num_threads(1)


def values(shape, start):
    """Whole numbers from 0 to 2."""
    return ((torch.arange(int(torch.Size(shape).numel())) + start) % 3).reshape(shape).float()


def group_in(make):
    """A group for each rank: what ``make`` makes of values, which differ between tensors and ranks."""
    shapes = [(), (4,), (2, 3), (0,), (1, 2, 1, 2, 3)]
    return lambda rank: [make(values(shape, rank + place)) for place, shape in enumerate(shapes)]


GROUPS = {
    "plain": lambda tensor: tensor,
    "parameters": torch.nn.Parameter,
    "of another dtype": lambda tensor: tensor.to(torch.bfloat16),
    "strided": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "views": lambda tensor: torch.cat([tensor.flatten(), torch.zeros(5)])[: tensor.numel()].view(tensor.shape),
    "negated when read": lambda tensor: torch.complex(0 * tensor.flatten()[:1], 1 + tensor.flatten()[:1]).conj().imag,
    "of NumPy": lambda tensor: torch.from_numpy(tensor.numpy().copy()),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_group_in_place_of_whatever_kind(kind):
    make = group_in(GROUPS[kind])

    def on_rank(rank):
        for turn in range(3):  # the request of the first turn is used again
            given = make(rank)
            if turn == 2:
                given = given[1:]
            before, others = ([tensor.detach().clone() for tensor in make(each)[-len(given) :]] for each in range(2))
            assert hvd.grouped_allreduce_(given, name="group", op=hvd.Max) is given
            for found, one, other in zip(given, before, others, strict=True):
                assert torch.equal(found.detach(), torch.maximum(one, other)), kind

    with World(2) as world:
        world.run(on_rank)


def test_a_group_in_place_with_a_mismatch_names_the_tensor():
    def on_rank(rank):
        with pytest.raises(hvd.HorovodInternalError, match=r"'unequal'.*\[4\], \[5\] on rank 1"):
            hvd.grouped_allreduce_([torch.zeros(4), torch.zeros(4 + rank)], name="unequal")

    with World(2) as world:
        world.run(on_rank)


def test_tensors_of_a_pending_group_stay_in_their_place():
    def on_rank(rank):
        given = [torch.ones(4) for _ in range(3)]
        if rank == 1:
            hvd.barrier()
        handle = hvd.grouped_allreduce_async_(given, name="pending", op=hvd.Sum)
        if rank == 0:
            with pytest.raises(RuntimeError, match="resiz"):
                given[1].resize_(1 << 20)
            hvd.barrier()
        first, _, last = hvd.synchronize(handle)  # torch has given the second its new shape, but no memory for it
        assert first.sum() == last.sum() == 8

    with World(2) as world:
        world.run(on_rank)


def test_a_group_with_a_tensor_without_memory_is_refused_on_all_ranks():
    def on_rank(rank):
        given = [torch.ones(4), torch.ones(4)]
        if rank == 1:
            given[1].untyped_storage().resize_(0)
        with pytest.raises(hvd.HorovodInternalError, match="memory that holds its elements"):
            hvd.grouped_allreduce_(given, name="gone")

    with World(2) as world:
        world.run(on_rank)
