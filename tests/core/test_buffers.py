"""Input of every kind and layout is read right; results come back in the library of the input; memory lives long enough."""

import array
import gc
import sys

import numpy as np
import pytest
from refusals import said_alike
from worlds import World, sizes

import ringtrain as rt
from ringtrain._binding import tables, tensor_memory
from ringtrain.errors import InvalidArgumentError, UnsupportedError

base = np.arange(5 * 6 * 7, dtype=np.float32).reshape(5, 6, 7)
LAYOUTS = {
    "contiguous": base,
    "fortran": np.asfortranarray(base),
    "transposed": base.T,
    "every other": base[::2, ::3, ::2],
    "backwards": base[::-1, :, ::-1],
    "one column": base[:, 2, 3],
    "broadcast": np.broadcast_to(base[:1], base.shape),
    "scalar": np.array(3.5, np.float32),
    "empty": base[:0],
    "empty inside": base[:, :0],
    "one element": base[:1, :1, :1],
    "unaligned": np.frombuffer(b"\0" + base.tobytes(), np.uint8)[1:].view(np.float32).reshape(base.shape),
    "other byte order": base.astype(base.dtype.newbyteorder()),
    "read-only": np.frombuffer(base.tobytes(), np.float32),
    "nine dimensions": base[:2, :2, :2].reshape(1, 2, 1, 2, 1, 2, 1, 1, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(world, layout):
    given = LAYOUTS[layout]
    before = given.copy()

    def on_rank(rank):
        found = rt.allreduce(given, "t", rt.Sum)
        assert found.dtype == np.float32 and found.shape == given.shape
        assert np.array_equal(found, before * rt.size())
        assert np.array_equal(rt.broadcast(given, 0, "b"), before)
        if given.ndim:
            assert np.array_equal(rt.allgather(given, "g"), np.concatenate([before] * rt.size()))

    world.run(on_rank)
    assert np.array_equal(given, before), "an input must not change"


@pytest.mark.parametrize("layout", [name for name, given in LAYOUTS.items() if given.flags.writeable])
def test_any_layout_in_place(world, layout):
    """The result reaches the caller's own memory, through a copy where it is not contiguous."""

    def on_rank(rank):
        before = LAYOUTS[layout].copy()
        neighbours = np.zeros((*before.shape, 2), before.dtype)
        mine = neighbours[..., 0]
        mine[...] = before
        assert rt.allreduce_(mine, "t", rt.Sum) is mine
        assert np.array_equal(mine, before * rt.size())
        assert rt.synchronize(rt.broadcast_async_(mine, 0, "b")) is mine
        assert np.array_equal(mine, before * rt.size())
        assert not neighbours[..., 1].any()

    world.run(on_rank)


def test_read_only_in_place_is_refused(world):
    def on_rank(rank):
        frozen = np.ones(3)
        frozen.flags.writeable = False
        for given in (frozen, b"bytes", np.broadcast_to(np.ones(1), 3)):
            with pytest.raises(InvalidArgumentError, match="read-only"):
                rt.allreduce_(given, "t", rt.Sum)

    world.run(on_rank)


def test_buffer_protocol_and_plain_python(world):
    def on_rank(rank):
        size = rt.size()
        inputs = {
            "bytes": (b"abc", np.uint8),
            "bytearray": (bytearray(b"abc"), np.uint8),
            "memoryview": (memoryview(b"abc"), np.uint8),
            "strided memoryview": (memoryview(b"a-b-c-")[::2], np.uint8),
            "array": (array.array("d", [97, 98, 99]), np.float64),
            "list": ([97, 98, 99], np.int64),
            "tuple": ((97.0, 98.0, 99.0), np.float64),
        }
        for name, (given, dtype) in inputs.items():
            found = rt.allgather(given, name)
            assert type(found) is np.ndarray and found.dtype == dtype, name
            assert found.tolist() == [97, 98, 99] * size, name
        assert rt.allreduce(2, "int", rt.Sum) == 2 * size and rt.allreduce(0.5, "float") == 0.5
        assert rt.allreduce(True, "bool", rt.Max) == np.True_
        place = array.array("d", [1, 2])
        assert rt.allreduce_(place, "array", rt.Sum) is place and place.tolist() == [size, 2 * size]

    world.run(on_rank)


def test_masked_array_is_refused(world):
    def on_rank(rank):
        with pytest.raises(InvalidArgumentError, match="masked"):
            rt.allreduce(np.ma.array([1.0, 2.0], mask=[True, False]), "t")

    world.run(on_rank)


class Foreign:
    """A tensor of a library that speaks DLPack and nothing else."""

    def __init__(self, tensor, device=(1, 0)):
        self.tensor, self.device = tensor, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **arguments):
        return self.tensor.__dlpack__(**arguments)


class OldForeign(Foreign):
    """The same from before DLPack had versions."""

    def __dlpack__(self, stream=None):
        return self.tensor.__dlpack__()


@pytest.mark.parametrize("library", [Foreign, OldForeign])
def test_dlpack(world, library):
    def on_rank(rank):
        for name, row in tables.DTYPES.items():
            if row.is_foreign:
                continue
            whole = np.arange(24).reshape(4, 6).astype(name)
            for given in (whole, whole[::2, 1::2], whole.T):
                found = rt.broadcast(library(given), 0, f"{name}{given.shape}")
                assert type(found) is np.ndarray and found.dtype == given.dtype
                assert np.array_equal(found, given)
        place = np.zeros((4, 6))
        foreign = library(place[:, ::2])
        assert rt.allreduce_(library(place), "whole", rt.Sum, 1.0) is not place
        place[:] = 1
        assert rt.allreduce_(foreign, "part", rt.Sum) is foreign
        assert place.sum() == 12 * rt.size() + 12

    world.run(on_rank)


def test_dlpack_of_a_device_is_refused_alike(world):
    def on_rank(rank):
        with pytest.raises(UnsupportedError, match="OpenCL device") as raised:
            rt.allreduce(Foreign(np.ones(3), (4, 0)), "t")
        assert said_alike(rt.allgather_object(str(raised.value)))

    world.run(on_rank)


def test_dlpack_that_will_not_be_exported(world):
    class Stubborn(Foreign):
        def __dlpack__(self, **arguments):
            raise BufferError("it requires gradient")

    def on_rank(rank):
        with pytest.raises(InvalidArgumentError, match="it requires gradient"):
            rt.allreduce(Stubborn(None), "t")

    world.run(on_rank)


def test_dlpack_gives_its_memory_back():
    class Base(np.ndarray):
        pass

    with World(sizes()[0]) as world:
        memory = np.ones(1000).view(Base)
        before = sys.getrefcount(memory)
        world.run(lambda rank: rt.allreduce(Foreign(memory), "t"))
        gc.collect()
        assert sys.getrefcount(memory) == before


def test_torch_without_its_adapter(world):
    """Through DLPack alone: any layout, bfloat16 too, and tensors come back as tensors."""
    import torch

    def on_rank(rank):
        size = rt.size()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
            whole = torch.arange(12).reshape(3, 4).to(dtype)
            for given in (whole, whole.t(), whole[:, ::2]):
                found = rt.allreduce(given, f"{dtype}{tuple(given.shape)}", rt.Max)
                assert isinstance(found, torch.Tensor) and found.dtype == dtype and torch.equal(found, given)
            gathered = rt.allgather(whole, f"rows {dtype}")
            assert gathered.dtype == dtype and torch.equal(gathered, torch.cat([whole] * size))
        place = torch.ones(4, 6, dtype=torch.bfloat16)
        assert rt.allreduce_(place[:, ::2], "place", rt.Sum) is not None
        assert place[0].tolist() == [size, 1] * 3

    world.run(on_rank)


def test_floats_of_8_bits_move_and_are_not_reduced(world):
    """In place and strided, too; a reduction is refused in the same words on all ranks."""
    import ml_dtypes

    def on_rank(rank):
        for name, row in tables.DTYPES.items():
            if not row.is_moved_only:
                continue
            dtype = getattr(ml_dtypes, name)
            given = np.array([1, 2, 4, 8]).astype(dtype)
            for part in (given, given[::2], given[::-1]):
                found = rt.allgather(part, "rows")
                assert found.dtype == dtype and found.tolist() == part.tolist() * rt.size()
            mine = np.full(4, 2 ** (rank % 4)).astype(dtype)
            rt.broadcast_(mine[::2], 0, "place")
            assert mine.astype(float).tolist() == [1, 2 ** (rank % 4)] * 2
            with pytest.raises(InvalidArgumentError) as refused:
                rt.allreduce(given, "sum", rt.Sum)
            told = (
                f"allreduce 'sum': {name}[4] cannot be reduced: a sum would lose most of its few bits. Cast to bfloat16 "
                "or float32 first; allgather, alltoall and broadcast take it."
            )
            assert str(refused.value) == (f"{told} Found on rank {rank}." if rt.size() > 1 else told)

    world.run(on_rank)


@pytest.mark.parametrize("op", [rt.Min, rt.Max, rt.Product, rt.Adasum])
def test_complex_numbers_have_sums_and_averages_only(world, op):
    words = "adasum needs floating-point tensors" if op == rt.Adasum else "the reduction must be sum or average, but is"

    def on_rank(rank):
        with pytest.raises(InvalidArgumentError, match=words):
            rt.allreduce(np.ones(3, np.complex64), "x", op)

    world.run(on_rank)


def test_whole_numbers_without_sign_wrap_and_compare_as_such(world):
    """Where two's complement would tell another number: averages, extremes and factors beyond 2^63."""
    high = 2**64 - 4

    def on_rank(rank):
        given = np.array([high + rank % 2, 3], np.uint64)
        size = rt.size()
        assert rt.allreduce(given, "max", rt.Max).tolist() == [high + (size > 1), 3]
        assert rt.allreduce(given, "min", rt.Min).tolist() == [high, 3]
        assert rt.allreduce(np.uint64([2**63]), "half", rt.Max, 1.5).tolist() == [2**63 + 2**62]
        assert rt.allreduce(np.uint64([2**63]), "twice", rt.Max, 2.0).tolist() == [2**64 - 1]
        assert rt.allreduce(np.uint64([(2**64 - 1) // size]), "mean").tolist() == [(2**64 - 1) // size]
        assert rt.allreduce(np.uint16([2**16 - 1]), "wrap", rt.Sum).tolist() == [(size * (2**16 - 1)) % 2**16]

    world.run(on_rank)


def test_ml_dtypes_bfloat16(world):
    import ml_dtypes

    def on_rank(rank):
        given = np.arange(10).astype(ml_dtypes.bfloat16)
        for part in (given, given[::2], given[::-1], given[:0], given[3]):
            found = rt.allreduce(part, f"{part.size}", rt.Sum)
            assert found.dtype == given.dtype and np.array_equal(found, part * np.float32(rt.size()))
        mine = given.copy()
        rt.allreduce_(mine[::2], "place", rt.Sum)
        assert mine.astype(int).tolist() == [i * (rt.size() if i % 2 == 0 else 1) for i in range(10)]

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_dropped_handles_and_tensors_live_until_done(world):
    """Inputs that nobody else holds, handles that nobody keeps: the peers still get the right numbers."""

    def on_rank(rank):
        for turn in range(5):
            if rank == 0:
                rt.allreduce_async(np.full(100_000, float(turn)), f"dropped.{turn}", rt.Sum)
                gc.collect()
                noise = [np.full(100_000, -1.0) for _ in range(3)]  # would land where the input was
                rt.barrier()
                del noise
            else:
                rt.barrier()
                handle = rt.allreduce_async(np.full(100_000, float(turn)), f"dropped.{turn}", rt.Sum)
                assert (rt.synchronize(handle) == turn * rt.size()).all()
        rt.barrier()
        assert rt.allreduce(np.ones(1), "dropped.0", rt.Sum)[0] == rt.size()  # the name is free again

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_memory_of_a_pending_operation_cannot_be_resized(world):
    def on_rank(rank):
        memory = bytearray(64)
        if rank == 0:
            handle = rt.allreduce_async(memory, "pinned", rt.Sum)
            with pytest.raises(BufferError):
                memory.extend(b"x" * 10_000)
            rt.barrier()
        else:
            rt.barrier()
            handle = rt.allreduce_async(memory, "pinned", rt.Sum)
        assert len(rt.synchronize(handle)) == 64
        del handle
        gc.collect()
        memory.extend(b"x")

    world.run(on_rank)


def test_results_outlive_the_world():
    results = []
    with World(sizes()[0]) as world:
        world.run(
            lambda rank: results.append((rt.allgather(np.arange(1000.0), "rows"), rt.allreduce(np.ones(1000), "sum")))
        )
    del world
    gc.collect()
    for gathered, reduced in results:
        assert gathered[:1000].tolist() == list(range(1000)) and reduced.tolist() == [1.0] * 1000
        gathered += 1  # it is the caller's own memory


def test_buffer_of_an_array():
    given = np.arange(6, dtype=np.int16).reshape(2, 3)
    buffer = tensor_memory.as_buffer(given)
    assert buffer.address == given.ctypes.data and buffer.shape == (2, 3) and buffer.device == -1
    assert tables.DTYPE_BY_ID[buffer.dtype].name == "int16"
    assert tensor_memory.as_buffer(given[:, ::2]).address != given.ctypes.data
