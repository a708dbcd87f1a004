"""What the core has decided for a rank of an elastic job, as objects of Python: the world to connect, and what else to do."""

from typing import NamedTuple

from ringtrain._binding._native import CData, bytes_at, ffi, lib, text_at
from ringtrain._runtime.context import Peer
from ringtrain.errors import InternalError

NO_MEMORY = "elastic: the core has no memory left."


class FormedWorld:
    """A world that is to be connected: peers, their addresses and whether they join are by rank."""

    def __init__(self, action: CData, key: bytes):
        members = action.members[0 : action.member_count]
        self.count, self.rank, self.key = action.world, action.rank, key
        self.peers = [Peer(text_at(each.uid), text_at(each.host), each.slot) for each in members]
        self.addresses = [text_at(each.address) for each in members]
        self._joining = [bool(each.joins) for each in members]

    @property
    def has_joiners(self) -> bool:
        """Whether some ranks join the others."""
        return any(self._joining)

    @property
    def first_joiner(self) -> int:
        """The first of the ranks that join, which are the last; the number of ranks if none do."""
        return len(self._joining) - sum(self._joining)

    @property
    def takes_over(self) -> bool:
        """Whether this rank joins others, whose state it is to take."""
        return self._joining[self.rank]


class MemberAction(NamedTuple):
    """``rt_membership_action`` of ``ringtrain.h``."""

    kind: int
    frame: bytes
    text: str
    form: FormedWorld | None


def next_action(native: CData) -> MemberAction:
    """The next of those that have followed from an event. native: an ``rt_membership *``. Raises InternalError without memory."""
    action = ffi.new("rt_membership_action *")
    if lib.rt_membership_next(native, action) <= 0:
        raise InternalError(NO_MEMORY)
    frame = bytes_at(action.frame, action.frame_bytes)
    form = FormedWorld(action, frame) if action.kind == lib.RT_DO_CONNECT else None
    return MemberAction(action.kind, frame, text_at(action.text), form)
