"""FakeDeviceArray: an array in the fake libcuda's memory that other libraries take by the CUDA array interface or DLPack."""

from __future__ import annotations

import ctypes

import numpy

from fakes import driver

DLPACK_CUDA = 2
DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
DLPACK_BFLOAT16 = 4


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_exported: dict[int, tuple] = {}  # what a capsule's consumer may still use, by the managed tensor's address


@_DELETER
def _release(managed: int) -> None:
    _exported.pop(managed, None)


class FakeDeviceArray:
    """A C-contiguous array on a fake device; ``FakeDeviceArray(values)`` copies a NumPy array there.

    ``bfloat16=True`` takes uint16 values as the bits of bfloat16, which only DLPack can tell; ``read_only`` and
    ``stream`` appear in the CUDA array interface. The memory lives as long as the array and what was exported from it.
    """

    def __init__(
        self, values, device: int = 0, bfloat16: bool = False, read_only: bool = False, stream: int | None = None
    ):
        values = numpy.ascontiguousarray(values)
        self.shape, self.dtype, self.device = values.shape, values.dtype, device
        self.bfloat16, self.read_only, self.stream = bfloat16, read_only, stream
        driver.use_device(device)
        self._memory = _Memory(values.nbytes, device)
        self.fill(values)

    @property
    def ptr(self) -> int:
        return self._memory.address

    @property
    def nbytes(self) -> int:
        return int(numpy.prod(self.shape, dtype=numpy.int64)) * self.dtype.itemsize

    def fill(self, values) -> None:
        """Copies values of the same shape and dtype into the array, and waits."""
        values = numpy.ascontiguousarray(values, self.dtype)
        driver.use_device(self.device)
        driver.copy_to_device(self.ptr, values)

    def fill_on(self, values, stream: int) -> None:
        """The same on a stream, without waiting: what follows there sees the values."""
        values = numpy.ascontiguousarray(values, self.dtype)
        driver.use_device(self.device)
        driver.call(
            "cuMemcpyHtoDAsync",
            ctypes.c_uint64(self.ptr),
            values.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(values.nbytes),
            ctypes.c_void_p(stream),
        )

    def numpy(self, stream: int | None = None) -> numpy.ndarray:
        """A copy of the values, after what was put on a stream (None: after everything on the legacy stream)."""
        values = numpy.empty(self.shape, self.dtype)
        driver.use_device(self.device)
        arguments = [values.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(self.ptr), ctypes.c_size_t(values.nbytes)]
        if stream is None:
            driver.call("cuMemcpyDtoH", *arguments)
        else:
            driver.call("cuMemcpyDtoHAsync", *arguments, ctypes.c_void_p(stream))
        return values

    @property
    def __cuda_array_interface__(self) -> dict:
        if self.bfloat16:
            raise AttributeError("the CUDA array interface knows no bfloat16")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr, self.read_only),
            "version": 3,
            "strides": None,
            "stream": self.stream,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CUDA, self.device

    def __dlpack__(self, stream: int | None = None, **_options):
        if stream == 0:
            raise ValueError("DLPack forbids stream 0 for CUDA")
        code = DLPACK_BFLOAT16 if self.bfloat16 else DLPACK_CODES[self.dtype.kind]
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        tensor = _DLTensor(
            self.ptr,
            DLPACK_CUDA,
            self.device,
            len(self.shape),
            code,
            8 * self.dtype.itemsize,
            1,
            ctypes.cast(shape, ctypes.c_void_p),
            None,
            0,
        )
        managed = _DLManagedTensor(tensor, None, ctypes.cast(_release, ctypes.c_void_p))
        address = ctypes.addressof(managed)
        _exported[address] = (managed, shape, self._memory)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(address, b"dltensor", None)


class _Memory:
    """Memory of a device, freed with the last reference."""

    def __init__(self, size: int, device: int):
        self.address, self.device = driver.allocate(size), device

    def __del__(self):
        driver.use_device(self.device)
        driver.free(self.address)
