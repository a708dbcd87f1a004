"""16, 8 and 4 bits between hosts: what is lost, what is not, and that all ranks get the same bits for fewer bytes."""

import functools
import json

import ml_dtypes
import numpy as np
import pytest
from worlds import LAUNCHED_RANK, World, configurations

import ringtrain as rt
from ringtrain._binding._native import ffi
from ringtrain._runtime import error_feedback
from ringtrain._runtime.context import current
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.testing import World as ThreadWorld

COUNT = 4099


def in_blocks(values: np.ndarray) -> np.ndarray:
    """int8 as documented: in each 256 elements the largest magnitude is 127, the others are rounded to multiples."""
    rounded = np.zeros_like(values)
    for begin in range(0, len(values), 256):
        block = values[begin : begin + 256]
        most = np.abs(block).max()
        if not np.isfinite(most):
            rounded[begin : begin + 256] = np.nan
        elif most >= np.float32(2.0**-119):
            codes = np.rint(block * (np.float32(127) / most)).astype(np.int8)
            rounded[begin : begin + 256] = codes.astype(np.float32) * (most / np.float32(127))
    return rounded


def in_small_blocks(values: np.ndarray) -> np.ndarray:
    """int4: in each 128 elements the scale is the largest magnitude / 7, as bfloat16, rounded up."""
    rounded = np.zeros_like(values)
    for begin in range(0, len(values), 128):
        block = values[begin : begin + 128]
        most = np.abs(block).max()
        if not np.isfinite(most):
            rounded[begin : begin + 128] = np.nan
        elif most >= np.float32(2.0**-119):
            bits = (most / np.float32(7)).view(np.uint32) + np.uint32(0xFFFF)
            scale = (bits & np.uint32(0xFFFF0000)).view(np.float32)
            codes = np.rint(block * (np.float32(1) / scale)).astype(np.int8)
            rounded[begin : begin + 128] = codes.astype(np.float32) * scale
    return rounded


# float32 as it comes out on the other side.
WIRES = {
    rt.Compression.fp16: lambda values: values.astype(np.float16).astype(np.float32),
    rt.Compression.bf16: lambda values: values.astype(ml_dtypes.bfloat16).astype(np.float32),
    rt.Compression.int8: in_blocks,
    rt.Compression.int4: in_small_blocks,
}
BLOCKS = {rt.Compression.int8: 256, rt.Compression.int4: 128}
CASTS = [rt.Compression.fp16, rt.Compression.bf16]


def gradient(rank: int, dtype=np.float32, count=COUNT) -> np.ndarray:
    """Normal numbers, whose sums depend on every rounding."""
    return np.random.default_rng(rank).standard_normal(count).astype(dtype)


def expected(hosts: list[list[int]], compression: str, dtype=np.float32, prescale=1.0, postscale=1.0) -> np.ndarray:
    """The average by the documented rule: each host's float32 sum rounded, their average rounded, then the postscale."""
    through_the_wire, size = WIRES[compression], sum(map(len, hosts))
    sums = []
    for ranks in hosts:
        sums.append(functools.reduce(np.add, [gradient(rank, dtype) * dtype(prescale) for rank in ranks]))
    if len(hosts) == 1:
        return sums[0] / dtype(size) * dtype(postscale)
    total = functools.reduce(np.add, [through_the_wire(each.astype(np.float32)) for each in sums])
    return through_the_wire(total / np.float32(size)).astype(dtype) * dtype(postscale)


def hosts_of(size: int, layout: str | None, algorithm: str) -> list[list[int]]:
    """Ranks of each host."""
    each = (
        [1] * size
        if algorithm == "ring"
        else [int(n) for n in layout.replace("|", "+").split("+")]
        if layout
        else [size]
    )
    ends = np.cumsum(each)
    return [list(range(end - count, end)) for count, end in zip(each, ends, strict=True)]


