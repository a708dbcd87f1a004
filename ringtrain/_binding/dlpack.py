"""Reads tensors of any library that speaks DLPack, without a copy and without that library, and lends memory to them.

NumPy's own ``from_dlpack`` knows no bfloat16, no floats of 8 bits, and calls older producers' memory read-only; ``view`` serves both.
Called by ``tensor_memory`` for everything that is neither an ndarray nor of a registered framework, and by ``cuda_arrays``.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np

from ringtrain._binding import tables
from ringtrain.errors import InvalidArgumentError, UnsupportedError

CUDA = 2  # kDLCUDA
_CUDA_DEVICES = (CUDA, 13)  # and kDLCUDAManaged
_HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_DEVICE_NAMES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed", 14: "oneAPI"}
_READ_ONLY = 1  # flag of a versioned tensor
_BY_CODE = {(dtype.dlpack_code, dtype.dlpack_bits): dtype for dtype in tables.DTYPES.values()}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("manager_context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


class _Memory:
    """What NumPy needs to make a view; it keeps the capsule, which keeps the producer's memory.

    The capsule stays unconsumed, so its own destructor gives the tensor back.
    """

    def __init__(self, capsule: Any, tensor: _DLTensor, dtype: np.dtype, read_only: bool):
        self._capsule = capsule
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)) if tensor.strides else None
        address = (tensor.data or 0) + tensor.byte_offset
        self.__array_interface__ = {
            "version": 3, "shape": shape, "strides": strides, "typestr": dtype.str, "data": (address, read_only),
        }  # fmt: skip


def view(producer: Any) -> tuple[np.ndarray, tables.DType]:
    """A NumPy view of the producer's host memory, and its element type; what NumPy lacks is viewed as whole numbers.

    Raises:
        UnsupportedError: the tensor is on a device.
        InvalidArgumentError: its element type has no row in the table, or the producer refuses to export it.
    """
    device = int(producer.__dlpack_device__()[0])
    if device not in _HOST_DEVICES:
        where = _DEVICE_NAMES.get(device, f"DLPack type {device}")
        raise UnsupportedError(
            f"expected a tensor in host memory but found one on a {where} device. Copy it to the host first."
        )
    capsule = _export(producer)
    tensor, read_only = _open(capsule)
    dtype = _dtype_of(tensor)
    return np.asarray(_Memory(capsule, tensor, np.dtype(dtype.carrier), read_only)), dtype


class CudaMemory(NamedTuple):
    """A tensor in the memory of a GPU.

    Attributes:
        address: of the first element.
        dtype: of its elements.
        shape: number of elements along each dimension.
        device: index of the GPU.
        contiguous: whether the elements lie row by row without gaps.
        read_only: whether they must not be written.
        owner: keeps the memory alive.
    """

    address: int
    dtype: tables.DType
    shape: tuple[int, ...]
    device: int
    contiguous: bool
    read_only: bool
    owner: object


def is_on_cuda(producer: Any) -> bool:
    """Whether a tensor with DLPack is in CUDA memory."""
    return int(producer.__dlpack_device__()[0]) in _CUDA_DEVICES


def cuda_memory(producer: Any, stream: int) -> CudaMemory:
    """The memory of a tensor that ``is_on_cuda``.

    Args:
        producer: the tensor.
        stream: a CUDA stream, 1 for the legacy one: what it is given from now on waits until the tensor is computed.

    Raises:
        InvalidArgumentError: its element type has no row in the table, or the producer refuses to export it.
    """
    capsule = _export(producer, stream=stream)
    tensor, read_only = _open(capsule)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    contiguous = strides is None or is_contiguous(shape, strides)
    return CudaMemory(address, _dtype_of(tensor), shape, tensor.device_id, contiguous, read_only, capsule)


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements with these strides, counted in elements, lie row by row without gaps."""
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return 0 in shape
        expected *= extent
    return True


def _dtype_of(tensor: _DLTensor) -> tables.DType:
    dtype = _BY_CODE.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise InvalidArgumentError(
            f"expected one of {', '.join(tables.DTYPES)} but found elements of DLPack code {tensor.code}, "
            f"{tensor.bits} bits, {tensor.lanes} lanes. Cast before submitting."
        )
    return dtype


def _export(producer: Any, **stream: int) -> Any:
    try:
        try:
            return producer.__dlpack__(max_version=(1, 0), **stream)
        except TypeError:  # producers from before versions
            return producer.__dlpack__(**stream)
    except (BufferError, RuntimeError, ValueError) as problem:
        raise InvalidArgumentError(f"expected a tensor that its library exports but found: {problem}") from problem


def _open(capsule: Any) -> tuple[_DLTensor, bool]:
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        return versioned.tensor, bool(versioned.flags & _READ_ONLY)
    return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), False


# ---- lending memory ----

# What has been lent and not given back: the structures, and who owns the memory; by the address of the structure.
_lent: dict[int, tuple] = {}


def lend(address: int, dtype: tables.DType, shape: tuple[int, ...], device: int, owner: object) -> Any:
    """A capsule for contiguous CUDA memory, which ``owner`` keeps until the library that takes it gives it back."""
    extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    managed = _Managed()
    managed.tensor = _DLTensor(
        address, CUDA, device, len(shape), dtype.dlpack_code, dtype.dlpack_bits, 1,
        ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64)), None, 0,
    )  # fmt: skip
    managed.deleter = ctypes.cast(_give_back, ctypes.c_void_p)
    place = ctypes.addressof(managed)
    _lent[place] = managed, extents, owner
    return _new_capsule(place, b"dltensor", ctypes.cast(_drop_capsule, ctypes.c_void_p))


@_Deleter
def _give_back(managed: int) -> None:
    _lent.pop(managed, None)


@_Deleter
def _drop_capsule(capsule: int) -> None:
    """A capsule that nobody took ends; the name of one that was taken has changed."""
    if _address_is_valid(capsule, b"dltensor"):
        _lent.pop(_address_pointer(capsule, b"dltensor"), None)


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# For a capsule that is being destroyed: as an object it would be counted again.
_address_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_address_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
