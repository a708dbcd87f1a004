"""What survivors settle when they meet in the next world: what each says, and what follows for all. Pure.

The core decides (`Settle` in `native/core/transaction.h`), as in its simulation; here its numbers get names. Each rank
sends a row of whole numbers, sees those of all, and so comes to the same answer.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from ringtrain._native import OUT_OF_MEMORY, ffi, lib
from ringtrain.errors import InternalError


class Stage(IntEnum):
    """How far a rank is with the window after the last one that it has released."""

    IDLE = 0  # nothing of it has been drawn
    BEGUN = 1
    WHOLE = 2  # and this rank holds every result


class Standing(NamedTuple):
    """What a rank says.

    Attributes:
        holds_state: whether it has what the others have; not so before the first world's state was given out, and on a
            rank that joins.
        released: windows that it has released.
        stage: of the one after that.
        dealt_in: number of the world among whose members the samples of that one were dealt, or would be.
        has_sets: whether it knows of process sets that are to go on.
    """

    holds_state: bool
    released: int
    stage: Stage
    dealt_in: int
    has_sets: bool = False


class Settlement(NamedTuple):
    """What follows for all.

    Attributes:
        released: windows that are released on all ranks. Who has one less, and is whole, releases it.
        dealt_in: the world in which the samples of the window behind it have been dealt; None if nobody has begun it.
        gives_state: whether rank 0 gives its state to all.
        renews_sets: whether process sets go on.
    """

    released: int
    dealt_in: int | None
    gives_state: bool
    renews_sets: bool = False


def settle(standings: Sequence[Standing]) -> Settlement:
    """What follows from what the members of a world say.

    Raises:
        InternalError: not what ranks of one job can say: they are two windows apart, or one that has released a window
            knows of another that did not hold it.
    """
    holders = [each for each in standings if each.holds_state]
    renews_sets = any(each.has_sets for each in standings)
    if not holders:  # the first world
        return Settlement(0, None, True, renews_sets)
    released, fresh = ffi.new("int64_t *"), ffi.new("int32_t *")
    numbers = [number for each in holders for number in (each.released, each.stage)]
    settled = lib.rt_settle(numbers, len(holders), released, fresh)
    if settled < 0:
        raise MemoryError(OUT_OF_MEMORY)
    if not settled:
        raise InternalError(f"elastic: no standings: {standings}.")
    behind = [each for each in holders if each.released < released[0]]
    if any(each.released + 1 != released[0] or each.stage is not Stage.WHOLE for each in behind):
        raise InternalError(f"elastic: a window was released that not all ranks held: {standings}.")
    gives_state = len(holders) < len(standings)
    if fresh[0]:
        return Settlement(released[0], None, gives_state, renews_sets)
    begun = [each.dealt_in for each in holders if each not in behind and each.stage > Stage.IDLE]
    return Settlement(released[0], max(begun), gives_state, renews_sets)
