"""Ranks that are threads with fake GPUs: results, order, faults. One check for each promise: ``python -m gpu.worlds NAME``.

tests/gpu/test_gpu_worlds.py runs them all.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracle
from eventually import eventually
from fakes import driver, nccl
from fakes.array import FakeDeviceArray
from fakes.check import check, main
from refusals import said_alike

import ringtrain as rt
from ringtrain import errors
from ringtrain.testing import World

DTYPES = [
    "uint8", "int8", "int16", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64", "bool", "complex64",
]  # fmt: skip
PATIENCE = 60.0  # seconds


def on_host(found: object) -> np.ndarray:
    """The values of a result, in the order of the legacy stream, on which it was asked for."""
    interface = found.__cuda_array_interface__
    values = np.empty(interface["shape"], interface["typestr"])
    driver.use_device(found.__dlpack_device__()[1])
    driver.copy_to_host(values, interface["data"][0])
    return values


def values_of(rank: int, dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Whole numbers from 0 to 3, of which all dtypes hold sums and products of three."""
    return np.random.default_rng([rank, seed]).integers(0, 4, shape).astype(dtype)


def every_operation(ranks: int, plane: str) -> None:
    """Each operation, dtype and reduction against the oracle, a rank's arrays on its own device."""

    def on_rank(rank: int) -> None:
        for dtype in DTYPES:
            inputs = [values_of(each, dtype, (5, 301)) for each in range(ranks)]

            def array(values: np.ndarray) -> FakeDeviceArray:
                return FakeDeviceArray(values, rank)

            def expect(found: object, expected: list[np.ndarray], what: str) -> None:
                values = on_host(found)
                assert values.dtype == expected[rank].dtype and values.shape == expected[rank].shape, f"{what} {dtype}"
                assert np.array_equal(values, expected[rank]), f"{what} {dtype}: {values.ravel()[:8]}"

            for reduction, name in ((rt.Sum, "sum"), (rt.Min, "min"), (rt.Max, "max"), (rt.Product, "product")):
                if dtype.startswith("complex") and reduction != rt.Sum:
                    continue
                expect(
                    rt.allreduce(array(inputs[rank]), f"{name}.{dtype}", reduction),
                    oracle.allreduce(inputs, name),
                    name,
                )
            expect(
                rt.reducescatter(array(inputs[rank]), f"scatter.{dtype}", rt.Sum),
                oracle.reducescatter(inputs),
                "reducescatter",
            )
            expect(
                rt.broadcast(array(inputs[rank]), ranks - 1, f"root.{dtype}"),
                oracle.broadcast(inputs, ranks - 1),
                "broadcast",
            )
            rows = [values_of(each, dtype, (each * 3, 4)) for each in range(ranks)]  # rank 0 has none
            expect(rt.allgather(array(rows[rank]), f"gather.{dtype}"), oracle.allgather(rows), "allgather")
            splits = [[(sender + receiver) % 3 for receiver in range(ranks)] for sender in range(ranks)]
            sent = [values_of(each, dtype, (sum(splits[each]), 2)) for each in range(ranks)]
            found, received = rt.alltoall(array(sent[rank]), splits[rank], f"exchange.{dtype}")
            expect(found, oracle.alltoall(sent, splits), "alltoall")
            assert list(received) == [splits[sender][rank] for sender in range(ranks)]

    with World(ranks, gpu_plane=plane, chunk_bytes=4096) as world:
        world.run(on_rank)
    by_nccl = sum(
        nccl.calls(f"nccl{name}") for name in ("AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Send")
    )
    assert (by_nccl > 0) == (plane == "nccl" and ranks > 1)


def register_matrix() -> None:
    """One check for each number of ranks and plane."""
    for ranks in (1, 2, 3):
        for plane in ("staged", "nccl"):

            def body(ranks: int = ranks, plane: str = plane) -> None:
                every_operation(ranks, plane)

            body.__name__ = f"every_operation_of_{ranks}_ranks_{plane}"
            check(FAKE_DEVICES=3, FAKE_DELAY_US=200)(body)


register_matrix()


def summed(rank: int, name: str, count: int = 1000, device: int | None = None) -> np.ndarray:
    """The sum of a tensor of ones, on the rank's device or another one."""
    return on_host(
        rt.allreduce(FakeDeviceArray(np.ones(count, "f4"), rank if device is None else device), name, rt.Sum)
    )


def error_of(body: Callable[[], object]) -> str:
    """The text of the error that a call raises."""
    try:
        body()
    except errors.RingtrainError as problem:
        return str(problem)
    raise AssertionError("nothing was raised")


def same_on_all(texts: list[str]) -> str:
    assert said_alike(texts), texts
    return texts[0]


# ---- several devices ----


