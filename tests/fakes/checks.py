"""What the fakes promise, one check for each promise: ``python -m fakes.checks NAME`` runs it, in a process that has its settings.

tests/fakes/test_fakes.py runs them all. A check that ``dies`` must end its process, with that text.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy

from fakes import driver, nccl
from fakes.array import FakeDeviceArray
from fakes.check import check, main
from fakes.nccl import Communicator, address, size


def refused(code: int, name: str, *arguments) -> None:
    """The driver refuses a call with this code."""
    try:
        driver.call(name, *arguments)
    except driver.CudaError as error:
        assert error.code == code, f"{error}, expected {code}"
    else:
        raise AssertionError(f"{name} was not refused")


def recorded(stream: driver.Stream) -> ctypes.c_void_p:
    """An event that was recorded on a stream."""
    event = ctypes.c_void_p()
    driver.call("cuEventCreate", ctypes.byref(event), 2)
    driver.call("cuEventRecord", event, stream.handle)
    return event


def integers(rank: int, count: int, dtype: str = "float32") -> numpy.ndarray:
    """Small whole numbers, exact in every type, different for every rank."""
    return (numpy.random.default_rng(rank).integers(0, 4, count)).astype(dtype)


# ---- memory ----


@check(dies="")  # a fault of the processor leaves no text
def the_host_cannot_touch_device_memory():
    ctypes.memmove(FakeDeviceArray(numpy.zeros(4, "f4")).ptr, b"1234", 4)


@check()
def new_memory_is_poisoned():
    driver.use_device(0)
    memory = driver.allocate(8)
    found = ctypes.create_string_buffer(8)
    driver.call("cuMemcpyDtoH", found, ctypes.c_uint64(memory), size(8))
    assert found.raw == b"\xa5" * 8


@check(dies="which was freed")
def freed_memory_is_not_used():
    array = FakeDeviceArray(numpy.zeros(4, "f4"))
    driver.free(array.ptr)
    array.numpy()


@check(dies="while a stream uses it", FAKE_DEVICES=2)
def memory_is_not_freed_while_it_is_used():
    def body(rank: int) -> None:
        comm = Communicator(unique_id, 2, rank)
        array = FakeDeviceArray(numpy.zeros(4, "f4"), rank)
        if rank == 0:
            comm.settle(comm.start("AllReduce", address(array), address(array), size(4), 7, nccl.SUM))
            while not driver.library().fake_cuda_in_use(ctypes.c_uint64(array.ptr)):  # then it waits for the other rank
                time.sleep(0.001)
            driver.free(array.ptr)

    unique_id = nccl.new_id()
    nccl.on_ranks(2, body)


@check(dies="freed twice")
def memory_is_not_freed_twice():
    driver.use_device(0)
    memory = driver.allocate(8)
    driver.free(memory)
    driver.free(memory)


@check(dies="which end")
def a_copy_stays_within_its_memory():
    array = FakeDeviceArray(numpy.zeros(4, "f4"))
    driver.call("cuMemcpyDtoH", ctypes.create_string_buffer(20), ctypes.c_uint64(array.ptr), size(20))


@check(FAKE_MEMORY=100)
def a_device_can_be_full():
    driver.use_device(0)
    driver.allocate(60)
    refused(2, "cuMemAlloc", ctypes.byref(ctypes.c_uint64()), size(60))


# ---- streams and events ----


@check(FAKE_DELAY_US=2000)
def events_order_streams():
    array = FakeDeviceArray(numpy.zeros(4, "f4"))
    first, second = driver.Stream(), driver.Stream()
    first.busy_for(50)
    array.fill_on(numpy.ones(4, "f4"), first.ptr)
    driver.call("cuStreamWaitEvent", second.handle, recorded(first), 0)
    assert (array.numpy(second.ptr) == 1).all()


@check()
def nothing_but_events_orders_streams():
    array = FakeDeviceArray(numpy.zeros(4, "f4"))
    first, second = driver.Stream(), driver.Stream()
    first.busy_for(60_000)  # longer than any delay of the machine between the two calls
    array.fill_on(numpy.ones(4, "f4"), first.ptr)
    assert (array.numpy(second.ptr) == 0).all()


@check()
def the_legacy_stream_waits_for_blocking_ones():
    array = FakeDeviceArray(numpy.zeros(4, "f4"))
    blocking = ctypes.c_void_p()
    driver.call("cuStreamCreateWithPriority", ctypes.byref(blocking), 0, 0)
    driver.library().fake_cuda_spin(blocking, ctypes.c_double(100))
    array.fill_on(numpy.ones(4, "f4"), blocking.value)
    assert (array.numpy() == 1).all()


@check()
def an_event_is_not_ready_before_its_stream_is():
    driver.use_device(0)
    stream = driver.Stream()
    stream.busy_for(60_000)
    refused(600, "cuEventQuery", recorded(stream))


@check(dies="never recorded")
def an_event_is_recorded_before_it_is_waited_for():
    driver.use_device(0)
    event = ctypes.c_void_p()
    driver.call("cuEventCreate", ctypes.byref(event), 2)
    driver.call("cuStreamWaitEvent", driver.Stream().handle, event, 0)


@check(dies="no stream or was destroyed")
def a_destroyed_stream_is_not_used():
    driver.use_device(0)
    stream = driver.Stream()
    stream.destroy()
    stream.synchronize()


@check()
def a_capturing_stream_takes_no_work():
    array = FakeDeviceArray(numpy.zeros(4, "f4"))
    stream = driver.Stream()
    stream.capture(True)
    status = ctypes.c_int()
    driver.call("cuStreamIsCapturing", stream.handle, ctypes.byref(status))
    assert status.value == 1
    refused(
        900, "cuMemcpyDtoHAsync", ctypes.create_string_buffer(4), ctypes.c_uint64(array.ptr), size(4), stream.handle
    )


@check()
def a_capture_forbids_other_threads_what_is_unsafe():
    """Unless they say that they know: what asks a GPU or takes memory would spoil a capture in the global mode."""
    driver.use_device(0)
    first, stream = driver.Stream(), driver.Stream()
    event = recorded(first)
    first.synchronize()
    stream.capture(True)
    refused(900, "cuEventQuery", event)
    refused(900, "cuMemAlloc", ctypes.byref(ctypes.c_uint64()), size(8))
    mode = ctypes.c_int(2)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 0
    driver.call("cuEventQuery", event)
    driver.free(driver.allocate(8))
    stream.capture(False)


# ---- the driver's state ----


@check()
def a_call_needs_the_driver_and_a_context():
    refused(3, "cuCtxGetCurrent", ctypes.byref(ctypes.c_void_p()))
    driver.call("cuInit", 0)
    refused(201, "cuMemAlloc", ctypes.byref(ctypes.c_uint64()), size(8))


@check(FAKE_DEVICES=3, CUDA_VISIBLE_DEVICES="2,0")
def visible_devices_are_chosen():
    driver.use_device(1)
    identities = []
    for device in range(2):
        identity = ctypes.create_string_buffer(16)
        driver.call("cuDeviceGetUuid", identity, device)
        identities.append(identity.value)
    assert identities == [b"fake GPU 2", b"fake GPU 0"]
    refused(101, "cuDeviceGet", ctypes.byref(ctypes.c_int()), 2)


@check(CUDA_VISIBLE_DEVICES="")
def there_may_be_no_device():
    refused(100, "cuInit", 0)


@check(FAKE_DRIVER_VERSION=12010)
def functions_have_versions():
    found, status = ctypes.c_void_p(), ctypes.c_int()

    def look_up(name: bytes, version: int) -> tuple[int, bool, int]:
        result = driver.library().cuGetProcAddress_v2(
            name, ctypes.byref(found), version, ctypes.c_uint64(0), ctypes.byref(status)
        )
        return result, bool(found.value), status.value

    assert look_up(b"cuMemAlloc", 3020) == (0, True, 0)
    assert look_up(b"cuMemAlloc", 2000) == (0, False, 2)
    assert look_up(b"cuMemAllocate", 3020) == (0, False, 1)
    assert look_up(b"cuMemAlloc", 13000)[:2] == (1, False)


@check(FAKE_CUDA_FAIL="cuMemAlloc:2=2,cuStreamQuery:1+=999")
def planned_calls_fail():
    driver.use_device(0)
    driver.allocate(8)
    refused(2, "cuMemAlloc", ctypes.byref(ctypes.c_uint64()), size(8))
    driver.allocate(8)
    for _ in range(2):
        refused(999, "cuStreamQuery", driver.Stream().handle)
    assert driver.calls("cuMemAlloc") == 3


PTX = (
    ".version {}\n.target sm_{}\n.address_size 64\n"
    ".visible .entry pack_word4(\n\t.param .align 8 .b8 pack_word4_param_0[32672]\n)\n{{}}\n"
)


@check(FAKE_DRIVER_VERSION=12010, FAKE_CAPABILITY=80)
def ptx_must_suit_driver_and_device():
    driver.use_device(0)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    refused(222, "cuModuleLoadData", ctypes.byref(module), PTX.format("9.0", 75).encode())
    refused(209, "cuModuleLoadData", ctypes.byref(module), PTX.format("8.1", 90).encode())
    refused(
        218, "cuModuleLoadData", ctypes.byref(module), PTX.format("8.0", 75).encode()
    )  # too large a parameter for 8.0
    refused(218, "cuModuleLoadData", ctypes.byref(module), b"no PTX")
    driver.call("cuModuleLoadData", ctypes.byref(module), PTX.format("8.1", 80).encode())
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, b"pack_word4")
    refused(500, "cuModuleGetFunction", ctypes.byref(function), module, b"pack_word8")


# ---- NCCL ----


def reduced(op: int, all_values: list[numpy.ndarray]) -> numpy.ndarray:
    by_op = {nccl.SUM: numpy.add, nccl.PRODUCT: numpy.multiply, nccl.MAX: numpy.maximum, nccl.MIN: numpy.minimum}
    result = all_values[0]
    for values in all_values[1:]:
        result = by_op[op](result, values)
    return result


def every_operation(comm: Communicator, dtype: str, count: int) -> None:
    """Each operation of a communicator with whole numbers, whose results do not depend on the order."""
    rank, ranks, device, code = comm.rank, comm.ranks, comm.rank, nccl.DTYPES[dtype]
    inputs = [integers(one, count * ranks, dtype) for one in range(ranks)]
    sent = FakeDeviceArray(inputs[rank], device)
    received = FakeDeviceArray(numpy.zeros(count * ranks, dtype), device)

    def expect(values: numpy.ndarray, name: str, *arguments) -> None:
        assert comm.run(name, *arguments) == nccl.SUCCESS, comm.last_error()
        found = received.numpy(comm.stream.ptr)[: values.size]
        assert (found == values).all(), f"{name} {dtype}: {found[:8]}, expected {values[:8]}"

    whole, part, ops = size(count * ranks), size(count), (nccl.SUM, nccl.PRODUCT, nccl.MAX, nccl.MIN)
    for op in ops:
        total = reduced(op, inputs)
        expect(total, "AllReduce", address(sent), address(received), whole, code, op)
        expect(total[rank * count :][:count], "ReduceScatter", address(sent), address(received), part, code, op)
    pieces = [values[:count] for values in inputs]
    expect(numpy.concatenate(pieces), "AllGather", address(sent), address(received), part, code)
    expect(inputs[1], "Broadcast", address(sent), address(received), whole, code, 1)
    turned = [values[rank * count :][:count] for values in inputs]
    expect(numpy.concatenate(turned), "AlltoAll", address(sent), address(received), part, code)


@check(FAKE_DEVICES=3)
def collectives_are_right():
    def body(rank: int) -> None:
        comm = Communicator(unique_id, 3, rank)
        assert comm.result == nccl.SUCCESS, comm.last_error()
        for dtype in nccl.DTYPES:
            every_operation(comm, dtype, 1001)
        every_operation(comm, "float32", 50_001)  # more than fits at a time
        assert comm.destroy() == nccl.SUCCESS

    unique_id = nccl.new_id()
    nccl.on_ranks(3, body)
    assert nccl.calls("ncclAllReduce") == 3 * 10 * 4


@check(FAKE_DEVICES=3)
def a_group_sends_and_receives():
    def body(rank: int) -> None:
        comm = Communicator(unique_id, 3, rank)
        count = 20_001  # more than fits at a time
        sent = FakeDeviceArray(integers(rank, count), rank)
        received = FakeDeviceArray(numpy.zeros(3 * count, "f4"), rank)
        nccl.library().ncclGroupStart()
        for peer in range(3):
            assert comm.start("Send", address(sent), size(count), 7, peer) == nccl.SUCCESS
            assert comm.start("Recv", address(received, peer * count), size(count), 7, peer) == nccl.SUCCESS
        assert comm.settle(nccl.library().ncclGroupEnd()) == nccl.SUCCESS
        assert (received.numpy(comm.stream.ptr) == numpy.concatenate([integers(one, count) for one in range(3)])).all()

    unique_id = nccl.new_id()
    nccl.on_ranks(3, body)


def on_two(
    body: Callable[[Communicator, FakeDeviceArray], None],
    devices: list[int] | None = None,
    turn: AbstractContextManager | None = None,
) -> None:
    """Runs body(communicator, array of 8 floats) on two ranks, which take turns in NCCL if there is a lock for it."""

    def start(rank: int) -> None:
        array = FakeDeviceArray(numpy.zeros(8, "f4"), rank if devices is None else devices[rank])
        comm = Communicator(unique_id, 2, rank, turn=turn)
        try:
            body(comm, array)
        finally:  # nothing uses the array when it goes
            comm.abort()
            comm.stream.synchronize()

    unique_id = nccl.new_id()
    nccl.on_ranks(2, start, devices)


@check(FAKE_DEVICES=2)
def ranks_that_disagree_are_told():
    def body(comm: Communicator, array: FakeDeviceArray) -> None:
        assert comm.settle(
            comm.start("AllReduce", address(array), address(array), size(8 - comm.rank), 7, nccl.SUM)
        ) in (0, 5)
        assert comm.await_error() == nccl.INVALID_USAGE
        assert "count 8" in comm.last_error() and "count 7" in comm.last_error()

    on_two(body)


@check(FAKE_DEVICES=2)
def communicators_are_launched_in_one_order():
    def body(comm: Communicator, array: FakeDeviceArray) -> None:
        other = Communicator(second_id, 2, comm.rank)
        started.wait()  # both ranks have both
        for one in (comm, other) if comm.rank == 0 else (other, comm):
            assert one.settle(one.start("AllReduce", address(array), address(array), size(8), 7, nccl.SUM)) in (0, 5)
        assert nccl.INVALID_USAGE in (comm.await_error(), other.await_error())
        assert "different orders" in comm.last_error() + other.last_error()

    second_id = nccl.new_id()
    started = threading.Barrier(2)
    on_two(body)


@check()
def a_communicator_in_progress_takes_no_call():
    array = FakeDeviceArray(numpy.zeros(8, "f4"))
    comm = Communicator(nccl.new_id(), 1, 0)
    arguments = ("AllReduce", address(array), address(array), size(8), 7, nccl.SUM)
    results = [comm.start(*arguments)]
    while results[-1] == nccl.SUCCESS:
        results.append(comm.start(*arguments))
    assert results[-1] == nccl.IN_PROGRESS
    assert comm.start(*arguments) == nccl.INVALID_USAGE
    assert "in progress" in comm.last_error()
    comm.stream.synchronize()


@check(FAKE_DEVICES=2)
def arguments_are_looked_at():
    def body(comm: Communicator, array: FakeDeviceArray) -> None:
        def refuse(text: str, send, receive, count: int, dtype: int = 7, op: int = nccl.SUM) -> None:
            assert comm.start("AllReduce", send, receive, size(count), dtype, op) == nccl.INVALID_ARGUMENT
            assert text in comm.last_error(), comm.last_error()

        refuse("is not memory of device", address(array), address(array), 9)
        refuse("is not memory of device", ctypes.create_string_buffer(32), address(array), 8)
        refuse("overlap", address(array), address(array, 1), 4)
        refuse("type 10", address(array), address(array), 8, 10)
        refuse("reduction 5", address(array), address(array), 8, 7, 5)

    on_two(body)


@check()
def configurations_are_looked_at():
    driver.use_device(0)
    for wrong in ({"magic": 1}, {"size": 44}, {"version": 99_999}):
        assert Communicator(nccl.new_id(), 1, 0, nccl.config(**wrong)).result == nccl.INVALID_ARGUMENT, wrong
    assert Communicator(nccl.new_id(), 1, 0).result == nccl.SUCCESS


@check(FAKE_DEVICES=1)
def a_device_has_one_rank():
    both_have_heard = threading.Barrier(2, timeout=60)

    def body(comm: Communicator, array: FakeDeviceArray) -> None:
        both_have_heard.wait()  # or the first one aborts while the other is still on its way
        assert comm.result == nccl.INVALID_USAGE and "Duplicate GPU" in comm.last_error()

    on_two(body, [0, 0], threading.Lock())  # two processes would not meet, two threads must not


@check(FAKE_DEVICES=1, NCCL_MULTI_RANK_GPU_ENABLE=1)
def a_device_may_have_two_ranks():
    def body(comm: Communicator, array: FakeDeviceArray) -> None:
        assert comm.run("AllReduce", address(array), address(array), size(8), 7, nccl.SUM) == nccl.SUCCESS, (
            comm.last_error()
        )

    on_two(body, [0, 0])


@check(FAKE_DEVICES=2, FAKE_NCCL_HANG="ncclAllReduce:2=1", FAKE_NCCL_RANK=1)
def an_operation_may_hang_until_it_is_aborted():
    def body(comm: Communicator, array: FakeDeviceArray) -> None:
        arguments = ("AllReduce", address(array), address(array), size(8), 7, nccl.SUM)
        assert comm.run(*arguments) == nccl.SUCCESS
        assert comm.settle(comm.start(*arguments)) == nccl.SUCCESS
        event = recorded(comm.stream)
        refused(600, "cuEventQuery", event)
        both_hang.wait()
        if comm.rank == 0:  # the other aborts first, which is seen here
            assert comm.await_error() == nccl.REMOTE_ERROR

    both_hang = threading.Barrier(2)
    on_two(body)


@check(FAKE_DEVICES=2, FAKE_NCCL_ASYNC_ERROR="ncclAllReduce:1=6")
def an_operation_may_break():
    def body(comm: Communicator, array: FakeDeviceArray) -> None:
        comm.start("AllReduce", address(array), address(array), size(8), 7, nccl.SUM)
        assert comm.await_error() == nccl.REMOTE_ERROR

    on_two(body)


@check(dies="while another thread is in a call")
def one_thread_at_a_time():
    driver.use_device(0)
    comm = Communicator(nccl.new_id(), 1, 0)

    def poll() -> None:
        for _ in range(1_000_000):
            comm.error()

    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=poll) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@check()
def an_old_library_lacks_what_came_later():
    driver.use_device(0)
    old = ctypes.CDLL(os.path.join(os.path.dirname(os.environ["RINGTRAIN_NCCL_LIB"]), "old", "libnccl.so.2"))
    assert hasattr(old, "ncclCommSplit") and not hasattr(old, "ncclMemAlloc")


if __name__ == "__main__":
    main()
