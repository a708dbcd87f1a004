"""A GPU, real or fake, seen through the driver alone: arrays, streams, a kernel that keeps a stream busy, times.

``fakes.driver`` and ``fakes.array`` know a driver by its functions, so they serve a real one too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable

from fakes import driver

# Spins for so many nanoseconds: a kernel that is late, for whatever must wait for it.
SPIN = b"""
.version 8.1
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
  .reg .pred %more;
  .reg .b64 %now, %end;
  ld.param.u64 %end, [nanoseconds];
  mov.u64 %now, %globaltimer;
  add.u64 %end, %end, %now;
again:
  mov.u64 %now, %globaltimer;
  setp.lt.u64 %more, %now, %end;
  @%more bra again;
  ret;
}
"""
# JAX and TensorFlow would take most of the memory at once, which other parts need, too.
SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
LAUNCH = [sys.executable, "-m", "ringtrain.launch", "--share-gpus"]  # ranks of one GPU, by whichever transport
PATIENCE = {"RINGTRAIN_GPU_TIMEOUT_SECONDS": "40"}  # a GPU that hangs is to be said within the part's time
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # of cuDeviceGetAttribute


def is_fake() -> bool:
    """Whether this process's driver is the fake one."""
    return hasattr(driver.library(), "fake_cuda_spin")


def environment(device: str) -> dict[str, str]:
    """The environment of a process on a ``fake`` or the ``cuda`` device."""
    if device == "cuda":
        return {"RINGTRAIN_CUDA_LIB": "libcuda.so.1", **SHARING, **PATIENCE, **os.environ}
    import fakes

    return fakes.environment(FAKE_DEVICES=2, FAKE_DELAY_US=200)


def keep_busy(stream: driver.Stream, milliseconds: float) -> None:
    """Puts work that takes so long on a stream."""
    if is_fake():
        stream.busy_for(milliseconds)
    else:
        launch(kernel(SPIN, "spin"), 1, 1, ctypes.c_uint64(int(milliseconds * 1e6)), stream)


def capability() -> int:
    """10 * major + minor of the first device."""
    values = [ctypes.c_int(), ctypes.c_int()]
    for value, attribute in zip(values, (COMPUTE_MAJOR, COMPUTE_MINOR), strict=True):
        driver.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, 0)
    return 10 * values[0].value + values[1].value


@functools.cache
def kernel(ptx: bytes, name: str) -> ctypes.c_void_p:
    """A kernel of a text, loaded for the first device."""
    function = ctypes.c_void_p()
    driver.call("cuModuleGetFunction", ctypes.byref(function), module(ptx), name.encode())
    return function


@functools.cache
def module(ptx: bytes) -> ctypes.c_void_p:
    """A text, loaded for the first device."""
    driver.use_device(0)
    loaded = ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(loaded), ptx)
    return loaded


def launch(function: ctypes.c_void_p, blocks: int, threads: int, parameter: object, stream: driver.Stream) -> None:
    """Launches a kernel of one parameter, a ctypes' object, which the driver copies."""
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
    driver.call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream.handle, parameters, None)


def copy(to: int, source: int, size: int, stream: driver.Stream) -> None:
    """Copies bytes within the device, on a stream."""
    driver.call("cuMemcpyDtoDAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), stream.handle)


def seconds_of(work: Callable[[], None], stream: driver.Stream, rounds: int) -> float:
    """Seconds that a stream takes for one piece of work, of many in a row; after one to warm up."""
    work()
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    stream.synchronize()
    return (time.perf_counter() - start) / rounds
