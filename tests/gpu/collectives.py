"""What one rank checks of the operations on arrays of the device: results, types, order of streams, lifetime. Run by ``part``."""

from __future__ import annotations

import ctypes
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fakes import driver
from fakes.array import FakeDeviceArray as DeviceArray

import ringtrain as rt
from gpu import machine

DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")


def values_of(array: Any) -> np.ndarray:
    """A copy of an array of the device on the host, after what was enqueued for it."""
    interface = array.__cuda_array_interface__
    values = np.empty(interface["shape"], interface["typestr"])
    driver.use_device(0)
    if values.size:
        driver.call(
            "cuMemcpyDtoH",
            values.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_uint64(interface["data"][0]),
            ctypes.c_size_t(values.nbytes),
        )
    return values


def of_rank(rank: int, dtype: str, shape: tuple[int, ...] = (5, 301)) -> np.ndarray:
    """Small whole numbers, of which every dtype holds the sums."""
    return (np.arange(np.prod(shape)).reshape(shape) % 7 + rank).astype(dtype)


def operations_are_right() -> bool:
    """Every operation on every dtype, against NumPy."""
    rank, size = rt.rank(), rt.size()
    right = True
    for dtype in DTYPES:
        own, all_of = of_rank(rank, dtype), [of_rank(each, dtype) for each in range(size)]
        total = np.sum(all_of, 0).astype(dtype)

        def check(found: Any, expected: np.ndarray) -> None:
            nonlocal right
            right = right and np.array_equal(values_of(found), expected)

        check(rt.allreduce(DeviceArray(own), f"sum.{dtype}", rt.Sum), total)
        check(rt.allreduce(DeviceArray(own), f"max.{dtype}", rt.Max), np.max(all_of, 0))
        check(rt.allreduce_(DeviceArray(own), f"average.{dtype}"), (total.astype("float64") / size).astype(dtype))
        check(rt.broadcast(DeviceArray(own), size - 1, f"broadcast.{dtype}"), all_of[-1])
        rows = of_rank(rank, dtype, (rank + 2, 3))
        check(
            rt.allgather(DeviceArray(rows), f"gather.{dtype}"),
            np.concatenate([of_rank(each, dtype, (each + 2, 3)) for each in range(size)]),
        )
        mine = np.array_split(np.arange(5), size)[rank]
        check(rt.reducescatter(DeviceArray(own), f"scatter.{dtype}", rt.Sum), total[mine])
        square = of_rank(rank, dtype, (size * 2, 4))
        received = [of_rank(each, dtype, (size * 2, 4))[2 * rank : 2 * rank + 2] for each in range(size)]
        check(rt.alltoall(DeviceArray(square), name=f"exchange.{dtype}"), np.concatenate(received))
        group = [DeviceArray(own + index) for index in range(3)]
        for index, found in enumerate(rt.grouped_allreduce_(group, f"group.{dtype}", rt.Sum)):
            right = right and found is group[index]
            check(found, (total + size * index).astype(dtype))
    return right


def floats_scale_and_compress() -> bool:
    """Factors of float32 exactly; bfloat16 between ranks within its precision."""
    rank, size = rt.rank(), rt.size()
    random = np.random.default_rng(3)
    all_of = [random.standard_normal(70001).astype("float32") for _ in range(size)]
    scaled = rt.allreduce(DeviceArray(all_of[rank]), "scaled", rt.Sum, 0.5, 4.0)
    expected = np.sum(np.array(all_of, "float64"), 0)
    right = np.allclose(values_of(scaled), 2 * expected, rtol=1e-5, atol=1e-5)
    narrow = rt.allreduce(DeviceArray(all_of[rank]), "narrow", rt.Sum, compression=rt.Compression.bf16)
    return right and np.allclose(values_of(narrow), expected, rtol=0.02, atol=0.05)


def bfloat16_is_summed() -> bool:
    """bfloat16 by DLPack: small whole numbers, which it holds exactly."""
    values = of_rank(rt.rank(), "float32", (1000,))
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    found = rt.allreduce(DeviceArray(bits, bfloat16=True), "bfloat16", rt.Sum)
    total = np.sum([of_rank(rank, "float32", (1000,)) for rank in range(rt.size())], 0).astype("float32")
    return np.array_equal(values_of(found), (total.view(np.uint32) >> 16).astype(np.uint16))


def late_writer_is_awaited(rounds: int, milliseconds: float) -> bool:
    """A kernel that is late writes the input; the operation must wait for it, and the caller's stream for the operation."""
    size = rt.size()
    driver.use_device(0)
    stream = driver.Stream()
    wanted = DeviceArray(np.full(100003, 3, "float32"))
    right = True
    for index in range(rounds):
        array, copy = (
            DeviceArray(np.zeros(100003, "float32"), stream=stream.ptr),
            DeviceArray(np.zeros(100003, "float32")),
        )
        driver.use_device(0)
        machine.keep_busy(stream, milliseconds)
        machine.copy(array.ptr, wanted.ptr, array.nbytes, stream)
        rt.allreduce_async_(array, f"late.{index}", rt.Sum).wait()
        machine.copy(copy.ptr, array.ptr, array.nbytes, stream)  # by the caller, on its stream, at once
        stream.synchronize()
        right = right and np.array_equal(copy.numpy(), np.full(100003, 3 * size, "float32"))
    stream.destroy()
    return right


