"""Arrays in the memory of a GPU, of whatever library: where they lie, on which stream, and results for the same library.

DLPack is asked first, since it knows bfloat16 and names the device; then the CUDA array interface (version 3), as Numba
has it. No library is imported. Called by ``tensor_memory`` for what is no tensor of a registered framework.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ringtrain._binding import dlpack, tables
from ringtrain._binding._native import ffi, lib
from ringtrain._binding.dlpack import CudaMemory
from ringtrain.errors import InvalidArgumentError

LEGACY_STREAM = 1  # the handle of CUDA's default stream, with which other streams wait for each other
_driver = ""
_NO_STREAM = (None, -1)  # DLPack: the consumer orders nothing


def driver() -> str:
    """The library that ``use_driver`` has named."""
    return _driver


def use_driver(path: str) -> None:
    """Names the library of the CUDA driver, option ``cuda_lib``; "" for the system's."""
    global _driver
    _driver = path


def is_on_cuda(tensor: object) -> bool:
    """Whether a tensor is in CUDA memory, by what it says of itself."""
    if hasattr(tensor, "__dlpack_device__"):
        return dlpack.is_on_cuda(tensor)
    return hasattr(tensor, "__cuda_array_interface__")


def memory_of(tensor: object, stream: int) -> CudaMemory:
    """The memory of a tensor that ``is_on_cuda``.

    Args:
        tensor: the tensor.
        stream: the one that ``stream_of`` names; it waits for the tensor.

    Raises:
        InvalidArgumentError: an element type without a row in the table, or elements that do not lie row by row.
    """
    found = dlpack.cuda_memory(tensor, stream) if hasattr(tensor, "__dlpack__") else _by_interface(tensor)
    if not found.contiguous:
        raise InvalidArgumentError(
            f"expected a contiguous array on a GPU but found a strided one of shape {found.shape}. "
            "Copy it with ascontiguousarray first."
        )
    return found


# How to ask libraries for the stream on which they work at the moment, by the name of their package.
_CURRENT_STREAM: dict[str, Callable[[Any, Any], int]] = {
    "cupy": lambda cupy, tensor: cupy.cuda.get_current_stream().ptr,
    "torch": lambda torch, tensor: torch.cuda.current_stream(tensor.device).cuda_stream,
}


def is_read_only(tensor: object, found: CudaMemory) -> bool:
    """Whether the tensor must not be written: older DLPack cannot say so, the CUDA array interface can."""
    interface = None if found.read_only else getattr(tensor, "__cuda_array_interface__", None)
    return found.read_only or bool(interface and interface["data"][1])


def stream_of(tensor: object) -> int:
    """Handle of the stream on which the tensor was made and its result will be read, as far as its library tells.

    Where it tells nothing it is the legacy stream, for which DLPack makes the library wait.
    """
    library = _library_of(tensor)
    if library in _CURRENT_STREAM:
        return _CURRENT_STREAM[library](sys.modules[library], tensor) or LEGACY_STREAM
    interface = getattr(tensor, "__cuda_array_interface__", None) or {}
    return interface.get("stream") or LEGACY_STREAM


def empty_like(tensor: Any) -> object | None:
    """A fresh array of the tensor's library, dtype, shape and device; None where the library has none to be written to."""
    library = _library_of(tensor)
    if library not in _CURRENT_STREAM:
        return None
    return sys.modules[library].empty_like(tensor)


class CudaArray:
    """Contiguous memory of a GPU, as an array that other libraries take without a copy: by DLPack and the CUDA array interface.

    Results come as this where the library of the input cannot take them.

    Args:
        address: of the first element.
        dtype: of the elements.
        shape: number of elements along each dimension.
        device: index of the GPU.
        owner: keeps the memory alive.
        hold_back: makes a stream wait until the elements are computed.
    """

    def __init__(
        self,
        address: int,
        dtype: tables.DType,
        shape: tuple[int, ...],
        device: int,
        owner: object,
        hold_back: Callable[[int], None],
    ):
        self.shape = shape
        self._address, self._dtype, self._device, self._owner = address, dtype, device, owner
        self._hold_back = hold_back

    def __dlpack_device__(self) -> tuple[int, int]:
        """CUDA, and the index of the GPU."""
        return dlpack.CUDA, self._device

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> Any:
        """A capsule; what ``stream`` is given from now on waits for the elements."""
        if stream not in _NO_STREAM:
            self._hold_back(stream)
        return dlpack.lend(self._address, self._dtype, self.shape, self._device, self._owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; what it does not know, such as bfloat16, as whole numbers."""
        self._hold_back(LEGACY_STREAM)
        carrier = np.dtype(self._dtype.carrier)
        return {
            "version": 3, "shape": self.shape, "typestr": carrier.str, "strides": None,
            "data": (self._address if 0 not in self.shape else 0, False), "stream": LEGACY_STREAM,
        }  # fmt: skip


def in_library_of(like: object, array: CudaArray) -> Any:
    """The array as one of the library that ``like`` came from; itself where that has no way to take it."""
    library = _library_of(like)
    if library == "numba":
        return sys.modules["numba.cuda"].as_cuda_array(array)
    namespace = like.__array_namespace__() if hasattr(like, "__array_namespace__") else sys.modules.get(library)
    take = getattr(namespace, "from_dlpack", None)
    return array if take is None else take(array)


def _library_of(tensor: object) -> str:
    return type(tensor).__module__.partition(".")[0]


def _by_interface(tensor: Any) -> CudaMemory:
    interface = tensor.__cuda_array_interface__
    element = np.dtype(interface["typestr"])
    dtype = tables.DTYPES.get(element.name) if element.isnative else None
    if dtype is None:
        raise InvalidArgumentError(
            f"expected one of {', '.join(tables.DTYPES)} but found elements of type {interface['typestr']}. "
            "Cast before submitting."
        )
    address, read_only = interface["data"]
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    contiguous = strides is None or dlpack.is_contiguous(
        shape, tuple(stride // element.itemsize if stride % element.itemsize == 0 else -1 for stride in strides)
    )
    return CudaMemory(address, dtype, shape, _device_of(address), contiguous, bool(read_only), tensor)


def _device_of(address: int) -> int:
    """The GPU that an address belongs to, as the driver says; 0 for no address, which an empty array may have."""
    if address == 0:
        return 0
    device = lib.rt_device_of(os.fsencode(_driver), ffi.cast("void *", address))
    if device < 0:
        raise InvalidArgumentError(
            f"expected an address on a GPU but found {address:#x}, which the CUDA driver does not know. "
            "Pass the array while it is alive."
        )
    return device