def two_devices_and_the_host(plane: str) -> None:
    """Tensors of a rank on two GPUs and in host memory, submitted together in an order of the rank's own."""

    def on_rank(rank: int) -> None:
        places = [None, 2 * rank, 2 * rank + 1]
        names = [(place, index) for place in range(3) for index in range(20)]
        np.random.default_rng(rank).shuffle(names)
        handles = {}
        for place, index in names:
            values = np.full(100 + index, rank + index, "f4")
            tensor = values if places[place] is None else FakeDeviceArray(values, places[place])
            handles[place, index] = rt.allreduce_async(tensor, f"{place}.{index}", rt.Sum)
        for (place, index), handle in handles.items():
            found = handle.wait()
            values = found if places[place] is None else on_host(found)
            assert (values == 1 + 2 * index).all() and len(values) == 100 + index, (place, index, values)

    with World(2, gpu_plane=plane) as world:
        world.run(on_rank)


@check(FAKE_DEVICES=4, FAKE_DELAY_US=500)
def two_devices_and_the_host_staged():
    two_devices_and_the_host("staged")


@check(FAKE_DEVICES=4, FAKE_DELAY_US=500)
def two_devices_and_the_host_by_nccl():
    two_devices_and_the_host("nccl")


@check(FAKE_DEVICES=3, FAKE_DELAY_US=200)
def process_sets_have_ways_of_their_own():
    def on_rank(rank: int) -> None:
        pair = rt.add_process_set([0, 2])
        for step in range(5):
            world_handle = rt.allreduce_async(FakeDeviceArray(np.ones(50, "f4"), rank), f"world.{step}", rt.Sum)
            if rank != 1:
                found = rt.allreduce(FakeDeviceArray(np.ones(50, "f4"), rank), f"pair.{step}", rt.Sum, process_set=pair)
                assert (on_host(found) == 2).all()
            assert (on_host(world_handle.wait()) == 3).all()

    with World(3) as world:
        world.run(on_rank)


@check(FAKE_DEVICES=2)
def many_small_tensors_travel_together():
    def on_rank(rank: int) -> None:
        for _ in range(3):
            arrays = [FakeDeviceArray(np.full(10, index, "f4"), rank) for index in range(64)]
            rt.grouped_allreduce_(arrays, "small", rt.Sum)  # a group is ready as a whole
            for index, array in enumerate(arrays):
                assert (on_host(array) == 2 * index).all()

    with World(2, gpu_plane="nccl") as world:
        world.run(on_rank)
    assert nccl.calls("ncclAllReduce") == 2 * 3, "a call for each rank and group"


@check(FAKE_DEVICES=3)
def a_rank_that_has_joined_adds_nothing():
    def on_rank(rank: int) -> int:
        for step in range(rank + 1):
            present = 3 - step
            assert (summed(rank, "joined") == present).all()
        return rt.join()

    with World(3) as world:
        assert world.run(on_rank) == [2, 2, 2]


# ---- schedules of allreduce ----


def gradients(rank: int, dtype: str = "f4") -> list[np.ndarray]:
    """Tensors of a rank: a scalar's size, odd ones, one that makes 1 MiB of float32 with the others."""
    random = np.random.default_rng(rank)
    return [random.standard_normal(count).astype(dtype) for count in (1, 7, 1000, 300_001)]


def reduced(rank: int, tensors: list[np.ndarray], name: str, on_gpu: bool, **arguments: object) -> list[np.ndarray]:
    """What an allreduce of each tensor and a grouped one of all give, on the rank's GPU or in host memory."""

    def put(values: np.ndarray) -> object:
        return FakeDeviceArray(values, rank) if on_gpu else values

    alone = [rt.allreduce(put(values), f"{name}.{index}", **arguments) for index, values in enumerate(tensors)]
    together = rt.grouped_allreduce([put(values) for values in tensors], f"{name}.group", **arguments)
    return [on_host(found) if on_gpu else found for found in [*alone, *together]]


