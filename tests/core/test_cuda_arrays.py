"""Arrays that say they are on a GPU: what is read of them, and what is handed back. Memory is never touched here."""

import ctypes
import gc
import sys
import types
import weakref

import numpy as np
import pytest
from refusals import said_alike

import ringtrain as rt
from ringtrain._binding import cuda_arrays, dlpack, tables
from ringtrain._bootstrap import nccl
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.testing import World


class Interfaced:
    """An array with the CUDA array interface alone, as Numba's are; ``changes`` replace items of it."""

    def __init__(self, shape=(2, 3), typestr="<f4", **changes):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": shape, "typestr": typestr, "strides": None, "data": (4096, False), "stream": None,
        } | changes  # fmt: skip


class Lent:
    """An array with DLPack; notes the stream for which it was asked."""

    def __init__(self, dtype="float32", shape=(2, 3), device=1):
        self.dtype, self.shape, self.device, self.asked_for = tables.DTYPES[dtype], shape, device, []

    def __dlpack_device__(self):
        return dlpack.CUDA, self.device

    def __dlpack__(self, stream=None):
        self.asked_for.append(stream)
        return dlpack.lend(4096, self.dtype, self.shape, self.device, self)


@pytest.fixture(autouse=True)
def device_of_any_address(monkeypatch):
    monkeypatch.setattr(cuda_arrays, "_device_of", lambda address: 3)


@pytest.mark.parametrize("dtype", tables.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_dlpack_says_all_of_an_array(dtype, shape):
    found = cuda_arrays.memory_of(array := Lent(dtype, shape, 1), 7)
    assert array.asked_for == [7]
    assert found[:6] == (4096, tables.DTYPES[dtype], shape, 1, True, False)


def test_host_arrays_are_not_on_cuda():
    assert not cuda_arrays.is_on_cuda(np.zeros(3)) and not cuda_arrays.is_on_cuda([1.0])
    assert cuda_arrays.is_on_cuda(Lent()) and cuda_arrays.is_on_cuda(Interfaced())


@pytest.mark.parametrize(
    "typestr, dtype", [("<f4", "float32"), ("<f2", "float16"), ("|u1", "uint8"), ("|b1", "bool"), ("<i8", "int64")]
)
def test_the_interface_says_all_of_an_array(typestr, dtype):
    found = cuda_arrays.memory_of(Interfaced((2, 3), typestr), 1)
    assert found[:6] == (4096, tables.DTYPES[dtype], (2, 3), 3, True, False)
    assert cuda_arrays.memory_of(Interfaced(data=(4096, True)), 1).read_only


@pytest.mark.parametrize("shape, strides, contiguous", [
    ((2, 3), (12, 4), True), ((2, 3), (4, 8), False), ((2, 3), (24, 8), False), ((1, 3), (999, 4), True),
    ((0, 3), (4, 4), True), ((), (), True), ((4,), (5,), False), ((2, 1, 3), (12, 8, 4), True),
])  # fmt: skip
def test_strided_arrays_are_refused(shape, strides, contiguous):
    array = Interfaced(shape, strides=strides)
    if contiguous:
        assert cuda_arrays.memory_of(array, 1).contiguous
    else:
        with pytest.raises(InvalidArgumentError, match="contiguous.*strided.*ascontiguousarray"):
            cuda_arrays.memory_of(array, 1)


@pytest.mark.parametrize("typestr", [">f4", "<c32", "<f16", "<M8[s]"])
def test_unknown_elements_are_refused(typestr):
    with pytest.raises(InvalidArgumentError, match="Cast before"):
        cuda_arrays.memory_of(Interfaced(typestr=typestr), 1)


def test_streams_are_those_of_the_library(monkeypatch):
    assert cuda_arrays.stream_of(Lent()) == cuda_arrays.LEGACY_STREAM
    assert cuda_arrays.stream_of(Interfaced()) == cuda_arrays.LEGACY_STREAM
    assert cuda_arrays.stream_of(Interfaced(stream=4711)) == 4711
    pointer = 0
    stream = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=pointer))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=stream))
    cupy_array = type("ndarray", (Lent,), {"__module__": "cupy._core.core"})()
    assert cuda_arrays.stream_of(cupy_array) == cuda_arrays.LEGACY_STREAM, "DLPack forbids 0"
    pointer = 815
    assert cuda_arrays.stream_of(cupy_array) == 815