def seconds_in_synchronize(milliseconds: float) -> float:
    """How long the CPU is in ``allreduce_async`` and ``wait`` while the GPU is busy for so long."""
    driver.use_device(0)
    stream = driver.Stream()
    array = DeviceArray(np.ones(1 << 18, "float32"), stream=stream.ptr)
    rt.allreduce_(array, "warm up", rt.Sum)
    machine.keep_busy(stream, milliseconds)
    start = time.perf_counter()
    rt.allreduce_async_(array, "timed", rt.Sum).wait()
    taken = time.perf_counter() - start
    stream.synchronize()
    stream.destroy()
    return taken


def dropped_tensors_live_on(rounds: int) -> bool:
    """Handles and arrays that nobody keeps, while others are made: their memory must not be used again too early."""
    driver.use_device(0)
    stream = driver.Stream()
    kept = DeviceArray(np.zeros(4096, "float32"), stream=stream.ptr)
    for index in range(rounds):
        machine.keep_busy(stream, 0.2)
        rt.allreduce_async_(
            DeviceArray(np.full(4096, index, "float32"), stream=stream.ptr), f"dropped.{index % 8}.{index}", rt.Sum
        )
        if index % 16 == 0:
            gc.collect()
    rt.allreduce_(kept, "kept", rt.Sum)
    stream.synchronize()
    stream.destroy()
    return not values_of(kept).any()


def microseconds_of_a_submission(rounds: int) -> float:
    """Median CPU time of ``allreduce_async_`` of a small array, under names that come again."""
    arrays = [DeviceArray(np.ones(256, "float32")) for _ in range(16)]
    return microseconds_of(
        [functools.partial(rt.allreduce_async_, array, f"submitted.{index}", rt.Sum) for index, array in enumerate(arrays)],
        lambda handle: handle.wait(), rounds,
    )  # fmt: skip


def microseconds_of(submissions: Sequence[Callable[[], Any]], finish: Callable[[Any], object], rounds: int) -> float:
    """Median CPU time of a submission, of several under way at once; the first round warms up."""
    taken = []
    for _ in range(rounds):
        handles = []
        for submit in submissions:
            start = time.perf_counter()
            handles.append(submit())
            taken.append(time.perf_counter() - start)
        for handle in handles:
            finish(handle)
    return 1e6 * statistics.median(taken[len(submissions) :])


def refusals_are_clear() -> bool:
    """Read-only memory in place, and a stream under capture; afterwards all goes on."""
    right = _refuses(
        lambda: rt.allreduce_(DeviceArray(np.ones(3, "float32"), read_only=True, stream=1), "read only"), "read-only"
    )
    if machine.is_fake():
        driver.use_device(0)
        stream = driver.Stream()
        array = DeviceArray(np.ones(3, "float32"), stream=stream.ptr)
        stream.capture(True)
        right = right and _refuses(lambda: rt.allreduce_(array, "captured"), "graph")
        stream.capture(False)
        stream.destroy()
    return right and bool(
        (values_of(rt.allreduce(DeviceArray(np.ones(3, "float32")), "after", rt.Sum)) == rt.size()).all()
    )


def _refuses(operate: Any, words: str) -> bool:
    try:
        operate()
    except rt.RingtrainError as problem:
        return words in str(problem)
    return False


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """Of work that all ranks begin together; after one round to warm up."""
    taken = []
    for _ in range(rounds + 1):
        rt.barrier()
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def seconds_of_allreduce(megabytes: float, rounds: int) -> float:
    """Median seconds of an allreduce in place of so many megabytes of float32, until the GPU has finished."""
    driver.use_device(0)
    array = DeviceArray(np.zeros(int(megabytes * 250000), "float32"))

    def work() -> None:
        rt.allreduce_(array, "measured", rt.Sum)
        driver.call("cuStreamSynchronize", ctypes.c_void_p(driver.LEGACY_STREAM))

    return median_seconds(work, rounds)


def seconds_on_the_host(megabytes: int, rounds: int) -> float:
    """Median seconds of an allreduce in place of so many megabytes of float32 in host memory."""
    array = np.zeros(megabytes * 250000, "float32")
    return median_seconds(lambda: rt.allreduce_(array, "on the host", rt.Sum), rounds)


def seconds_of_copies(megabytes: int, rounds: int, *functions: str) -> float:
    """Median seconds of copies of so many megabytes beside each other, between the device and pinned memory, by all ranks at once.

    Args:
        functions: of the driver, one for each copy: cuMemcpyDtoHAsync or cuMemcpyHtoDAsync.
    """
    driver.use_device(0)
    size = ctypes.c_size_t(megabytes * 10**6)
    copies = []
    for function in functions:
        host, device, stream = ctypes.c_void_p(), ctypes.c_uint64(driver.allocate(size.value)), driver.Stream()
        driver.call("cuMemHostAlloc", ctypes.byref(host), size, 1)
        copies.append((function, host, device, stream))

    def work() -> None:
        for function, host, device, stream in copies:
            ends = (host, device) if function == "cuMemcpyDtoHAsync" else (device, host)
            driver.call(function, *ends, size, stream.handle)
        for *_, stream in copies:
            stream.synchronize()

    seconds = median_seconds(work, rounds)
    for _, host, device, stream in copies:
        driver.call("cuMemFreeHost", host)
        driver.free(device.value)
        stream.destroy()
    return seconds
