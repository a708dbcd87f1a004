"""Process sets: named subsets of the ranks that run collective operations of their own.

A set is registered by all ranks of the world together, in the same order; then its members alone use it. One that is
given as an mpi4py communicator gets its ranks when ``init`` registers it.

In an elastic job whose steps survive sets go on in the next world (``ringtrain.elastic.sets``). A rank that joins makes
those of the script's beginning without a word to the others, and takes theirs over.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from ringtrain._binding._native import OUT_OF_MEMORY, counted, ffi, lib
from ringtrain._runtime import context as contexts
from ringtrain._runtime import mpi
from ringtrain._runtime.submission import Submission, id_of, refuse_lost
from ringtrain.errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "ProcessSet", "add_process_set", "global_process_set", "id_of", "is_alone", "members_of", "place_in", "remove_process_set", "size_of",
]  # fmt: skip


class ProcessSet:
    """A set of ranks for ``process_set=``; usable once ``init`` or ``add_process_set`` has registered it.

    Example:
        >>> even = rt.add_process_set(rt.ProcessSet(range(0, rt.size(), 2)))
        >>> if even.included():
        ...     rt.allreduce(loss, name="loss", process_set=even)

    Args:
        ranks_or_comm: the members' global ranks; or, for ``init(comm=...)``, an mpi4py communicator of them, of which
            other ranks may pass another one at the same place, such as the parts of a ``Split``.

    Attributes:
        process_set_id: None until it is registered, and after its removal.
        ranks: the members' global ranks, ascending; None for a communicator until it is registered.
        mpi_comm: the communicator, or None.
        lost: in an elastic job, why the set cannot be used any more, the same on all ranks: a member is gone. Else "".
            ``ranks`` are those that are left then; ``add_process_set`` has the set go on with them.
        origin: in an elastic job, what names the set among all ranks: the world in which it was added, and its id there.
        peers: in an elastic job, who the members are, in the order of their ranks.
        world: in an elastic job, the number of the world in which it is registered.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any):
        self.process_set_id: int | None = None
        self.lost = ""
        self.origin: tuple[int, int] | None = None
        self.peers: tuple[contexts.Peer, ...] = ()
        self.world = 0
        self.mpi_comm: Any = ranks_or_comm if mpi.is_communicator(ranks_or_comm) else None
        self.ranks: list[int] | None = None
        if self.mpi_comm is None:
            try:
                self.ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
            except TypeError:
                raise InvalidArgumentError(
                    f"ProcessSet: expected a sequence of ranks but found {ranks_or_comm!r}."
                ) from None

    def register(self, context: contexts.Context, world: Any = None) -> None:
        """Registers the set with a world; called by ``init`` and ``add_process_set`` on all ranks alike.

        Args:
            context: of this rank.
            world: the mpi4py communicator that ``init`` was given, or None.
        """
        with Submission("add_process_set", None, global_process_set):
            self._require_unregistered()
        if context.takes_over:  # nobody would answer; the others have theirs
            context.sets.append(self)
            return
        if self.mpi_comm is None:
            self.process_set_id = context.add_process_set(self.ranks or ())
        else:
            self._register_communicator(context, world)
        if context.peers:
            self._note_members(context)

    def _note_members(self, context: contexts.Context) -> None:
        assert self.process_set_id is not None
        self.origin, self.world, self.lost = (context.world, self.process_set_id), context.world, ""
        self.peers = tuple(context.peers[rank] for rank in self.ranks or ())
        context.sets.append(self)

    def _require_unregistered(self) -> None:
        if self.process_set_id is not None:
            raise InvalidArgumentError(
                f"add_process_set: expected an unregistered set but found {self}. Remove it first."
            )

    def _register_communicator(self, context: contexts.Context, world: Any) -> None:
        """Registers what all ranks brought at this place, each set once, by their lowest ranks; this rank's is its own."""
        if not mpi.is_communicator(world):
            raise UnsupportedError(
                "ProcessSet: a communicator needs init(comm=...) with a communicator of the world, but found none. "
                "Give the ranks instead."
            )
        mine = sorted(self.mpi_comm.allgather(context.rank)) if self.mpi_comm else []
        for ranks in sorted({tuple(theirs) for theirs in world.allgather(mine)} - {()}):
            identity = context.add_process_set(ranks)
            if list(ranks) == mine:
                self.process_set_id, self.ranks = identity, mine

    def size(self) -> int | None:
        """Number of members; None if the set is not registered. Raises ProcessSetLostError if one is gone."""
        refuse_lost(self)
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """This rank's place among the members; None if the set is not registered.

        Raises:
            InvalidArgumentError: this rank is not a member.
            ProcessSetLostError: a member is gone.
        """
        refuse_lost(self)
        if self.process_set_id is None:
            return None
        rank, members = contexts.current().rank, self.ranks or []
        if rank not in members:
            raise InvalidArgumentError(f"rank: this rank must be a member of {self}, but rank {rank} is not.")
        return members.index(rank)

    def included(self) -> bool | None:
        """Whether this rank is a member; None if the set is not registered.

        Raises:
            ProcessSetLostError: a member is gone; on all ranks, members or not, so that all that ask come to the same.
        """
        refuse_lost(self)
        return None if self.process_set_id is None else contexts.current().rank in (self.ranks or ())

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All ranks of the world, whichever is current."""

    def __init__(self) -> None:
        self.process_set_id = 0
        self.lost = ""

    @property
    def mpi_comm(self) -> Any:
        """The communicator that ``init`` was given, or None."""
        return contexts.current().communicator if contexts.is_initialized() else None

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]  # nobody sets those of the world
        return list(range(contexts.current().size)) if contexts.is_initialized() else None

    def size(self) -> int | None:
        return contexts.current().size if contexts.is_initialized() else None


global_process_set: ProcessSet = _GlobalProcessSet()


def members_of(process_set: ProcessSet) -> list[int]:
    """The global ranks of a registered set, ascending. Raises InvalidArgumentError for one that is not registered."""
    id_of(process_set)
    return process_set.ranks or []


def size_of(process_set: ProcessSet) -> int:
    """Number of members of a registered set. Raises InvalidArgumentError for one that is not registered."""
    id_of(process_set)
    return process_set.size() or 0


def is_alone(process_set: ProcessSet) -> bool:
    """Whether a set has one member and never more: the world of an elastic job may grow, and what was traced stays."""
    may_grow = process_set.process_set_id == 0 and bool(contexts.current().peers)
    return process_set.size() == 1 and not may_grow


def place_in(process_set: ProcessSet) -> int:
    """This rank's place among the members of a registered set.

    Raises:
        InvalidArgumentError: the set is not registered, or this rank is not a member.
    """
    id_of(process_set)
    return process_set.rank() or 0


def ranks_of(context: contexts.Context, process_set: int) -> list[int] | None:
    """Members of the process set of this id, ascending; None if there is no such set."""
    ranks = ffi.new("int32_t[]", context.size)
    count = lib.rt_process_set_ranks(context.native, process_set, ranks, context.size)
    if count < -1:
        raise MemoryError(OUT_OF_MEMORY)
    return None if count < 0 else list(ranks[0:count])


def hosts_of(context: contexts.Context, process_set: int) -> int:
    """How many hosts the tensors of the process set of this id travel between."""
    return counted(lib.rt_process_set_hosts(context.native, process_set))


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a set of ranks. All ranks of the world call this, members or not, in the same order; blocks.

    Example:
        >>> even = rt.add_process_set(range(0, rt.size(), 2))
        >>> if even.included():
        ...     mean = rt.allreduce(array, name="even", process_set=even)

    On a rank that joins an elastic job it does not: before ``State.epochs`` the set is noted, and becomes there what the
    others have made of theirs, whatever its ranks.

    Args:
        process_set: the set, or its ranks; in an elastic job also a set that has lost members, to go on with the others.

    Returns:
        The set, registered: a new one if ranks were given.

    Raises:
        MismatchError: ranks gave different sets.
        InvalidArgumentError: a rank that does not exist, a rank twice, or a set that is registered already; with the
            option ``equal_process_sets=refuse`` also ranks that another set has.
    """
    with Submission("add_process_set", None, global_process_set):
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(process_set)
    process_set.register(contexts.current())
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; all ranks of the world call this in the same order.

    Example:
        >>> even = rt.add_process_set(range(0, rt.size(), 2))
        >>> rt.remove_process_set(even)

    In an elastic job a set that has lost a member is forgotten.

    Args:
        process_set: the set, as ``add_process_set`` has returned it.

    Returns:
        Whether it was removed: False for the global and for an unregistered set.

    Raises:
        InvalidArgumentError: not a process set.
    """
    with Submission("remove_process_set", None, global_process_set):
        if not isinstance(process_set, ProcessSet):
            raise InvalidArgumentError(f"process_set: expected a ProcessSet but found {process_set!r}.")
    if process_set.process_set_id == 0:  # the world's
        return False
    was_lost, process_set.lost = bool(process_set.lost), ""
    if process_set.process_set_id is not None:
        contexts.current().remove_process_set(process_set.process_set_id)
    elif not was_lost:
        return False
    process_set.process_set_id = process_set.origin = None
    return True


class RankPlace(NamedTuple):
    """Where a rank is, as ``ringtrain`` tells it."""

    rank: int
    local_rank: int
    local_size: int
    cross_rank: int


def ranks_by_host(places: Sequence[RankPlace]) -> list[list[int]]:
    """The ranks of each host, ascending.

    Example:
        >>> ranks_by_host([RankPlace(0, 0, 2, 0), RankPlace(1, 0, 1, 1), RankPlace(2, 1, 2, 0)])
        [[0, 2], [1]]

    A host's number is the cross rank of its local rank 0. The cross rank of another rank counts those hosts alone that
    have its local rank.
    """
    sizes = {place.cross_rank: place.local_size for place in places if place.local_rank == 0}
    hosts: dict[int, list[int]] = {host: [] for host in sorted(sizes)}
    for place in sorted(places):
        having = [host for host in hosts if sizes[host] > place.local_rank]
        hosts[having[place.cross_rank]].append(place.rank)
    return list(hosts.values())
