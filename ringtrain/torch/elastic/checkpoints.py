"""Files that a training goes on from when its job has ended: written between two steps, each whole or not there."""

import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

from ringtrain.elastic import saving
from ringtrain.torch.modes.base import State

_ROWS = re.compile(r"step-(\d{12})-[0-9a-f]+")
ROWS = "sharded embeddings"  # in a file: the name of the folder beside it with their rows; no value of a state is called so


class TorchFolder(saving.Folder):
    """Files as torch writes them, with tensors, numbers, texts and containers of these."""

    _SUFFIX = "pt"
    _UNREADABLE = (OSError, EOFError, RuntimeError, pickle.UnpicklingError)

    def for_rows(self, step: int, token: str) -> Path:
        """A folder for rows of sharded embeddings, which the file behind that step names when they are all there."""
        return self._path / f"step-{step:012}-{token}"

    def write(self, step: int, values: State, keep: int) -> None:
        """Folders of rows go with their files, and with them what is left of those that no file came to name.

        Raises:
            OSError: the folder takes no file.
        """
        super().write(step, values, keep)
        self._remove_rows(step, values.get(ROWS))

    def rows_of(self, values: State) -> Path | None:
        """The folder of rows that a file names; None if it has none."""
        return self._path / values[ROWS] if ROWS in values else None

    def _remove_rows(self, step: int, named: str | None) -> None:
        kept = set(self.steps()) - {step}
        for each in self._path.iterdir():
            match = _ROWS.fullmatch(each.name)
            if match and each.name != named and int(match[1]) <= step and int(match[1]) not in kept:
                shutil.rmtree(each, ignore_errors=True)

    def _save(self, values: State, file: IO[bytes]) -> None:
        _save(values, file)

    def _load(self, path: Path) -> State:
        loaded: State = torch.load(path, "cpu", weights_only=True)
        return loaded


def _save(values: State, file: IO[bytes]) -> None:
    """``torch.save``. Where the disk is full that raises an error of its archive's, and has what the disk said as its context."""
    try:
        torch.save(values, file)
    except RuntimeError as error:
        if isinstance(said := error.__context__, OSError):
            raise said from error
        raise


def on_devices(optimizer: torch.optim.Optimizer, state: State) -> State:
    """What ``state_of`` an optimizer has in a file, with tensors where its own are: beside the parameters.

    But for its counter of steps, which lies in the host's memory where the optimizer does not say otherwise.
    """
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    states = [
        values and {name: _beside(value, parameter, group, name) for name, value in values.items()}
        for (parameter, group), values in zip(parameters, state["states"], strict=True)
    ]
    return {**state, "states": states}


def _beside(value: object, parameter: torch.Tensor, group: Mapping[str, object], name: str) -> object:
    stays = name == "step" and not (group.get("capturable") or group.get("fused"))
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and not stays else value
