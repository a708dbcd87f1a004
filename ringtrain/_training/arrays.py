"""What ways of training ask of a framework's arrays. PowerSGD, one-step-late updates and averaging are written once, above it.

Beside these functions they use what all arrays have: operators, slices, ``shape``, ``dtype``, ``T``, ``any`` and ``reshape``.
Here are NumPy's, which TensorFlow and JAX come by where a step is a graph: it calls functions of the host. PyTorch's, on the
CPU and on GPUs, are in ``ringtrain.torch.arrays``.
"""

from typing import Protocol, TypeVar

import numpy as np

from ringtrain._binding.tensor_memory import Buffer, as_buffer
from ringtrain._runtime.pending import Operation

Array = TypeVar("Array")
HALVES = ("float16", "bfloat16")


class Arrays(Protocol[Array]):
    """The arrays of one framework."""

    # ---- memory ----

    def matrix(self, array: Array, rows: int, columns: int) -> Array:
        """A copy, row by row; floats of 16 bits as float32."""

    def empty_like(self, array: Array) -> Array:
        """An array of the same shape, dtype and device."""

    def like(self, array: Array, other: Array) -> Array:
        """The values in the dtype and on the device of another array, row by row; maybe the array itself."""

    def wide(self, array: Array) -> Array:
        """The values as float64, row by row; maybe the array itself."""

    def is_contiguous(self, array: Array) -> bool:
        """Whether the elements are in memory row by row."""

    def is_on_host(self, array: Array) -> bool:
        """Whether a processor's caches hold what is worked on, rather than a GPU's memory."""

    def saved(self, array: Array) -> Array:
        """A copy in host memory."""

    def to_host(self, array: Array) -> np.ndarray:
        """The values in host memory; maybe the array's own memory."""

    def from_host(self, array: np.ndarray) -> Array:
        """An array over the same memory."""

    def flat(self, array: Array) -> np.ndarray:
        """The values in host memory, as one row; floats of 16 bits as float32. Maybe the array's own memory."""

    def rounded(self, values: np.ndarray, array: Array) -> np.ndarray:
        """Values of ``flat`` as this array would hold them."""

    # ---- arithmetic ----

    def drawn(self, seed: int, rows: int, columns: int) -> Array:
        """Random numbers about 0, in host memory; the same for the same seed on every machine."""

    def lengths(self, matrix: Array) -> Array:
        """The norms of the columns, as float64."""

    def sqrt(self, array: Array) -> Array:
        """The square roots, correctly rounded."""

    def where(self, condition: Array, one: Array | float, other: Array | float) -> Array:
        """By element one or the other."""

    def subtract_product(self, matrix: Array, left: Array, right: Array) -> None:
        """``matrix -= left @ right.T``."""

    def is_finite(self, array: Array) -> bool:
        """Whether there is neither an infinity nor a NaN."""

    # ---- on the way to other ranks ----

    def buffer(self, array: Array) -> Buffer:
        """The memory of a contiguous array."""

    def finish(self, operation: Operation, array: Array) -> None:
        """Waits for an operation on it; on a GPU its current stream does."""


class NumpyArrays:
    """Those of NumPy."""

    def matrix(self, array: np.ndarray, rows: int, columns: int) -> np.ndarray:
        return np.array(array, np.float32 if array.dtype.name in HALVES else None, order="C").reshape(rows, columns)

    def empty_like(self, array: np.ndarray) -> np.ndarray:
        return np.empty_like(array)

    def like(self, array: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array, other.dtype)

    def wide(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array, np.float64)

    def is_contiguous(self, array: np.ndarray) -> bool:
        return array.flags.c_contiguous

    def is_on_host(self, array: np.ndarray) -> bool:
        return True

    def saved(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def from_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def flat(self, array: np.ndarray) -> np.ndarray:
        row = np.ascontiguousarray(array).reshape(-1)
        return row.astype(np.float32) if array.dtype.name in HALVES else row

    def rounded(self, values: np.ndarray, array: np.ndarray) -> np.ndarray:
        return values.astype(array.dtype).astype(np.float32) if array.dtype.name in HALVES else values

    def drawn(self, seed: int, rows: int, columns: int) -> np.ndarray:
        # Philox, whose numbers no version of NumPy changes, and no transformation of them, which may differ by a bit.
        return np.random.Generator(np.random.Philox(key=seed)).random((rows, columns)) - 0.5

    def lengths(self, matrix: np.ndarray) -> np.ndarray:
        wide = matrix.astype(np.float64)
        return np.asarray(np.sqrt((wide * wide).sum(axis=0)))

    def sqrt(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(array))

    def where(self, condition: np.ndarray, one: np.ndarray | float, other: np.ndarray | float) -> np.ndarray:
        return np.where(condition, one, other)

    def subtract_product(self, matrix: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        matrix -= left @ right.T

    def is_finite(self, array: np.ndarray) -> bool:
        return bool(np.isfinite(array.astype(np.float32) if array.dtype.name in HALVES else array).all())

    def buffer(self, array: np.ndarray) -> Buffer:
        return as_buffer(array)

    def finish(self, operation: Operation, array: np.ndarray) -> None:
        operation.wait()


NUMPY = NumpyArrays()
