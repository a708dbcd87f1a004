"""Every operation against the oracle: dtypes × sizes × worlds × host layouts × algorithms, bit for bit."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from worlds import World, configurations

import ringtrain as rt
from ringtrain._binding import tables
from ringtrain.errors import InvalidArgumentError

CHUNK_BYTES = 4096  # small, so that a few thousand elements take many chunks
REDUCTIONS = {name: getattr(rt, name.capitalize()) for name in ("average", "sum", "min", "max", "product")}
REDUCTIONS |= {"l2norm": rt.L2Norm, "bitand": rt.BitAnd, "bitor": rt.BitOr, "bitxor": rt.BitXor}
FLOATS_OF_8_BITS = [name for name, row in tables.DTYPES.items() if row.is_moved_only]
ALIKE = {
    "uint16",
    "uint32",
    *FLOATS_OF_8_BITS[1:],
}  # as others here, but for their kernels: tests/native/reduce_test.cc
MOVED = [
    np.dtype(getattr(ml_dtypes, name) if row.is_foreign else name)
    for name, row in tables.DTYPES.items()
    if name not in ALIKE
]
DTYPES = [dtype for dtype in MOVED if dtype.name not in FLOATS_OF_8_BITS]

worlds_of_all_kinds = pytest.mark.parametrize(
    "size, layout, algorithm", configurations(), ids=lambda value: str(value).replace("None", "one_host")
)


def lengths(world, dtype):
    """0, 1, around the number of ranks, a prime, more than a chunk, and in every third world more than the slots of the window.

    The last takes most of the time: each dtype has it in a third of the worlds, and each world with a third of the dtypes.
    """
    size, turn = world[0], configurations().index(world) + MOVED.index(dtype)
    longest = {10 * CHUNK_BYTES + 7} if turn % 3 == 0 else set()
    return sorted({0, 1, size - 1, size, 97, CHUNK_BYTES + 1} | longest)


def lengths_of_moved(world, dtype):
    """The same, for what is only moved, as bytes: of the dtypes of a size the first has all of them, each other one has two."""
    is_first = dtype == next(other for other in MOVED if other.itemsize == dtype.itemsize)
    return lengths(world, dtype) if is_first else [1, 97]


def values(dtype, shape, rank, small=False):
    """Numbers whose sums and products are exact in every dtype, so that the order of additions does not matter."""
    random = np.random.default_rng([rank, int(np.prod(shape)), dtype.num])
    if dtype == bool:
        return random.integers(0, 2, shape).astype(bool)
    if small:
        return random.choice([1, 2] if dtype.kind == "u" else [1, 2, -1], shape).astype(dtype)
    whole = random.integers(0 if dtype.kind == "u" else -16, 16, shape)
    if dtype.kind == "c":
        return (whole / 4 + 1j * random.integers(-16, 16, shape)).astype(dtype)
    return whole.astype(dtype) if dtype.kind in "iu" else (whole / 4).astype(dtype)


def has_meaning(reduction, dtype):
    if reduction == "l2norm":
        return dtype in (np.float32, np.float64)
    if reduction in oracle.OF_BITS:
        return dtype.kind in "iub"
    return reduction in {"b": ("sum", "min", "max", "product"), "c": ("sum", "average")}.get(dtype.kind, REDUCTIONS)


def assert_same_bits(found, expected, what):
    assert found.dtype == expected.dtype and found.shape == expected.shape, (
        what,
        found.dtype,
        found.shape,
        expected.shape,
    )
    if found.tobytes() != expected.tobytes():
        at = np.flatnonzero(found.ravel().view(np.uint8) != expected.ravel().view(np.uint8))[0] // found.itemsize
        raise AssertionError(f"{what}: element {at} is {found.ravel()[at]}, expected {expected.ravel()[at]}")


def check(world, cases):
    """Runs cases of (text, inputs by rank, expected by rank, call) on all ranks."""

    def on_rank(rank):
        for text, inputs, expected, call in cases:
            assert_same_bits(call(inputs[rank]), expected[rank], text)

    world.run(on_rank)


@worlds_of_all_kinds
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_allreduce(size, layout, algorithm, reduction):
    op, cases = REDUCTIONS[reduction], []
    for dtype in DTYPES:
        if not has_meaning(reduction, dtype):
            continue
        for length in lengths((size, layout, algorithm), dtype):
            inputs = [values(dtype, length, rank, reduction == "product") for rank in range(size)]
            expected = oracle.allreduce(inputs, reduction)
            text = f"{dtype}[{length}]"
            cases.append((text, inputs, expected, lambda x, text=text: rt.allreduce(x, text, op)))
            cases.append((f"{text} in place", inputs, expected, lambda x, text=text: rt.allreduce_(x.copy(), text, op)))
    with World(size, layout, algorithm=algorithm, chunk_bytes=CHUNK_BYTES) as world:
        check(world, cases)


@worlds_of_all_kinds
def test_reducescatter(size, layout, algorithm):
    cases = []
    for dtype in DTYPES:
        for reduction in ("sum", "average", "max", "l2norm", "bitand"):
            if not has_meaning(reduction, dtype):
                continue
            # How rows are dealt no reduction changes: the others have many chunks, and rows that do not divide.
            for rows in lengths((size, layout, algorithm), dtype) if reduction == "sum" else (97, CHUNK_BYTES + 1):
                inputs = [values(dtype, (rows, 3), rank) for rank in range(size)]
                expected, op = oracle.reducescatter(inputs, reduction), REDUCTIONS[reduction]
                text = f"{reduction} {dtype}[{rows}, 3]"
                cases.append((text, inputs, expected, lambda x, text=text, op=op: rt.reducescatter(x, text, op)))
    with World(size, layout, algorithm=algorithm, chunk_bytes=CHUNK_BYTES) as world:
        check(world, cases)


@worlds_of_all_kinds
def test_allgather(size, layout, algorithm):
    cases = []
    for dtype in MOVED:
        for length in lengths_of_moved((size, layout, algorithm), dtype):
            ragged = [(length * (rank + 1)) // size for rank in range(size)]
            for rows in (ragged, [length] * size, [0] * (size - 1) + [length]):
                inputs = [values(dtype, (rows[rank], 2), rank) for rank in range(size)]
                text = f"{dtype}{rows}"
                cases.append((text, inputs, oracle.allgather(inputs), lambda x, text=text: rt.allgather(x, text)))
    with World(size, layout, algorithm=algorithm, chunk_bytes=CHUNK_BYTES) as world:
        check(world, cases)


@worlds_of_all_kinds
def test_broadcast(size, layout, algorithm):
    cases = []
    for dtype in MOVED:
        for length in lengths_of_moved((size, layout, algorithm), dtype):
            for root in {0, size // 2, size - 1}:
                inputs = [values(dtype, length, rank) for rank in range(size)]
                expected, text = oracle.broadcast(inputs, root), f"{dtype}[{length}] from {root}"
                cases.append((text, inputs, expected, lambda x, text=text, root=root: rt.broadcast(x, root, text)))
                cases.append(
                    (text, inputs, expected, lambda x, text=text, root=root: rt.broadcast_(x.copy(), root, text))
                )
    with World(size, layout, algorithm=algorithm, chunk_bytes=CHUNK_BYTES) as world:
        check(world, cases)


@worlds_of_all_kinds
def test_alltoall(size, layout, algorithm):
    cases = []
    for dtype in MOVED:
        for length in lengths_of_moved((size, layout, algorithm), dtype):
            splits = [
                [(length * (1 + (source + target) % 3)) // (3 * size) for target in range(size)]
                for source in range(size)
            ]
            inputs = [values(dtype, (sum(rows), 2), rank) for rank, rows in enumerate(splits)]
            expected, text = oracle.alltoall(inputs, splits), f"{dtype}[{length}]"

            def call(x, text=text, splits=splits):
                rank = rt.rank()
                received, rows = rt.alltoall(x, splits[rank], text)
                assert rows.tolist() == [sent[rank] for sent in splits]
                return received

            cases.append((text, inputs, expected, call))
            even = [values(dtype, (length * size,), rank) for rank in range(size)]
            expected = oracle.alltoall(even, [[length] * size] * size)
            cases.append((f"{text} even", even, expected, lambda x, text=text: rt.alltoall(x, name=f"{text} even")))
    with World(size, layout, algorithm=algorithm, chunk_bytes=CHUNK_BYTES) as world:
        check(world, cases)


@worlds_of_all_kinds
def test_scales(size, layout, algorithm):
    cases = []
    for dtype in DTYPES:
        if dtype == bool:
            continue
        for pre, post in ((0.5, 1.0), (1.0, 0.25), (2.0, 0.5)):
            for reduction in ("sum", "average", "min", "l2norm"):
                if not has_meaning(reduction, dtype):
                    continue
                inputs = [values(dtype, 301, rank) for rank in range(size)]
                expected, op = oracle.allreduce(inputs, reduction, pre, post), REDUCTIONS[reduction]
                text = f"{dtype} {reduction} {pre} {post}"
                cases.append((text, inputs, expected, lambda x, a=(text, op, pre, post): rt.allreduce(x, *a)))
    with World(size, layout, algorithm=algorithm, chunk_bytes=CHUNK_BYTES) as world:
        check(world, cases)


@pytest.mark.on_threads("a world of two")
def test_reductions_of_bits_refuse_what_has_none_of_its_own():
    def on_rank(rank):
        for dtype in (np.float32, np.complex64):
            words = rf"reduction bitor needs integers or bool, but found {np.dtype(dtype).name}\[2\]"
            with pytest.raises(InvalidArgumentError, match=words):
                rt.allreduce(np.ones(2, dtype), "flags", rt.BitOr)
        with pytest.raises(InvalidArgumentError, match="reduction bitxor must not be scaled"):
            rt.allreduce(np.ones(2, np.int32), "flags", rt.BitXor, prescale_factor=2.0)
        assert rt.allreduce(np.array([5, 4 << rank]), "flags", rt.BitAnd).tolist() == [5, 0]

    with World(2, "1+1") as world:
        world.run(on_rank)


@pytest.mark.on_threads("a world of two")
def test_l2norm_refuses_what_its_squares_leave():
    """16 bits, whose range ends at the square of 256, and all that is no float."""

    def on_rank(rank):
        for dtype in (np.float16, np.int32, np.complex64, bool):
            words = rf"reduction l2norm needs float32 or float64, but found {np.dtype(dtype).name}\[2\]"
            with pytest.raises(InvalidArgumentError, match=words):
                rt.allreduce(np.ones(2, dtype), "norm", rt.L2Norm)
        with pytest.raises(InvalidArgumentError, match="must not be compressed, but found compression bfloat16"):
            rt.allreduce(np.ones(2, np.float32), "norm", rt.L2Norm, compression=rt.Compression.bf16)
        with pytest.raises(InvalidArgumentError, match="only an average may be weighted"):
            rt.allreduce(np.ones(2, np.float32), "norm", rt.L2Norm, weight=2)
        large = np.float32(3e4) * np.array([1, rank], np.float32)
        assert rt.allreduce(large, "norm", rt.L2Norm).tolist() == [np.sqrt(np.float32(18e8)), 3e4]

    with World(2, "1+1") as world:
        world.run(on_rank)


@worlds_of_all_kinds
def test_groups(size, layout, algorithm):
    """Several tensors of different dtypes and shapes, all in one operation."""
    shapes = [(), (5,), (0, 3), (7, 11), (CHUNK_BYTES + 3,)]
    inputs = [[values(DTYPES[i % len(DTYPES)], shape, rank) for i, shape in enumerate(shapes)] for rank in range(size)]
    expected = [oracle.allreduce(list(tensors))[0] for tensors in zip(*inputs, strict=True)]
    gathered = [oracle.allgather(list(tensors))[0] for tensors in list(zip(*inputs, strict=True))[1:]]
    scattered = [oracle.reducescatter(list(tensors), "max") for tensors in list(zip(*inputs, strict=True))[1:]]

    def on_rank(rank):
        for found, want in zip(rt.grouped_allreduce(inputs[rank], "reduced", rt.Sum), expected, strict=True):
            assert_same_bits(found, want, "grouped_allreduce")
        mine = [tensor.copy() for tensor in inputs[rank]]
        for found, tensor, want in zip(rt.grouped_allreduce_(mine, "in place", rt.Sum), mine, expected, strict=True):
            assert found is tensor
            assert_same_bits(found, want, "grouped_allreduce_")
        for found, want in zip(rt.grouped_allgather(inputs[rank][1:], "gathered"), gathered, strict=True):
            assert_same_bits(found, want, "grouped_allgather")
        for found, want in zip(rt.grouped_reducescatter(inputs[rank][1:], "scattered", rt.Max), scattered, strict=True):
            assert_same_bits(found, want[rank], "grouped_reducescatter")
        assert rt.grouped_allreduce([], "nothing") == []

    with World(size, layout, algorithm=algorithm, chunk_bytes=CHUNK_BYTES) as world:
        world.run(on_rank)


@worlds_of_all_kinds
def test_many_at_once(size, layout, algorithm):
    """A training step's worth of tensors, submitted asynchronously, fused as the core likes."""
    counts = [1, 3, 64, 1000, 2048, 10, 5000, 77] * 12
    inputs = [[values(np.dtype(np.float32), count, rank) for count in counts] for rank in range(size)]
    expected = [oracle.allreduce(list(tensors))[0] for tensors in zip(*inputs, strict=True)]

    def on_rank(rank):
        for _ in range(3):
            handles = [rt.allreduce_async(tensor, f"gradient.{i}", rt.Sum) for i, tensor in enumerate(inputs[rank])]
            for i, handle in enumerate(handles):
                assert_same_bits(rt.synchronize(handle), expected[i], f"gradient.{i}")

    with World(size, layout, algorithm=algorithm, chunk_bytes=CHUNK_BYTES) as world:
        world.run(on_rank)


