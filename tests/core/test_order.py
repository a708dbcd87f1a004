"""The bits of a sum depend on (tensor, element, world) alone: not on submission order, fusion, timing or the cache."""

import time

import numpy as np
import oracle
import pytest
from worlds import World, configurations, sizes

import ringtrain as rt

COUNTS = [1, 7, 1000, 4099, 64, 513, 20011, 2, 300]
NAMES = [f"gradient.{i}" for i in range(len(COUNTS))]


def gradients(rank, dtype):
    random = np.random.default_rng(rank)
    return [random.standard_normal(count).astype(dtype) for count in COUNTS]


def step(rank, dtype, seed, pause=0.0):
    """One step of asynchronous operations in an order of this rank's own; the results in the order of NAMES."""
    random = np.random.default_rng([rank, seed])
    tensors, handles = gradients(rank, dtype), {}
    for place in random.permutation(len(COUNTS)):
        handles[place] = rt.allreduce_async(tensors[place], NAMES[place], rt.Average)
        if pause:
            time.sleep(random.uniform(0, pause))
    return [rt.synchronize(handles[place]).tobytes() for place in range(len(COUNTS))]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("size, layout, algorithm", configurations(least=2), ids=str)
def test_same_bits_however_it_is_run(size, layout, algorithm, dtype):
    bits = {}
    ways = [
        {},
        {"fusion_threshold_bytes": 0},
        {"fusion_threshold_bytes": 5000},
        {"cache_capacity": 0},
        {"cache_capacity": 3},
        {"spin_microseconds": 100},
    ]
    for way in ways:
        with World(size, layout, algorithm=algorithm, **way) as world:
            for seed in range(2):
                for results in world.run(step, dtype, seed):
                    bits.setdefault("first", results)
                    assert results == bits["first"], way
    with World(size, layout, algorithm=algorithm) as world:
        for results in world.run(step, dtype, 9, 0.002):
            assert results == bits["first"], "with pauses"


@pytest.mark.parametrize("size", sizes())
def test_one_host_adds_in_rank_order(size):
    """Random float32, whose sum depends on the order: equal to the oracle's, which adds in rank order."""
    inputs = [np.random.default_rng(rank).standard_normal(30011).astype(np.float32) for rank in range(size)]
    expected = oracle.allreduce(inputs)[0]
    with World(size, chunk_bytes=4096) as world:
        for found in world.run(lambda rank: rt.allreduce(inputs[rank], "sum", rt.Sum)):
            assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", sizes(least=2))
def test_sixteen_bits_are_rounded_once(size):
    """Added in float32 and rounded at the end: what is lost when every partial sum is rounded survives."""
    inputs = [np.array([2048.0 if rank == 0 else 0.75], np.float16) for rank in range(size)]
    expected = np.float16(np.float32(2048.0) + np.float32(0.75) * np.float32(size - 1))
    with World(size) as world:
        for found in world.run(lambda rank: rt.allreduce(inputs[rank], "half", rt.Sum)):
            assert found[0] == expected
