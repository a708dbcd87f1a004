"""What stands for the backward passes of a model in benchmarks: threads that compute, and gradients that become ready."""

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

import ringtrain as rt
from ringtrain._runtime.operations import Handle
from ringtrain.bench import ranks
from ringtrain.bench.turns import time_of

ROUND_FLOATS = 1 << 13  # within the cache of a core: computing is not to be slowed by memory that sending uses
CALIBRATION_ROUNDS = 1000


def cores_to_compute_on() -> dict[str, list[int]]:
    """By how many cores are left free of computing, "none" or "one": the others of this machine."""
    cores = sorted(os.sched_getaffinity(0))
    return {"none": cores, **({"one": cores[:-1]} if len(cores) > 1 else {})}


class Computation:
    """Threads of this rank that compute at once, on the cores that it may use."""

    def __init__(self, cores: Collection[int]):
        """Shares the cores among all ranks, as these are on one machine; a rank has one thread at least."""
        self.threads = max(1, len(cores) // ranks.size())
        self._pool = ThreadPoolExecutor(self.threads, initializer=os.sched_setaffinity, initargs=(0, cores))
        self._blocks = [np.ones((2, ROUND_FLOATS), np.float32) for _ in range(self.threads)]

    def run(self, rounds: int) -> None:
        """Computes this many rounds on each thread."""
        list(self._pool.map(partial(_compute, rounds), self._blocks))

    def rounds_for(self, seconds: float) -> int:
        """Rounds that take so long while all ranks compute; the same on every rank."""
        self.run(CALIBRATION_ROUNDS)  # wakes threads and cores
        taken = max(ranks.gathered(time_of(lambda: self.run(CALIBRATION_ROUNDS))))
        return max(1, round(seconds / taken * CALIBRATION_ROUNDS))

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def _compute(rounds: int, block: np.ndarray) -> None:
    for _ in range(rounds):
        np.sin(block[0], out=block[1])


def backward(
    gradients: Sequence[np.ndarray],
    computation: Computation,
    rounds: int,
    submit: Callable[[int, np.ndarray], Handle] | None,
) -> None:
    """A backward pass: computes these rounds before each gradient, submits it if there is ``submit(index, gradient)``,
    and waits for all in the end."""
    handles = []
    for index, gradient in enumerate(gradients):
        if rounds:
            computation.run(rounds)
        if submit is not None:
            handles.append(submit(index, gradient))
    for handle in handles:
        rt.synchronize(handle)