def test_async_forms_give_what_the_waiting_forms_give(world):
    def on_rank(rank):
        x, n = np.arange(2.0 * rt.size()) + rank, rt.size()
        pairs = [
            (rt.allreduce_async(x), rt.allreduce(x)),
            (rt.allreduce_async_(x.copy()), rt.allreduce(x)),
            (rt.broadcast_async(x, n - 1), rt.broadcast(x, n - 1)),
            (rt.broadcast_async_(x.copy(), 0), rt.broadcast(x, 0)),
            (rt.allgather_async(x), rt.allgather(x)),
            (rt.alltoall_async(x, [2] * n), rt.alltoall(x, [2] * n)),
            (rt.reducescatter_async(x), rt.reducescatter(x)),
            (rt.grouped_allreduce_async([x, x]), rt.grouped_allreduce([x, x])),
            (rt.grouped_allreduce_async_([x.copy()]), rt.grouped_allreduce([x])),
            (rt.grouped_allgather_async([x]), rt.grouped_allgather([x])),
            (rt.grouped_reducescatter_async([x]), rt.grouped_reducescatter([x])),
        ]
        for place, (handle, expected) in enumerate(pairs):
            found = rt.synchronize(handle)
            assert all(map(np.array_equal, found, expected)), place
            assert rt.poll(handle)
            assert rt.synchronize(handle) is found

    world.run(on_rank)


