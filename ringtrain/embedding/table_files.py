"""Tables on disk: each rank writes its rows, and any number of ranks, or a plain table, reads them.

Of a table ``NAME`` rank k of n writes ``NAME.k-of-n.ARRAY.npy`` for each array, ``weight`` and what an optimizer keeps of
each row, and then ``NAME.k-of-n.json``. That holds what the table is, and the save's token: files of two saves are never
taken for one.
"""

import dataclasses
import json
import os
import pathlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ringtrain._binding.durable import replaced
from ringtrain.embedding.dealing import Dealing
from ringtrain.errors import InvalidArgumentError

_AT_ONCE = 1 << 16  # rows that are read at a time
_parsing = threading.Lock()  # Python 3.11 fails where two threads parse the headers of files at once (gh-106905)


def write(
    folder: str | os.PathLike, name: str, rank: int, dealing: Dealing, token: str,
    arrays: Mapping[str, np.ndarray], numbers: Mapping[str, float],
) -> None:  # fmt: skip
    """Writes one rank's rows.

    Args:
        folder: exists.
        name: of the table.
        rank: place in the process set.
        dealing: who owns which row.
        token: the same on all ranks, and another one in each save.
        arrays: by name, (rows of this rank, width); ``weight`` is one.
        numbers: what an optimizer keeps of the table as a whole.

    Raises:
        InvalidArgumentError: the name is no file's, the folder takes no file, or another number of ranks has written there.
    """
    others = _saved_by_others(folder, name, dealing.ranks)
    if others:
        raise InvalidArgumentError(
            f"embedding '{name}': {os.fspath(folder)!r} must hold no save by another number of ranks than {dealing.ranks}, but "
            f"holds {others[0]}. Save into a new folder."
        )
    base = pathlib.Path(folder) / f"{_checked(name)}.{rank}-of-{dealing.ranks}"
    about = {
        "rows": dealing.rows, "ranks": dealing.ranks, "dealing": dealing.kind, "token": token,
        "arrays": sorted(arrays), "numbers": dict(numbers),
    }  # fmt: skip
    with _writing(folder, name):
        _write(base, arrays, about)


