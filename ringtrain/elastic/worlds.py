"""From one world to the next, for everything here that goes on in another one."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ringtrain._bootstrap import membership
from ringtrain._bootstrap.start import init, shutdown
from ringtrain._runtime.operations import Max, allreduce
from ringtrain.errors import ClosedError, ForkedError, PeerLostError, ProcessSetLostError, RingtrainError

_REFUSED = "ringtrain.elastic.refused"

_signs: list[Callable[[Exception], bool]] = []


def register_sign(sign: Callable[[Exception], bool]) -> None:
    """Has exceptions of a framework's own tell of a world's end: those for which it returns True."""
    _signs.append(sign)


def ends_world(problem: Exception) -> bool:
    """Whether an exception of some framework's own says that the world has ended."""
    is_theirs = not isinstance(problem, RingtrainError) and membership.current() is not None
    return is_theirs and any(sign(problem) for sign in _signs)


def can_go_on(problem: BaseException) -> bool:
    """Whether another world may do what this one could not: a rank was lost, has left, or the script has said so."""
    if isinstance(problem, (ProcessSetLostError, ForkedError)):
        return False
    of_the_world = isinstance(problem, (PeerLostError, ClosedError)) or type(problem) is RingtrainError
    return of_the_world and membership.current() is not None


def next_world() -> None:
    """Leaves this world and takes the next one, once the launcher has formed it."""
    shutdown()
    init()


def let_all_know() -> None:
    """Until all ranks have heard by what they differ nobody leaves the world, whose end would be what others hear."""
    with suppress(RingtrainError):
        allreduce(np.zeros(1, np.uint8), op=Max, name=_REFUSED)
