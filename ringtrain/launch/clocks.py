"""Who was first, when every host has a clock of its own.

What happens on a host is stamped there, with `time.monotonic()`, whose zero differs from host to host. The launcher
asks every agent for its time when the job starts and with every beat (see `job`). A question and its answer bound the
other clock's distance; the quickest of the last ones bounds it best, to half the time that both took. Times of one host
are compared as they are, since all of them are moved alike.
"""

from __future__ import annotations

from collections import deque

KEPT_ANSWERS = 12  # of a minute: drifting clocks part by less than a packet takes


class HostClock:
    """The clock of one host, as the launcher knows it. Until its first answer it is taken for the launcher's own."""

    def __init__(self) -> None:
        self._answers: deque[tuple[float, float]] = deque(maxlen=KEPT_ANSWERS)  # (time taken, distance), in seconds

    def note(self, asked: float, answered: float, told: float) -> None:
        """Takes an answer: the host's clock said `told` between two times of the launcher's clock."""
        self._answers.append((answered - asked, (asked + answered) / 2 - told))

    def here(self, time_there: float) -> float:
        """The time on the launcher's clock for one on the host's."""
        return time_there + self._distance()

    def there(self, time_here: float) -> float:
        """The time on the host's clock for one on the launcher's."""
        return time_here - self._distance()

    def _distance(self) -> float:
        return min(self._answers)[1] if self._answers else 0.0
