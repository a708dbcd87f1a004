"""Which step ends with a synchronisation. Pure.

Steps of the optimizer are counted, never time, so all ranks come to the same answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ringtrain._runtime.arguments import integer
from ringtrain._training.averaging.fragments import Fragments
from ringtrain.errors import InvalidArgumentError


class Period:
    """What one worker has done since the last synchronisation.

    Args:
        every: steps from one synchronisation to the next.
        warmup: exact steps before the first local one.
        fragments, overlap, merge: as for ``Fragments``.

    Attributes:
        every: as given.
        warmup: as given.
        fragments: how a period's average is spread over its steps.
        total: steps since the start.
        steps: local steps since the last synchronisation; the last one of all parameters, where fragments travel.
        counted: whether the user said what steps count, by ``count_samples``.
        round: number of synchronisations; where fragments travel, of their averages.
    """

    def __init__(self, every: int, warmup: int = 0, fragments: int = 1, overlap: int = 0, merge: str = "additive"):
        self.every, self.warmup = _at_least("every", every, 1), _at_least("warmup", warmup, 0)
        self.fragments = Fragments(self.every, fragments, overlap, merge)
        self.total = self.steps = self.round = 0
        self.counted = False
        self._weights = [0] * self.fragments.parts
        self._of_next: int | None = None

    @property
    def warms_up(self) -> bool:
        """Whether the next step is an exact one."""
        return self.total < self.warmup

    @property
    def due(self) -> bool:
        """Whether the step that has just been counted ends the period, where all is averaged at once."""
        return self.steps >= self.every

    @property
    def samples(self) -> int:
        """What the steps since the last synchronisation counted."""
        return self._weights[0]

    def samples_of(self, part: int) -> int:
        """What the steps counted since a part was averaged, or since its change was sent."""
        return self._weights[part]

    def send(self, part: int) -> int:
        """A part's change is sent: what it weighs, which begins anew."""
        samples, self._weights[part] = self._weights[part], 0
        return samples

    def recall(self, part: int, samples: int) -> None:
        """What was sent has not come to anything: the change is to be sent with the next one."""
        self._weights[part] += samples

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
            self._weights = [weight + (1 if of_next is None else of_next) for weight in self._weights]

    def begin(self) -> None:
        """A synchronisation was made."""
        self.count_round()
        self.forget()

    def count_round(self) -> None:
        """A part was averaged."""
        self.round += 1

    def forget(self) -> None:
        """The steps since the last synchronisation count no longer."""
        self.steps = 0
        self._weights = [0] * len(self._weights)
        self.counted = False
        self._of_next = None

    def state(self) -> dict[str, int]:
        """What goes into a checkpoint, beside ``weights`` where fragments travel."""
        return {name: int(getattr(self, name)) for name in _SAVED} | {"samples": self.samples}

    @property
    def weights(self) -> list[int]:
        """Of each part, what the steps counted since its change was sent."""
        return list(self._weights)

    def load(self, state: Mapping[str, Any], weights: Sequence[int] | None = None) -> None:
        """Goes on with what ``state`` has returned, and with ``weights``; None: all parts were averaged last together."""
        self._of_next = None
        for name in _SAVED:
            setattr(self, name, int(state[name]))
        self.counted = bool(self.counted)
        self._weights = [int(state["samples"])] * len(self._weights) if weights is None else [int(x) for x in weights]


_SAVED = ("total", "steps", "counted", "round")


def _at_least(what: str, value: object, least: int) -> int:
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
