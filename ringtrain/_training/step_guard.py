"""What a step of an optimizer lets others do: a guard may release its results, passengers travel in its rounds.

Without an elastic job there is no guard, and without sharded tables no passenger: ``elastic`` and ``embedding`` register
theirs, and neither is imported by those who use neither.
"""

from collections.abc import Callable, Generator
from contextlib import suppress
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain.errors import RingtrainError, UnsupportedError

Result = TypeVar("Result")


class Part(IntEnum):
    """What results are of the open window; the core's numbers."""

    NOTHING = 0  # they are given up
    SOME = 1  # more will come
    STEP = 2  # with them an optimizer's step is complete, and so is the window if there is one optimizer
    LAST = 3  # with them it is complete


class StepGuard(Protocol):
    """Holds results until all ranks have them, so that a step survives a change of the world (``elastic.transaction``)."""

    def weight(self) -> int | None:
        """What this rank's inputs count in an average of the present world; None if all count alike."""

    def run(
        self,
        attempt: Callable[[], Generator[Operation, None, Result]],
        part_of: Callable[[Result], Part],
        take_back: Callable[[], None],
    ) -> Generator[Operation, None, Result]:
        """Attempts until all ranks hold the results; yields the operations that it waits for."""

    def use_within(self, attempt: Callable[[], Generator[Operation, None, Result]]) -> Result:
        """What an attempt in the midst of a step returns, again in each world that takes the place of the one before."""

    def survive(self, function: Callable[[], Result], part: Part) -> Result:
        """What a function between ranks returns, in whichever world all come to hold it."""


class Passenger(Protocol):
    """What travels in the rounds of an optimizer beside its gradients (``embedding.row_gradients``)."""

    def reduce(self, name: str, share: int | None, gives_up: bool) -> None:
        """Travels, in a round that ends here."""

    def release(self) -> None:
        """All ranks hold the results."""

    def take_back(self) -> None:
        """What was reduced and held is nothing any more."""

    def forget(self) -> None:
        """The step is given up."""


_under_way: list[StepGuard] = []


def enter(guard: StepGuard) -> None:
    """From now on this process is in a guard, whose steps survive."""
    _under_way.append(guard)


def leave(guard: StepGuard) -> None:
    """It is in that one no longer."""
    _under_way.remove(guard)


def under_way() -> Any:
    """The guard that this process is in; None if there is none."""
    return _under_way[-1] if _under_way else None


def require_all_ranks(owner: str, process_set: ProcessSet, state: str) -> None:
    """Raises UnsupportedError where some ranks alone would train; ``state`` is the one for ``elastic.run`` instead."""
    if process_set is not global_process_set:
        raise UnsupportedError(
            f"{owner}: with elastic.State all ranks must take part, since one that joins gets the one model that all have, but "
            f"there is a process set. Leave it out, and use it in State.survive; or use {state} and elastic.run."
        )


def awaited(steps: Generator[Operation, None, Result]) -> Result:
    """Waits for each operation that a window names, until it has its result."""
    while True:
        try:
            operation = next(steps)
        except StopIteration as end:
            return end.value
        with suppress(RingtrainError):  # the window looks at it itself
            operation.wait()
