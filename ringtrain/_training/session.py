"""The rank that something long-lived acts for: its context and process set in the current epoch.

An optimizer may outlive its world: ``shutdown()`` and ``init()`` open another one. So it keeps a ``Session`` instead of
a context, and asks at each use.
"""

from ringtrain._runtime import context as contexts
from ringtrain._runtime.process_sets import ProcessSet, id_of


class Session:
    """A rank in a process set, from epoch to epoch.

    Args:
        process_set: a registered set; after a new start one that was registered again, or the global one.

    Attributes:
        context: of the current epoch; where there is no world, the last one's, which refuses what is submitted.
        process_set_id: the set's id in this epoch.
    """

    __slots__ = ("context", "process_set_id", "_process_set")

    def __init__(self, process_set: ProcessSet):
        self._process_set = process_set
        self._enter()

    @property
    def process_set(self) -> ProcessSet:
        """As given."""
        return self._process_set

    def has_moved(self) -> bool:
        """Whether there is another world than at the last look. Then nothing holds that was agreed on in the old one.

        To be asked wherever the owner is called: what it submits after that goes to the current epoch.
        """
        if self.context.usable or not contexts.is_initialized():
            return False
        self._enter()
        return True

    def _enter(self) -> None:
        self.context, self.process_set_id = contexts.current(), id_of(self._process_set)
