"""The operations for torch tensors: every dtype and layout, identity of tensors, lifetime of memory, refusals."""

import gc

import pytest
import torch

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._binding import tables
from ringtrain.testing import World
from ringtrain.torch import Compression

torch.set_num_threads(1)

DTYPES = {getattr(torch, name): row for name, row in tables.DTYPES.items() if hasattr(torch, name)}
REDUCTIONS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3)]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[row.name for row in DTYPES.values()])


def has_meaning(dtype, name):
    if dtype.is_complex:
        return name in ("sum", "average")
    return not DTYPES[dtype].is_moved_only and (dtype, name) != (torch.bool, "average")


def values(dtype, shape, rank):
    """Small whole numbers, the same in every dtype that holds them: 1 to 3."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) + rank) % 3 + 1).reshape(shape).to(dtype)


def reduced(inputs, name):
    """What the ranks' tensors come to, in float64; truncated for integers."""
    stacked = torch.stack([tensor if tensor.is_complex() else tensor.double() for tensor in inputs])
    if inputs[0].dtype == torch.bool:
        return stacked.amax(0) if name in ("sum", "max") else stacked.amin(0)
    result = {
        "sum": stacked.sum, "average": stacked.mean, "min": stacked.amin, "max": stacked.amax, "product": stacked.prod
    }[name](0)  # fmt: skip
    return result if inputs[0].is_floating_point() or inputs[0].is_complex() else result.trunc()


def assert_equal(found, expected, dtype):
    assert found.dtype == dtype
    expected = expected.to(dtype)
    if DTYPES[dtype].is_moved_only:  # torch compares no floats of 8 bits
        found, expected = found.float(), expected.float()
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=0)


