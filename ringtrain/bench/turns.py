"""Timing of systems that take turns, so that each meets the same caches, frequency and neighbours."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from ringtrain.bench import ranks, report

Name = TypeVar("Name")

WARM_UP = 3  # turns that do not count


def time_in_turn(
    timed: Mapping[Name, Callable[[], list[float]]], repetitions: int, warm_up: int = WARM_UP
) -> dict[Name, np.ndarray]:
    """Times in seconds of each system, of the rank that took longest; the same on all ranks.

    Args:
        timed: by name, a system's turn, which returns the times that it took.
        repetitions: turns of each, after ``warm_up`` more.
        warm_up: turns of each that do not count.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in timed}
    for repetition in range(warm_up + repetitions):
        for name, turn in timed.items():
            report.PROGRESS.show(f"turn {repetition + 1} of {warm_up + repetitions}: {name}")
            taken = turn()
            if repetition >= warm_up:
                seconds[name] += taken
    return {name: ranks.slowest(times) for name, times in seconds.items()}


def time_of(run: Callable[[], object]) -> float:
    """Seconds that it takes, on ranks that begin together."""
    ranks.wait_for_all()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Pause:
    """Other work of all ranks, after which they come to what is measured at one time.

    The work goes over memory of its own, so that a core's caches hold something else afterwards, in pieces so short that
    ranks that have begun together end together.
    """

    _MEMORY_FLOATS = 4 << 20
    _PIECE_FLOATS = 4 << 10  # some microseconds

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._pieces = np.ones((self._MEMORY_FLOATS // self._PIECE_FLOATS, self._PIECE_FLOATS), np.float32)

    def compute(self) -> None:
        """Returns when the time has passed since the last rank began."""
        ranks.wait_for_all()
        end = time.perf_counter() + self._seconds
        piece = 0
        while time.perf_counter() < end:
            np.negative(self._pieces[piece], out=self._pieces[piece])
            piece = (piece + 1) % len(self._pieces)
