"""Reads tensors of any library that speaks DLPack as strided NumPy views, without a copy and without that library.

NumPy's own ``from_dlpack`` knows no bfloat16 and calls older producers' memory read-only; this one serves both.
Called by ``buffers`` for everything that is neither an ndarray nor of a registered framework.
"""

import ctypes

import numpy as np

from ringtrain import tables
from ringtrain.errors import InvalidArgumentError, UnsupportedError

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


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


class _Memory:
    """What NumPy needs to make a view; it keeps the capsule, which keeps the producer's memory.

    The capsule stays unconsumed, so its own destructor gives the tensor back.
    """

    def __init__(self, capsule, tensor: _DLTensor, dtype: np.dtype, read_only: bool):
        self._capsule = capsule
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)) if tensor.strides else None
        address = (tensor.data or 0) + tensor.byte_offset
        self.__array_interface__ = {
            "version": 3, "shape": shape, "strides": strides, "typestr": dtype.str, "data": (address, read_only),
        }  # fmt: skip


def view(producer: object) -> tuple[np.ndarray, tables.DType]:
    """A NumPy view of the producer's host memory, and its element type; bfloat16 is viewed as uint16.

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
    dtype = _BY_CODE.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise InvalidArgumentError(
            f"expected one of {', '.join(tables.DTYPES)} but found elements of DLPack code {tensor.code}, "
            f"{tensor.bits} bits, {tensor.lanes} lanes. Cast before submitting."
        )
    carrier = np.dtype(np.uint16 if dtype.name == "bfloat16" else dtype.name)
    return np.asarray(_Memory(capsule, tensor, carrier, read_only)), dtype


def _export(producer: object):
    try:
        try:
            return producer.__dlpack__(max_version=(1, 0))
        except TypeError:  # producers from before versions
            return producer.__dlpack__()
    except (BufferError, RuntimeError, ValueError) as problem:
        raise InvalidArgumentError(f"expected a tensor that its library exports but found: {problem}") from problem


def _open(capsule) -> tuple[_DLTensor, bool]:
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        return versioned.tensor, bool(versioned.flags & _READ_ONLY)
    return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
