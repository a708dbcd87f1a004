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
