"""The pack and summing kernels on the device: bit for bit against NumPy, and how near they come to a copy of the same bytes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from fakes import driver

from gpu import machine

DEVICE = Path(__file__).resolve().parents[2] / "native" / "device"
CHUNK, THREADS, MOST_SLICES = 16384, 512, 1360
SCALE = np.float32(0.37)
PAIRS = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
]
SIZES = [0, 1, 3, 16383, 16384, 16385, (1 << 20) + 1]
CARRIERS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class Slice(ctypes.Structure):
    _fields_ = [
        ("tensor", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("elements", ctypes.c_uint32),
        ("first_chunk", ctypes.c_uint32),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("buffer", ctypes.c_uint64),
        ("scale", ctypes.c_float),
        ("slice_count", ctypes.c_uint32),
        ("chunks", ctypes.c_uint64),
        ("slices", Slice * MOST_SLICES),
    ]


class SumLaunch(ctypes.Structure):
    _fields_ = [
        ("to", ctypes.c_uint64),
        ("own", ctypes.c_uint64),
        ("received", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("elements", ctypes.c_uint64),
        ("members", ctypes.c_uint32),
        ("me", ctypes.c_uint32),
        ("divisor", ctypes.c_float),
        ("postscale", ctypes.c_float),
        ("factors", ctypes.c_float * 1024),
    ]


def text(kernels: str = "pack") -> bytes:
    """The PTX that the core would load here."""
    return (DEVICE / f"{kernels}_sm{80 if machine.capability() >= 80 else 75}.ptx").read_bytes()


def run(name: str, tensors: list[tuple[int, int, int]], buffer: int, scale: float, stream) -> None:
    """Launches a kernel over (address, offset, elements) of each tensor, in as many launches as that takes."""
    for start in range(0, len(tensors), MOST_SLICES):
        launch, chunks = Launch(buffer, scale, 0), 0
        for address, offset, elements in tensors[start : start + MOST_SLICES]:
            launch.slices[launch.slice_count] = Slice(address, offset, elements, chunks)
            launch.slice_count += 1
            chunks += -(-elements // CHUNK)
        launch.chunks = chunks
        if chunks:
            machine.launch(machine.kernel(text(), name), chunks, THREADS, launch, stream)


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """As float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values.astype(np.float32)


def narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to nearest even, in the dtype's carrier."""
    if dtype != "bfloat16":
        return values.astype(CARRIERS[dtype])
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Memory:
    """Bytes of the device that hold what a NumPy array holds."""

    address = 0  # none yet

    def __init__(self, values: np.ndarray):
        self.dtype, self.size = values.dtype, values.size
        self.address = driver.allocate(values.nbytes)
        driver.copy_to_device(self.address, values)

    def values(self) -> np.ndarray:
        """What it holds now."""
        found = np.empty(self.size, self.dtype)
        driver.call(
            "cuMemcpyDtoH",
            found.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(found.nbytes),
        )
        return found

    def __del__(self):
        if self.address:
            driver.free(self.address)


def is_exact(tensor: str, buffer: str, sizes: list[int], shift: int) -> bool:
    """Whether pack and unpack of tensors that begin ``shift`` elements behind an aligned address do what NumPy does."""
    random = np.random.default_rng(5)
    slots = np.cumsum([0, *((size + 63) // 64 * 64 for size in sizes)]).tolist()
    places = list(zip(slots, sizes, strict=False))
    given = narrowed(random.standard_normal(slots[-1] + 64, np.float32), tensor)
    memory, packed = Memory(given), Memory(narrowed(random.standard_normal(slots[-1] + 64, np.float32), buffer))
    tensors = [(memory.address + (slot + shift) * given.itemsize, slot, size) for slot, size in places]
    expected, stream = packed.values(), driver.Stream()
    for slot, size in places:
        expected[slot : slot + size] = narrowed(
            widened(given[slot + shift : slot + shift + size], tensor) * SCALE, buffer
        )
    run(f"pack_{tensor}_{buffer}", tensors, packed.address, SCALE, stream)
    stream.synchronize()
    right = np.array_equal(packed.values(), expected)
    for slot, size in places:
        given[slot + shift : slot + shift + size] = narrowed(
            widened(expected[slot : slot + size], buffer) * SCALE, tensor
        )
    run(f"unpack_{tensor}_{buffer}", tensors, packed.address, SCALE, stream)
    stream.synchronize()
    stream.destroy()
    return right and np.array_equal(memory.values(), given)


def sums_in_order(dtype: str, members: int, elements: int) -> bool:
    """Whether a sum of so many ranks' elements is what NumPy makes of them rank by rank, scaled and divided as on the host."""
    random = np.random.default_rng(6)
    given = [narrowed(100 * random.standard_normal(elements, np.float32), dtype) for _ in range(members)]
    factors = np.linspace(0.3, 1.7, members, dtype=np.float32)
    total = widened(given[0], dtype) * factors[0]
    for values, factor in zip(given[1:], factors[1:], strict=True):
        total = total + widened(values, dtype) * factor
    expected = narrowed(total / np.float32(3) * SCALE, dtype)
    me = members // 2
    own, received = Memory(given[me]), Memory(np.concatenate(given[:me] + given[me + 1 :]))
    launch = SumLaunch(own.address, own.address, received.address, elements, elements, members, me, 3.0, SCALE)
    launch.factors[:members] = factors.tolist()
    stream = driver.Stream()
    machine.launch(machine.kernel(text("sum"), f"sum_{dtype}"), -(-elements // CHUNK), THREADS, launch, stream)
    stream.synchronize()
    stream.destroy()
    return own.values().tobytes() == expected.tobytes()


def seconds_there_and_back(sizes: list[int], rounds: int) -> float:
    """Seconds of pack + unpack of float32 tensors of so many elements."""
    total = sum(sizes)
    source, buffer = driver.allocate(4 * total), driver.allocate(4 * total)
    starts = np.cumsum([0, *sizes])
    places = [(source + 4 * int(start), int(start), size) for start, size in zip(starts, sizes, strict=False)]
    stream = driver.Stream()

    def there_and_back() -> None:
        run("pack_float32_float32", places, buffer, 1.0, stream)
        run("unpack_float32_float32", places, buffer, 1.0, stream)

    taken = machine.seconds_of(there_and_back, stream, rounds)
    stream.destroy()
    driver.free(source)
    driver.free(buffer)
    return taken


def shares_of_floor(sizes: list[int], rounds: int) -> tuple[float, float]:
    """Time of pack + unpack of float32 tensors over that of two copies of the same bytes, and the copies' bytes a second."""
    total = sum(sizes)
    source, buffer = driver.allocate(4 * total), driver.allocate(4 * total)
    stream = driver.Stream()
    floor = machine.seconds_of(lambda: machine.copy(buffer, source, 4 * total, stream), stream, rounds)
    stream.destroy()
    driver.free(source)
    driver.free(buffer)
    return seconds_there_and_back(sizes, rounds) / (2 * floor), 2 * 4 * total / floor
