"""From one world to the next, for everything here that goes on in another one."""

from ringtrain import membership
from ringtrain.errors import ClosedError, PeerLostError, ProcessSetLostError, RingtrainError
from ringtrain.start import init, shutdown


def can_go_on(problem: BaseException) -> bool:
    """Whether another world may do what this one could not: a rank was lost, has left, or the script has said so."""
    if isinstance(problem, ProcessSetLostError):
        return False
    of_the_world = isinstance(problem, (PeerLostError, ClosedError)) or type(problem) is RingtrainError
    return of_the_world and membership.current() is not None


def next_world() -> None:
    """Leaves this world and takes the next one, once the launcher has formed it."""
    shutdown()
    init()
