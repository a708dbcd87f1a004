"""Each collective of the backend "ringtrain" against what torch.distributed says it does, called as torch's functions call it."""

import functools
import gc
import operator
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import ringtrain as rt
from ringtrain._runtime import context, exits
from ringtrain.errors import InvalidArgumentError
from ringtrain.torch.distributed import calls
from ringtrain.torch.distributed.completions import Completions
from ringtrain.torch.distributed.process_group import RingtrainProcessGroup

DEADLINE = timedelta(seconds=60)


def group(name="0"):
    return RingtrainProcessGroup(context.current(), name, DEADLINE)


def reducing(options, op, root=0):
    options.reduceOp = op
    if hasattr(options, "rootRank"):
        options.rootRank = root
    return options


def rooted(options, root):
    options.rootRank = root
    return options


def of(rank, *shape, dtype=torch.float32):
    """What a rank contributes: numbers that no other rank has."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) + 100 * rank + 1).to(dtype).reshape(shape)


OPERATORS = {
    "SUM": sum,
    "AVG": lambda all: sum(all) / len(all),
    "MIN": lambda all: torch.stack(all).amin(0),
    "MAX": lambda all: torch.stack(all).amax(0),
    "PRODUCT": lambda all: torch.stack(all).prod(0),
}


OF_BITS = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}


@pytest.mark.parametrize("name", OF_BITS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_all_reduce_of_bits(world, name, dtype):
    def on_rank(rank):
        tensors = [torch.tensor([0, 1, 6 >> each, each]).to(dtype) for each in range(world.size)]
        found = tensors[rank].clone()
        assert group().allreduce([found], reducing(c10d.AllreduceOptions(), getattr(dist.ReduceOp, name))).wait()
        assert torch.equal(found, functools.reduce(OF_BITS[name], tensors))

    world.run(on_rank)


@pytest.mark.parametrize("name", OPERATORS)
def test_all_reduce(world, name):
    def on_rank(rank):
        tensor = of(rank, 2, 3, dtype=torch.float64)
        assert group().allreduce([tensor], reducing(c10d.AllreduceOptions(), getattr(dist.ReduceOp, name))).wait()
        torch.testing.assert_close(
            tensor, OPERATORS[name]([of(each, 2, 3, dtype=torch.float64) for each in range(world.size)])
        )

    world.run(on_rank)


def test_all_reduce_of_factors_strides_and_several(world):
    def on_rank(rank):
        ours, size = group(), world.size
        twice = of(rank, 3)
        ours.allreduce([twice], reducing(c10d.AllreduceOptions(), dist._make_nccl_premul_sum(2.0))).wait()
        assert torch.equal(twice, 2 * sum(of(each, 3) for each in range(size)))
        strided = of(rank, 4, 4).t()[1:]
        ours.allreduce([strided]).wait()
        assert torch.equal(strided, sum(of(each, 4, 4).t()[1:] for each in range(size)))
        several = [of(rank, 2), of(rank, 5)]
        ours.allreduce_coalesced(several).wait()
        assert all(torch.equal(each, sum(of(r, *each.shape) for r in range(size))) for each in several)

    world.run(on_rank)


def test_sparse_sum(world):
    def on_rank(rank):
        tensor = torch.sparse_coo_tensor([[rank, 0]], [1.0, 2.0], (world.size,), check_invariants=True)
        group().allreduce([tensor]).wait()
        wanted = torch.ones(world.size)
        wanted[0] += 2 * world.size
        assert torch.equal(tensor.to_dense(), wanted)

    world.run(on_rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e4m3fn])
def test_broadcast(world, dtype):
    def on_rank(rank):
        root = world.size - 1
        tensor, scalar = of(rank, 3, 2, dtype=dtype), torch.tensor(float(rank))
        group().broadcast([tensor], rooted(c10d.BroadcastOptions(), root)).wait()
        group("1").broadcast([scalar], rooted(c10d.BroadcastOptions(), root)).wait()
        assert tensor.view(torch.uint8).equal(of(root, 3, 2, dtype=dtype).view(torch.uint8)) and scalar == root

    world.run(on_rank)


def test_reduce_leaves_the_others_alone(world):
    def on_rank(rank):
        root, tensor = world.size - 1, of(rank, 3)
        group().reduce([tensor], reducing(c10d.ReduceOptions(), dist.ReduceOp.SUM, root)).wait()
        wanted = sum(of(each, 3) for each in range(world.size)) if rank == root else of(rank, 3)
        assert torch.equal(tensor, wanted)

    world.run(on_rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_all_gather(world, dtype):
    def on_rank(rank):
        ours, size = group(), world.size
        listed = [torch.zeros(each + 1, 2, dtype=dtype) for each in range(size)]
        ours.allgather([listed], [of(rank, rank + 1, 2, dtype=dtype)]).wait()
        assert all(torch.equal(each, of(r, r + 1, 2, dtype=dtype)) for r, each in enumerate(listed))
        several = [[torch.zeros(2, dtype=dtype), torch.zeros(r + 1, dtype=dtype)] for r in range(size)]
        ours.allgather_coalesced(several, [of(rank, 2, dtype=dtype), of(rank, rank + 1, dtype=dtype)]).wait()
        assert all(
            torch.equal(each, of(r, *each.shape, dtype=dtype)) for r, pair in enumerate(several) for each in pair
        )
        one = torch.zeros(size * 3, dtype=dtype)
        ours._allgather_base(one, of(rank, 3, dtype=dtype), c10d.AllgatherOptions()).wait()
        whole = torch.cat([of(each, 3, dtype=dtype) for each in range(size)])
        assert torch.equal(one, whole)
        some = [torch.zeros(size, 3, dtype=dtype), torch.zeros(size, dtype=dtype)]
        ours.allgather_into_tensor_coalesced(some, [of(rank, 3, dtype=dtype), of(rank, 1, dtype=dtype)]).wait()
        assert torch.equal(some[0].reshape(-1), whole) and torch.equal(some[1], whole[::3])

    world.run(on_rank)


def test_reduce_scatter(world):
    def on_rank(rank):
        ours, size = group(), world.size
        total = sum(of(each, size, 2) for each in range(size))
        one, listed = torch.zeros(2), torch.zeros(1, 2)
        ours._reduce_scatter_base(one, of(rank, size * 2), c10d.ReduceScatterOptions()).wait()
        ours.reduce_scatter([listed], [list(of(rank, size, 1, 2))], c10d.ReduceScatterOptions()).wait()
        assert torch.equal(one, total[rank]) and torch.equal(listed[0], total[rank])
        unequal = torch.zeros(rank + 1)
        ours.reduce_scatter([unequal], [[of(rank, each + 1) for each in range(size)]]).wait()
        assert torch.equal(unequal, sum(of(each, rank + 1) for each in range(size)))
        some = [torch.zeros(2), torch.zeros(1)]
        ours.reduce_scatter_tensor_coalesced(some, [of(rank, size, 2), of(rank, size)]).wait()
        assert torch.equal(some[0], total[rank]) and some[1] == sum(of(each, size)[rank] for each in range(size))

    world.run(on_rank)


def test_all_to_all(world):
    def on_rank(rank):
        ours, size = group(), world.size
        equal = torch.zeros(size)
        ours.alltoall_base(equal, of(rank, size), [], []).wait()
        assert torch.equal(equal, torch.stack([of(each, size)[rank] for each in range(size)]))
        sent = [each + 1 for each in range(size)]
        rows = torch.zeros(size * (rank + 1), 2)
        ours.alltoall_base(rows, of(rank, sum(sent), 2), [rank + 1] * size, sent).wait()
        assert torch.equal(rows, torch.cat([of(each, sum(sent), 2).split(sent)[rank] for each in range(size)]))
        listed = [torch.zeros(each) for each in range(size)]
        ours.alltoall(listed, [of(10 * rank + each, rank) for each in range(size)]).wait()
        assert all(torch.equal(each, of(10 * r + rank, r)) for r, each in enumerate(listed))

    world.run(on_rank)


def test_results_are_written_where_they_belong(world, monkeypatch):
    """By the core itself, also through lists whose tensors lie one behind the other: nothing is dealt out afterwards."""
    monkeypatch.setattr(calls, "deal", None)

    def on_rank(rank):
        ours, size = group(), world.size
        everyone = torch.cat([of(each, 6) for each in range(size)])
        gathered = torch.zeros(6 * size)
        ours.all_gather_single(gathered, of(rank, 6)).wait()
        assert torch.equal(gathered, everyone)
        ours.allgather([list(gathered.zero_().chunk(size))], [of(rank, 6)]).wait()
        assert torch.equal(gathered, everyone)
        sums = torch.zeros(6)
        ours.reduce_scatter_single(sums, everyone).wait()
        assert torch.equal(sums, size * of(rank, 6))
        ours.all_to_all_single(gathered.zero_(), of(rank, size, 6).view(-1), [], []).wait()
        assert torch.equal(gathered, torch.cat([of(each, size, 6)[rank] for each in range(size)]))
        flags = torch.zeros(size, 2, dtype=torch.bool)  # which the core does not know, and moves as bytes
        ours.all_gather_single(flags, torch.tensor([rank == 0, True])).wait()
        assert torch.equal(flags, torch.tensor([[each == 0, True] for each in range(size)]))

    world.run(on_rank)


@pytest.mark.parametrize("elsewhere", [0, 1], ids=["at its own place", "elsewhere"])
def test_inputs_that_lie_within_outputs(world, elsewhere):
    """FSDP2 gathers in place. Where the memory is shared in another way, the core gets none of it for the result."""

    def on_rank(rank):
        ours, size, count = group(), world.size, 100_000
        memory = torch.zeros(count * size + 1)
        own = memory[rank * count + elsewhere :][:count]
        own.copy_(of(rank, count))
        ours.all_gather_single(memory[: count * size], own).wait()
        assert torch.equal(memory[: count * size], torch.cat([of(each, count) for each in range(size)]))

        everyone = torch.arange(float(count * size + 1))
        expected = size * torch.arange(float(count * size))[rank * count :][:count]
        ours.reduce_scatter_single(everyone[rank * count + elsewhere :][:count], everyone[: count * size]).wait()
        assert torch.equal(everyone[rank * count + elsewhere :][:count], expected)

        exchanged = torch.zeros(count * size + 1)
        exchanged[elsewhere:][: count * size].copy_(of(rank, count * size))
        ours.all_to_all_single(exchanged[: count * size], exchanged[elsewhere:][: count * size], [], []).wait()
        assert torch.equal(
            exchanged[: count * size],
            torch.cat([of(each, count * size)[rank * count :][:count] for each in range(size)]),
        )

    world.run(on_rank)


def test_gather_and_scatter(world):
    def on_rank(rank):
        ours, size, root = group(), world.size, world.size // 2
        listed = [torch.zeros(2) for _ in range(size)]
        ours.gather([listed] if rank == root else [], [of(rank, 2)], rooted(c10d.GatherOptions(), root)).wait()
        wanted = [of(each, 2) if rank == root else torch.zeros(2) for each in range(size)]
        assert all(torch.equal(*pair) for pair in zip(listed, wanted, strict=True))
        own = torch.zeros(2)
        parts = [[of(each, 2) for each in range(size)]] if rank == root else []
        ours.scatter([own], parts, rooted(c10d.ScatterOptions(), root)).wait()
        assert torch.equal(own, of(rank, 2))

    world.run(on_rank)


EACH_TORCH = pytest.mark.parametrize("keeps_works", [True, False], ids=["torch 2.8", "torch 2.4"])


@EACH_TORCH
def test_futures_and_their_callbacks_that_wait_for_further_collectives(world, monkeypatch, keeps_works):
    monkeypatch.setattr(calls, "KEEPS_WORKS", keeps_works)

    def on_rank(rank):
        ours, size = group(), world.size

        def once_more(future):
            return ours.allreduce([future.value()[0] * 2]).get_future().wait()[0]

        chains = [ours.allreduce([torch.ones(2)]).get_future().then(once_more) for _ in range(4 if size == 1 else 1)]
        for chain in chains:
            assert torch.equal(chain.wait(), torch.full((2,), 2.0 * size * size))
        gathered = torch.zeros(size)
        work = ours._allgather_base(gathered, torch.tensor([float(rank)]))
        assert torch.equal(work.get_future().wait()[0], torch.arange(float(size)))
        awaited = ours.allreduce([torch.ones(2)])
        awaited.wait()
        assert torch.equal(awaited.get_future().value()[0], torch.full((2,), float(size)))
        ours.barrier().wait()

    world.run(on_rank)


@EACH_TORCH
def test_small_works_that_nobody_has_waited_for_live_on(world, monkeypatch, keeps_works):
    """Before torch 2.8 all do. C++ may wait for them, as DDP's reducer does within join(): without it torch's own case of that hangs."""
    monkeypatch.setattr(calls, "KEEPS_WORKS", keeps_works)

    def on_rank(rank):
        ours = group()
        for _ in range(100):
            ours.allreduce([torch.ones(1)])
            ours.allreduce([torch.ones(5000)])
            ours.allreduce([torch.ones(1)]).wait()
        gc.collect()
        if keeps_works:
            assert len(ours._way._dropped) == 64 and all(work.result()[0].numel() == 1 for work in ours._way._dropped)
        else:
            assert len(list(ours._way._held)) == 200
        for work in ours._way._dropped if keeps_works else ours._way._held:
            work.wait()
            assert (work.get_future().value()[0] == float(world.size)).all()
        assert keeps_works or not list(ours._way._held)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_errors_keep_their_words_on_all_ranks(world):
    def on_rank(rank):
        ours = group()
        with pytest.raises(
            rt.errors.MismatchError, match=r"torch\.distributed\.0\.0': shape must be the same on all ranks"
        ):
            ours.allreduce([torch.ones(rank + 1)]).wait()
        with pytest.raises(rt.errors.MismatchError, match="operation must be the same on all ranks"):
            (ours.allreduce([torch.ones(2)]) if rank else ours.broadcast([torch.ones(2)])).wait()
        with pytest.raises(RuntimeError, match="MismatchError.*dtype must be the same on all ranks"):
            ours.allreduce([torch.ones(2, dtype=torch.float64 if rank else None)]).get_future().wait()
        failing = ours.allreduce([torch.ones(rank + 1)])
        with pytest.raises(rt.errors.MismatchError):
            failing.wait()
        assert failing.is_completed() and not failing.is_success() and "shape must be" in str(failing.exception())
        # What one rank alone sees to be wrong reaches the others, which wait for it.
        with pytest.raises(rt.errors.InvalidArgumentError, match="splits that add up to the 3 rows"):
            ours.alltoall_base(torch.zeros(3), torch.zeros(3), [], [] if rank else [3] * world.size).wait()
        tensor = torch.ones(2)
        ours.allreduce([tensor]).wait()
        assert tensor[0] == world.size

    world.run(on_rank)


def test_results_without_memory_of_their_own_are_refused_on_all_ranks(world):
    def on_rank(rank):
        ours = group()
        with pytest.raises(
            rt.errors.InvalidArgumentError, match="each element of a result must have memory of its own"
        ):
            ours.allreduce([torch.ones(1).expand(4) if rank == 0 else torch.ones(4)]).wait()

    world.run(on_rank)


def test_a_future_ends_where_results_find_no_place(world):
    """That only shows behind the operation: torch refuses to copy into the output."""

    def on_rank(rank):
        ours = group()
        work = ours.all_gather_single(torch.zeros(1).expand(2 * world.size), torch.ones(2))
        with pytest.raises(RuntimeError, match="single memory location"):
            work.get_future().wait()
        assert "single memory location" in str(work.exception()) and not work.is_success()
        with pytest.raises(RuntimeError, match="single memory location"):
            work.wait()
        ours.allreduce([torch.ones(1)]).get_future().wait()

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_a_wait_has_a_deadline(world):
    late = threading.Event()

    def on_rank(rank):
        ours = group()
        if rank == 0:
            work = ours.barrier()
            with pytest.raises(TimeoutError):
                work.wait(timedelta(seconds=0.05))
            late.set()
            work.wait()
        else:
            late.wait(2)  # the event of another process does not come
            ours.barrier().wait()

    world.run(on_rank)


@pytest.mark.parametrize("kind, of_a_peer", [(rt.errors.PeerLostError, True), (rt.errors.MismatchError, False)])
def test_what_a_future_says_of_a_peer_counts_as_the_peers_error(kind, of_a_peer):
    """Through one future and through two, as in DDP with a hook."""

    def fail(_):
        raise kind("rank 1 on host 'a': expected it to live until shutdown() but its process has ended")

    begun = torch.futures.Future()
    failed = begun.then(fail)
    begun.set_result(None)
    for future in (failed, failed.then(lambda done: done.value())):
        with pytest.raises(RuntimeError) as met:
            future.wait()
        assert exits.error_of_a_peer(met.value) is (met.value if of_a_peer else None), met.value


stores = []


def barriers(world, enter):
    """What each rank of a world gets of ``enter(its barriers, its number)``: None, or the text of the RuntimeError."""
    store = dist.HashStore()
    stores.append(store)

    def on_rank(rank):
        ours = RingtrainProcessGroup(context.current(), "0", DEADLINE, store=store)
        try:
            return enter(ours, rank)
        except RuntimeError as problem:
            return str(problem)

    return world.run(on_rank)


def test_a_monitored_barrier_waits_for_all(world):
    come = []

    def enter(ours, rank):
        for _ in range(3):
            come.append(rank)
            ours.monitored_barrier()
            assert len(set(come)) == world.size

    assert barriers(world, enter) == [None] * world.size
    assert all(store.num_keys() <= 2 * world.size for store in stores)


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_monitored_barrier_names_who_is_missing(world, all_ranks):
    absent = list(range(1, world.size))[-2:]
    seconds = timedelta(seconds=0.3)
    told = barriers(world, lambda ours, rank: None if rank in absent else ours.monitored_barrier(seconds, all_ranks))
    if not absent:
        assert told == [None]
        return
    several = f"Ranks {', '.join(map(str, absent))}" if all_ranks else f"Rank {absent[0]}"
    assert told[0] == f"[Rank 0]: {several} failed to pass monitoredBarrier in 300 ms"
    for rank in set(range(1, world.size)) - set(absent):
        assert f"Rank {rank} successfully reached monitoredBarrier, but received errors" in told[rank]


def test_refusals(world):
    def on_rank(rank):
        ours = group()
        with pytest.raises(InvalidArgumentError, match="reduction bitand needs integers or bool, but found float32"):
            ours.allreduce([torch.ones(1)], reducing(c10d.AllreduceOptions(), dist.ReduceOp.BAND)).wait()

    world.run(on_rank)


def test_completions_of_callbacks_that_need_each_other():
    """However deep: the callback of each job waits until the next one's has been called."""
    completions, called = Completions(), [threading.Event() for _ in range(20)]

    def complete(place):
        if place + 1 < len(called):
            assert called[place + 1].wait(60)
        called[place].set()

    for place in range(len(called)):
        completions.add(lambda: None, lambda place=place: complete(place))
    assert called[0].wait(60)
    completions.close()
