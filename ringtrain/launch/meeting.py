"""Who has called init() where TCP is to connect the ranks, and what they are told once all have. Decides; `job` sends.

Each meeting has a secret and an epoch of its own, so that a connection of an earlier world cannot be taken for one of a
later world. The ranks of a meeting are those of the job, or a list of them (``init(comm=[...])``).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from ringtrain._rendezvous.agent_protocol import Arrival, Introduce
from ringtrain._rendezvous.meeting import SECRET_BYTES, named, of_the_late

LET_ALL_COME = "Let the program call init() on every rank before it ends, or start only as many ranks as do."


class MeetingEnd(NamedTuple):
    """The end of a meeting: what is said, and the ranks that are there to hear it."""

    introduce: Introduce
    to: list[int]
    ended: tuple[int, ...] = ()  # that ended well before they came, so that there is no world


@dataclass
class _Meeting:
    """Ranks that have come, with the addresses at which they listen."""

    members: list[int]
    came: dict[int, str] = field(default_factory=dict)
    deadline: float = float("inf")
    seconds: float = 0.0  # that the deadline came of

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.came]


class Meetings:
    """The meetings that have begun in a job of so many ranks. Times are the launcher's."""

    def __init__(self, size: int):
        self._size = size
        self._begun: dict[tuple[int, ...], _Meeting] = {}  # by the ranks that were named; () for all
        self._ended: set[int] = set()
        self._epoch = 0

    @property
    def deadline(self) -> float:
        """When the next meeting fails, if nobody comes."""
        return min((meeting.deadline for meeting in self._begun.values()), default=float("inf"))

    def arrive(self, rank: int, arrival: Arrival, now: float) -> list[MeetingEnd]:
        """A rank has come; the answer, if it was the last one, or waits for one that has ended."""
        key = tuple(arrival["ranks"])
        meeting = self._begun.setdefault(key, _Meeting(list(key) or list(range(self._size))))
        meeting.came[rank] = arrival["addresses"]
        if now + arrival["seconds"] < meeting.deadline:
            meeting.deadline, meeting.seconds = now + arrival["seconds"], arrival["seconds"]
        if not meeting.missing:
            del self._begun[key]
            return [self._introduce(key, meeting)]
        return self._fail_those_that_wait_for_the_ended()

    def withdraw(self, rank: int, ranks: list[int]) -> None:
        """Whoever has come for a rank has gone again."""
        meeting = self._begun.get(tuple(ranks))
        if meeting is not None:
            meeting.came.pop(rank, None)
            if not meeting.came:
                del self._begun[tuple(ranks)]

    def end(self, rank: int) -> list[MeetingEnd]:
        """A rank has ended well, and comes no more."""
        self._ended.add(rank)
        return self._fail_those_that_wait_for_the_ended()

    def expire(self, now: float) -> list[MeetingEnd]:
        """The answers for those that have waited long enough."""
        return [
            self._fail(key, f"{named(meeting.missing)} did not")
            for key, meeting in list(self._begun.items())
            if now >= meeting.deadline
        ]

    def _introduce(self, key: tuple[int, ...], meeting: _Meeting) -> MeetingEnd:
        self._epoch += 1
        return MeetingEnd(
            {
                "do": "introduce",
                "ranks": list(key),
                "peers": [meeting.came[rank] for rank in meeting.members],
                "secret": secrets.token_hex(SECRET_BYTES),
                "epoch": self._epoch,
            },
            meeting.members,
        )

    def _fail_those_that_wait_for_the_ended(self) -> list[MeetingEnd]:
        ended = {key: [rank for rank in meeting.missing if rank in self._ended] for key, meeting in self._begun.items()}
        return [
            self._fail(key, f"{named(ranks)} ended before that, with exit code 0", LET_ALL_COME)._replace(
                ended=tuple(ranks)
            )
            for key, ranks in ended.items()
            if ranks
        ]

    def _fail(self, key: tuple[int, ...], what: str, advice: str = "") -> MeetingEnd:
        meeting = self._begun.pop(key)
        who = f"ranks {', '.join(map(str, key))}" if key else f"all {self._size} ranks"
        failure = of_the_late(who, meeting.seconds, what, advice)
        return MeetingEnd({"do": "introduce", "ranks": list(key), "failure": failure}, list(meeting.came))
