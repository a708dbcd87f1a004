"""The fake NCCL from Python: communicators of ranks that are threads of this process, as tests of the fake itself need them."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from fakes import driver

SUCCESS, CUDA_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 1, 4, 5, 6, 7
SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)
DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
}
UNSET = -(2**31)
PATIENCE = 60.0  # seconds


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


@functools.cache
def library() -> ctypes.CDLL:
    """The libnccl that RINGTRAIN_NCCL_LIB names, after the driver that it needs."""
    driver.library()
    loaded = ctypes.CDLL(os.environ["RINGTRAIN_NCCL_LIB"])
    loaded.ncclGetErrorString.restype = loaded.ncclGetLastError.restype = ctypes.c_char_p
    loaded.fake_nccl_calls.restype = ctypes.c_long
    return loaded


def calls(name: str, rank: int = -1) -> int:
    """How often a rank called a function, or all ranks of this process."""
    return library().fake_nccl_calls(name.encode(), rank)


def new_id() -> UniqueId:
    made = UniqueId()
    assert library().ncclGetUniqueId(ctypes.byref(made)) == SUCCESS
    return made


def config(size: int = 48, magic: int = 0xCAFEBEEF, version: int = 0, blocking: int = 0) -> ctypes.Array:
    """The first 48 bytes of an ncclConfig_t, with nothing set but these."""
    found = ctypes.c_int()
    library().ncclGetVersion(ctypes.byref(found))
    packed = struct.pack(
        "QIIiiiiQii", size, magic, version or found.value, blocking, UNSET, UNSET, UNSET, 0, UNSET, UNSET
    )
    return ctypes.create_string_buffer(packed, len(packed))


class Communicator:
    """One rank's part of a communicator on the current device; ``result`` of the last call is how it ended.

    Ranks that share a device share ``turn``, a lock: one thread at a time is in NCCL with a device's communicators.
    """

    def __init__(
        self,
        unique_id: UniqueId,
        ranks: int,
        rank: int,
        settings: ctypes.Array | None = None,
        turn: AbstractContextManager | None = None,
    ):
        self.rank, self.ranks, self.handle = rank, ranks, ctypes.c_void_p()
        self.stream = driver.Stream()
        self.turn = nullcontext() if turn is None else turn
        with self.turn:
            result = library().ncclCommInitRankConfig(
                ctypes.byref(self.handle), ranks, unique_id, rank, config() if settings is None else settings
            )
        self.result = self.settle(result)

    def settle(self, result: int, seconds: float = PATIENCE) -> int:
        """Polls while a call is in progress; its result, or IN_PROGRESS after so many seconds."""
        deadline = time.monotonic() + seconds
        state = ctypes.c_int(result)
        while state.value == IN_PROGRESS and time.monotonic() < deadline:
            time.sleep(0.0005)
            with self.turn:
                library().ncclCommGetAsyncError(self.handle, ctypes.byref(state))
        return state.value

    def start(self, name: str, *arguments) -> int:
        """Calls an operation on the communicator's stream, without waiting for anything."""
        return getattr(library(), f"nccl{name}")(*arguments, self.handle, self.stream.handle)

    def run(self, name: str, *arguments) -> int:
        """The same, and waits until the stream has done it."""
        self.result = self.settle(self.start(name, *arguments))
        if self.result == SUCCESS:
            self.stream.synchronize()
        return self.result

    def error(self) -> int:
        """The asynchronous error."""
        state = ctypes.c_int(SUCCESS)
        library().ncclCommGetAsyncError(self.handle, ctypes.byref(state))
        return state.value

    def await_error(self) -> int:
        """The asynchronous error, once there is one."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.error()) in (SUCCESS, IN_PROGRESS) and time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    def last_error(self) -> str:
        return library().ncclGetLastError(self.handle).decode()

    def destroy(self) -> int:
        return library().ncclCommDestroy(self.handle)

    def abort(self) -> int:
        return library().ncclCommAbort(self.handle)


def on_ranks(ranks: int, body: Callable[[int], None], devices: list[int] | None = None) -> None:
    """Runs ``body(rank)`` on a thread for each rank, with a device of its own, or those given; raises what the first raised."""
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            driver.use_device(rank if devices is None else devices[rank])
            body(rank)
        except BaseException as failure:  # to be raised by the caller's thread
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank did not end"


def address(array, offset: int = 0) -> ctypes.c_void_p:
    """The address of a FakeDeviceArray's element, as an argument."""
    return ctypes.c_void_p(array.ptr + offset * array.dtype.itemsize)


def size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)