@pytest.mark.parametrize("compression", WIRES)
@pytest.mark.parametrize("size, layout, algorithm", configurations(), ids=str)
def test_every_bit_follows_the_rule(size, layout, algorithm, compression):
    hosts = hosts_of(size, layout, algorithm)
    with World(size, layout, algorithm=algorithm, chunk_bytes=4096) as world:
        for dtype in (np.float32, np.float64):

            def on_rank(rank, dtype=dtype):
                name = np.dtype(dtype).name  # the first of its name, so nothing was lost before
                whole = rt.allreduce(gradient(rank, dtype), f"a.{name}", None, 0.5, 4.0, compression=compression)
                rows = rt.reducescatter(
                    gradient(rank, dtype), f"r.{name}", None, rt.global_process_set, 0.5, 4.0, compression
                )
                return whole.tobytes(), rt.allgather_object(rows)

            oracle = expected(hosts, compression, dtype, 0.5, 4.0)
            for whole, rows in world.run(on_rank):
                assert whole == oracle.tobytes()
                if compression in CASTS:
                    assert np.concatenate(rows).tobytes() == whole


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] or c[2] == "ring"], ids=str)
def test_blocks_of_int8_begin_with_each_rows_share(size, layout, algorithm):
    """Reducescatter: a block never has elements of two members; whatever is fused, since blocks begin with the tensor."""
    hosts, count = hosts_of(size, layout, algorithm), 5003 * size + 1

    def on_rank(rank):
        mine = gradient(rank, count=count)
        rows = rt.reducescatter(mine, "r", rt.Sum, compression=rt.Compression.int8)
        alone = rt.allreduce(mine, "a", rt.Sum, compression=rt.Compression.int8)
        others = [gradient(rank, count=each) for each in (300, 4096, 9999)]
        fused = rt.grouped_allreduce([*others, mine], "g", rt.Sum, compression=rt.Compression.int8)
        assert fused[-1].tobytes() == alone.tobytes()
        return rt.allgather_object(rows)

    sums = [functools.reduce(np.add, [gradient(rank, count=count) for rank in ranks]) for ranks in hosts]
    ends = np.cumsum([count // size + (member < count % size) for member in range(size)])
    with World(size, layout, algorithm=algorithm) as world:
        for rows in world.run(on_rank):
            for member, found in enumerate(rows):
                share = slice(ends[member] - len(found), ends[member])
                total = functools.reduce(np.add, [in_blocks(each[share]) for each in sums])
                assert found.tobytes() == in_blocks(total).tobytes()


@pytest.mark.parametrize("count", [0, 1, 255, 4095, 4096, 4097, 70001])
@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1]], ids=str)
def test_int8_is_off_by_a_127th_of_its_block_at_most(size, layout, algorithm, count):
    """Half a scale for each host's sum, half a scale for the total; tensors below 4,096 elements are not rounded."""

    def on_rank(rank):
        mine = gradient(rank, count=count)
        plain = rt.allreduce(mine, "p", rt.Sum)
        found = rt.allreduce(mine, "c", rt.Sum, compression=rt.Compression.int8)
        for shape in ((count, 1), (1, count)):
            shaped = rt.allreduce(mine.reshape(shape), f"s{shape}", rt.Sum, compression=rt.Compression.int8)
            assert shaped.shape == shape and shaped.tobytes() == found.tobytes()
        return plain, found

    with World(size, layout, algorithm=algorithm) as world:
        results = world.run(on_rank)
    hosts = hosts_of(size, layout, algorithm)
    sums = [functools.reduce(np.add, [gradient(rank, count=count) for rank in ranks]) for ranks in hosts]
    for plain, found in results:
        assert found.tobytes() == results[0][1].tobytes()
        assert (found.tobytes() == plain.tobytes()) is (count < 4096)
        for begin in range(0, count if count >= 4096 else 0, 256):
            block = slice(begin, begin + 256)
            allowed = sum(np.abs(each[block]).max() for each in sums) / 254
            allowed += (np.abs(plain[block]).max() + allowed) / 254
            assert np.abs(found[block] - plain[block]).max() <= allowed * 1.001


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(4) if c[1] == "1+1+1+1"], ids=str)
def test_int8_in_process_sets(size, layout, algorithm):
    def on_rank(rank):
        even, odd = rt.add_process_set([0, 2]), rt.add_process_set([1, 3])
        first, mine = rank % 2, even if rank % 2 == 0 else odd
        found = rt.allreduce(gradient(rank), "x", rt.Sum, process_set=mine, compression=rt.Compression.int8)
        total = in_blocks(in_blocks(gradient(first)) + in_blocks(gradient(first + 2)))
        assert found.tobytes() == total.tobytes()

    with World(size, layout, algorithm=algorithm) as world:
        world.run(on_rank)


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] in ("1+1", "2+1")], ids=str)
def test_a_block_that_is_no_number_is_none_on_every_rank(size, layout, algorithm):
    """One value of one rank: its block alone is NaN, so that a loss scale sees it on all ranks alike."""

    def on_rank(rank):
        mine = np.ones(5000, np.float32)
        if rank == 1:
            mine[700], mine[3000] = np.inf, np.nan
        return rt.allreduce(mine, "x", rt.Sum, compression=rt.Compression.int8)

    bad = np.zeros(5000, bool)
    bad[512:768] = bad[2816:3072] = True
    with World(size, layout, algorithm=algorithm) as world:
        for found in world.run(on_rank):
            assert np.array_equal(np.isnan(found), bad) and (found[~bad] == size).all()


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] == "1+1"], ids=str)
def test_int8_takes_the_bytes_that_it_says(size, layout, algorithm):
    """A byte for each element and four for each 256; integers and 16-bit floats travel as they are."""

    def sent(dtype, compression):
        before = rt.counters()["wire_bytes_sent"]
        rt.allreduce(np.ones(1 << 16, dtype), "g", rt.Sum, compression=compression)
        return rt.counters()["wire_bytes_sent"] - before

    def on_rank(rank):
        for dtype in (np.float32, np.float64):
            assert sent(dtype, rt.Compression.int8) == (1 << 16) * 260 // 256
            assert sent(dtype, rt.Compression.int4) == (1 << 16) * 66 // 128
        for dtype in (np.float16, np.int32):
            assert sent(dtype, rt.Compression.int8) == sent(dtype, rt.Compression.none)

    with World(size, layout, algorithm=algorithm) as world:
        world.run(on_rank)


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] == "1+1"], ids=str)
def test_small_and_large_tensors_of_int8_travel_together(size, layout, algorithm, tmp_path):
    """In one batch for each form, if they were fused; the trace has the stages of each under its own name."""
    counts = [10, 5000, 20, 9000, 4095, 4096]
    compression = rt.Compression.int8.without_feedback  # so that the last of 20 steps is like the first

    def on_rank(rank):
        for _ in range(20):
            handles = [
                rt.allreduce_async(gradient(rank, count=count), f"t{count}", rt.Sum, compression=compression)
                for count in counts
            ]
            results = [rt.synchronize(handle).tobytes() for handle in handles]
        assert rt.counters()["fused_operations"] > 0
        assert results == wanted

    plain = [gradient(0, count=count) + gradient(1, count=count) for count in counts]
    coded = [in_blocks(in_blocks(gradient(0, count=count)) + in_blocks(gradient(1, count=count))) for count in counts]
    wanted = [(few if len(few) < 4096 else many).tobytes() for few, many in zip(plain, coded, strict=True)]
    with World(size, layout, algorithm=algorithm, timeline=f"{tmp_path}/trace.{{rank}}.json") as world:
        world.run(on_rank)
    events = json.loads((tmp_path / f"trace.{LAUNCHED_RANK}.json").read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    unpacked = {}
    for event in events:
        if event.get("cat") == "unpack":
            unpacked.setdefault(tracks[event["tid"]], []).append(event["args"]["bytes"])
    assert unpacked.keys() == {f"allreduce.t{count}" for count in counts}
    assert all(max(unpacked[f"allreduce.t{count}"]) <= 4 * count for count in counts)


@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
def test_int8_is_for_sums(world, op):
    def on_rank(rank):
        with pytest.raises(InvalidArgumentError) as raised:
            rt.allreduce(np.ones(5000, np.float32), "x", getattr(rt, op), compression=rt.Compression.int8)
        return str(raised.value)

    for text in world.run(on_rank):
        assert text.startswith(
            f"allreduce 'x': with compression int8 the reduction must be sum or average, but is {op.lower()}. "
            "Use float16, bfloat16 or no compression."
        )


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(3) if c[1] == "2+1"], ids=str)
def test_a_rank_that_has_joined_adds_nothing_to_int8(size, layout, algorithm):
    total = in_blocks(in_blocks(gradient(0) + gradient(1)))

    def on_rank(rank):
        if rank != 2:  # the only one on its host
            found = rt.allreduce(gradient(rank), "x", rt.Sum, compression=rt.Compression.int8)
            assert found.tobytes() == total.tobytes()
        rt.join()

    with World(size, layout, algorithm=algorithm) as world:
        world.run(on_rank)


