"""How large each rank's share of a constant batch is, by how fast the ranks are (``--batch balanced``). Pure, but for a clock.

A rank's speed is the samples that it computes in a second of its own: from the end of an exchange to the beginning of the
next one, so that waiting for others is left out. What it tells moves slowly with what it measures. Where that is quite
another speed it is believed when it is measured twice in a row, so that a pause moves nothing. From the speeds of all, and
the present shares, each rank decides the same.
"""

import zlib
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from ringtrain.errors import InvalidArgumentError

PAYS = 1.05  # as many times as fast a step must become for shares to change: readers then give up what they have read ahead
EVERY = 4  # windows, about, from one decision to the next
SKIPPED = 2  # windows of a world that are not measured
AVERAGE_COST = 1000  # of a sample, in whole numbers
_NOISE = 0.25  # by which part a speed may differ from the one before and be a measurement of the same
_GAIN = 0.25  # by which part of such a difference the told one moves


class ShareRules(NamedTuple):
    """What a sampler was told of shares.

    Attributes:
        most: samples of this rank's share, which its memory has room for; 0 for any number.
        multiple_of: the same on all ranks, and the batch is a multiple of it.
        costs: of each sample of the data set, int64 above 0, `AVERAGE_COST` on average; empty if all cost alike. The same on all ranks.
    """

    most: int = 0
    multiple_of: int = 1
    costs: np.ndarray = np.empty(0, np.int64)

    @property
    def text(self) -> str:
        """What of it must be the same on all ranks, as an addition to other words."""
        multiples = f", shares in multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        costs = f", at costs with the checksum {zlib.crc32(self.costs.tobytes())}" if len(self.costs) else ""
        return multiples + costs

    def costs_in(self, order: np.ndarray) -> np.ndarray:
        """Of the samples in an order; empty if all cost alike."""
        return self.costs[order] if len(self.costs) else self.costs

    @property
    def unit(self) -> int:
        """What a sample costs on average."""
        return AVERAGE_COST if len(self.costs) else 1


def costs_of(found: np.ndarray) -> np.ndarray:
    """As `ShareRules` has them, of numbers above 0."""
    found = found / found.max()  # whose sum may be too large for a float
    return np.maximum(1, np.rint(found * (AVERAGE_COST / found.mean()))).astype(np.int64)


class Pace:
    """Measures this rank.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self._clock = clock
        self._since: float | None = None
        self._own = 0.0  # seconds, in the open window
        self._samples, self._seconds = 0.0, 0.0  # since it was told last
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

    def note_window(self, samples: float) -> None:
        """A window has ended, in which this rank had so many samples, or as much work as so many have on average."""
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
        self._samples, self._seconds = 0.0, 0.0
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


def shares(speeds: Sequence[float], batch: int, most: Sequence[int] = (), multiple_of: int = 1) -> list[int]:
    """How many samples of a batch each rank has, so that all take about equally long; one at least.

    Args:
        speeds: by place; of ranks that have not measured any, 0, which counts as the mean of the others.
        batch: as many as there are ranks, or more.
        most: by place, how many samples it may have; 0 for any number.
        multiple_of: of what all shares are multiples, unless there are fewer such than ranks.

    Raises:
        InvalidArgumentError: the ranks may have fewer samples together than a batch has, or one less than a multiple, or the
            batch is no such multiple.
    """
    if batch % multiple_of:
        raise InvalidArgumentError(
            f"--batch balanced: a batch must be a multiple of multiple_of={multiple_of}, but has {batch} samples on all ranks. Choose "
            "batch_size so, or another multiple_of."
        )
    if batch // multiple_of < len(speeds):
        multiple_of = 1
    units = batch // multiple_of
    if units < len(speeds):
        return equal_shares(batch, len(speeds))
    known = [speed for speed in speeds if speed > 0] or [1.0]
    speeds = [speed if speed > 0 else sum(known) / len(known) for speed in speeds]
    room = [limit // multiple_of if limit else units for limit in most or [0] * len(speeds)]
    if sum(room) < units or min(room) == 0:
        raise InvalidArgumentError(_too_little_room(batch, most, multiple_of))
    return [multiple_of * each for each in _dealt(speeds, units, room)]


def _dealt(speeds: Sequence[float], units: int, room: Sequence[int]) -> list[int]:
    """So many units, one at least to each place, and no more than it has room for."""
    found = [max(1, int(each)) for each in _ideal(speeds, units, room)]
    while sum(found) < units:  # to who is then done first
        free = [place for place in range(len(found)) if found[place] < room[place]]
        found[min(free, key=lambda place: ((found[place] + 1) / speeds[place], place))] += 1
    while sum(found) > units:  # of those that have one at least
        several = [place for place in range(len(found)) if found[place] > 1]
        found[max(several, key=lambda place: (found[place] / speeds[place], -place))] -= 1
    return found


def _ideal(speeds: Sequence[float], units: float, room: Sequence[int]) -> list[float]:
    """What places without room leave goes to the others."""
    found = [0.0] * len(speeds)
    free = set(range(len(speeds)))
    while free:
        left = units - sum(room[place] for place in range(len(speeds)) if place not in free)
        total = sum(speeds[place] for place in free)
        full = {place for place in free if left * speeds[place] / total > room[place]}
        if not full:
            break
        free -= full
    for place in range(len(speeds)):
        found[place] = left * speeds[place] / total if place in free else float(room[place])
    return found


def _too_little_room(batch: int, most: Sequence[int], multiple_of: int) -> str:
    in_multiples = f", in multiples of {multiple_of}, one at least" if multiple_of > 1 else ""
    return (
        f"--batch balanced: the shares of all ranks must hold a batch of {batch} samples{in_multiples}, but most= allows "
        f"{' + '.join(str(limit or 'any') for limit in most)}. Lower batch_size or multiple_of, raise most=, or raise the MIN of -np."
    )


def seconds_of(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """How long a batch takes with these shares: as long as the last rank."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True) if speed > 0)


def better(
    speeds: Sequence[float], batch: int, present: Sequence[int], most: Sequence[int] = (), multiple_of: int = 1
) -> list[int] | None:
    """Shares that are worth the change; None to keep the present ones. Raises InvalidArgumentError as ``shares`` does."""
    found = shares(speeds, batch, most, multiple_of)
    if not _fits(present, most, multiple_of) and _fits(found, most, multiple_of):
        return found
    is_known = any(speed > 0 for speed in speeds)
    return found if is_known and seconds_of(present, speeds) >= PAYS * seconds_of(found, speeds) else None


def _fits(counts: Sequence[int], most: Sequence[int], multiple_of: int) -> bool:
    limits = most or [0] * len(counts)
    return all(
        (not limit or count <= limit) and count % multiple_of == 0 for count, limit in zip(counts, limits, strict=True)
    )


def gain(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """As many times as fast as equal shares."""
    equal = equal_shares(sum(counts), len(counts))
    return seconds_of(equal, speeds) / seconds_of(counts, speeds)


def described(counts: Sequence[int], speeds: Sequence[float]) -> str:
    """For people: shares, and what they bring."""
    return f"shares {' : '.join(map(str, counts))} of {sum(counts)}; {100 * (gain(counts, speeds) - 1):+.0f} % over equal shares"