@pytest.mark.parametrize(
    "dtype, name",
    [(dtype, name) for dtype in DTYPES for name in REDUCTIONS if has_meaning(dtype, name)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_allreduce_in_every_form(world, dtype, name):
    op = REDUCTIONS[name]

    def on_rank(rank):
        for shape in SHAPES:
            everyone = [values(dtype, shape, each) for each in range(world.size)]
            expected, mine = reduced(everyone, name), everyone[rank]
            assert_equal(hvd.allreduce(mine, name="a", op=op), expected, dtype)
            assert_equal(hvd.synchronize(hvd.allreduce_async(mine, name="b", op=op)), expected, dtype)
            assert torch.equal(mine, values(dtype, shape, rank)), "an input was changed"
            for operate in (hvd.allreduce_, lambda *a, **k: hvd.synchronize(hvd.allreduce_async_(*a, **k))):
                target = mine.clone()
                assert operate(target, name="c", op=op) is target
                assert_equal(target, expected, dtype)
            both = [mine, mine.clone().reshape(1, *shape)]
            for found in hvd.grouped_allreduce(both, name="d", op=op):
                assert_equal(found.reshape(shape), expected, dtype)
            for found in hvd.synchronize(hvd.grouped_allreduce_async(both, name="e", op=op)):
                assert_equal(found.reshape(shape), expected, dtype)
            targets = [mine.clone(), mine.clone()]
            assert hvd.grouped_allreduce_(targets, name="f", op=op) is targets
            assert hvd.synchronize(hvd.grouped_allreduce_async_([t.clone() for t in both], name="g", op=op))
            assert_equal(targets[1], expected, dtype)

    world.run(on_rank)


@every_dtype
def test_rows_and_broadcasts(world, dtype):
    size = world.size

    def on_rank(rank):
        rows = [values(dtype, (each + 1, 2), each) for each in range(size)]
        for gathered in (hvd.allgather(rows[rank], name="a"), hvd.allgather_async(rows[rank], name="b").wait()):
            assert_equal(gathered, torch.cat(rows), dtype)
        for gathered in (
            hvd.grouped_allgather([rows[rank]] * 2, "c"),
            hvd.grouped_allgather_async([rows[rank]] * 2, "d").wait(),
        ):
            for each in gathered:
                assert_equal(each, torch.cat(rows), dtype)

        root, mine = size - 1, values(dtype, (2, 3), rank)
        for found in (hvd.broadcast(mine, root, "e"), hvd.broadcast_async(mine, root, "f").wait()):
            assert_equal(found, values(dtype, (2, 3), root), dtype)
        target = mine.clone()
        assert (
            hvd.broadcast_(target, root, "g") is target
            and hvd.broadcast_async_(mine.clone(), root, "h").wait() is not None
        )
        assert_equal(target, values(dtype, (2, 3), root), dtype)

        sent, splits = values(dtype, (sum(range(1, size + 1)), 2), rank), list(range(1, size + 1))
        received, counts = hvd.alltoall(sent, splits, "i")
        parts = [values(dtype, (sum(splits), 2), each).split(splits)[rank] for each in range(size)]
        assert_equal(received, torch.cat(parts), dtype)
        assert counts.dtype == torch.int32 and counts.tolist() == [rank + 1] * size
        equal_parts = values(dtype, (2 * size,), rank)
        expected = torch.cat([values(dtype, (2 * size,), each).chunk(size)[rank] for each in range(size)])
        assert_equal(hvd.alltoall(equal_parts, name="j"), expected, dtype)
        if DTYPES[dtype].is_moved_only:
            with pytest.raises(ValueError, match=r"cannot be reduced.*Cast to bfloat16 or float32 first"):
                hvd.allreduce(mine, name="refused")
            return

        whole = [values(dtype, (2 * size + 1, 2), each) for each in range(size)]
        mine = reduced(whole, "sum").tensor_split(size)[rank]
        for found in (
            hvd.reducescatter(whole[rank], "k", op=hvd.Sum),
            hvd.reducescatter_async(whole[rank], "l", op=hvd.Sum).wait(),
            hvd.grouped_reducescatter([whole[rank]], "m", op=hvd.Sum)[0],
            hvd.grouped_reducescatter_async([whole[rank]], "n", op=hvd.Sum).wait()[0],
        ):
            assert_equal(found, mine, dtype)

    world.run(on_rank)


def test_groups_of_nothing_and_from_generators(world):
    def on_rank(rank):
        for operate in (
            hvd.grouped_allreduce,
            hvd.grouped_allreduce_,
            hvd.grouped_allgather,
            hvd.grouped_reducescatter,
        ):
            assert operate([]) == []
            (found,) = operate(torch.ones(world.size) for _ in range(1))
            assert found[0] == 1

    world.run(on_rank)


def test_layouts(world):
    """Transposed, strided, expanded, channels-last, offset: read right, and written right in place."""

    def on_rank(rank):
        base = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).reshape(2, 3, 4, 4) + rank
        layouts = [base.transpose(1, 3), base[:, ::2, 1:], base[1:], base.contiguous(memory_format=torch.channels_last)]
        shift = sum(range(world.size)) - world.size * rank  # each rank's values are shifted by its rank
        negative = torch.complex(base, -base).conj().imag[0, 0, 0, :1]  # a view with torch's lazy minus sign
        assert negative.is_neg() and negative.is_contiguous()
        for index, tensor in enumerate([*layouts, base[:1, :1, :1, :1].expand(2, 3, 4, 4), negative]):
            expected = tensor.clone() * world.size + shift
            assert torch.equal(hvd.allreduce(tensor, name=f"layout {index}", op=hvd.Sum), expected)
        for index, tensor in enumerate(layouts):
            target = tensor.clone(memory_format=torch.preserve_format)
            expected, strides = tensor.clone() * world.size + shift, target.stride()
            hvd.allreduce_(target, name=f"in place {index}", op=hvd.Sum)
            assert torch.equal(target, expected) and target.stride() == strides

    world.run(on_rank)


def test_a_parameter_in_place(world):
    """In-place forms take leaves that need gradients, and leave no history behind."""

    def on_rank(rank):
        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        assert hvd.broadcast_(parameter, 0, "parameter") is parameter
        assert parameter.tolist() == [0.0] * 3 and parameter.is_leaf
        hvd.synchronize(hvd.allreduce_async_(parameter, name="again"))
        parameter.sum().backward()

    world.run(on_rank)


def test_scales_and_compression(world):
    size, total = world.size, float(sum(range(world.size)))

    def on_rank(rank):
        mine = torch.full((4,), float(rank))
        assert (
            hvd.allreduce(mine, name="a", op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5).tolist() == [total] * 4
        )
        for compression in (Compression.none, Compression.fp16, Compression.bf16, Compression.int8):
            found = hvd.allreduce(mine, name="b", compression=compression, op=hvd.Sum)
            assert found.dtype == torch.float32 and found.tolist() == [total] * 4
            found = hvd.grouped_allreduce([mine], name="c", compression=compression, op=hvd.Sum)[0]
            assert found.dtype == torch.float32 and found.tolist() == [total] * 4
            whole = hvd.allreduce(torch.ones(2, dtype=torch.int64), name="d", compression=compression, op=hvd.Sum)
            assert whole.dtype == torch.int64 and whole.tolist() == [size] * 2
            rows = hvd.reducescatter(torch.ones(size, 2), "e", compression, hvd.Sum)
            assert rows.dtype == torch.float32 and rows.tolist() == [[size] * 2]

    world.run(on_rank)


class Halves(Compression.none):
    """A user's compressor, of which both methods must be called."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, "context"

    @staticmethod
    def decompress(tensor, context):
        return tensor * 2 + (0 if context == "context" else torch.nan)


def test_a_compressor_of_the_user(world):
    def on_rank(rank):
        x, rows = torch.ones(2, requires_grad=True), torch.ones(world.size)
        total = hvd.allreduce(x, name="a", compression=Halves, op=hvd.Max)
        assert total.tolist() == [1.0] * 2
        assert hvd.grouped_allreduce([rows], name="b", compression=Halves, op=hvd.Sum)[0][0] == world.size
        assert hvd.reducescatter(rows, "c", Halves, hvd.Sum).tolist() == [world.size]
        assert hvd.grouped_reducescatter([rows], "d", Halves, hvd.Sum)[0].tolist() == [world.size]
        hvd.allreduce(x, name="e", compression=Halves, op=hvd.Sum).sum().backward()
        assert x.grad.tolist() == [world.size] * 2

    world.run(on_rank)


@pytest.mark.parametrize("compression, share", [("fp16", 1 / 2), ("bf16", 1 / 2), ("int8", 65 / 256)])
def test_compression_reduces_what_travels_between_hosts(compression, share):
    def on_rank(rank):
        sent = []
        for chosen in (Compression.none, getattr(Compression, compression)):
            before = rt.counters()["wire_bytes_sent"]
            hvd.allreduce(torch.ones(1 << 16), compression=chosen)
            hvd.grouped_allreduce([torch.ones(1 << 16)], compression=chosen)
            hvd.reducescatter(torch.ones(1 << 16), compression=chosen)
            hvd.grouped_reducescatter([torch.ones(1 << 16)], compression=chosen)
            sent.append(rt.counters()["wire_bytes_sent"] - before)
        assert sent[0] > 0 and sent[1] == sent[0] * share

    with World(2, "1+1") as world:
        world.run(on_rank)


def test_weighted_averages(world):
    """Each rank's tensor counts as many samples as it had; rank 0 had none."""
    size = world.size
    counts = [max(rank, int(size == 1)) for rank in range(size)]
    expected = sum(count * (rank + 1) for rank, count in enumerate(counts)) / sum(counts)

    def on_rank(rank):
        x, weight = torch.full((size, 2), rank + 1.0), {"weight": counts[rank]}
        found = [
            hvd.allreduce(x, name="a", **weight),
            hvd.allreduce_async(x, name="b", **weight).wait(),
            hvd.allreduce_(x.clone(), name="c", **weight),
            hvd.allreduce_async_(x.clone(), name="d", **weight).wait(),
            *hvd.grouped_allreduce([x], name="e", **weight),
            *hvd.grouped_allreduce_async([x], name="f", **weight).wait(),
            *hvd.grouped_allreduce_([x.clone()], name="g", **weight),
            *hvd.grouped_allreduce_async_([x.clone()], name="h", **weight).wait(),
            hvd.reducescatter(x, "i", **weight),
            hvd.reducescatter_async(x, "j", **weight).wait(),
            *hvd.grouped_reducescatter([x], "k", **weight),
            *hvd.grouped_reducescatter_async([x], "l", **weight).wait(),
            hvd.allreduce(x.to_sparse(1), name="m", **weight).to_dense(),
            hvd.allreduce_async(x.half().to_sparse(), name="n", **weight).wait().float().to_dense(),
        ]
        for each in found:
            torch.testing.assert_close(each, torch.full_like(each, expected), rtol=1e-3, atol=0)

    world.run(on_rank)


def test_the_deprecated_average():
    def on_rank(rank):
        for average in (True, False):
            with pytest.warns(DeprecationWarning, match="op=Average or op=Sum") as warned:
                assert hvd.allreduce(torch.ones(1), average=average).tolist() == [1.0]
            assert warned[0].filename == __file__, "the warning must name the user's line"
        with pytest.raises(ValueError, match="found both"):
            hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)

    with World(1) as world:
        world.run(on_rank)