def result(held_back, owner=None, dtype="float32", shape=(2, 3)):
    return cuda_arrays.CudaArray(4096, tables.DTYPES[dtype], shape, 1, owner, held_back.append)


@pytest.mark.parametrize("stream, expected", [(1, [1]), (4711, [4711]), (None, []), (-1, [])])
def test_whoever_takes_a_result_waits_for_it_on_its_stream(stream, expected):
    held_back = []
    found = dlpack.cuda_memory(Passing(result(held_back), stream), 99)
    assert held_back == expected and found[:6] == (4096, tables.DTYPES["float32"], (2, 3), 1, True, False)


class Passing:
    """Asks for another stream than it is asked for."""

    def __init__(self, array, stream):
        self.array, self.stream = array, stream

    def __dlpack__(self, **_):
        return self.array.__dlpack__(stream=self.stream)


def test_a_result_has_the_interface():
    held_back = []
    interface = result(held_back).__cuda_array_interface__
    assert (interface["shape"], interface["typestr"], interface["data"], interface["version"]) == (
        (2, 3),
        "<f4",
        (4096, False),
        3,
    )
    assert held_back == [interface["stream"]]
    assert result([], dtype="bfloat16").__cuda_array_interface__["typestr"] == "<u2"
    assert result([], shape=(0, 3)).__cuda_array_interface__["data"] == (0, False)


def test_memory_lives_as_long_as_a_capsule_that_nobody_took():
    owner = type("Owner", (), {})()
    gone = weakref.ref(owner)
    capsule = result([], owner).__dlpack__()
    del owner
    gc.collect()
    assert gone() is not None
    del capsule
    gc.collect()
    assert gone() is None


def test_memory_lives_until_the_library_gives_it_back():
    owner = type("Owner", (), {})()
    gone = weakref.ref(owner)
    capsule = result([], owner).__dlpack__()
    del owner
    place = dlpack._capsule_pointer(capsule, b"dltensor")
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    used = b"used_dltensor"
    assert rename(capsule, used) == 0
    del capsule
    gc.collect()
    assert gone() is not None
    managed = dlpack._Managed.from_address(place)
    dlpack._Deleter(managed.deleter)(place)
    gc.collect()
    assert gone() is None


def test_results_go_to_the_library_of_the_input(monkeypatch):
    array = result([])
    namespace = types.SimpleNamespace(from_dlpack=lambda given: ("taken", given))
    like = type("Array", (), {"__array_namespace__": lambda self: namespace})()
    assert cuda_arrays.in_library_of(like, array) == ("taken", array)
    assert cuda_arrays.in_library_of(Interfaced(), array) is array
    numba_array = type("DeviceNDArray", (), {"__module__": "numba.cuda.cudadrv.devicearray"})()
    monkeypatch.setitem(sys.modules, "numba.cuda", types.SimpleNamespace(as_cuda_array=lambda given: ("numba", given)))
    assert cuda_arrays.in_library_of(numba_array, array) == ("numba", array)


def test_without_a_driver_all_ranks_hear_why_and_the_host_still_works():
    def on_rank(rank):
        with pytest.raises(
            UnsupportedError, match="allreduce 't': CUDA driver '/nowhere/libcuda.so.1'.*Install NVIDIA's driver"
        ) as raised:
            rt.allreduce(Lent(), "t")
        assert said_alike(rt.allgather_object(str(raised.value)))
        return rt.allreduce(np.ones(3), "t", rt.Sum).tolist()

    with World(2, cuda_lib="/nowhere/libcuda.so.1") as world:
        assert world.run(on_rank) == [[2.0] * 3] * 2


def test_grouped_tensors_of_several_devices_are_refused():
    def on_rank(rank):
        with pytest.raises(InvalidArgumentError, match="one device.*the host and cuda:1"):
            rt.grouped_allreduce_([np.ones(3), Lent()], "t")

    with World(2) as world:
        world.run(on_rank)


def test_nccl_is_suggested_from_a_wheel(tmp_path, monkeypatch):
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nvidia", "nvidia.nccl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    nccl.suggested_path.cache_clear()
    try:
        assert nccl.suggested_path().endswith("nvidia/nccl/lib/libnccl.so.2")
    finally:
        nccl.suggested_path.cache_clear()
