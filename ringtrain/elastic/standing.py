"""How far a rank is with its steps, as the ranks of a world tell each other, and what a step is of a training."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from ringtrain._binding._native import CData
from ringtrain.elastic.balance import ShareRules
from ringtrain.elastic.likeness import Outline


class ReleaseStage(IntEnum):
    """How far a rank is with the part behind the last one that it has released; the core's numbers."""

    IDLE = 0
    BEGUN = 1
    WHOLE = 2


class Standing(NamedTuple):
    """What a rank says of itself: a row of whole numbers, as the core has it."""

    holds_state: bool
    released: int
    stage: ReleaseStage
    dealt_in: int
    has_sets: bool


class Training(Protocol):
    """What a transaction goes on with in another world."""

    def enter_world(self) -> None:
        """The default context is another one. What was under way in the one before is nothing any more."""

    def outline(self) -> Outline:
        """What the state has, as far as ranks must have it alike before one takes over what another has."""

    def take_state(self) -> None:
        """Takes the state of rank 0, on all ranks together, between two steps."""

    def deal(self, size: int, place: int) -> None:
        """The samples of the next window are dealt to so many ranks, of which this is the one at that place."""

    def batch(self) -> int:
        """Samples of a batch on all ranks together."""

    def share_rules(self) -> ShareRules:
        """What the shares of a batch must be."""

    def work(self) -> float:
        """The samples of this rank in the open window; those of average cost that would cost as much, where costs differ."""

    def share(self, counts: Sequence[int]) -> None:
        """So many samples of a whole batch are dealt to each place, from the next window on; none for equal shares."""

    def drawn(self) -> str:
        """What this rank has drawn for the open window, in words that must be the same on all ranks."""

    def finish_window(self, contributors: set[int] | None) -> None:
        """All results of a window are released: the samples that these places have drawn are in them; None: of all."""

    def weight(self, contributors: set[int] | None) -> int | None:
        """What this rank's inputs of the open window count in an average over these places, None: all; None if all count alike."""


def set_of(places: CData, count: int) -> set[int] | None:
    """Places of contributors; None: all."""
    return None if count < 0 else set(places[0:count])


def standing_of(row: list[int]) -> Standing:
    holds_state, released, stage, dealt_in, has_sets = row
    return Standing(bool(holds_state), released, ReleaseStage(stage), dealt_in, bool(has_sets))
