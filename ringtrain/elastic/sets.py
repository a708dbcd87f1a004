"""Process sets of a training whose steps survive: what becomes of each in another world.

A set is its members, whatever their ranks are. In another world it goes on, as the same object and under the same id, if
all of them live; if one is gone it is lost, and whoever asks for it raises the same ``ProcessSetLostError``. Sets of a rule
are made anew for the size of each world.

All ranks add sets in one order, so their lists are alike, but for what was being added when a world ended: what not all
have is lost. A rank that joins has made as many sets before the loop as the others have, and takes theirs over by place.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringtrain._runtime.context import Context, Peer, current, is_initialized
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.process_sets import ProcessSet, add_process_set
from ringtrain.errors import InvalidArgumentError

Rule = Callable[[int], Sequence[Sequence[int]]]
_SETS = "ringtrain.elastic.sets"
_EXAMPLE = "lambda size: [range(0, size, 2), range(1, size, 2)]"
_NOT_ON_ALL = (0, 0)  # the origin of a set that not all have added, or removed, when a world ended
_TORN = "process set: all ranks must have added it, but the world ended before. Add it again, on all ranks."


class SetRecord(NamedTuple):
    """A set, as ranks tell each other of it.

    Attributes:
        origin: the world in which it was added, and its id.
        members: who they are, in the order of their ranks.
    """

    origin: tuple[int, int]
    members: tuple[Peer, ...]


class KnownSets(NamedTuple):
    """What a rank knows of the sets.

    Attributes:
        knows: not so on a rank that joins; nothing else counts then.
        founding: those that were made before the loop, in that order; None where one was removed since.
        later: those that were made in it.
        of_rule: the origins of those of the rule, by their places in it; None where one has not been made yet.
    """

    knows: bool
    founding: tuple[SetRecord | None, ...]
    later: tuple[SetRecord, ...]
    of_rule: tuple[tuple[int, int] | None, ...]


# ---- what follows for all: pure ----


def shared(told: Sequence[KnownSets]) -> KnownSets:
    """What all who know of sets have alike."""
    first, *others = [each for each in told if each.knows]
    founding = tuple(_same(records) for records in zip(*(each.founding for each in (first, *others)), strict=True))
    later = tuple(record for record in first.later if all(record in other.later for other in others))
    places = zip(*(each.of_rule for each in (first, *others)), strict=False)
    of_rule = tuple(origins[0] if len(set(origins)) == 1 else None for origins in places)
    return KnownSets(True, founding, later, of_rule)


def _same(records: Sequence[SetRecord | None]) -> SetRecord | None:
    if all(record == records[0] for record in records):
        return records[0]
    return SetRecord(_NOT_ON_ALL, next(record.members for record in records if record is not None))


def ranks_left(members: Sequence[Peer], world: Sequence[Peer]) -> list[int]:
    """The ranks in a world of those members that are in it, ascending."""
    return [rank for rank, peer in enumerate(world) if peer in members]


def loss(record: SetRecord, world: Sequence[Peer]) -> str:
    """Why a set is lost in a world, in the same words on all its ranks; "" if it is not."""
    (_, identity), members = record
    if record.origin == _NOT_ON_ALL:
        return _TORN
    gone = [f"the one in slot {peer.slot} of host '{peer.host}'" for peer in members if peer not in world]
    if not gone:
        return ""
    return (
        f"process set {identity}: all of its members must live, but {' and '.join(gone)} "
        f"{'is' if len(gone) == 1 else 'are'} gone. Add it again on all ranks, for those that are left; or have "
        "State(process_sets=...) make sets for each world."
    )


def ranks_by(rule: Rule, size: int) -> list[list[int]]:
    """The sets that a rule makes of a number of ranks.

    Raises:
        InvalidArgumentError: it is no function that returns lists of ranks.
    """
    if not callable(rule):
        raise InvalidArgumentError(
            f"elastic.State: process_sets must be a function of the number of ranks, but is {rule!r}. Give for example "
            f"{_EXAMPLE}; sets with members of their own go on without being given."
        )
    made = rule(size)
    try:
        return [sorted(int(rank) for rank in ranks) for ranks in made]
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"elastic.State: process_sets must return lists of ranks, but has returned {made!r} for {size} ranks. Give for "
            f"example {_EXAMPLE}."
        ) from None


class Sets:
    """The process sets of one rank, from world to world.

    Args:
        rule: the sets of a world of so many ranks, beside those that the script adds; the same on all ranks. A set
            without ranks is not there in that world.

    Attributes:
        of_rule: by their places in it, the same objects in each world.
    """

    def __init__(self, rule: Rule | None = None):
        self._rule = rule
        self._founding: list[ProcessSet] = []
        self._later: list[ProcessSet] = []
        self._pool: list[ProcessSet] = []  # of the rule, for the most that it has made
        self.of_rule: list[ProcessSet] = []
        self._context: Context | None = None  # whose sets are in the lists
        if rule is not None and is_initialized():
            self._follow_rule(current().size)

    # ---- in a job of a fixed size ----

    def make(self) -> None:
        """Adds those of the rule, on all ranks together."""
        if self._rule is not None:
            self._follow_rule(current().size)
            for process_set in self.of_rule:
                if process_set.ranks:
                    add_process_set(process_set)

    # ---- in an elastic job ----

    def begin(self) -> None:
        """The loop begins: what was made before it is what each rank that joins has made, too."""
        self._context = current()
        self._founding = list(self._context.sets)

    def are_known(self) -> bool:
        """Whether this rank has any, or a rule; to be asked once in each world, before anything is added there."""
        self._gather()
        self._context = current()
        return bool(self._rule or self._founding or self._later)

    def outline(self) -> dict[str, str]:
        """What ranks must have alike before one takes over what another has."""
        outline = {"process_sets": "a rule"} if self._rule else {}
        if self._founding:
            outline["the number of process sets before the loop"] = str(len(self._founding))
        return outline

    def renew(self) -> None:
        """Has the sets go on in the present world; on all ranks together, if one of them has any."""
        context = current()
        agreed = shared(allgather_object(self._told(context), _SETS))
        if context.takes_over:
            self._take_over(agreed)
        else:
            self._give_up_what_not_all_have(agreed, context)
        kept = [each for each in (*self._founding, *self._later) if each.origin and each.world != context.world]
        for process_set in kept:
            assert process_set.origin is not None
            process_set.process_set_id = None
            process_set.ranks = ranks_left(process_set.peers, context.peers)
            process_set.lost = loss(SetRecord(process_set.origin, process_set.peers), context.peers)
        if self._rule is not None:
            self._follow_rule(context.size)
        self._register([each for each in kept if not each.lost], context)
        context.sets = [*self._founding, *self._later]

    def _gather(self) -> None:
        """Adds to the lists what the script has added since in its world."""
        if self._context is not None:
            known = {id(each) for each in (*self._founding, *self._later)}
            self._later += [each for each in self._context.sets if id(each) not in known]

    def _told(self, context: Context) -> KnownSets:
        later = [_record_of(each) for each in self._later]
        return KnownSets(
            not context.takes_over,
            tuple(_record_of(each) for each in self._founding),
            tuple(record for record in later if record is not None),
            tuple(each.origin for each in self._pool),
        )

    def _take_over(self, agreed: KnownSets) -> None:
        """A rank that joins: its sets become those of the others; of what they have made later it has nothing yet."""
        for process_set, record in zip(self._founding, agreed.founding, strict=True):
            _become(process_set, record)
        self._later = [ProcessSet([]) for _ in agreed.later]
        for process_set, record in zip(self._later, agreed.later, strict=True):
            _become(process_set, record)
        self._pool += [ProcessSet([]) for _ in agreed.of_rule[len(self._pool) :]]
        for process_set, origin in zip(self._pool, agreed.of_rule, strict=False):
            process_set.origin = origin

    def _give_up_what_not_all_have(self, agreed: KnownSets, context: Context) -> None:
        for process_set, record in zip(self._founding, agreed.founding, strict=True):
            if _record_of(process_set) != record:
                _become(process_set, record)
        for process_set in self._later:
            if process_set.origin is not None and _record_of(process_set) not in agreed.later:
                process_set.ranks = ranks_left(process_set.peers, context.peers)
                process_set.lost, process_set.process_set_id, process_set.origin = _TORN, None, None
        self._later = [each for each in self._later if each.origin is not None]
        for place, process_set in enumerate(self._pool):
            process_set.origin = agreed.of_rule[place] if place < len(agreed.of_rule) else None

    def _follow_rule(self, size: int) -> None:
        assert self._rule is not None
        made = ranks_by(self._rule, size)
        self._pool += [ProcessSet([]) for _ in made[len(self._pool) :]]
        for place, process_set in enumerate(self._pool):
            process_set.process_set_id = None
            process_set.ranks = made[place] if place < len(made) else []
        self.of_rule[:] = self._pool[: len(made)]

    def _register(self, kept: Sequence[ProcessSet], context: Context) -> None:
        """Adds sets to the present world under the ids that they have; ids that nobody has any more are passed over."""
        present = [each for each in (*self._founding, *self._later) if each.world == context.world]
        first = 1 + max((each.process_set_id or 0 for each in present), default=0)
        named = [each for each in (*self._founding, *self._later, *self._pool) if each.origin is not None]
        last = max((each.origin[1] for each in named if each.origin), default=0)
        by_id = {each.origin[1]: each for each in (*kept, *self.of_rule) if each.origin and each.ranks}
        for identity in range(first, last + 1):
            if (process_set := by_id.get(identity)) is None:
                context.remove_process_set(context.add_process_set([0]))
            else:
                self._add(process_set, context)
        for process_set in self.of_rule:
            if process_set.ranks and process_set.origin is None:
                self._add(process_set, context)

    def _add(self, process_set: ProcessSet, context: Context) -> None:
        process_set.process_set_id = context.add_process_set(process_set.ranks or ())
        process_set.world = context.world
        process_set.origin = process_set.origin or (context.world, process_set.process_set_id)


def _record_of(process_set: ProcessSet) -> SetRecord | None:
    """None if it was removed, or was never added."""
    return None if process_set.origin is None else SetRecord(process_set.origin, process_set.peers)


def _become(process_set: ProcessSet, record: SetRecord | None) -> None:
    process_set.origin, process_set.peers = record or (None, ())
    process_set.process_set_id, process_set.world, process_set.lost = None, 0, ""