# ---- memory of pending operations ----


@pytest.mark.least_ranks(2)
def test_a_pending_tensor_cannot_be_resized(world):
    """Rank 0 submits first and meddles; the others submit once it has tried."""

    def on_rank(rank):
        for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.bool)):
            tensor = torch.ones(1000, dtype=dtype)
            if rank == 0:
                handles = [hvd.allreduce_async_(tensor, name=f"{index}", op=hvd.Max)]
                scalar = torch.ones((), dtype=dtype)
                handles.append(hvd.allreduce_async(scalar, name=f"scalar {index}", op=hvd.Max))
                for pending in (tensor, scalar):
                    with pytest.raises(RuntimeError, match="not resizable"):
                        pending.detach().resize_(1 << 20)  # of an alias: torch leaves the new shape on what it refused
                    with pytest.raises(RuntimeError, match="not resizable"):
                        pending.untyped_storage().resize_(0)
            hvd.barrier()
            if rank != 0:
                handles = [hvd.allreduce_async_(tensor, name=f"{index}", op=hvd.Max)]
                handles.append(hvd.allreduce_async(torch.ones((), dtype=dtype), name=f"scalar {index}", op=hvd.Max))
            for handle in handles:
                hvd.synchronize(handle)
            assert tensor.all()

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_a_pending_tensor_may_be_dropped(world):
    """Tensor and handle go before the others submit; the memory must live, and other tensors must not be written."""

    def on_rank(rank):
        if rank == 0:
            for index in range(20):
                hvd.allreduce_async_(torch.full((100_000,), 2.0), name=f"{index}", op=hvd.Sum)
            gc.collect()
            others = [torch.zeros(100_000) for _ in range(40)]
        hvd.barrier()
        if rank != 0:
            handles = [hvd.allreduce_async(torch.ones(100_000), name=f"{index}", op=hvd.Sum) for index in range(20)]
            assert all(handle.wait().eq(2.0 + world.size - 1).all() for handle in handles)
        hvd.barrier()
        if rank == 0:
            assert not any(tensor.any() for tensor in others)

    world.run(on_rank)


# ---- refusals ----


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: torch.ones(2, 2).to_sparse_csr(), NotImplementedError, "to_dense"),
        (
            lambda: torch.ones(2, device="meta"),
            NotImplementedError,
            "expected memory of the CPU or a CUDA device but found device meta",
        ),
        (lambda: torch.ones(2, dtype=torch.complex32), ValueError, "complex32"),
        (lambda: torch.ones(2, dtype=torch.bool), ValueError, "bool"),
    ],
    ids=["sparse rows", "meta", "complex", "average of bool"],
)
def test_what_one_rank_refuses_fails_everywhere(world, make, kind, text):
    def on_rank(rank):
        with pytest.raises(rt.RingtrainError, match=text) as caught:
            hvd.allreduce(make() if rank == 0 else torch.ones(2), name="refused")
        if rank == 0:
            assert isinstance(caught.value, kind)
        assert "allreduce 'refused'" in str(caught.value)
        assert hvd.allreduce(torch.ones(2), name="next", op=hvd.Sum).tolist() == [world.size] * 2

    world.run(on_rank)
