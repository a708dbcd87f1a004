"""Who may be a rank of a job whose processes an engine starts, and which slot of which host each has. Pure: events in, seats out.

The first world waits until as many have come as the job may have, or some seconds after there were enough. Later each is let
in as it comes. Those beyond the maximum wait, and take the place of one that has gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHORT_LIFE = 60.0  # seconds: whoever goes so soon after it was let in may do so again and again


@dataclass
class Seat:
    """A process: uid, the name of its host in this job, its slot there, when it was heard last, and how far it is.

    is_let_in: it is one of the job's. since: when that was. is_out: it was evicted, and is not to be counted any more, though it
    may still be there.
    """

    uid: str
    host: str
    slot: int
    heard: float
    is_let_in: bool = False
    is_out: bool = False
    since: float = float("-inf")


class Seats:
    """The processes that have come, in their order.

    minimum, maximum: of ranks. gather: seconds from the moment in which there were enough to the first world. patience:
    seconds of silence after which another process may have the place. has_begun: there has been a world before. pauses: seconds
    that a slot stays empty when a second process has lived there for a short time, and at most; each further one doubles them.
    """

    def __init__(
        self,
        minimum: int,
        maximum: int,
        gather: float,
        patience: float,
        has_begun: bool,
        pauses: tuple[float, float] = (0.0, 0.0),
    ):
        self.minimum, self.maximum = minimum, maximum
        self._first_pause, self._longest_pause = pauses
        self._short_lives: dict[tuple[str, int], int] = {}  # in a row, by host and slot
        self._pauses: dict[tuple[str, int], float] = {}  # until when
        self.gather, self.patience = gather, patience
        self._has_gathered = has_begun
        self._enough_since: float | None = None
        self._seats: dict[str, Seat] = {}
        self._names: dict[tuple[str, str], str] = {}  # of hosts, by what they call themselves and what no other one has

    def of(self, uid: str) -> Seat | None:
        """None for a process that is not there."""
        return self._seats.get(uid)

    def all(self) -> list[Seat]:
        """The oldest first."""
        return list(self._seats.values())

    def on(self, host: str) -> list[Seat]:
        """The job's processes on a host."""
        return [seat for seat in self._seats.values() if seat.host == host and seat.is_let_in]

    def waiting(self) -> list[Seat]:
        """Those that are not let in."""
        return [seat for seat in self._seats.values() if not seat.is_let_in]

    def taken(self) -> dict[str, tuple[str, int]]:
        """Host and slot of the job's processes, by uid."""
        return {seat.uid: (seat.host, seat.slot) for seat in self._seats.values() if seat.is_let_in and not seat.is_out}

    def come(self, now: float, uid: str, hostname: str, machine: str) -> Seat:
        """A process that was not there before. machine: what no other one has."""
        name = self._names.setdefault((hostname, machine), self._free_name(hostname))
        slots = {seat.slot for seat in self._seats.values() if seat.host == name}
        slot = next(number for number in range(len(slots) + 1) if number not in slots)
        seat = self._seats[uid] = Seat(uid, name, slot, now)
        return seat

    def keep(self, now: float, uid: str, host: str, slot: int, is_let_in: bool = True) -> Seat:
        """One that has its slot already: of the job's, or one that waited when an earlier authority ended."""
        seat = self._seats[uid] = Seat(uid, host, slot, now, is_let_in)
        return seat

    def knows(self, host: str, hostname: str, machine: str) -> None:
        """A host has this name since before."""
        self._names[hostname, machine] = host

    def go(self, now: float, uid: str) -> float:
        """It is not there any more. Returns for how many seconds its slot stays empty."""
        seat = self._seats.pop(uid, None)
        if seat is None or not seat.is_let_in:
            return 0.0
        place = seat.host, seat.slot
        lives = self._short_lives[place] = self._short_lives.get(place, 0) + 1 if now < seat.since + SHORT_LIFE else 0
        pause = min(self._first_pause * 2.0 ** (lives - 2), self._longest_pause) if lives > 1 else 0.0
        if pause:
            self._pauses[place] = now + pause
        return pause

    def let_in(self, now: float) -> list[Seat]:
        """Who may come in now, the oldest first."""
        if not self._may_begin(now):
            return []
        self._pauses = {place: end for place, end in self._pauses.items() if now < end}
        room = self.maximum - self._count(now)
        chosen = [seat for seat in self.waiting() if (seat.host, seat.slot) not in self._pauses][: max(0, room)]
        for seat in chosen:
            seat.is_let_in, seat.since = True, now
        return chosen

    def are_full(self, now: float) -> bool:
        """Whether nobody can come in until one has gone."""
        return self._has_gathered and self._count(now) >= self.maximum

    def next_time(self) -> float:
        """When `let_in` may answer otherwise though nobody comes or goes."""
        if self._has_gathered:
            never = float("inf")
            return min((self._pauses.get((seat.host, seat.slot), never) for seat in self.waiting()), default=never)
        return float("inf") if self._enough_since is None else self._enough_since + self.gather

    def _may_begin(self, now: float) -> bool:
        there = len(self._seats)
        if there < self.minimum:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        is_time = self._enough_since is not None and now >= self._enough_since + self.gather
        self._has_gathered = self._has_gathered or there >= self.maximum or is_time
        return self._has_gathered

    def _count(self, now: float) -> int:
        """The job's processes. While nobody at all is heard it is this host that is cut off."""
        inside = [seat for seat in self._seats.values() if seat.is_let_in and not seat.is_out]
        heard = [seat for seat in inside if now - seat.heard < self.patience]
        return len(heard) if heard else len(inside)

    def _free_name(self, hostname: str) -> str:
        """Two hosts may call themselves alike."""
        taken = {*self._names.values(), *(seat.host for seat in self._seats.values())}
        return next(name for name in _names_like(hostname, len(taken) + 1) if name not in taken)


def _names_like(hostname: str, count: int) -> Iterable[str]:
    plain = "".join(each if each.isprintable() and each not in "|\t\n" else "?" for each in hostname) or "host"
    yield plain
    yield from (f"{plain}#{number}" for number in range(2, count + 2))
