"""The rank that something long-lived acts for: its context and process set in the current epoch.

An optimizer may outlive its world: ``shutdown()`` and ``init()`` open another one. So it keeps a ``Session`` instead of
a context, and asks at each use. Whatever belongs to it and knows something of its world registers with the session, and
hears of another one, whoever was the first to notice.
"""

from collections.abc import Callable
from enum import Enum, auto
from weakref import WeakMethod

from ringtrain._runtime import context as contexts
from ringtrain._runtime.process_sets import ProcessSet, id_of


class NewWorld(Enum):
    """What a new world means for what is under way."""

    ANEW = auto()  # it is given up: the others have given it up as well, or are others
    GOES_ON = auto()  # it is sent again: the guard of an elastic job has kept its inputs
    NUMBERED = auto()  # there is nothing: the world is the present one, in which optimizers are numbered again


class Session:
    """A rank in a process set, from epoch to epoch.

    Args:
        process_set: a registered set; after a new start one that was registered again, or the global one.

    Attributes:
        context: of the current epoch; where there is no world, the last one's, which refuses what is submitted.
        process_set_id: the set's id in this epoch.
    """

    __slots__ = ("context", "process_set_id", "_process_set", "_told")

    def __init__(self, process_set: ProcessSet):
        self._process_set = process_set
        self._told: list[WeakMethod[Callable[[NewWorld], None]]] = []
        self._enter()

    @property
    def process_set(self) -> ProcessSet:
        """As given."""
        return self._process_set

    def on_new_world(self, method: Callable[[NewWorld], None]) -> None:
        """Has a method called in each new world, behind those that were registered before; it keeps no object alive.

        So what others are made with registers before them: first the number, which all names begin with.
        """
        self._told.append(WeakMethod(method))

    def follow(self, change: NewWorld = NewWorld.ANEW) -> bool:
        """Goes on in another world, if there is one, and says so to all that have registered; returns whether it has.

        To be called wherever the owner is: what it submits after that goes to the current epoch, under the names of that.

        Args:
            change: what it means. ``NUMBERED`` is said in the present world, too.
        """
        if change is not NewWorld.NUMBERED and (self.context.usable or not contexts.is_initialized()):
            return False
        self._enter()
        self._told = [reference for reference in self._told if reference() is not None]
        for reference in self._told:
            if (method := reference()) is not None:
                method(change)
        return True

    def _enter(self) -> None:
        self.context, self.process_set_id = contexts.current(), id_of(self._process_set)
