"""Who is asked to leave an elastic job, and until when. Used by `elastic_job`."""

from __future__ import annotations

from collections.abc import Mapping


class Notices:
    """Ranks that must have left at some time.

    grace: seconds that a rank has.
    """

    def __init__(self, grace: float):
        self._grace = grace
        self._ranks: dict[int, tuple[str, float]] = {}  # uid, and when it is ended, by the slot's number

    @property
    def deadline(self) -> float:
        """When the next rank is overdue; infinite if none has a notice."""
        return min((at for _, at in self._ranks.values()), default=float("inf"))

    def give(self, processes: Mapping[int, str], now: float) -> None:
        """Processes are asked to leave: their uids, by the slots' numbers. One that has been asked gets no more time."""
        for number, uid in processes.items():
            self._ranks.setdefault(number, (uid, now + self._grace))

    def end(self, number: int) -> bool:
        """The process in a slot has ended; returns whether it had a notice."""
        return self._ranks.pop(number, None) is not None

    def take_overdue(self, now: float) -> dict[int, str]:
        """Uids of those that have not left in time, by the slots' numbers; once."""
        overdue = {number: uid for number, (uid, at) in self._ranks.items() if now >= at}
        for number in overdue:
            del self._ranks[number]
        return overdue
