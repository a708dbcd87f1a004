"""16 bits between hosts: what is lost, what is not, and that all ranks get the same bits for half the bytes."""

import functools

import ml_dtypes
import numpy as np
import pytest
from worlds import World, configurations

import ringtrain as rt
from ringtrain.errors import InvalidArgumentError, MismatchError

pytestmark = pytest.mark.timeout(60)

WIRES = {rt.Compression.fp16: np.float16, rt.Compression.bf16: ml_dtypes.bfloat16}
COUNT = 4099


def gradient(rank: int, dtype=np.float32) -> np.ndarray:
    """Normal numbers, whose sums depend on every rounding."""
    return np.random.default_rng(rank).standard_normal(COUNT).astype(dtype)


def expected(hosts: list[list[int]], compression: str, dtype=np.float32, prescale=1.0, postscale=1.0) -> np.ndarray:
    """The average by the documented rule: each host's float32 sum rounded, their average rounded, then the postscale."""
    wire, size = WIRES[compression], sum(map(len, hosts))
    sums = []
    for ranks in hosts:
        sums.append(functools.reduce(np.add, [gradient(rank, dtype) * dtype(prescale) for rank in ranks]))
    if len(hosts) == 1:
        return sums[0] / dtype(size) * dtype(postscale)
    total = functools.reduce(np.add, [each.astype(np.float32).astype(wire).astype(np.float32) for each in sums])
    return (total / np.float32(size)).astype(wire).astype(dtype) * dtype(postscale)


def hosts_of(size: int, layout: str | None, algorithm: str) -> list[list[int]]:
    """Ranks of each host."""
    each = [1] * size if algorithm == "ring" else [int(n) for n in layout.split("+")] if layout else [size]
    ends = np.cumsum(each)
    return [list(range(end - count, end)) for count, end in zip(each, ends, strict=True)]


@pytest.mark.parametrize("compression", WIRES)
@pytest.mark.parametrize("size, layout, algorithm", configurations(), ids=str)
def test_every_bit_follows_the_rule(size, layout, algorithm, compression):
    hosts = hosts_of(size, layout, algorithm)
    with World(size, layout, algorithm=algorithm, chunk_bytes=4096) as world:
        for dtype in (np.float32, np.float64):

            def on_rank(rank, dtype=dtype):
                whole = rt.allreduce(gradient(rank, dtype), "a", None, 0.5, 4.0, compression=compression)
                rows = rt.reducescatter(gradient(rank, dtype), "r", None, rt.global_process_set, 0.5, 4.0, compression)
                return whole.tobytes(), rt.allgather_object(rows)

            oracle = expected(hosts, compression, dtype, 0.5, 4.0)
            for whole, rows in world.run(on_rank):
                assert whole == oracle.tobytes()
                assert np.concatenate(rows).tobytes() == whole


@pytest.mark.least_ranks(2)
def test_nothing_is_lost_within_a_host(world):
    def on_rank(rank):
        plain, narrow = (rt.allreduce(gradient(rank), "g", compression=way) for way in ("none", rt.Compression.fp16))
        return plain.tobytes() == narrow.tobytes()

    assert all(world.run(on_rank))


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] or c[2] == "ring"], ids=str)
def test_half_the_bytes_travel(size, layout, algorithm):
    def sent(compression):
        before = rt.counters()["wire_bytes_sent"]
        rt.allreduce(np.ones(4096, np.float32), "g", compression=compression)
        return rt.counters()["wire_bytes_sent"] - before

    with World(size, layout, algorithm=algorithm) as world:
        for plain, narrow in world.run(lambda rank: (sent(rt.Compression.none), sent(rt.Compression.fp16))):
            assert narrow * 2 == plain
        for plain, narrow in world.run(lambda rank: (sent(rt.Compression.none), sent(rt.Compression.bf16))):
            assert narrow * 2 == plain


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] == "1+1"], ids=str)
def test_overflow_reaches_every_rank(size, layout, algorithm):
    """A sum beyond float16 is infinite everywhere; an average within it is not, nor what the prescale makes small enough."""

    def on_rank(rank):
        value = np.full(5, 4e4, np.float32)
        ways = {"sum": (rt.Sum, 1.0, 1.0), "average": (rt.Average, 1.0, 1.0), "scaled": (rt.Sum, 2.0**-8, 2.0**8)}
        fp16 = rt.Compression.fp16
        results = {way: rt.allreduce(value, way, *how, compression=fp16) for way, how in ways.items()}
        return {way: np.isfinite(result).all() for way, result in results.items()}

    with World(size, layout, algorithm=algorithm) as world:
        for finite in world.run(on_rank):
            assert finite == {"sum": False, "average": True, "scaled": True}


@pytest.mark.least_ranks(2)
def test_ranks_that_disagree_are_told(world):
    def on_rank(rank):
        with pytest.raises(MismatchError, match="compression .* is float16 on rank 0 and none on rank"):
            own = rt.Compression.fp16 if rank == 0 else rt.Compression.none
            rt.allreduce(np.ones(3, np.float32), "g", compression=own)
        # Known by now, so it travels as an id: another compression must not be taken for it.
        for compression in (rt.Compression.fp16, rt.Compression.bf16, rt.Compression.none):
            total = rt.allreduce(np.ones(3, np.float32), "h", rt.Sum, compression=compression)
            assert total.tolist() == [rt.size()] * 3

    world.run(on_rank)


def test_what_does_not_exist_is_refused(world):
    def on_rank(rank):
        with pytest.raises(InvalidArgumentError, match="compression must be one of none, float16, bfloat16, but is 'zip'"):
            rt.allreduce(np.ones(3, np.float32), "g", compression="zip")

    world.run(on_rank)
