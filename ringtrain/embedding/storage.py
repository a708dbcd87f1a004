"""Where a rank's rows lie: in memory, or in a file that is mapped, of which a bounded part is resident.

A file has no name: it is gone when the process ends, however that is; what must last is a checkpoint. Its rows get
their first values when they are first asked for, so a table much larger than memory begins at once.
"""

import math
import mmap
import os
import tempfile
from typing import NamedTuple

import numpy as np

from ringtrain._runtime.arguments import check_among
from ringtrain.embedding.initial import Initializer
from ringtrain.errors import InvalidArgumentError

STORAGES = ("memory", "file")
_PAGE = mmap.PAGESIZE
_AT_ONCE = 1 << 16  # rows that are given first values at a time


class Storage(NamedTuple):
    """Where rows are.

    Attributes:
        kind: ``"memory"`` or ``"file"``.
        path: folder on a disk with room for all rows, for ``"file"``.
        resident_bytes: of a mapped file, about how many may be in memory before those are let go.
    """

    kind: str = "memory"
    path: str | os.PathLike | None = None
    resident_bytes: int = 1 << 30


IN_MEMORY = Storage()


class Rows:
    """Rows of one rank.

    Args:
        count: how many.
        width: numbers in a row.
        dtype: of them.
        first: of the places, int64 (n,), their first values, (n, width); None if each row is ``put`` before it is read.
        storage: where they are.

    Attributes:
        array: all rows, (count, width); who reads others than ``prepare`` was told finds zeros in a file.

    Raises:
        InvalidArgumentError: no such storage, no folder, or no room in it.
    """

    def __init__(
        self, count: int, width: int, dtype: np.dtype, first: Initializer | None,
        storage: Storage = IN_MEMORY,
    ):  # fmt: skip
        check_among("embedding: storage must be 'memory' or 'file'", storage.kind, STORAGES)
        self._first = first
        self._map: mmap.mmap | None = None
        self._is_new = np.zeros(0, bool)
        self._resident_bytes, self._touched_bytes = storage.resident_bytes, 0
        shape = (count, width)
        if storage.kind == "memory":
            self.array = np.empty(shape, dtype)
            self._begin(np.arange(count if first is not None else 0))
        else:
            self._map = _mapped(storage.path, math.prod(shape) * dtype.itemsize)
            self.array = np.frombuffer(self._map, dtype, math.prod(shape)).reshape(shape)
            self._is_new = np.full(count, first is not None)

    @classmethod
    def around(cls, array: np.ndarray) -> "Rows":
        """Those of an array in memory, (count, width), which stays the one."""
        made = cls(0, array.shape[1], array.dtype, None)
        made.array = array
        return made

    def prepare(self, places: np.ndarray) -> None:
        """To be called before some rows are read or changed: each place at most once."""
        if self._map is None:
            return
        new = places[self._is_new[places]]
        self._is_new[new] = False
        self._begin(new)
        self._touched_bytes += len(places) * max(_PAGE, self.array.strides[0])

    def let_go(self) -> None:
        """To be called when no row is in use: what is resident beyond the bound is given back to the system.

        The kernel writes it to the file in its own time; nothing is lost.
        """
        if self._map is not None and self._touched_bytes > self._resident_bytes:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._touched_bytes = 0

    def gather(self, places: np.ndarray) -> np.ndarray:
        """Copies of some rows: (n,) to (n, width)."""
        self.prepare(places)
        return self.array.take(places, axis=0)

    def put(self, places: np.ndarray, rows: np.ndarray) -> None:
        """Sets some rows, each at most once."""
        self.prepare(places)
        self.array[places] = rows

    def _begin(self, places: np.ndarray) -> None:
        for start in range(0, len(places), _AT_ONCE):
            assert self._first is not None  # else no place is new
            some = places[start : start + _AT_ONCE]
            self.array[some] = self._first(some)


def _mapped(path: str | os.PathLike | None, size: int) -> mmap.mmap:
    """A file without a name in a folder, with all its blocks: a disk that is full says so now, and not by a signal later."""
    if path is None or not os.path.isdir(path):
        raise InvalidArgumentError(
            f"embedding: storage 'file' must have path, a folder on a disk with {size >> 20} MiB, but it is {path!r}."
        )
    with tempfile.TemporaryFile(dir=os.fspath(path), prefix="ringtrain-rows-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        except OSError as problem:
            raise InvalidArgumentError(
                f"embedding: the folder {os.fspath(path)!r} must have room for {size >> 20} MiB, but: {problem.strerror}. "
                "Free some, or name another."
            ) from problem
        return mmap.mmap(file.fileno(), max(size, 1))
