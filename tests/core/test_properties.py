"""Properties of negotiation and tensor fusion, over programs that hypothesis makes up and shrinks.

A program is a list of operations that every rank submits, each rank in an order of its own. Whatever the order, the
fusion threshold, the cache and the layout, every operation gives what NumPy gives, runs once, and batches obey the
threshold. In process only: hypothesis decides from what it sees, so the ranks of a launched world would part.
"""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringtrain as rt
from ringtrain.testing import World

DTYPES = [np.int32, np.int64, np.float32, np.float64, np.uint8]
KINDS = ["sum", "max", "gather", "broadcast"]

operations = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(DTYPES), st.integers(0, 3000)), min_size=1, max_size=24
)
layouts = st.sampled_from([(2, None), (3, None), (3, "2+1"), (4, "2+2"), (2, "1+1"), (1, None)])
options = st.fixed_dictionaries(
    {
        "fusion_threshold_bytes": st.sampled_from([0, 1, 1000, 64 << 20]),
        "cache_capacity": st.sampled_from([0, 1, 5, 1024]),
        "chunk_bytes": st.sampled_from([0, 4096]),
    }
)


def value_of(rank, place, dtype, count):
    """Small integers, so that sums are exact in every dtype."""
    return ((np.arange(count) * 7 + 3 * place + rank) % 11).astype(dtype)


def submit(rank, place, kind, dtype, count):
    """Submits operation ``place`` of the program on this rank."""
    tensor, name = value_of(rank, place, dtype, count), f"op.{place}"
    if kind == "gather":
        return rt.allgather_async(tensor[: count // (rank + 1)], name)
    if kind == "broadcast":
        return rt.broadcast_async(tensor, place % rt.size(), name)
    return rt.allreduce_async(tensor, name, rt.Sum if kind == "sum" else rt.Max)


def expected(size, place, kind, dtype, count):
    """What NumPy says about it."""
    contributions = [value_of(rank, place, dtype, count) for rank in range(size)]
    if kind == "gather":
        return np.concatenate([each[: count // (rank + 1)] for rank, each in enumerate(contributions)])
    if kind == "broadcast":
        return contributions[place % size]
    return np.sum(contributions, axis=0, dtype=dtype) if kind == "sum" else np.max(contributions, axis=0)


def run_program(rank, program, seed, steps):
    """Runs the program a few times, each time in another order; the results of the last time and the counters."""
    for step in range(steps):
        order = np.random.default_rng([rank, seed, step]).permutation(len(program))
        handles = {int(place): submit(rank, int(place), *program[place]) for place in order}
        results = [rt.synchronize(handles[place]) for place in range(len(program))]
    return results, rt.counters()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(program=operations, shape=layouts, chosen=options, seed=st.integers(0, 2**16))
def test_every_program_gives_what_numpy_gives(program, shape, chosen, seed):
    size, layout = shape
    with World(size, layout, **chosen) as ranks:
        for results, counters in ranks.run(run_program, program, seed, 2):
            for place, result in enumerate(results):
                wanted = expected(size, place, *program[place])
                assert result.dtype == wanted.dtype and np.array_equal(result, wanted), (place, program[place])
            assert counters["operations"] == 2 * len(program)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(program=operations, seed=st.integers(0, 2**16))
def test_without_fusion_every_operation_is_a_batch(program, seed):
    with World(2, fusion_threshold_bytes=0) as ranks:
        for _, counters in ranks.run(run_program, program, seed, 1):
            assert counters["batches"] == len(program) and counters["fused_operations"] == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(program=operations, seed=st.integers(0, 2**16))
def test_all_ranks_run_the_same_batches(program, seed):
    with World(3) as ranks:
        counters = [counters for _, counters in ranks.run(run_program, program, seed, 2)]
    assert len({(each["batches"], each["fused_operations"]) for each in counters}) == 1
    assert counters[0]["batches"] <= 2 * len(program)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(program=operations, seed=st.integers(0, 2**16))
def test_after_the_first_time_only_ids_travel(program, seed):
    with World(2) as ranks:
        first = [counters for _, counters in ranks.run(run_program, program, seed, 1)]
        later = [counters for _, counters in ranks.run(run_program, program, seed, 3)]
    for before, after in zip(first, later, strict=True):
        assert after["cache_misses"] == before["cache_misses"] == len(program)
        assert after["cache_hits"] - before["cache_hits"] == 3 * len(program)
