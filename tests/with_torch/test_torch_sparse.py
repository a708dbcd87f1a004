"""Sums of sparse tensors: values, what travels, and shapes that differ."""

import copy

import pytest
import torch
from torch_models import assert_replicas_equal, assert_same_bits
from worlds import World, sizes

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._runtime.context import current
from ringtrain.torch import sparse

torch.set_num_threads(1)


def entries(rank: int, dtype: torch.dtype = torch.float32, dense: tuple[int, ...] = (2,)) -> torch.Tensor:
    """5 rows, of which each rank has some: a duplicate, one that everybody has, one of its own; rank 1 has none."""
    rows = torch.tensor([[3, 0, 3, 1 + rank % 2]]) if rank != 1 else torch.empty(1, 0, dtype=torch.int64)
    values = (torch.arange(rows.shape[1]) + rank + 1).reshape(-1, *[1] * len(dense)).expand(-1, *dense).to(dtype)
    return torch.sparse_coo_tensor(rows, values, (5, *dense), check_invariants=True)


def dense_sum(ranks: int, dtype: torch.dtype, dense: tuple[int, ...]) -> torch.Tensor:
    return sum(entries(rank, torch.float64, dense).to_dense() for rank in range(ranks)).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
def test_sparse_sums(world, dtype):
    def on_rank(rank):
        for dense in ((), (2,), (2, 3)):
            mine = entries(rank, dtype, dense)
            before = mine.clone()
            total = dense_sum(world.size, dtype, dense)
            average = (total.double() / world.size).to(dtype)
            for operate, expected in (
                (lambda: hvd.sparse_allreduce_async(mine, "x", hvd.Sum)(), total),
                (lambda: hvd.synchronize(hvd.sparse_allreduce_async(mine, name="x", op=hvd.Average)), average),
                (lambda: hvd.allreduce(mine, name="x", op=hvd.Sum), total),
                (lambda: hvd.synchronize(hvd.allreduce_async(mine)), average),
                (lambda: hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5), total),
            ):
                found = operate()
                assert found.is_coalesced() and found.dtype == dtype and found.shape == expected.shape
                torch.testing.assert_close(found.to_dense(), expected)
                assert_replicas_equal([found.indices(), found.values()])
            assert_same_bits([mine._indices(), mine._values()], [before._indices(), before._values()])

    world.run(on_rank)


@pytest.mark.least_ranks(3)
def test_an_average_of_another_divisor_is_noticed(world, monkeypatch):
    """The planted fault: ranks without entries are not counted."""
    monkeypatch.setattr(sparse, "_all_members", lambda context, process_set: context.size - 1)

    def on_rank(rank):
        found = hvd.allreduce(entries(rank), name="x").to_dense()
        with pytest.raises(AssertionError):
            torch.testing.assert_close(found, dense_sum(world.size, torch.float32, (2,)) / world.size)

    world.run(on_rank)


def test_duplicates_do_not_travel(world):
    def on_rank(rank):
        rows = torch.zeros(1, 1000, dtype=torch.int64)
        mine = torch.sparse_coo_tensor(rows, torch.ones(1000, 4), (8, 4), check_invariants=True)
        before = rt.counters()["bytes"]
        assert hvd.allreduce(mine, op=hvd.Sum).to_dense()[0].tolist() == [1000.0 * world.size] * 4
        assert rt.counters()["bytes"] - before < 100

    world.run(on_rank)


def test_several_sparse_dimensions(world):
    def on_rank(rank):
        mine = torch.eye(3).to_sparse() * (rank + 1)
        found = hvd.allreduce(mine, name="eye", op=hvd.Sum)
        assert found.sparse_dim() == 2
        assert torch.equal(found.to_dense(), torch.eye(3) * sum(range(1, world.size + 1)))

    world.run(on_rank)


def test_an_embedding_trains_as_one_process(world):
    """Gradients go through the reduction by hand, as an optimizer's hook would send them."""
    words = torch.arange(4 * world.size).reshape(world.size, 4) % 7
    torch.manual_seed(3)
    start = torch.nn.Embedding(7, 2, sparse=True, dtype=torch.float64)
    whole = copy.deepcopy(start)
    whole(words.flatten()).square().sum().backward()

    def on_rank(rank):
        module = copy.deepcopy(start)
        module(words[rank]).square().sum().backward()
        pending = sparse.SparseAllreduce(current(), module.weight.grad, "embedding", hvd.Sum)
        torch.testing.assert_close(pending.wait().to_dense(), whole.weight.grad.to_dense())
        assert pending.done() and pending() is pending.wait()

    world.run(on_rank)


@pytest.mark.parametrize("size", sizes(2))
@pytest.mark.parametrize("divisor", ["active", "initial"])
def test_beside_a_rank_that_has_joined(size, divisor):
    def on_rank(rank):
        if rank > 0:
            found = hvd.allreduce(entries(2), name="x").to_dense()
            contributions = size - 1
            expected = entries(2).to_dense() * contributions / (contributions if divisor == "active" else size)
            torch.testing.assert_close(found, expected)
        hvd.join()

    with World(size, join_divisor=divisor) as world:
        world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_weights_on_some_ranks(world):
    def on_rank(rank):
        with pytest.raises(rt.RingtrainError, match=r"weight must be given on all ranks or on none.*\[2, None"):
            hvd.allreduce(entries(0), name="x", **({"weight": 2} if rank == 0 else {}))
        with pytest.raises(ValueError, match="weight"):
            hvd.allreduce(entries(0), name="y", op=hvd.Sum, weight=2)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_shapes_that_differ(world):
    def on_rank(rank):
        handle = hvd.sparse_allreduce_async(torch.eye(3 + (rank == 1)).to_sparse(), "x", hvd.Sum)
        with pytest.raises(rt.RingtrainError, match=r"sparse allreduce 'x': shape must.*\[3, 3\].*\[4, 4\]"):
            handle.wait()
        rt.barrier()

    world.run(on_rank)
