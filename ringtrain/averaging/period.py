"""Which step ends with a synchronisation. Pure.

Steps of the optimizer are counted, never time, so all ranks come to the same answer.
"""

from collections.abc import Mapping
from typing import Any

from ringtrain.arguments import integer
from ringtrain.errors import InvalidArgumentError


class Period:
    """What one worker has done since the last synchronisation.

    Args:
        every: steps from one synchronisation to the next.
        warmup: exact steps before the first local one.

    Attributes:
        every: as given.
        warmup: as given.
        total: steps since the start.
        steps: local steps since the last synchronisation.
        samples: what these steps counted.
        counted: whether the user said so, by ``count_samples``.
        round: number of synchronisations.
    """

    def __init__(self, every: int, warmup: int = 0):
        self.every, self.warmup = _at_least("every", every, 1), _at_least("warmup", warmup, 0)
        self.total = self.steps = self.samples = self.round = 0
        self.counted = False
        self._of_next: int | None = None

    @property
    def warms_up(self) -> bool:
        """Whether the next step is an exact one."""
        return self.total < self.warmup

    @property
    def due(self) -> bool:
        """Whether the step that has just been counted ends the period."""
        return self.steps >= self.every

    def count_samples(self, samples: int) -> None:
        """Says what the next step counts; several calls before it add up."""
        self._of_next = (self._of_next or 0) + _at_least("samples", samples, 0)

    def note_step(self, used: bool = True) -> None:
        """A step was taken; ``used`` is False where it changed nothing, so that it counts as a step but weighs nothing."""
        of_next, self._of_next = self._of_next, None
        exact = self.warms_up
        self.total += 1
        if exact:
            return
        self.steps += 1
        self.counted |= of_next is not None
        if used:
            self.samples += 1 if of_next is None else of_next

    def begin(self) -> None:
        """A synchronisation was made."""
        self.round += 1
        self.forget()

    def forget(self) -> None:
        """The steps since the last synchronisation count no longer."""
        self.steps = self.samples = 0
        self.counted = False
        self._of_next = None

    def state(self) -> dict[str, int]:
        """What goes into a checkpoint."""
        return {name: int(getattr(self, name)) for name in _SAVED}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state`` has returned."""
        self._of_next = None
        for name in _SAVED:
            setattr(self, name, int(state[name]))
        self.counted = bool(self.counted)


_SAVED = ("total", "steps", "samples", "counted", "round")


def _at_least(what: str, value: Any, least: int) -> int:
    number = integer(f"local steps: {what}", value)
    if number < least:
        raise InvalidArgumentError(f"local steps: {what} must be at least {least}, but is {number}.")
    return number


def factor_of(samples: int, total: int, workers: int) -> float:
    """What a worker's change is multiplied by before the plain average: exactly 1 where all weigh the same.

    Example:
        >>> factor_of(3, 8, 2)
        0.75
    """
    return samples * workers / total