# ---- what rounding loses is made up for ----


def kept(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """What this rank keeps of a tensor: of its host's sums, and of those that it finishes."""
    _, *memory = error_feedback.save(current(), 0, name, 0, count)
    sent, finished = (np.frombuffer(ffi.buffer(each), np.float32).astype(np.float64) for each in memory)
    return sent, finished


@pytest.mark.parametrize("compression", BLOCKS)
@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] or c[2] == "ring"], ids=str)
def test_nothing_is_lost_in_the_long_run(size, layout, algorithm, compression):
    """All that was delivered, with what is kept, is all that was to be delivered: on each element, after any step."""

    def on_rank(rank):
        random, delivered, exact = np.random.default_rng(rank), np.zeros(COUNT), np.zeros(COUNT)
        for _ in range(60):
            mine = random.standard_normal(COUNT).astype(np.float32)
            delivered += rt.allreduce(mine, "x", compression=compression)
            exact += rt.allreduce(mine.astype(np.float64), "exact")
        sent, finished = (rt.allreduce(each, f"k{place}", rt.Sum) for place, each in enumerate(kept("x", COUNT)))
        gap = np.linalg.norm(delivered + sent / size + finished - exact) / np.linalg.norm(exact)
        lost = np.linalg.norm(delivered - exact) / np.linalg.norm(exact)
        return gap, lost, rt.allgather_object(delivered.tobytes())

    with World(size, layout, algorithm=algorithm) as world:
        for gap, lost, copies in world.run(on_rank):
            assert gap < 1e-6 < 1e-5 < lost  # so it was not for want of loss
            assert len(set(copies)) == 1


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(3) if c[1] == "2+1"], ids=str)
def test_a_step_that_is_taken_back_leaves_no_trace(size, layout, algorithm):
    """Overflows included: then the tensors that are fine, too, are as if the step had not been."""

    def on_rank(rank, bad_steps):
        context, random, results = current(), np.random.default_rng(rank), []
        name = f"run.{bad_steps}."
        for step in range(8):
            mine = random.standard_normal(2 * COUNT).astype(np.float32)
            if step not in bad_steps:
                results.append(rt.allreduce(mine[:COUNT], f"{name}a", compression=rt.Compression.int4))
                if step % 3:  # not in every step
                    results.append(rt.allreduce(mine[COUNT:], f"{name}b", compression=rt.Compression.int4))
                error_feedback.keep(context, 0, name)
                continue
            if bad_steps:
                mine[100 * rank] = np.inf
                rt.allreduce(mine[COUNT:] * 3, f"{name}a", compression=rt.Compression.int4)
                error_feedback.take_back(context, 0, name)
                error_feedback.take_back(context, 0, name)  # is done
        return b"".join(each.tobytes() for each in results)

    with World(size, layout, algorithm=algorithm) as world:
        for bad in ({0}, {2, 3}, {7}, {1, 5}):
            skipped = world.run(on_rank, bad)
            assert len(set(skipped)) == 1
            plain = world.run(lambda rank, bad=bad: run_without(rank, bad))
            assert plain == skipped


