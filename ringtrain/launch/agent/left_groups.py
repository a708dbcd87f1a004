"""Process groups of ranks that nobody waits for any longer, which are killed again at the end of the job."""

from __future__ import annotations

import time

from ringtrain.launch.agent.processes import TIDIERS, kill_once, processes_of

SECONDS_BETWEEN_LOOKS = 1.0


class LeftGroups:
    """The groups of ranks whose supervisor is gone while their command had not ended.

    Attributes:
        numbers: of the ranks, by the process group of the command, which is its session's too.
        look_at: when `look` is to be called.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.look_at = float("inf")

    def add(self, group: int, number: int) -> None:
        """Kills a group, and remembers it."""
        self.numbers[group] = number
        kill_once(processes_of({group}, None), spare=TIDIERS)
        self.look_at = time.monotonic() + SECONDS_BETWEEN_LOOKS

    def look(self) -> None:
        """Forgets groups in which nobody is left: their number may be that of a stranger by the end of the job."""
        for group in [group for group in self.numbers if not processes_of({group}, None)]:
            del self.numbers[group]
        self.look_at = time.monotonic() + SECONDS_BETWEEN_LOOKS if self.numbers else float("inf")
