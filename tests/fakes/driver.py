"""The fake libcuda from Python: what a test needs of a driver to make arrays, streams and events, and to look behind the fake."""

from __future__ import annotations

import ctypes
import functools
import os

LEGACY_STREAM = 1  # the handle of the default stream


class CudaError(RuntimeError):
    """A call of the driver failed; ``code`` is its CUresult."""

    def __init__(self, function: str, code: int):
        super().__init__(f"{function} returned {code}")
        self.code = code


@functools.cache
def library() -> ctypes.CDLL:
    """The libcuda that RINGTRAIN_CUDA_LIB names."""
    return ctypes.CDLL(os.environ["RINGTRAIN_CUDA_LIB"])


@functools.cache
def function(name: str):
    """A function of the driver by its name; its arguments are to be given as ctypes' objects."""
    address = ctypes.c_void_p()
    library().cuGetProcAddress_v2(name.encode(), ctypes.byref(address), 12000, ctypes.c_uint64(0), None)
    if not address.value:
        raise AttributeError(name)
    return ctypes.CFUNCTYPE(ctypes.c_int)(address.value)


def call(name: str, *arguments) -> None:
    """Calls a function of the driver; raises CudaError unless it succeeds."""
    code = function(name)(*arguments)
    if code != 0:
        raise CudaError(name, code)


def use_device(device: int) -> None:
    """Makes a device's primary context the calling thread's, as torch and CuPy do."""
    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)


def allocate(size: int) -> int:
    """So many bytes of the current device; their address."""
    address = ctypes.c_uint64()
    call("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
    return address.value


def free(address: int) -> None:
    call("cuMemFree", ctypes.c_uint64(address))


def copy_to_host(values, address: int) -> None:
    """Fills a C-contiguous NumPy array from the current device, after what the legacy stream was given."""
    call(
        "cuMemcpyDtoH", values.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(address), ctypes.c_size_t(values.nbytes)
    )


def copy_to_device(address: int, values) -> None:
    """Fills memory of the current device from a C-contiguous NumPy array, and waits until it is there.

    The copy alone returns when the values are on their way, and streams that are not ordered with the default one pass it.
    """
    source = values.ctypes.data_as(ctypes.c_void_p)
    call("cuMemcpyHtoD", ctypes.c_uint64(address), source, ctypes.c_size_t(values.nbytes))
    call("cuStreamSynchronize", ctypes.c_void_p(LEGACY_STREAM))


class Stream:
    """A stream of the current device, not ordered with the default one."""

    def __init__(self):
        self.handle = ctypes.c_void_p()
        call("cuStreamCreateWithPriority", ctypes.byref(self.handle), 1, 0)

    @property
    def ptr(self) -> int:
        return self.handle.value

    def synchronize(self) -> None:
        call("cuStreamSynchronize", self.handle)

    def busy(self) -> bool:
        """Whether it has work that is not done."""
        code = function("cuStreamQuery")(self.handle)
        if code not in (0, 600):
            raise CudaError("cuStreamQuery", code)
        return code == 600

    def busy_for(self, milliseconds: float) -> None:
        """Work that does nothing for so long, as a kernel that spins."""
        library().fake_cuda_spin(self.handle, ctypes.c_double(milliseconds))

    def capture(self, capturing: bool) -> None:
        library().fake_cuda_capture(self.handle, int(capturing))

    def destroy(self) -> None:
        call("cuStreamDestroy", self.handle)


def fail(plan: str) -> None:
    """From now on, calls fail that a plan names as FAKE_CUDA_FAIL does: "cuMemAlloc:1+=2"; "" ends it."""
    library().fake_cuda_fail(plan.encode())


def calls(name: str) -> int:
    """How often this process called a function of the driver."""
    library().fake_cuda_calls.restype = ctypes.c_long
    return library().fake_cuda_calls(name.encode())


def live() -> dict[str, int]:
    """What was made and is still there: streams, events, allocations of memory (device and pinned)."""
    numbers = [ctypes.c_long() for _ in range(3)]
    library().fake_cuda_live(*map(ctypes.byref, numbers))
    return dict(zip(("streams", "events", "allocations"), (number.value for number in numbers), strict=True))
