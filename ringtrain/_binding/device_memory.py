"""Memory of a GPU that the native library hands over, or reads."""

import math

from ringtrain._binding import tables
from ringtrain._binding._native import CData, check, ffi, lib
from ringtrain._binding.tensor_memory import Buffer


class DeviceMemory:
    """Memory of a GPU that the native library handed over; freed with its last user.

    Attributes:
        address: of the first byte.
        device: index of the CUDA device.
    """

    __slots__ = ("address", "device")

    def __init__(self, address: int, device: int):
        self.address = address
        self.device = device

    def __del__(self) -> None:
        lib.rt_device_free(self.device, ffi.cast("void *", self.address))


def allocate_on_device(native: CData, device: int, size_bytes: int) -> DeviceMemory:
    """Fresh memory of a GPU; raises UnsupportedError without a driver, InternalError where there is not enough.

    Args:
        native: the context's ``rt_context *``.
        device: index of the CUDA device.
        size_bytes: how much.
    """
    memory, error = ffi.new("void **"), ffi.new("char **")
    check(lib.rt_device_allocate(native, device, size_bytes, memory, error), error)
    return DeviceMemory(int(ffi.cast("uintptr_t", memory[0])), device)


def read_device(native: CData, memory: Buffer) -> bytearray:
    """The bytes of a tensor on a GPU, once its stream has come so far. Blocks; raises InternalError if the GPU fails."""
    content = bytearray(math.prod(memory.shape) * tables.DTYPE_BY_ID[memory.dtype].bytes)
    stream, address, error = ffi.cast("void *", memory.stream), memory.pointer, ffi.new("char **")
    to = ffi.from_buffer(content)
    if content:
        check(lib.rt_device_read(native, memory.device, stream, address, len(content), to, error), error)
    return content
