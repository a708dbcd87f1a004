"""How large each rank's share of a constant batch is, by how fast the ranks are (``--batch balanced``). Pure, but for a clock.

A rank's speed is the samples that it computes in a second of its own: from the end of an exchange to the beginning of the
next one, so that waiting for others is left out. What it tells moves slowly with what it measures. Where that is quite
another speed it is believed when it is measured twice in a row, so that a pause moves nothing. From the speeds of all, and
the present shares, each rank decides the same.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

PAYS = 1.05  # as many times as fast a step must become for shares to change: readers then give up what they have read ahead
EVERY = 4  # windows, about, from one decision to the next
SKIPPED = 2  # windows of a world that are not measured
_NOISE = 0.25  # by which part a speed may differ from the one before and be a measurement of the same
_GAIN = 0.25  # by which part of such a difference the told one moves


class Pace:
    """Measures this rank.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self._clock = clock
        self._since: float | None = None
        self._own = 0.0  # seconds, in the open window
        self._samples, self._seconds = 0, 0.0  # since it was told last
        self._told = 0.0
        self._has_doubt = False
        self._skipped = 0

    def enter_world(self) -> None:
        """The next windows are not like others: programs are compiled, and readers begin."""
        self._skipped = SKIPPED

    def begin_exchange(self) -> None:
        """From here on this rank may wait for others."""
        if self._since is not None:
            self._own += self._clock() - self._since
            self._since = None

    def end_exchange(self) -> None:
        """From here on it computes."""
        self._since = self._clock()

    def note_window(self, samples: int) -> None:
        """A window has ended, in which this rank had so many samples."""
        own, self._own = self._own, 0.0
        if self._skipped > 0:
            self._skipped -= 1
            return
        self._samples += samples
        self._seconds += own

    def tell(self) -> float:
        """Samples a second; 0 if no window was measured so far."""
        if self._samples > 0 and self._seconds > 0:
            self._believe(self._samples / self._seconds)
        self._samples, self._seconds = 0, 0.0
        return self._told

    def _believe(self, found: float) -> None:
        is_near = abs(found - self._told) < _NOISE * self._told
        if is_near:
            self._told += _GAIN * (found - self._told)
        elif self._has_doubt or self._told == 0:
            self._told = found
            is_near = True
        self._has_doubt = not is_near


def equal_shares(batch: int, ranks: int) -> list[int]:
    """Those of ranks of which nobody knows how fast they are."""
    return [batch // ranks + (place < batch % ranks) for place in range(ranks)]


def shares(speeds: Sequence[float], batch: int) -> list[int]:
    """How many samples of a batch each rank has, so that all take about equally long; one at least.

    Args:
        speeds: by place; of ranks that have not measured any, 0, which counts as the mean of the others.
        batch: as many as there are ranks, or more.
    """
    known = [speed for speed in speeds if speed > 0]
    if not known or batch < len(speeds):
        return equal_shares(batch, len(speeds))
    speeds = [speed if speed > 0 else sum(known) / len(known) for speed in speeds]
    ideal = [batch * speed / sum(speeds) for speed in speeds]
    found = [max(1, int(each)) for each in ideal]
    while sum(found) < batch:  # to who is then done first
        place = min(range(len(found)), key=lambda place: ((found[place] + 1) / speeds[place], place))
        found[place] += 1
    while sum(found) > batch:  # of those that have one at least
        place = max(
            (place for place in range(len(found)) if found[place] > 1),
            key=lambda place: (found[place] / speeds[place], -place),
        )
        found[place] -= 1
    return found


def seconds_of(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """How long a batch takes with these shares: as long as the last rank."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True) if speed > 0)


def better(speeds: Sequence[float], batch: int, present: Sequence[int]) -> list[int] | None:
    """Shares that are worth the change; None to keep the present ones."""
    if not any(speed > 0 for speed in speeds):
        return None
    found = shares(speeds, batch)
    return found if seconds_of(present, speeds) >= PAYS * seconds_of(found, speeds) else None


def gain(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """As many times as fast as equal shares."""
    equal = equal_shares(sum(counts), len(counts))
    return seconds_of(equal, speeds) / seconds_of(counts, speeds)


def described(counts: Sequence[int], speeds: Sequence[float]) -> str:
    """For people: shares, and what they bring."""
    return f"shares {' : '.join(map(str, counts))} of {sum(counts)}; {100 * (gain(counts, speeds) - 1):+.0f} % over equal shares"
