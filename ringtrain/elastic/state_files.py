"""The files of a state: ``save_every`` has rank 0 write them, and ``resume`` takes the newest."""

import os
import random
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol, TypeVar

import numpy as np

from ringtrain._binding.log import logger
from ringtrain._runtime import operations
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.world import long_phase
from ringtrain.elastic.saving import LONGEST_SAVE, Folder, SavingPlan, check_keep, check_names, is_plain, taken_from
from ringtrain.elastic.values import StateValues
from ringtrain.errors import InvalidArgumentError

Result = TypeVar("Result")
_DUE = "ringtrain.elastic.save_every.due"
_RANDOM = "ringtrain.elastic.random_states"


class SavedState(Protocol):
    """What this needs of the state."""

    epoch: int
    batch: int
    step: int

    def survive(self, function: Callable[[], Result]) -> Result:
        """What a function returns that uses the present world."""
        ...

    def _in_file(self, content: dict[str, Any]) -> dict[str, Any]: ...


class StateFiles:
    """Of one state. values: which of it are in a file."""

    def __init__(self, state: SavedState, values: StateValues):
        self._state, self._values = state, values
        self._saves: tuple[Folder, SavingPlan, int] | None = None  # where, when, and how many files are kept
        self._random: Sequence[Any] | None = None  # random states of all ranks, from which they are to go on

    @property
    def given(self) -> tuple[Sequence[Any] | None, tuple[int, int, int] | None]:
        """What ranks that join take over: the random states, and how far the plan is, which ranks agree on."""
        return self._random, None if self._saves is None else self._saves[1].progress

    @given.setter
    def given(self, theirs: tuple[Sequence[Any] | None, tuple[int, int, int] | None]) -> None:
        self._random, progress = theirs
        if self._saves is not None and progress is not None:
            self._saves[1].progress = progress

    def save_every(
        self, folder: "str | os.PathLike[str]", steps: int | None, minutes: float | None, epochs: int | None, keep: int
    ) -> None:
        """Plans the files. Raises InvalidArgumentError and UnsupportedError for values that have no place in one."""
        check_keep(keep)
        self._refuse_in_file()
        for name, value in self._values.plain().items():
            if not is_plain(value):
                raise InvalidArgumentError(
                    f"save_every: values must be numbers, texts, arrays, or containers of these, but '{name}' is or has something "
                    f"else ({type(value).__name__}). Give what it counts instead."
                )
        plan = SavingPlan(steps, minutes, self._state.step, monotonic(), epochs, self._state.epoch)
        self._saves = Folder(folder), plan, keep

    def _refuse_in_file(self) -> None:
        for adapter, values in self._values.by_adapter().items():
            adapter.refuse_in_file(values)

    def refusal(self) -> str:
        """Why the training must not begin: the folder has files of later steps; "" if it may."""
        return "" if self._saves is None else self._saves[0].refuse_later_than(self._state.step)

    def resume(self, folder: "str | os.PathLike[str]") -> dict[str, Any] | None:
        """Takes the values of the newest file, and returns all that it has; None without one. Raises InvalidArgumentError."""
        self._refuse_in_file()
        found = Folder(folder).newest()
        if found is None:
            return None
        path, kept = found
        check_names(self._values.names, kept["names"], path)
        for (adapter, values), theirs in zip(self._values.by_adapter().items(), kept["values"], strict=True):
            with taken_from(path, ", ".join(type(value).__name__ for value in values)):
                adapter.take_from_file(values, theirs)
        for name, value in kept["plain"].items():
            self._values.take(name, value)
        self._random = kept["random"]
        return kept

    def save_if_due(self) -> None:
        """To be called on all ranks alike, where the state is whole."""
        if self._saves is None:
            return
        folder, plan, keep = self._saves
        state = self._state
        due = plan.is_due(state.step, state.epoch, state.batch > 0)
        if not due and plan.asks_at(state.step):
            own = np.array(plan.answer(state.step, monotonic()), np.int64)
            is_time, next_look = state.survive(lambda: operations.broadcast(own, 0, _DUE)).tolist()
            due = plan.hear(state.step, monotonic(), (is_time, next_look))
        if not due:
            return
        plan.note(state.step, monotonic(), state.epoch)
        states = state.survive(lambda: allgather_object(self._random_states(), _RANDOM))
        if current().rank != 0:
            return
        try:
            with long_phase(LONGEST_SAVE):
                folder.write(state.step, state._in_file(self._content(states)), keep)
        except (OSError, InvalidArgumentError) as problem:
            logger.warning("save_every: the state behind step %d could not be written: %s", state.step, problem)

    def _content(self, states: Sequence[Any]) -> dict[str, Any]:
        return {
            "names": self._values.names,
            "values": [adapter.in_file(values) for adapter, values in self._values.by_adapter().items()],
            "plain": self._values.plain(),
            "random": list(states),
        }

    def _random_states(self) -> list[Any]:
        return [
            random.getstate(),
            np.random.get_state(legacy=True),
            *(adapter.random_states(values) for adapter, values in self._values.by_adapter().items()),
        ]

    def draw_on(self) -> None:
        """Goes on with the random numbers behind those of the saved training, on as many ranks; once."""
        states, self._random = self._random, None
        if states is None or len(states) != current().size:
            return
        of_python, of_numpy, *of_adapters = states[current().rank]
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for (adapter, values), each in zip(self._values.by_adapter().items(), of_adapters, strict=True):
            adapter.draw_on(values, each)