@contextmanager
def _writing(folder: str | os.PathLike, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise InvalidArgumentError(
            f"embedding '{name}': every rank must be able to write into {os.fspath(folder)!r}, but cannot: {problem}. "
            "Make the folder before, with room, where all ranks see it."
        ) from problem


def _write(base: pathlib.Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """The arrays' files, and then that which says what they are."""
    for each, array in arrays.items():
        with replaced(f"{base}.{each}.npy", f"{base}.{each}.npy.part") as file:
            np.save(file, array)
    with replaced(f"{base}.json", f"{base}.json.part") as file:
        file.write(json.dumps(about).encode())


@dataclasses.dataclass(frozen=True)
class Saved:
    """A table as it lies in a folder.

    Attributes:
        name: of the table.
        dealing: over the ranks that wrote it.
        numbers: what an optimizer keeps of the table as a whole.
    """

    name: str
    dealing: Dealing
    numbers: dict[str, float]
    _parts: dict[str, list[np.ndarray]]  # mapped, not read

    @property
    def arrays(self) -> list[str]:
        """What is there of each row: ``weight``, and what an optimizer keeps."""
        return sorted(self._parts)

    def width(self, array: str = "weight") -> int:
        """Numbers in a row."""
        return self._part(array)[0].shape[1]

    def dtype(self, array: str = "weight") -> np.dtype:
        """Of the numbers."""
        return self._part(array)[0].dtype

    def share(self, dealing: Dealing, rank: int, array: str = "weight") -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows of one rank of another dealing, some at a time: places there, and their values.

        Raises InvalidArgumentError if the table has another number of rows, or nothing of this name was saved.
        """
        self._part(array)
        self.check_rows(dealing)
        for start in range(0, dealing.count(rank), _AT_ONCE):
            places = np.arange(start, min(start + _AT_ONCE, dealing.count(rank)))
            yield places, self.at(dealing.ids(rank, places), array)

    def check_width(self, width: int, array: str = "weight") -> None:
        """Raises InvalidArgumentError if rows of another width were saved, or nothing of this name."""
        if self.width(array) != width:
            raise InvalidArgumentError(
                f"embedding '{self.name}': {array} must have {width} numbers in a row, but {self.width(array)} were saved."
            )

    def check_rows(self, dealing: Dealing) -> None:
        """Raises InvalidArgumentError if another number of rows was saved than is dealt."""
        if dealing.rows != self.dealing.rows:
            raise InvalidArgumentError(
                f"embedding '{self.name}': the table must have {dealing.rows} rows, but {self.dealing.rows} were saved."
            )

    def at(self, ids: np.ndarray, array: str = "weight") -> np.ndarray:
        """Some rows, int64 (n,), to (n, width). Raises InvalidArgumentError if nothing of this name was saved."""
        parts = self._part(array)
        owners, there = self.dealing.owners(ids), self.dealing.places(ids)
        values = np.empty((len(ids), parts[0].shape[1]), parts[0].dtype)
        for owner, part in enumerate(parts):
            mine = owners == owner
            values[mine] = part[there[mine]]
        return values

    def plain(self, array: str = "weight") -> np.ndarray:
        """All rows in their order, (rows, width), as a plain embedding has them; needs memory for all."""
        parts = self._part(array)
        whole = np.empty((self.dealing.rows, parts[0].shape[1]), parts[0].dtype)
        for rank, part in enumerate(parts):
            whole[self.dealing.ids_of(rank)] = part
        return whole

    def _part(self, array: str) -> list[np.ndarray]:
        if array not in self._parts:
            raise InvalidArgumentError(
                f"embedding '{self.name}': '{array}' must be among what was saved, but that is {', '.join(self.arrays)}."
            )
        return self._parts[array]


def find(folder: str | os.PathLike, name: str) -> Saved:
    """A table that was saved in a folder, by whatever number of ranks.

    Raises:
        InvalidArgumentError: no such table, files of some ranks are missing, or files of two saves lie there.
    """
    folder = pathlib.Path(folder)
    found = {path.name: json.loads(path.read_text()) for path in folder.glob(f"{_checked(name)}.*-of-*.json")}
    if not found:
        raise InvalidArgumentError(
            f"embedding '{name}': {str(folder)!r} must hold the table, but nothing of it is there."
        )
    if len({about["token"] for about in found.values()}) > 1:
        raise InvalidArgumentError(
            f"embedding '{name}': {str(folder)!r} must hold one save, but holds parts of several. Save into a new folder."
        )
    about = next(iter(found.values()))
    missing = [rank for rank in range(about["ranks"]) if f"{name}.{rank}-of-{about['ranks']}.json" not in found]
    if missing:
        raise InvalidArgumentError(
            f"embedding '{name}': {str(folder)!r} must hold what {about['ranks']} ranks wrote, but lacks that of ranks "
            f"{missing}. Bring the files of all hosts together."
        )
    dealing = Dealing(about["rows"], about["ranks"], about["dealing"])

    def parts(array: str) -> list[np.ndarray]:
        files = [folder / f"{name}.{rank}-of-{dealing.ranks}.{array}.npy" for rank in range(dealing.ranks)]
        return [_opened(file) for file in files]

    return Saved(name, dealing, about["numbers"], {array: parts(array) for array in about["arrays"]})


def _saved_by_others(folder: str | os.PathLike, name: str, ranks: int) -> list[str]:
    """Files of this table that another number of ranks wrote: a save beside them could not be told from them."""
    pattern = re.compile(rf"{re.escape(_checked(name))}\.\d+-of-(\d+)\.json")
    with _writing(folder, name):
        matches = [pattern.fullmatch(entry.name) for entry in pathlib.Path(folder).iterdir()]
    return [match[0] for match in matches if match and int(match[1]) != ranks]


def _opened(file: pathlib.Path) -> np.ndarray:
    with _parsing:
        array: Any = np.load(file) if file.stat().st_size < 4096 else np.load(file, mmap_mode="r")
    return array


def _checked(name: str) -> str:
    if not re.fullmatch(r"[\w.\-]+", name):
        raise InvalidArgumentError(
            f"embedding: a table's name must be letters, digits, '.', '-' and '_' to be saved, but is {name!r}."
        )
    return name
