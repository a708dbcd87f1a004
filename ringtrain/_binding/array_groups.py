"""Groups of NumPy's arrays, described by the core from the arrays themselves: a thousand of them by one call.

Python needs half a microsecond and three objects to tell the core of an array; the core reads in a few nanoseconds what it
is, from the struct behind it. That struct is part of NumPy's ABI (``PyArrayObject_fields``, read in place by every extension
that was compiled for NumPy), and its offsets are tried on some arrays before they are used. Where they do not hold, and for
arrays that are not plain, each is looked at by itself (``tensor_memory``).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringtrain._binding import tables
from ringtrain._binding._native import CData, ffi, lib
from ringtrain._binding.tensor_memory import Buffer

_IDS = ffi.typeof("uintptr_t[]")
_TENSORS = ffi.typeof("rt_tensor[]")
_C_CONTIGUOUS, _WRITEABLE = 0x1, 0x400  # NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_WRITEABLE
_POINTER = 8  # bytes


class ArrayGroup(Sequence[Buffer]):
    """The memory of arrays of known dtypes, each contiguous, as the core's tensors, with where their results go.

    Args:
        tensors: the ``rt_tensor`` of each.
        arrays: keeps the memory alive.
    """

    __slots__ = ("tensors", "arrays")

    def __init__(self, tensors: CData, arrays: Sequence[Any]):
        self.tensors = tensors
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: Any) -> Any:
        tensor = self.tensors[index]
        return Buffer(tensor.data, tensor.dtype, tuple(tensor.shape[0 : tensor.ndim]), owner=self.arrays)


def in_place(arrays: Sequence[Any]) -> ArrayGroup | None:
    """A group whose results replace what it was given; None if one of the objects is no plain array that may be written."""
    if set(map(type, arrays)) != {np.ndarray}:
        return None
    return _described(_WRITABLE, arrays, arrays, arrays)


def with_results(arrays: Sequence[Any]) -> tuple[ArrayGroup, list[np.ndarray]] | None:
    """A group and fresh arrays for its results; None if one of the objects is no plain array."""
    if set(map(type, arrays)) != {np.ndarray}:
        return None
    results = [np.empty(array.shape, array.dtype) for array in arrays]
    group = _described(_READABLE, arrays, results, (arrays, results))
    return None if group is None else (group, results)


def _described(layout: CData | None, inputs: Sequence[Any], outputs: Sequence[Any], kept: Any) -> ArrayGroup | None:
    if layout is None:
        return None
    count = len(inputs)
    tensors = ffi.new(_TENSORS, count)
    into = read = ffi.new(_IDS, list(map(id, inputs)))
    if outputs is not inputs:
        into = ffi.new(_IDS, list(map(id, outputs)))
    described = lib.rt_describe(layout, read, into, count, tensors)
    return ArrayGroup(tensors, kept) if described == count else None


# ---- where the fields are ----


def _find_layout(needs: int) -> CData | None:
    """The layout of an array whose flags contain those; None where it is not what is expected."""
    if ffi.sizeof("void *") != _POINTER:
        return None
    begin = object.__basicsize__
    layout = ffi.new("rt_layout *")
    layout.data, layout.ndim, layout.shape = begin, begin + _POINTER, begin + 2 * _POINTER
    layout.dtype, layout.flags, layout.needs = begin + 5 * _POINTER, begin + 6 * _POINTER, needs
    for row in tables.DTYPES.values():
        layout.dtypes[row.id] = 0 if row.is_foreign else id(np.dtype(row.name))
    probes = [
        np.zeros(3, np.float32),
        np.zeros((2, 3, 5), np.int64)[1],
        np.asfortranarray(np.zeros((4, 7), np.float16)),
        np.array(True),
        np.empty((0, 6), np.uint8),
    ]
    probes[0].flags.writeable = False
    return (
        layout if layout.flags + 4 <= np.ndarray.__basicsize__ and all(_fits(layout, one) for one in probes) else None
    )


def _fits(layout: CData, array: np.ndarray) -> bool:
    """Whether the fields of an array are where the layout has them; reads nothing but the object, until most are right."""

    def field(kind: str, offset: int) -> Any:
        return ffi.cast(f"{kind} *", id(array) + offset)[0]

    flags = field("int", layout.flags)
    return (
        field("uintptr_t", layout.data) == array.ctypes.data
        and field("int", layout.ndim) == array.ndim
        and field("uintptr_t", layout.dtype) == id(array.dtype)
        and bool(flags & _C_CONTIGUOUS) == array.flags.c_contiguous
        and bool(flags & _WRITEABLE) == array.flags.writeable
        and tuple(field("int64_t *", layout.shape)[0 : array.ndim]) == array.shape
    )


_READABLE, _WRITABLE = _find_layout(_C_CONTIGUOUS), _find_layout(_C_CONTIGUOUS | _WRITEABLE)
