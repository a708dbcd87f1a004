"""Ranks that run out of data: each divisor against its own oracle, what is legal meanwhile, and weighted averages."""

import numpy as np
import pytest
from worlds import World, configurations

import ringtrain as rt
from ringtrain.errors import InvalidArgumentError, MismatchError

SEVERAL = [each for each in configurations(least=2) if each[2] == "auto" and each[0] <= 4]


def steps_of(rank: int) -> int:
    """Batches of a rank: none on rank 0, one more on each rank."""
    return rank


def samples(rank: int, step: int) -> int:
    """Samples in a batch; the last one of each rank is short."""
    return 3 if step + 1 == steps_of(rank) else 8


def gradient(rank: int, step: int) -> np.ndarray:
    """Small integers: sums and their halves, thirds and so on are rounded once, as by the oracle."""
    return (np.arange(1000) * 7 + rank * 5 + step) % 23 - np.float32(11)


ORACLES = {
    "active": lambda parts, size: sum(x for x, _ in parts) / np.float32(len(parts)),
    "initial": lambda parts, size: sum(x for x, _ in parts) / np.float32(size),
    "weighted": lambda parts, size: sum(x * np.float32(w) for x, w in parts) / np.float32(sum(w for _, w in parts)),
}


@pytest.mark.parametrize("policy", ORACLES)
@pytest.mark.parametrize("size, layout, algorithm", SEVERAL, ids=str)
def test_divisor_follows_the_policy(size, layout, algorithm, policy):
    def on_rank(rank):
        results = []
        for step in range(steps_of(rank)):
            weight = samples(rank, step) if policy == "weighted" else None
            results.append(rt.allreduce(gradient(rank, step), "g", weight=weight))
        assert rt.join() == size - 1
        return results

    divisor = "initial" if policy == "initial" else "active"
    with World(size, layout, algorithm=algorithm, join_divisor=divisor) as world:
        for results in world.run(on_rank):
            for step, found in enumerate(results):
                parts = [(gradient(r, step), samples(r, step)) for r in range(size) if step < steps_of(r)]
                np.testing.assert_array_equal(found, ORACLES[policy](parts, size))


def test_oracles_differ():
    """Else one policy would pass for another."""
    parts = [(gradient(r, 0), samples(r, 0)) for r in range(1, 3)]
    results = [oracle(parts, 3) for oracle in ORACLES.values()]
    assert not any(np.array_equal(a, b) for i, a in enumerate(results) for b in results[:i])


@pytest.mark.least_ranks(2)
def test_every_operation_goes_on_without_rank_0(world):
    def on_rank(rank):
        size = rt.size()
        if rank > 0:
            x = np.full((size, 2), rank, np.float32)
            actives = list(range(1, size))
            assert rt.allreduce(x, "sum", rt.Sum)[0, 0] == sum(actives)
            assert rt.allreduce(x, "min", rt.Min)[0, 0] == 1
            assert rt.allgather(x[:rank], "rows")[:, 0].tolist() == [r for r in actives for _ in range(r)]
            assert rt.broadcast(x, 1, "root")[0, 0] == 1
            received, splits = rt.alltoall(x, [1] * size, "all")
            assert received[:, 0].tolist() == actives and splits.tolist() == [0] + [1] * (size - 1)
            assert rt.reducescatter(x, "scatter", rt.Sum).tolist() == [[sum(actives)] * 2]
            rt.barrier()
            with pytest.raises(MismatchError, match="root 0 has joined and has nothing to send"):
                rt.broadcast(x, 0, "gone")
        rt.join()
        assert rt.allreduce(np.ones(1), "afterwards", rt.Sum) == [size]

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_a_new_process_set_counts_a_joined_rank_as_a_member(world):
    def on_rank(rank):
        both = rt.add_process_set([0, 1])
        if rank != 0:
            rt.allreduce(np.ones(1), "one more")
        rt.join()
        if rank < 2:
            assert rt.allreduce(np.ones(1), "in the set", rt.Sum, process_set=both) == [2]

    world.run(on_rank)


@pytest.mark.parametrize("size, layout, algorithm", SEVERAL, ids=str)
def test_weight_zero_contributes_nothing(size, layout, algorithm):
    """Not even a NaN; and float16 sums of heavy weights do not overflow between hosts."""

    def on_rank(rank):
        x = np.full(7, np.nan if rank == 0 else 20000.0, np.float16)
        for weight in (1 << 20, 12345):  # the second time known to the cache, but not with these weights
            heavy = rt.allreduce(x, "heavy", weight=0 if rank == 0 else weight)
            np.testing.assert_allclose(heavy.astype(np.float64), 20000.0, rtol=2e-3)
        narrow = rt.allreduce(x.astype(np.float32), "narrow", compression="float16", weight=0 if rank == 0 else 5)
        np.testing.assert_allclose(narrow, 20000.0, rtol=2e-3)
        return heavy.tobytes()

    with World(size, layout, algorithm=algorithm) as world:
        assert len(set(world.run(on_rank))) == 1


@pytest.mark.least_ranks(2)
def test_weights_that_do_not_fit(world):
    x = np.ones(3, np.float32)

    def on_rank(rank):
        with pytest.raises(MismatchError, match="weighting must be the same on all ranks"):
            rt.allreduce(x, "some", weight=1 if rank == 0 else None)
        with pytest.raises(MismatchError, match="some weight must be above 0"):
            rt.allreduce(x, "none", weight=0)
        with pytest.raises(InvalidArgumentError, match="only an average may be weighted"):
            rt.allreduce(x, "sum", rt.Sum, weight=1)
        with pytest.raises(InvalidArgumentError, match=r"needs floating-point tensors, but found int32\[3\]"):
            rt.allreduce(x.astype(np.int32), "integers", weight=1)
        with pytest.raises(InvalidArgumentError, match=r"the weight must be in \[0, "):
            rt.allreduce(x, "negative", weight=-1)
        assert rt.allreduce(x, "afterwards", weight=rank + 1).tolist() == [1.0] * 3

    world.run(on_rank)
