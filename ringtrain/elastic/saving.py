"""When files of a training are due, and how those of NumPy arrays and plain values are written: each whole or not there.

PyTorch has files of its own (``ringtrain.torch.elastic.checkpoints``) in folders of the same kind.
"""

import json
import os
import re
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from ringtrain._binding.durable import replaced
from ringtrain.elastic.likeness import is_made_of
from ringtrain.errors import InvalidArgumentError

_UNFINISHED = re.compile(r"\.step-\d+-\d+")
LONGEST_LOOK = 10.0  # seconds between two looks at the time, as far as the pace of the steps is known
LONGEST_SAVE = 3600.0  # seconds that the others wait for a file before they take this rank for one that hangs
_VALUES = "values"  # the member of a file that is text
# Of ranks that are threads: NumPy has Python parse the heads of arrays, which fails in two threads at a time in 3.11.
_one_reader = threading.Lock()


class SavingPlan:
    """When the next file is due: all ranks agree on the step, since each adds its random states, and rows of its own.

    Minutes are those of rank 0, which the others ask now and then, at a step that it has named the last time.

    Args:
        steps: between two files; None where others count.
        minutes: the same.
        epochs: the same, where an epoch ends.
        step: from which on.
        epoch: in which that is.
        now: a time in seconds.

    Attributes:
        progress: the step behind which the last file was due, the epoch that had come then, and the step at which rank 0 is
            asked next. Ranks that join take it over.

    Raises:
        InvalidArgumentError: neither is given, or one is not above 0.
    """

    def __init__(
        self,
        steps: int | None,
        minutes: float | None,
        step: int,
        now: float,
        epochs: int | None = None,
        epoch: int = 0,
    ):
        given = [each for each in (steps, minutes, epochs) if each is not None]
        if not given or min(given) <= 0:
            raise InvalidArgumentError(
                f"save_every: expected steps=, minutes= or epochs= above 0 but found steps={steps}, minutes={minutes}, "
                f"epochs={epochs}. Give one of them."
            )
        self._steps, self._minutes, self._epochs = steps, minutes, epochs
        self.progress = step, epoch, step
        self._time = now  # when the last one was due
        self._looked: tuple[int, float] | None = None  # the step behind which rank 0 was asked last, and when

    def is_due(self, step: int, epoch: int = 0, is_in_epoch: bool = True) -> bool:
        """Whether a file is to be written behind a step, whatever the time is.

        Args:
            step: the number of those that are done.
            epoch: that has come.
            is_in_epoch: whether some of it is done.
        """
        last_step, last_epoch, _ = self.progress
        by_steps = self._steps is not None and step - last_step >= self._steps
        by_epochs = self._epochs is not None and epoch - last_epoch >= self._epochs and not is_in_epoch
        return step > last_step and (by_steps or by_epochs)

    def asks_at(self, step: int) -> bool:
        """Whether rank 0 is to be asked for the time behind this step."""
        last_step, _, next_look = self.progress
        return self._minutes is not None and step > last_step and step >= next_look

    def answer(self, step: int, now: float) -> tuple[int, int]:
        """What this rank says as rank 0: whether a file is due (1) or not (0), and the step at which it is asked next."""
        assert self._minutes is not None
        left = self._time + 60.0 * self._minutes - now
        ahead = 0
        if self._looked is not None and now > self._looked[1]:
            before, then = self._looked
            ahead = int((step - before) / (now - then) * min(left / 2, LONGEST_LOOK))
        return int(left <= 0), step + max(1, ahead)

    def hear(self, step: int, now: float, answer: tuple[int, int]) -> bool:
        """Rank 0 has answered; whether a file is due."""
        due, next_look = answer
        self.progress = *self.progress[:2], next_look
        self._looked = step, now
        return bool(due)

    def note(self, step: int, now: float, epoch: int = 0) -> None:
        """One was due behind this step."""
        self.progress, self._time = (step, epoch, self.progress[2]), now


def check_keep(keep: int) -> None:
    """Raises InvalidArgumentError if no file would stay."""
    if keep < 1:
        raise InvalidArgumentError(f"save_every: expected keep= above 0 but found {keep}. Keep one file at least.")