CHANGES = {  # layout before, after, and the former ranks that are left; others have joined
    "a host is gone": ("1+1+1", "1+1", [0, 2]),
    "one of a host's ranks is gone": ("2+2", "2+1", [0, 1, 3]),
    "one comes": ("1+1", "1+1+1", [0, 1]),
    "one host is left": ("1+1", "2", [0, 1]),
    "and several again": ("2+1", "1+1+1", [0, 1, 2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_ranks_have_lost_goes_on_in_the_next_world(change):
    """The law over a change of the world: of those that are left nothing is lost, and nothing is delivered twice."""
    before, after, left = CHANGES[change]
    former_size, size = (sum(map(int, layout.split("+"))) for layout in (before, after))

    def steps(rank, count, seed):
        random, delivered, exact = np.random.default_rng([seed, rank]), np.zeros(COUNT), np.zeros(COUNT)
        for _ in range(count):
            mine = random.standard_normal(COUNT).astype(np.float32)
            delivered += rt.allreduce(mine, "x", compression=rt.Compression.int4)
            exact += rt.allreduce(mine.astype(np.float64), "exact")
        return delivered, exact

    def first(rank):
        delivered, exact = steps(rank, 10, 1)
        error_feedback.keep(current(), 0, "")
        rt.allreduce(gradient(rank), "x", compression=rt.Compression.int4)  # of a step that is done again
        error_feedback.take_back(current(), 0, "")
        sent, finished = kept("x", COUNT)
        return delivered, exact, sent / former_size + finished, current()

    def second(rank):
        if rank < len(left):
            error_feedback.inherit(current(), formers[left[rank]][3])
            sent, finished = kept("x", COUNT)
            assert not sent.any() and np.allclose(finished, owed[rank], rtol=1e-6, atol=1e-6)  # as a part of the result
        delivered, exact = steps(rank, 10, 2)
        sent, finished = (rt.allreduce(each, f"k{place}", rt.Sum) for place, each in enumerate(kept("x", COUNT)))
        return delivered, exact, sent / size + finished

    with ThreadWorld(former_size, before) as world:
        formers = world.run(first)
    owed = [formers[rank][2] for rank in left]
    with ThreadWorld(size, after) as world:
        for delivered, exact, still in world.run(second):
            gap = np.linalg.norm(delivered + still - exact - sum(owed)) / np.linalg.norm(exact)
            assert gap < 1e-6 < 1e-5 < np.linalg.norm(sum(owed)) / np.linalg.norm(exact)


def test_what_was_not_kept_can_be_taken_back_in_the_next_world():
    """As a step that is done again there; what was used before it cannot, and goes on."""

    def first(rank):
        context, found = current(), []
        for factor in (1, 3, 7):
            rt.allreduce(factor * gradient(rank), "x", compression=rt.Compression.int4)
            found.append((error_feedback.turns(context), *kept("x", COUNT)))
        return found, context

    def second(rank):
        found, former = formers[rank]
        context = current()
        error_feedback.inherit(context, former)
        assert error_feedback.turns(context) == found[-1][0]
        error_feedback.take_back(context, 0, "", found[-1][0])  # is before it
        owed = [kept("x", COUNT)[1]]
        error_feedback.take_back(context, 0, "", found[-2][0])
        owed.append(kept("x", COUNT)[1])
        for mine, (_, sent, finished) in zip(owed, reversed(found), strict=False):
            np.testing.assert_allclose(mine, sent / 2 + finished, rtol=1e-6, atol=1e-6)

    with ThreadWorld(2, "1+1") as world:
        formers = world.run(first)
    with ThreadWorld(2, "1+1") as world:
        world.run(second)


def run_without(rank: int, left_out: set[int]) -> bytes:
    """The steps of the test above without those, under names of their own."""
    random, results = np.random.default_rng(rank), []
    for step in range(8):
        mine = random.standard_normal(2 * COUNT).astype(np.float32)
        if step in left_out:
            continue
        results.append(rt.allreduce(mine[:COUNT], f"without.{left_out}.a", compression=rt.Compression.int4))
        if step % 3:
            results.append(rt.allreduce(mine[COUNT:], f"without.{left_out}.b", compression=rt.Compression.int4))
    return b"".join(each.tobytes() for each in results)


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] == "1+1"], ids=str)
def test_operations_without_a_name_make_up_for_nothing(size, layout, algorithm):
    def on_rank(rank):
        mine, int8 = gradient(rank), rt.Compression.int8
        named = [rt.allreduce(mine, "x", compression=int8).tobytes() for _ in range(3)]
        unnamed = [rt.allreduce(mine, compression=int8).tobytes() for _ in range(3)]
        plain = [rt.allreduce(mine, "p", compression=int8.without_feedback).tobytes() for _ in range(3)]
        assert len(set(named)) == 3 and set(unnamed) == set(plain) == {named[0]}
        assert error_feedback.sizes(current(), 0, "") == {("x", 0): COUNT}

    with World(size, layout, algorithm=algorithm) as world:
        world.run(on_rank)


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] == "1+1"], ids=str)
def test_descent_ends_where_it_does_without_compression(size, layout, algorithm):
    """Least squares with other data on each rank: gradients whose sum vanishes while each of them does not."""
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((size, 64, 96, 64)).astype(np.float32)  # 64 problems: 4,096 unknowns
    matrices *= np.linspace(0.1, 1, 64, dtype=np.float32)  # so that descent takes its time
    targets = (rng.standard_normal((size, 64, 96)) + np.arange(size)[:, None, None]).astype(np.float32)
    stacked, wanted = np.concatenate(matrices, 1).astype(float), np.concatenate(targets, 1).astype(float)
    best = np.linalg.pinv(stacked) @ wanted[..., None]

    def excess(x):
        return np.square(stacked @ (x[..., None] - best)).mean()

    def on_rank(rank, compression):
        x = np.zeros((64, 64), np.float32)
        for _ in range(2400):
            difference = np.einsum("pij,pj->pi", matrices[rank], x) - targets[rank]
            slope = np.einsum("pij,pi->pj", matrices[rank], difference) / 96
            x -= 0.15 * rt.allreduce(slope, f"x.{compression}", compression=compression)
        assert len(set(rt.allgather_object(x.tobytes()))) == 1
        return excess(x.astype(float)) / excess(np.zeros((64, 64)))

    int8, int4, none = rt.Compression.int8, rt.Compression.int4, rt.Compression.none
    with World(size, layout, algorithm=algorithm) as world:
        end = {each: world.run(on_rank, each)[0] for each in (none, int8, int4, int4.without_feedback)}
    assert end[int8] < 1.05 * end[none] and end[int4] < 2 * end[none]
    assert end[int4.without_feedback] > 50 * end[none]