def same_bits(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(
        one.dtype == other.dtype and one.tobytes() == other.tobytes()
        for one, other in zip(found, expected, strict=True)
    )


def whole_numbers_by(algorithm: str) -> None:
    """Sums that have no rounding, of one to three ranks, in a fusion buffer and beside it."""
    for ranks in (1, 2, 3):
        for threshold in (1 << 26, 0):
            with World(ranks, gpu_plane="nccl", nccl_algorithm=algorithm, fusion_threshold_bytes=threshold) as world:
                world.run(reduces_whole_numbers)


def reduces_whole_numbers(rank: int) -> None:
    """Sums, maxima and scaled sums on the GPU, against those of the host."""
    for dtype in ("f4", "f2", "f8", "i4"):
        tensors = [(np.arange(values.size) % 7 + rank).astype(dtype) for values in gradients(rank)]
        for name, arguments in (
            ("sum", {"op": rt.Sum}),
            ("most", {"op": rt.Max}),
            ("half", {"op": rt.Sum, "prescale_factor": 0.5}),
        ):
            if name == "half" and dtype == "i4":
                continue
            on_gpu = reduced(rank, tensors, f"{name}.{dtype}.gpu", True, **arguments)
            assert same_bits(on_gpu, reduced(rank, tensors, f"{name}.{dtype}.host", False, **arguments)), (name, dtype)


@check(FAKE_DEVICES=3)
def scatter_gather_sums_as_the_host_does():
    whole_numbers_by("scatter_gather")
    assert nccl.calls("ncclReduceScatter") == nccl.calls("ncclAllGather") > 0


@check(FAKE_DEVICES=2, FAKE_DELAY_US=100)
def large_tensors_are_summed_where_they_are():
    """As buckets of gradients are: no kernel for sums, and one for each average, which divides it."""

    def on_rank(rank: int, op: object, expected: float) -> None:
        tensors = [FakeDeviceArray(np.full(1 << 20, rank + 1, "f4"), rank) for _ in range(2)]
        assert all(np.all(on_host(each) == expected) for each in rt.grouped_allreduce(tensors, f"large.{op}", op))

    with World(2, gpu_plane="nccl") as world:
        world.run(summed, "opens it")  # which launches each kernel once
        for op, expected, kernels in ((rt.Sum, 3.0, 0), (rt.Average, 1.5, 4)):
            before = driver.calls("cuLaunchKernel")
            world.run(on_rank, op, expected)
            assert driver.calls("cuLaunchKernel") - before == kernels


def bits_by(algorithm: str, threshold: int, ranks: int = 3) -> bool:
    """Whether sums and averages of floats that round have the host's bits."""

    def on_rank(rank: int) -> bool:
        same = True
        for dtype in ("f4", "f2", "f8"):
            tensors = gradients(rank, dtype)
            asked = [("sum", {"op": rt.Sum})]
            if dtype != "f8":  # whose averages go through the host whatever the algorithm
                asked += [
                    ("mean", {}),
                    ("scaled", {"op": rt.Sum, "prescale_factor": 0.3, "postscale_factor": 1.7}),
                    ("weighed", {"weight": rank + 1}),
                ]
            for name, arguments in asked:
                found = reduced(rank, tensors, f"{name}.{dtype}.gpu", True, **arguments)
                same &= same_bits(found, reduced(rank, tensors, f"{name}.{dtype}.host", False, **arguments))
        return same

    with World(ranks, gpu_plane="nccl", nccl_algorithm=algorithm, fusion_threshold_bytes=threshold) as world:
        return all(world.run(on_rank))


@check(FAKE_DEVICES=3, FAKE_DELAY_US=100)
def ordered_sums_have_the_bits_of_the_host_whatever_is_fused():
    for threshold in (1 << 26, 8192, 0):
        assert bits_by("ordered", threshold), threshold
    assert nccl.calls("ncclAllReduce") == 0
    assert bits_by("ordered", 1 << 26, ranks=2)
    assert not bits_by("nccl", 1 << 26), "the fake's sums do not show an order of their own: this check proves nothing"


@check(FAKE_DEVICES=3, FAKE_DELAY_US=200)
def adasum_has_the_hosts_bits():
    """Also of a tensor that is longer than what goes through pinned memory at a time: its coefficients are the whole one's."""

    def on_rank(rank: int) -> None:
        for dtype in ("f2", "f4", "f8"):
            tensors = [
                np.random.default_rng([rank, count]).standard_normal(count).astype(dtype) for count in (10, 7001, 0, 3)
            ]
            on_gpu = reduced(rank, tensors, f"{dtype}.gpu", True, op=rt.Adasum)
            assert same_bits(on_gpu, reduced(rank, tensors, f"{dtype}.host", False, op=rt.Adasum)), dtype

    for plane in ("nccl", "staged"):
        with World(3, gpu_plane=plane, chunk_bytes=4096) as world:
            world.run(on_rank)
    assert nccl.calls("ncclAllReduce") == 0


@check(FAKE_DEVICES=3, FAKE_DELAY_US=100)
def int8_between_hosts_has_the_hosts_bits():
    """It goes through the host, in pieces that no block of the codec lies in two of; within a host nothing is rounded."""
    values = [np.random.default_rng(rank).standard_normal((3, 20011)).astype("f4") for rank in range(3)]

    def on_rank(rank: int) -> tuple[bytes, bytes, bytes]:
        how = {"op": rt.Sum, "compression": rt.Compression.int8}
        host = rt.allreduce(values[rank], "host", **how)
        device = on_host(rt.allreduce(FakeDeviceArray(values[rank], rank), "device", **how))
        return host.tobytes(), device.tobytes(), rt.allreduce(values[rank], "exact", rt.Sum).tobytes()

    for plane in ("staged", "nccl"):
        for layout in ("2+1", None):
            with World(3, layout, gpu_plane=plane, chunk_bytes=50000) as world:
                for host, device, exact in world.run(on_rank):
                    assert device == host or (plane == "nccl" and layout is None)
                    assert (host == exact) is (layout is None)


@check(FAKE_DEVICES=3)
def products_keep_their_order_by_way_of_the_host():
    def on_rank(rank: int) -> None:
        tensors = gradients(rank)
        on_gpu = reduced(rank, tensors, "gpu", True, op=rt.Product)
        assert same_bits(on_gpu, reduced(rank, tensors, "host", False, op=rt.Product))
        scattered = rt.reducescatter(FakeDeviceArray(np.tile(tensors[2], 3), rank), "scattered", rt.Sum)
        assert same_bits([on_host(scattered)], [rt.reducescatter(np.tile(tensors[2], 3), "scattered.host", rt.Sum)])

    with World(3, gpu_plane="nccl", nccl_algorithm="ordered") as world:
        world.run(on_rank)


@check(FAKE_DEVICES=4, FAKE_DELAY_US=100)
def nccl_within_hosts_and_the_host_between_them():
    def on_rank(rank: int) -> None:
        reduces_whole_numbers(rank)
        gathered = rt.allgather(FakeDeviceArray(np.full((rank + 1, 2), rank, "f4"), rank), "gathered")
        assert on_host(gathered).shape == (10, 2)

    for communicators, threshold in ((1, 1 << 26), (2, 8192)):
        with World(
            4,
            "2+2",
            gpu_plane="nccl",
            nccl_algorithm="hierarchical",
            nccl_communicators=communicators,
            fusion_threshold_bytes=threshold,
        ) as world:
            world.run(on_rank)
    assert nccl.calls("ncclReduceScatter") == nccl.calls("ncclAllGather") > 0


@check(FAKE_DEVICES=3)
def hosts_with_different_numbers_of_ranks_cannot_share_shards_out():
    with World(3, "2+1", gpu_plane="nccl", nccl_algorithm="hierarchical") as world:
        text = same_on_all(world.run(lambda rank: error_of(lambda: summed(rank, "refused"))))
    assert "found 2, 1 on the hosts" in text, text
    with World(3, "2+1", nccl_algorithm="hierarchical") as world:
        assert all((found == 3).all() for found in world.run(lambda rank: summed(rank, "staged")))
    assert nccl.calls("ncclReduceScatter") == 0


# ---- communicators and their memory ----


def sums_of_many(rank: int) -> None:
    """More batches at once than communicators have buffers."""
    arrays = [FakeDeviceArray(np.full(3000, rank + index, "f4"), rank) for index in range(24)]
    for _ in range(2):
        handles = [rt.allreduce_async(array, f"many.{index}", rt.Sum) for index, array in enumerate(arrays)]
        for index, handle in enumerate(handles):
            assert (on_host(handle.wait()) == 3 + 3 * index).all()


@check(FAKE_DEVICES=3, FAKE_DELAY_US=500)
def communicators_take_turns():
    for algorithm in ("auto", "ordered"):
        with World(
            3, gpu_plane="nccl", nccl_communicators=3, nccl_algorithm=algorithm, fusion_threshold_bytes=16384
        ) as world:
            world.run(sums_of_many)
    assert nccl.calls("ncclCommInitRankConfig") == 6 and nccl.calls("ncclCommSplit") == 12


@check(FAKE_DEVICES=3)
def buffers_are_registered_with_each_communicator():
    with World(3, gpu_plane="nccl", nccl_communicators=2) as world:
        world.run(sums_of_many)
    assert (
        nccl.calls("ncclCommWindowRegister") == nccl.calls("ncclCommRegister") == 6
    )  # windows were asked for, and there are none


@check(FAKE_DEVICES=3, FAKE_NCCL_WINDOWS=1)
def windows_take_the_place_of_registrations():
    with World(3, gpu_plane="nccl") as world:
        world.run(sums_of_many)
    assert nccl.calls("ncclCommWindowRegister") == 3 and nccl.calls("ncclCommRegister") == 0


@check(FAKE_DEVICES=3)
def an_nccl_that_cannot_register_does_without():
    path = Path(os.environ["RINGTRAIN_NCCL_LIB"])
    with World(3, gpu_plane="nccl", nccl_lib=str(path.parent / "old" / path.name), nccl_communicators=2) as world:
        world.run(sums_of_many)


@check(FAKE_DEVICES=2, FAKE_NCCL_FAIL="ncclCommRegister:1=3", FAKE_NCCL_RANK=1)
def a_registration_that_fails_ends_the_world():
    texts = failing_world(gpu_plane="nccl")
    assert all("ncclCommRegister" in text for text in texts), texts


# ---- what does not fit ----


@check(FAKE_DEVICES=2)
def the_kind_of_memory_must_agree():
    def on_rank(rank: int) -> str:
        ones = np.ones(4, "f4")
        text = error_of(lambda: rt.allreduce(ones if rank == 0 else FakeDeviceArray(ones, rank), "mixed", rt.Sum))
        assert (summed(rank, "afterwards") == 2).all()
        return text

    with World(2) as world:
        text = same_on_all(world.run(on_rank))
    assert "mixed" in text and "cuda" in text.lower() and "host" in text, text


@check(FAKE_DEVICES=1, FAKE_DELAY_US=200)
def ranks_may_share_a_device():
    with World(3) as world:
        assert all((found == 3).all() for found in world.run(lambda rank: summed(rank, "shared", device=0)))
    assert nccl.calls("ncclAllReduce") == 0


@check(FAKE_DEVICES=1)
def nccl_refuses_ranks_that_share_a_device():
    with World(2, gpu_plane="nccl") as world:
        text = same_on_all(world.run(lambda rank: error_of(lambda: summed(rank, "shared", device=0))))
        assert "nccl_multi_rank" in text, text
        assert world.run(lambda rank: rt.allreduce(np.ones(1), "host", rt.Sum)[0]) == [2.0, 2.0]


@check(FAKE_DEVICES=1, NCCL_MULTI_RANK_GPU_ENABLE=1)
def nccl_serves_two_ranks_on_a_device_where_it_may():
    with World(2, gpu_plane="nccl", nccl_multi_rank=1) as world:
        assert all((found == 2).all() for found in world.run(lambda rank: summed(rank, "shared", device=0)))
    assert nccl.calls("ncclAllReduce") == 2


@check(FAKE_DEVICES=2, FAKE_NCCL_VERSION=21700)
def an_old_nccl_is_not_used():
    with World(2) as world:
        assert all((found == 2).all() for found in world.run(lambda rank: summed(rank, "auto")))
    with World(2, gpu_plane="nccl") as world:
        text = same_on_all(world.run(lambda rank: error_of(lambda: summed(rank, "nccl"))))
    assert "2.18.0" in text and "2.17.0" in text, text


@check(FAKE_DEVICES=2, FAKE_CAPABILITY=70)
def gpus_that_are_too_old_for_the_kernels_go_through_the_host():
    for size in (1, 2):
        with World(size) as world:
            assert all((found == size).all() for found in world.run(lambda rank: summed(rank, "old")))
    with World(2, gpu_plane="nccl") as world:
        text = same_on_all(world.run(lambda rank: error_of(lambda: summed(rank, "nccl"))))
    assert "compute capability 7.5 or newer, but cuda:0 has 7.0" in text, text


@check(FAKE_DEVICES=2)
def a_stream_under_capture_is_refused():
    def on_rank(rank: int) -> str:
        array = FakeDeviceArray(np.ones(4, "f4"), rank)
        stream = driver.Stream()
        array.stream = stream.ptr
        array.__class__ = Interfaced
        both.wait(PATIENCE)  # while one captures, the other one takes no memory
        stream.capture(True)
        text = error_of(lambda: rt.allreduce(array, "captured", rt.Sum))
        both.wait(PATIENCE)
        stream.capture(False)
        both.wait(PATIENCE)
        assert (summed(rank, "afterwards") == 2).all()
        return text

    both = threading.Barrier(2)
    with World(2) as world:
        text = same_on_all(world.run(on_rank))
    assert "captur" in text, text


@check(FAKE_DEVICES=2, FAKE_DELAY_US=300)
def operations_go_on_beside_the_capture_of_a_graph():
    """Of another stream, by whichever thread: the driver's thread looks at events, takes memory and loads kernels meanwhile."""

    def on_rank(rank: int) -> None:
        for index in range(20):
            rt.allreduce_async_(arrays[rank], f"under way {index % 2} {index}", rt.Sum).wait()
            handle = rt.allreduce_async(arrays[rank], f"polled {index}", rt.Sum)
            while not handle.done():
                pass

    for plane in ("nccl", "staged"):
        with World(2, gpu_plane=plane, nccl_algorithm="ordered") as world:
            arrays = [FakeDeviceArray(np.zeros(5000, "f4"), rank) for rank in range(2)]
            driver.use_device(0)
            stream = driver.Stream()
            stream.capture(True)
            world.run(on_rank)
            stream.capture(False)


@check(FAKE_DEVICES=2)
def a_stream_under_capture_does_not_wait_for_results():
    def on_rank(rank: int) -> str:
        array = Interfaced(np.ones(4, "f4"), rank)
        handle = rt.allreduce_async(array, "waited for", rt.Sum)
        driver.use_device(rank)
        stream = driver.Stream()
        array.stream = stream.ptr
        both.wait(PATIENCE)
        stream.capture(True)
        text = error_of(handle.wait)
        both.wait(PATIENCE)
        stream.capture(False)
        both.wait(PATIENCE)
        return text

    both = threading.Barrier(2)
    with World(2, gpu_plane="nccl") as world:
        assert "graph" in same_on_all(world.run(on_rank))


class Interfaced(FakeDeviceArray):
    """Without DLPack, so that it names its stream."""

    __dlpack__ = __dlpack_device__ = property(lambda self: (_ for _ in ()).throw(AttributeError()))


# ---- replicas and finite numbers ----


@check(FAKE_DEVICES=2)
def what_is_on_a_gpu_is_compared_and_looked_at():
    """After the work of the stream that the array names, and only then; the host cannot touch the memory itself."""

    def on_rank(rank: int) -> list[str]:
        array = Interfaced(np.ones(1000, "f4"), rank)
        stream = driver.Stream()
        array.stream = stream.ptr
        own = {"whole": FakeDeviceArray(np.arange(6, dtype="i4"), rank), "empty": FakeDeviceArray(np.empty((0, 3), "f4"), rank),
               "weight": array, "bias": np.ones(3)}  # fmt: skip
        rt.check_replicas(own)
        rt.check_finite(own)
        stream.busy_for(50)
        array.fill_on(np.full(1000, np.inf if rank == 1 else 1, "f4"), stream.ptr)
        return [error_of(lambda: rt.check_replicas(own)), error_of(lambda: rt.check_finite(own))]

    with World(2) as world:
        replicas, finite = map(same_on_all, zip(*world.run(on_rank), strict=True))
    assert "'weight'" in replicas and "rank 0 and of rank 1 differ" in replicas, replicas
    assert "'weight'" in finite and "rank 1 has" in finite, finite


# ---- faults ----


def failing_world(**options: object) -> list[str]:
    """What the ranks of a world are told when the second of their sums fails."""

    def on_rank(rank: int) -> str:
        try:
            for index in range(4):
                summed(rank, f"sum.{index}")
        except errors.RingtrainError as problem:
            return str(problem)
        return ""

    world = World(2, **options)
    texts = world.run(on_rank)
    try:
        world.close()
    except errors.RingtrainError:
        pass  # it has failed, and says so once more
    return texts


def tells_where(text: str) -> bool:
    """Whether an error of NCCL has its result, the network, a rank, its host and its device."""
    return (
        re.search(
            r"found NCCL error \d, .*\. See .* NCCL_SOCKET_IFNAME is 'eth7'; NCCL_DEBUG=WARN tells more\. "
            r"This is rank [01] on \S+, cuda:[01]\.",
            text,
        )
        is not None
    )


@check(FAKE_DEVICES=2, FAKE_NCCL_ASYNC_ERROR="ncclAllReduce:2=6", FAKE_NCCL_RANK=1, NCCL_SOCKET_IFNAME="eth7")
def an_asynchronous_error_of_nccl_ends_the_world():
    texts = failing_world(gpu_plane="nccl")
    assert all("remote process exited" in text and tells_where(text) for text in texts), texts


@check(FAKE_DEVICES=2, FAKE_NCCL_FAIL="ncclAllReduce:2=3", NCCL_SOCKET_IFNAME="eth7")
def a_failing_call_of_nccl_ends_the_world():
    texts = failing_world(gpu_plane="nccl")
    assert all("ncclAllReduce" in text and "planned failure" in text and tells_where(text) for text in texts), texts


@check(FAKE_DEVICES=2, FAKE_NCCL_HANG="ncclAllReduce:2=1")
def a_hanging_gpu_ends_the_world():
    texts = failing_world(gpu_plane="nccl", gpu_timeout_seconds=2)
    assert all("gpu_timeout_seconds" in text for text in texts), texts


@check(FAKE_DEVICES=2, FAKE_NCCL_HANG="ncclCommInitRankConfig:1=1")
def a_communicator_that_does_not_come_about_ends_the_world():
    texts = failing_world(gpu_plane="nccl", gpu_timeout_seconds=2)
    assert all(texts), texts


def until_the_end() -> str:
    """What the rank is told when its world ends."""

    def goes_on() -> None:
        while True:
            rt.allreduce(np.ones(1), "on the host")
            time.sleep(0.005)  # it has a core else, for as long as a GPU may hang

    return error_of(goes_on)


def kernels_of_several_communicators_hang() -> None:
    """Two of the world and two of a process set. To end one of them alone waits for the others' kernels."""

    def on_rank(rank: int) -> str:
        everyone = rt.add_process_set([0, 1])
        handles = [
            rt.allreduce_async(
                FakeDeviceArray(np.ones(5000, "f4"), rank), f"{each.process_set_id}.{index}", rt.Sum, process_set=each
            )
            for each in (rt.global_process_set, everyone)
            for index in range(2)
        ]
        for handle in handles:
            handle.wait()  # all is on the GPU's queue
        return until_the_end()

    world = World(2, gpu_plane="nccl", nccl_communicators=2, gpu_timeout_seconds=8, fusion_threshold_bytes=16384)
    assert "gpu_timeout_seconds" in same_on_all(world.run(on_rank))
    with contextlib.suppress(errors.RingtrainError):
        world.close()  # it has failed, and says so once more
    assert nccl.calls("ncclCommAbort") == 8


@check(FAKE_DEVICES=2, FAKE_NCCL_HANG="ncclAllReduce:1+=1")
def communicators_are_aborted_as_a_group():
    kernels_of_several_communicators_hang()


@check(FAKE_DEVICES=2, FAKE_NCCL_HANG="ncclAllReduce:1=1", FAKE_NCCL_FAIL="ncclAllReduce:3=3")
def another_process_set_opens_beside_a_kernel_that_hangs():
    """It needs kernels that are there: the driver loads others only when those that run have ended."""

    def on_rank(rank: int) -> str:
        array, everyone = FakeDeviceArray(np.ones(5000, "f4"), rank), rt.add_process_set([0, 1])
        rt.allreduce_async(array, "hangs", rt.Sum)
        eventually(lambda: nccl.calls("ncclAllReduce") >= 2, "the first sum is on the queues of both GPUs")
        assert (on_host(rt.allreduce(array, "beside", rt.Sum, process_set=everyone)) == 2).all()
        went_on.wait(PATIENCE)
        rt.allreduce_async(array, "fails", rt.Sum)
        return until_the_end()

    went_on = threading.Barrier(2)
    world = World(2, gpu_plane="nccl")
    assert "planned failure" in same_on_all(world.run(on_rank))
    with contextlib.suppress(errors.RingtrainError):
        world.close()  # it has failed, and says so once more


@check(FAKE_DEVICES=2, FAKE_NCCL_HANG="ncclAllReduce:1+=1", FAKE_NCCL_VERSION=22100)
def an_older_nccl_aborts_communicators_side_by_side():
    kernels_of_several_communicators_hang()


@check(FAKE_DEVICES=2)
def a_world_ends_though_its_gpu_does_not():
    """What the program has given to its stream, and the operation waits for, never ends: nor may shutdown wait for it."""
    hangs = {}

    def on_rank(rank: int) -> str:
        array = Interfaced(np.ones(5000, "f4"), rank)
        assert (summed(rank, "before") == 2).all()
        hangs[rank] = stream = driver.Stream()
        array.stream = stream.ptr
        stream.busy_for(60_000)
        rt.allreduce(array, "sum", rt.Sum)
        return until_the_end()

    world = World(2, gpu_plane="nccl", gpu_timeout_seconds=8)
    assert "gpu_timeout_seconds" in same_on_all(world.run(on_rank))
    with contextlib.suppress(errors.RingtrainError):
        world.close()  # it has failed, and says so once more
    contexts = [weakref.ref(each) for each in world.contexts]
    del world
    gc.collect()
    assert [each() for each in contexts] == [None, None]  # what they had on the GPU is given back
    for rank, stream in hangs.items():
        driver.use_device(rank)
        assert stream.busy(), "shutdown has waited for the GPU"
    print("passed", flush=True)
    os._exit(0)  # the streams' threads still run


@check(FAKE_DEVICES=2, FAKE_DELAY_US=20000)
def nothing_is_written_after_a_failure():
    """Whoever hears that an operation has failed has its tensors back: no late copy may change them any more."""
    elements = 1 << 16

    def on_rank(rank: int) -> bool:
        array = FakeDeviceArray(np.zeros(elements, "f4"), rank)
        first = driver.calls("cuMemcpyDtoHAsync")
        ready.wait(PATIENCE)
        if rank == 0:
            driver.fail(f"cuMemcpyDtoHAsync:{first + 24}+=999")
        ready.wait(PATIENCE)
        error_of(lambda: rt.allreduce_(array, "sum", rt.Sum))
        array.fill(np.full(elements, 7, "f4"))
        time.sleep(0.3)
        driver.fail("")
        return bool((array.numpy() == 7).all())

    ready = threading.Barrier(2)
    world = World(2, gpu_plane="staged", chunk_bytes=4096)
    assert world.run(on_rank) == [True, True]
    try:
        world.close()
    except errors.RingtrainError:
        pass  # it has failed, and says so once more


@check(
    FAKE_DEVICES=4,
    FAKE_NCCL_HANG="ncclAllReduce:1=1",
    FAKE_NCCL_FAIL="ncclAllReduce:3=3",
    FAKE_NCCL_ABORT_US=50000,
    FAKE_DELAY_US=20000,
)
def what_an_abort_ends_is_not_taken_for_done():
    """A kernel that is aborted lets its stream go on as one that is done: nobody may use what was not there before.

    What another GPU had done before is there, though its world has failed.
    """

    def on_rank(rank: int) -> str:
        first, second = (FakeDeviceArray(np.ones(5000, "f4"), device) for device in (rank, rank + 2))
        hangs = rt.allreduce_async(first, "hangs", rt.Sum)
        eventually(lambda: nccl.calls("ncclAllReduce") >= 2, "the first sum is on the queues of both GPUs")
        done = rt.allreduce_async(second, "done", rt.Sum)
        eventually(done.done, "the second sum, which is behind the first for the driver, has ended")
        started.wait(PATIENCE)
        rt.allreduce_async(second, "fails", rt.Sum)
        eventually(hangs.done, "the first sum has ended")
        assert nccl.calls("ncclCommAbort") >= 2, "its owner hears of it before this rank has aborted both communicators"
        problem = error_of(hangs.wait)
        assert done.done() and (on_host(done.wait()) == 2).all()
        return problem

    started = threading.Barrier(2)
    world = World(2, gpu_plane="nccl")
    assert "planned failure" in same_on_all(world.run(on_rank))
    with contextlib.suppress(errors.RingtrainError):
        world.close()  # it has failed, and says so once more


# ---- opened beside what goes through the host ----


def sums_beside(count: int = 80, **options: object) -> tuple[list[int], list[str]]:
    """How many of NCCL's sums were launched by then, after each sum of rank 0; and what the ranks were told."""
    launched: list[int] = []

    def on_rank(rank: int) -> str:
        try:
            for index in range(count):
                assert (summed(rank, f"sum.{index}") == 2).all()
                rt.barrier()
                if rank == 0:
                    launched.append(nccl.calls("ncclAllReduce"))
                rt.barrier()
        except errors.RingtrainError as problem:
            return str(problem)
        return ""

    with World(2, nccl_opening="beside", **options) as world:
        return launched, world.run(on_rank)


@check(FAKE_DEVICES=2)
def nccl_is_opened_beside_what_goes_through_the_host():
    launched, texts = sums_beside()
    assert texts == ["", ""]
    change = launched.index(2)  # both ranks at the same sum, which they asked each other before
    assert change % 16 == 0 and launched == [0] * change + [*range(2, 2 * (80 - change) + 2, 2)], launched


@check(FAKE_DEVICES=2)
def nccl_is_opened_beside_operations_of_several_dtypes():
    """Each of which is two tasks of the device: a counter of tasks steps over the number at which ranks ask each other."""

    def on_rank(rank: int) -> int:
        summed(rank, "alone")
        for index in range(60):
            arrays = [FakeDeviceArray(np.ones(5, dtype), rank) for dtype in ("f4", "f8")]
            rt.grouped_allreduce_(arrays, f"group.{index}", rt.Sum)
            assert all((array.numpy() == 2).all() for array in arrays)
        rt.barrier()
        return nccl.calls("ncclAllReduce")

    with World(2, nccl_opening="beside") as world:
        assert min(world.run(on_rank)) > 0


@check(FAKE_DEVICES=2, FAKE_NCCL_FAIL="ncclCommInitRankConfig:1=3", FAKE_NCCL_RANK=1)
def what_cannot_be_opened_beside_is_done_without():
    assert sums_beside() == ([0] * 80, ["", ""])


@check(FAKE_DEVICES=2, FAKE_NCCL_HANG="ncclCommInitRankConfig:1=1")
def what_does_not_open_beside_in_time_is_done_without():
    assert sums_beside(gpu_timeout_seconds=0.05) == ([0] * 80, ["", ""])


@check(FAKE_DEVICES=2, FAKE_NCCL_FAIL="ncclCommInitRankConfig:1=3", FAKE_NCCL_RANK=1)
def who_asks_for_nccl_is_told_that_it_did_not_open():
    launched, texts = sums_beside(gpu_plane="nccl")
    assert "NCCL could not be opened on all ranks" in same_on_all(texts) and set(launched) <= {0}


FAILING_CALLS = {"staged": ["cuMemHostAlloc", "cuStreamCreateWithPriority", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync",
                            "cuEventQuery", "cuStreamWaitEvent", "cuEventCreate"],
                 "nccl": ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuMemAlloc"]}  # fmt: skip


def failing_call(name: str, plane: str) -> None:
    """From some moment on, when both ranks have their tensors, a function of the driver fails."""

    def on_rank(rank: int) -> str:
        arrays = [FakeDeviceArray(np.ones(50, "f4"), rank) for _ in range(2)]
        ready.wait(PATIENCE)
        try:
            rt.grouped_allreduce_(arrays, "sums", rt.Sum)
            arrays[0].numpy()
        except errors.RingtrainError as problem:
            return str(problem)
        finally:
            ended.wait(PATIENCE)  # the arrays go without failures
        return ""

    ready = threading.Barrier(2, lambda: driver.fail(f"{name}:1+=999"))
    ended = threading.Barrier(2, lambda: driver.fail(""))
    world = World(2, gpu_plane=plane, nccl_algorithm="ordered")  # which needs memory of the driver's, too
    texts = world.run(on_rank)
    assert all("999" in text for text in texts), texts
    try:
        world.close()
    except errors.RingtrainError:
        pass  # it may have failed, and says so once more


def register_failing_calls() -> None:
    """One check for each function that may fail on the way: the ranks are told, and nobody waits for ever."""
    for plane, names in FAILING_CALLS.items():
        for name in names:

            def body(name: str = name, plane: str = plane) -> None:
                failing_call(name, plane)

            body.__name__ = f"{name}_may_fail"
            check(FAKE_DEVICES=2)(body)


register_failing_calls()


if __name__ == "__main__":
    main()
