"""Streaming fragments: which part of the parameters leaves after which step, and how it is merged when it is back. Pure.

Douillard et al., "Streaming DiLoCo with overlapping communication" (arXiv:2501.18512): in each period the parameters are
averaged part by part, and a part's change travels for some steps while training goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringtrain._runtime.arguments import integer
from ringtrain.errors import InvalidArgumentError

MERGES = ("additive", "half")


@dataclass(frozen=True)
class Fragments:
    """How a period's average is spread over its steps.

    Args:
        every: steps of a period.
        count: parts that the parameters are averaged in, at most ``every``; one after another, evenly spread.
        overlap: steps for which a part's change travels, less than ``every``; 0: the step that sends it waits for it.
        merge: what becomes of a value x that was x' when its change was sent, once the new common value X is there.
            ``"additive"``: x + (X - x'), so that what was learnt meanwhile stays whole; ``"half"``: (x + X) / 2, which
            needs an overlap.

    Raises:
        InvalidArgumentError: a number or a word that cannot be.
    """

    every: int
    count: int = 1
    overlap: int = 0
    merge: str = "additive"

    @property
    def schedule(self) -> tuple[int, int, int]:
        """What workers must have in common to go on from one state."""
        return self.every, self.count, self.overlap

    def __post_init__(self) -> None:
        _check_within("fragments", self.count, 1, self.every)
        _check_within("overlap", self.overlap, 0, self.every - 1)
        if self.merge not in MERGES:
            raise InvalidArgumentError(f"local steps: merge must be one of {', '.join(MERGES)}, but is {self.merge!r}.")
        if self.merge != "additive" and not self.overlap:
            raise InvalidArgumentError(
                f"local steps: merge must be additive without overlap, since values then become the common ones, but is "
                f"{self.merge!r}. Set overlap to the steps that a change may travel."
            )

    @property
    def streams(self) -> bool:
        """Whether parts travel by themselves, or behind steps; else all is averaged at once."""
        return self.count > 1 or self.overlap > 0

    @property
    def parts(self) -> int:
        """What a whole synchronisation averages one after another: the fragments and, where these stream, the buffers."""
        return self.count + self.streams

    @property
    def of_buffers(self) -> int:
        """The part that buffers belong to."""
        return self.parts - 1

    def leaving(self, steps: int) -> int | None:
        """The fragment whose change is sent after so many steps since the last whole synchronisation; None: none is.

        Example:
            >>> [Fragments(6, 2).leaving(steps) for steps in range(13)]
            [None, None, None, 0, None, None, 1, None, None, 0, None, None, 1]
        """
        place = (steps - 1) % self.every + 1
        part = -(-place * self.count // self.every) - 1
        return part if steps and (part + 1) * self.every // self.count == place else None

    def least_loaded(self, loads: Sequence[int]) -> int:
        """The fragment that the next tensor goes into: of those with the fewest elements the first.

        Args:
            loads: elements of each fragment so far.
        """
        return min(range(self.count), key=lambda part: loads[part])

    def terms(self) -> dict[str, object]:
        """What workers must have alike of them."""
        return {"fragments": self.count, "overlap": self.overlap, "merge": self.merge}

    def of_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a worker's state has of fragments: nothing, right after a synchronisation of others than these.

        Raises:
            InvalidArgumentError: it was saved between two synchronisations, with others.
        """
        given: Mapping[str, Any] = state.get("fragments", {})
        own = self.schedule if self.streams else None
        theirs = tuple(given["schedule"]) if given else None
        if own == theirs:
            return given
        if int(state["counters"]["steps"]):
            raise InvalidArgumentError(
                "load_state_dict: every, fragments and overlap must be those with which a state was saved between two "
                f"synchronisations, {_schedule_in_words(theirs)}, but are {_schedule_in_words(own)}. Save after synchronize() "
                "to change them."
            )
        return {}


def merged(values: np.ndarray, sent: np.ndarray, common: np.ndarray, merge: str) -> np.ndarray:
    """What a worker's values become when a new common copy is there.

    Args:
        values: x, flat.
        sent: what they were when their change was sent; used up.
        common: X.
        merge: one of ``MERGES``.
    """
    if merge == "half":
        return (values + common) * common.dtype.type(0.5)
    np.subtract(common, sent, out=sent)
    return np.add(values, sent, out=sent)


def _schedule_in_words(schedule: tuple[int, ...] | None) -> str:
    if schedule is None:
        return "all parameters at once"
    every, count, overlap = schedule
    return f"every={every}, fragments={count}, overlap={overlap}"


def _check_within(what: str, value: object, least: int, most: int) -> None:
    number = integer(f"local steps: {what}", value)
    if not least <= number <= most:
        raise InvalidArgumentError(
            f"local steps: {what} must be between {least} and {most} with every={most + (what == 'overlap')}, but is "
            f"{number}."
        )