class Folder:
    """Files of one training, each named by the step that it was written behind.

    Args:
        path: of the folder, which is made when the first is written.
    """

    _SUFFIX = "npz"
    _UNREADABLE: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile)

    def __init__(self, path: "str | os.PathLike[str]"):
        self._path = Path(path)
        self._file = re.compile(rf"step-(\d{{12}})\.{self._SUFFIX}")

    def steps(self) -> list[int]:
        """Of the files that are there, ascending."""
        names = [each.name for each in self._path.iterdir()] if self._path.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := self._file.fullmatch(name)))

    def refuse_later_than(self, step: int) -> str:
        """Why files that are there already would take the place of a training's that begins at a step; empty if they would not."""
        later = [self._path_of(each) for each in self.steps() if each > step]
        if not later:
            return ""
        return (
            f"save_every: expected no file behind step {step}, where this training begins, but found {later[-1]} of another "
            "one, which would go on from there. Call resume() with this folder, or give another folder."
        )

    def write(self, step: int, values: dict[str, Any], keep: int) -> None:
        """Writes a file, and removes all but the newest ones. Who looks meanwhile sees the whole file, or none.

        So goes what a process has left that was killed while it wrote.

        Raises:
            OSError: the folder takes no file.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        for left in [each for each in self._path.iterdir() if _UNFINISHED.fullmatch(each.name)]:
            left.unlink(missing_ok=True)
        with replaced(self._path_of(step), self._path / f".step-{step}-{os.getpid()}") as file:
            self._save(values, file)
        for old in [each for each in self.steps() if each <= step][:-keep]:
            self._path_of(old).unlink(missing_ok=True)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest file, and what it has, in the host's memory; None if there is none. Nothing in it is run.

        Raises:
            InvalidArgumentError: it cannot be read, or the path is that of a file.
        """
        if self._path.is_file():
            raise InvalidArgumentError(
                f"resume: expected a folder but found the file {self._path}. Give the folder that it lies in; the newest "
                "file there is taken."
            )
        while steps := self.steps():
            path = self._path_of(steps[-1])
            try:
                return path, self._load(path)
            except FileNotFoundError:  # rank 0 has written newer ones, and removed this one
                continue
            except self._UNREADABLE as problem:
                older = [self._path_of(each).name for each in steps[:-1]]
                instead = f"go on from {older[-1]}" if older else "begin anew"
                raise InvalidArgumentError(
                    f"resume: expected a whole file from save_every but could not read {path} ({type(problem).__name__}: "
                    f"{problem}). Remove it to {instead}."
                ) from problem
        return None

    def _path_of(self, step: int) -> Path:
        return self._path / f"step-{step:012}.{self._SUFFIX}"

    def _save(self, values: dict[str, Any], file: IO[bytes]) -> None:
        arrays: dict[str, np.ndarray] = {}
        text = json.dumps(_written(values, arrays)).encode()
        np.savez(file, **{_VALUES: np.frombuffer(text, np.uint8)}, **arrays)

    def _load(self, path: Path) -> dict[str, Any]:
        with _one_reader, np.load(path, allow_pickle=False) as file:
            return _read(json.loads(file[_VALUES].tobytes()), file)


def is_plain(value: Any) -> bool:
    """Whether a file can have it: a number, a text, an array of numbers, or containers of these."""
    return is_made_of(_is_value, value)


def _is_value(value: Any) -> bool:
    is_array = isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject
    return is_array or isinstance(value, (bool, int, float, str, type(None)))


def _written(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """As JSON has it: lists as they are, all else that is no number or text by a pair of its kind and its parts."""
    if isinstance(value, (np.ndarray, np.generic)):
        name = f"array-{len(arrays)}"
        arrays[name] = np.frombuffer(np.asarray(value).tobytes(), np.uint8)  # NumPy's files know no bfloat16
        return {"array": [name, value.dtype.name, list(value.shape), isinstance(value, np.generic)]}
    if isinstance(value, Mapping):
        return {"mapping": [[_written(each, arrays) for each in item] for item in value.items()]}
    if isinstance(value, (tuple, set, frozenset)):
        return {
            type(value).__name__ if type(value) in _KINDS.values() else "tuple": [
                _written(each, arrays) for each in value
            ]
        }
    if isinstance(value, list):
        return [_written(each, arrays) for each in value]
    return value


def _read(found: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(found, list):
        return [_read(each, arrays) for each in found]
    if not isinstance(found, dict):
        return found
    ((kind, parts),) = found.items()
    if kind == "array":
        name, dtype, shape, is_scalar = parts
        array = arrays[name].view(np.dtype(dtype)).reshape(shape)
        return array[()] if is_scalar else array
    if kind == "mapping":
        return {_read(key, arrays): _read(value, arrays) for key, value in parts}
    return _KINDS[kind](_read(each, arrays) for each in parts)


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (tuple, set, frozenset)}


def check_names(expected: Iterable[str], found: Iterable[str], path: Path) -> None:
    """Raises InvalidArgumentError if a file has other values than a state, by their names."""
    if set(expected) != set(found):
        raise InvalidArgumentError(
            f"resume: expected a file with {', '.join(sorted(expected))} but found {', '.join(sorted(found))} in {path}. Make the "
            "State with the values that it was saved with, or use another folder."
        )


@contextmanager
def taken_from(path: Path, what: str, like: str = "like this State's") -> Iterator[None]:
    """A block that takes values from a file; raises InvalidArgumentError if they do not fit what a state has."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as problem:
        said = " ".join(str(problem).split())
        raise InvalidArgumentError(
            f"resume: expected the values of {what} in {path} to be {like} but they are not ({type(problem).__name__}: "
            f"{said}). Make the State as it was when the file was written, or use another folder."
        ) from problem
