"""Process sets: named subsets of the ranks that run collective operations of their own.

A set is registered by all ranks of the world together, in the same order; then its members alone use it.
"""

from collections.abc import Sequence

from ringtrain import context as contexts
from ringtrain.errors import InvalidArgumentError


class ProcessSet:
    """A set of ranks for ``process_set=``; usable once ``init`` or ``add_process_set`` has registered it.

    Attributes:
        process_set_id: None until it is registered, and after its removal.
        ranks: the members' global ranks, ascending.

    Example:
        >>> even = rt.add_process_set(rt.ProcessSet(range(0, rt.size(), 2)))
        >>> if even.included():
        ...     rt.allreduce(loss, name="loss", process_set=even)
    """

    def __init__(self, ranks: Sequence[int]):
        try:
            self.ranks: list[int] | None = sorted(int(rank) for rank in ranks)
        except (TypeError, ValueError):
            raise InvalidArgumentError(f"ProcessSet: expected a sequence of ranks but found {ranks!r}.") from None
        self.process_set_id: int | None = None

    def register(self, context: contexts.Context) -> None:
        """Registers the set with a world; called by ``init`` and ``add_process_set`` on all ranks alike."""
        if self.process_set_id is not None:
            raise InvalidArgumentError(
                f"add_process_set: expected an unregistered set but found {self}. Remove it first."
            )
        self.process_set_id = context.add_process_set(self.ranks)

    def size(self) -> int | None:
        """Number of members; None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This rank's place among the members; None if the set is not registered.

        Raises:
            InvalidArgumentError: this rank is not a member.
        """
        if self.process_set_id is None:
            return None
        rank = contexts.current().rank
        if rank not in self.ranks:
            raise InvalidArgumentError(f"rank: this rank must be a member of {self}, but rank {rank} is not.")
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Whether this rank is a member; None if the set is not registered."""
        return None if self.process_set_id is None else contexts.current().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All ranks of the world, whichever is current."""

    def __init__(self):
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(contexts.current().size)) if contexts.is_initialized() else None

    def size(self) -> int | None:
        return contexts.current().size if contexts.is_initialized() else None


global_process_set = _GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a set of ranks. All ranks of the world call this, members or not, in the same order; blocks.

    Args:
        process_set: the set, or its ranks.

    Raises:
        MismatchError: ranks gave different sets.
        InvalidArgumentError: a rank that does not exist, a rank twice, or a set that is registered already.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    process_set.register(contexts.current())
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; all ranks of the world call this in the same order. False for the global or an unregistered set."""
    if process_set.process_set_id in (None, 0):
        return False
    contexts.current().remove_process_set(process_set.process_set_id)
    process_set.process_set_id = None
    return True


def id_of(process_set: ProcessSet) -> int:
    """The id that operations submit under.

    Raises:
        InvalidArgumentError: not a process set, or one that is not registered.
    """
    try:
        identity = process_set.process_set_id
    except AttributeError:
        raise InvalidArgumentError(f"process_set: expected a ProcessSet but found {process_set!r}.") from None
    if identity is None:
        raise InvalidArgumentError(
            f"process_set: expected a registered set but found {process_set}. Call add_process_set first."
        )
    return identity