def test_poll_turns_true_and_nothing_changes_before(world):
    def on_rank(rank):
        if rank == 0 and rt.size() > 1:
            handle = rt.allreduce_async(np.ones(5), "late", rt.Sum)
            assert not rt.poll(handle)
            rt.barrier()  # the others submit behind it
        else:
            rt.barrier()
            handle = rt.allreduce_async(np.ones(5), "late", rt.Sum)
        assert rt.synchronize(handle).tolist() == [rt.size()] * 5

    world.run(on_rank)


def test_ranks_may_submit_in_any_order(world):
    def on_rank(rank):
        names = [f"tensor.{i}" for i in range(40)]
        order = np.random.default_rng(rank).permutation(40)
        handles = {names[i]: rt.allreduce_async(np.full(i, float(i)), names[i], rt.Sum) for i in order}
        for i, name in enumerate(names):
            assert rt.synchronize(handles[name]).tolist() == [i * rt.size()] * i

    world.run(on_rank)


def test_integer_average_truncates_toward_zero(world):
    def on_rank(rank):
        total = sum(-1 - 2 * r for r in range(rt.size()))
        found = rt.allreduce(np.array([-1 - 2 * rank, 1 + 2 * rank], np.int32), "mean")
        assert found.tolist() == [-(-total // rt.size()), -total // rt.size()]

    world.run(on_rank)


@pytest.mark.parametrize("op", [rt.Min, rt.Max], ids=["min", "max"])
def test_min_and_max_propagate_nan(world, op):
    def on_rank(rank):
        for dtype in (np.float16, np.float32, np.float64):
            x = np.full(33, rank, dtype)
            x[rank % 33] = np.nan
            found = rt.allreduce(x, f"nan.{np.dtype(dtype)}", op)
            assert np.isnan(found[: rt.size()]).all() and not np.isnan(found[rt.size() :]).any()

    world.run(on_rank)


def test_integers_wrap(world):
    def on_rank(rank):
        assert rt.allreduce(np.array([100], np.int8), "wrap", rt.Sum)[0] == np.array(100 * rt.size()).astype(np.int8)

    world.run(on_rank)


@pytest.mark.on_threads("needs ranks that share a list, which threads do")
def test_barrier_waits_for_everyone(world):
    arrived = []

    def on_rank(rank):
        arrived.append(rank)
        rt.barrier()
        assert len(arrived) == rt.size()

    world.run(on_rank)


def test_join_lets_the_others_go_on(world):
    """Rank r has r + 1 batches; who has joined contributes nothing, and the average counts those who still do."""

    def on_rank(rank):
        size = rt.size()
        for batch in range(rank + 1):
            active = range(batch, size)
            assert rt.allreduce(np.array([float(rank)]), f"batch.{batch}")[0] == np.mean(list(active), dtype=np.float64)
            assert rt.allgather(np.array([rank]), f"rows.{batch}").tolist() == list(active)
        assert rt.join() == size - 1
        assert rt.allreduce(np.ones(1), "after", rt.Sum)[0] == size

    world.run(on_rank)
