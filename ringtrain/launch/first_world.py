"""Says for whom the first world of an elastic job waits, if that takes long. Used by `elastic_job`."""

from __future__ import annotations

from collections.abc import Callable

from ringtrain._runtime.rank_lists import ranks_text

SECONDS_IN_SILENCE = 20.0  # which imports may take


class FirstWorld:
    """Ranks that have called init() wait for those that have not: for half of --elastic-timeout, then they begin if they are enough.

    Args:
        minimum: ranks that are enough.
        wait: seconds of --elastic-timeout.
        began: when ranks were started.

    Attributes:
        look_at: when there may be something to say; infinite once it was said.
    """

    def __init__(self, minimum: int, wait: float, began: float):
        self.look_at = began + min(SECONDS_IN_SILENCE, wait / 4)
        self._minimum, self._ends_at = minimum, began + wait / 2

    def look(self, now: float, running: list[int], starting: list[int], say: Callable[[str], None]) -> None:
        """Says it once, if some have called init() and others have not.

        Args:
            running: numbers of all ranks that run.
            starting: those of them that have not called init().
        """
        if now < self.look_at:
            return
        if not starting or len(starting) == len(running):
            self.look_at = now + SECONDS_IN_SILENCE
            return
        self.look_at = float("inf")
        left = max(0.0, self._ends_at - now)
        say(
            f"not in init() yet: {ranks_text(starting)} of {len(running)}. The others wait for that, {left:.0f} s at most (half of "
            f"--elastic-timeout). Then the job begins without, if {self._minimum} or more are left."
        )
