"""Files that a training goes on from when its job has ended: written between two steps, each whole or not there."""

import os
import pickle
import re
import shutil
from pathlib import Path
from typing import IO, Any

import torch

from ringtrain.durable import replaced
from ringtrain.errors import InvalidArgumentError

_FILE = re.compile(r"step-(\d{12})\.pt")
_UNFINISHED = re.compile(r"\.step-\d+-\d+")
_ROWS = re.compile(r"step-(\d{12})-[0-9a-f]+")
LONGEST_LOOK = 10.0  # seconds between two looks at the time, as far as the pace of the steps is known
ROWS = "sharded embeddings"  # in a file: the name of the folder beside it with their rows; no value of a state is called so


class Plan:
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


class Folder:
    """Files of one training, each named by the step that it was written behind.

    Args:
        path: of the folder, which is made when the first is written.
    """

    def __init__(self, path: "str | os.PathLike[str]"):
        self._path = Path(path)

    def steps(self) -> list[int]:
        """Of the files that are there, ascending."""
        names = [each.name for each in self._path.iterdir()] if self._path.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))

    def later_than(self, step: int) -> list[Path]:
        """The files that were written behind later steps."""
        return [self._path_of(each) for each in self.steps() if each > step]

    def for_rows(self, step: int, token: str) -> Path:
        """A folder for rows of sharded embeddings, which the file behind that step names when they are all there."""
        return self._path / f"step-{step:012}-{token}"

    def write(self, step: int, values: dict[str, Any], keep: int) -> None:
        """Writes a file, and removes all but the newest ones. Who looks meanwhile sees the whole file, or none.

        Folders of rows go with their files, and with them what is left of those that no file came to name. So does what
        a process has left that was killed while it wrote.

        Raises:
            OSError: the folder takes no file.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        for left in [each for each in self._path.iterdir() if _UNFINISHED.fullmatch(each.name)]:
            left.unlink(missing_ok=True)
        with replaced(self._path_of(step), self._path / f".step-{step}-{os.getpid()}") as file:
            _save(values, file)
        for old in [each for each in self.steps() if each <= step][:-keep]:
            self._path_of(old).unlink(missing_ok=True)
        self._remove_rows(step, values.get(ROWS))

    def rows_of(self, values: dict[str, Any]) -> Path | None:
        """The folder of rows that a file names; None if it has none."""
        return self._path / values[ROWS] if ROWS in values else None

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest file, and what it has, in the host's memory; None if there is none.

        It has tensors, numbers, texts and containers of these; nothing in it is run.

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
                return path, torch.load(path, "cpu", weights_only=True)
            except FileNotFoundError:  # rank 0 has written newer ones, and removed this one
                continue
            except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as problem:
                older = [self._path_of(each).name for each in steps[:-1]]
                instead = f"go on from {older[-1]}" if older else "begin anew"
                raise InvalidArgumentError(
                    f"resume: expected a whole file from save_every but could not read {path} ({type(problem).__name__}: "
                    f"{problem}). Remove it to {instead}."
                ) from problem
        return None

    def _remove_rows(self, step: int, named: str | None) -> None:
        kept = set(self.steps()) - {step}
        for each in self._path.iterdir():
            match = _ROWS.fullmatch(each.name)
            if match and each.name != named and int(match[1]) <= step and int(match[1]) not in kept:
                shutil.rmtree(each, ignore_errors=True)

    def _path_of(self, step: int) -> Path:
        return self._path / f"step-{step:012}.pt"


def _save(values: dict[str, Any], file: IO[bytes]) -> None:
    """``torch.save``. Where the disk is full that raises an error of its archive's, and has what the disk said as its context."""
    try:
        torch.save(values, file)
    except RuntimeError as error:
        if isinstance(said := error.__context__, OSError):
            raise said from error
        raise


def on_devices(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What ``state_of`` an optimizer has in a file, with tensors where its own are: beside the parameters.

    But for its counter of steps, which lies in the host's memory where the optimizer does not say otherwise.
    """
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    states = [
        values and {name: _beside(value, parameter, group, name) for name, value in values.items()}
        for (parameter, group), values in zip(parameters, state["states"], strict=True)
    ]
    return {**state, "states": states}


def _beside(value: Any, parameter: torch.Tensor, group: dict[str, Any], name: str) -> Any:
    stays = name == "step" and not (group.get("capturable") or group.get("fused"))
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and not stays else value