@pytest.mark.least_ranks(2)
def test_nothing_is_lost_within_a_host(world):
    def on_rank(rank):
        plain, narrow = (rt.allreduce(gradient(rank), "g", compression=way) for way in ("none", rt.Compression.fp16))
        return plain.tobytes() == narrow.tobytes()

    assert all(world.run(on_rank))


@pytest.mark.parametrize("size, layout, algorithm", [c for c in configurations(2) if c[1] or c[2] == "ring"], ids=str)
def test_half_the_bytes_travel(size, layout, algorithm):
    """Of what is too large to go whole, in the fewest steps."""

    def sent(compression):
        before = rt.counters()["wire_bytes_sent"]
        rt.allreduce(np.ones(16384, np.float32), "g", compression=compression)
        return rt.counters()["wire_bytes_sent"] - before

    with World(size, layout, algorithm=algorithm) as world:
        for plain, narrow in world.run(lambda rank: (sent(rt.Compression.none), sent(rt.Compression.fp16))):
            assert narrow * 2 == plain
        for plain, narrow in world.run(lambda rank: (sent(rt.Compression.none), sent(rt.Compression.bf16))):
            assert narrow * 2 == plain


@pytest.mark.parametrize("compression", [rt.Compression.none, rt.Compression.fp16, rt.Compression.bf16], ids=str)
def test_a_small_sum_of_two_hosts_goes_with_the_promise(compression):
    """In a loop that repeats itself; with the bits of the sums before, for which ranks had agreed first."""

    def on_rank(rank):
        value = np.linspace(0.1, 7.0, 300, dtype=np.float32) * (rank + 1)
        results, carried = set(), 0
        for _ in range(30):
            before = rt.counters()["frame_bytes_sent"]
            results.add(rt.allreduce(value, "g", rt.Average, compression=compression).tobytes())
            carried = rt.counters()["frame_bytes_sent"] - before
        return results, carried

    with World(2, "1+1") as world:
        (results, carried), (others, _) = world.run(on_rank)
    assert len(results) == 1 and results == others
    assert carried > 300 * (4 if compression is rt.Compression.none else 2)


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
        with pytest.raises(MismatchError, match="compression .* is int8 on rank 0 and int8 without feedback on rank"):
            own = rt.Compression.int8 if rank == 0 else rt.Compression.int8.without_feedback
            rt.allreduce(np.ones(3, np.float32), "f", compression=own)
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
        with pytest.raises(
            InvalidArgumentError,
            match="compression must be one of none, float16, bfloat16, int8, .*int4.*, but is 'zip'",
        ):
            rt.allreduce(np.ones(3, np.float32), "g", compression="zip")

    world.run(on_rank)
