"""``ringtrain bench overlap``: a step that computes while gradients travel, beside computing and sending alone.

The step computes as many times as there are tensors and submits one after each, as a backward pass does. It cannot take
less than the larger of both; what it takes beyond is printed as a share of the smaller. ``shaped`` makes the hosts, all
on this machine, and starts this on their ranks: once with a core left free of computing, once with none.
"""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

import ringtrain as rt
from ringtrain.bench import ranks, report
from ringtrain.bench.sizes import bytes_text
from ringtrain.bench.turns import time_in_turn, time_of

ROUND_FLOATS = 1 << 13  # within the cache of a core: computing is not to be slowed by memory that sending uses
CALIBRATION_ROUNDS = 1000
LIMIT = 0.15  # of the smaller; what a good overlap stays below if a core is free


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


def run(size_bytes: int, tensors: int, repetitions: int, json: str | None, **_of_the_hosts: Any) -> bool:
    """Runs the benchmark on this rank; returns whether all sums were right."""
    rt.init()
    gradients = [np.zeros(max(1, size_bytes // tensors // 4), np.float32) for _ in range(tensors)]
    cores = sorted(os.sched_getaffinity(0))
    cases = {"none": cores, **({"one": cores[:-1]} if len(cores) > 1 else {})}
    results = [_measure(free, computing_on, gradients, repetitions) for free, computing_on in cases.items()]
    total = bytes_text(sum(gradient.nbytes for gradient in gradients))
    report.say(f"{total} of gradients in {tensors} tensors, {ranks.size()} ranks on {rt.cross_size()} hosts, "
               f"{len(cores)} cores in all")  # fmt: skip
    beyond = f"beyond the larger (at most {LIMIT:.0%})"
    report.print_table(["free cores", "computing", "sending", "step", beyond, "result"],
                       [_row(result) for result in results])  # fmt: skip
    report.write_json(json, results, hosts=rt.cross_size())
    rt.shutdown()
    return all(result["verified"] for result in results)


def _measure(free: str, cores: Collection[int], gradients: Sequence[np.ndarray], repetitions: int) -> dict[str, Any]:
    computation = Computation(cores)
    turn = partial(_turn, gradients, computation)
    sending = float(np.median(ranks.slowest([turn(0, sends=True) for _ in range(3)])[1:]))  # the first one connects
    rounds = computation.rounds_for(sending / len(gradients))
    timed = {
        "computing": lambda: [turn(rounds, sends=False)],
        "sending": lambda: [turn(0, sends=True)],
        "step": lambda: [turn(rounds, sends=True)],
    }
    seconds = time_in_turn(timed, repetitions)
    computation.close()
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    larger, smaller = max(medians["computing"], medians["sending"]), min(medians["computing"], medians["sending"])
    verified = ranks.all_true(all(np.all(gradient == ranks.size()) for gradient in gradients))
    return report.result(
        "ringtrain", "overlap", seconds["step"], verified,
        bytes=sum(gradient.nbytes for gradient in gradients), tensors=len(gradients), free_cores=free,
        threads=computation.threads, computing_seconds_median=medians["computing"],
        sending_seconds_median=medians["sending"], beyond_the_larger=(medians["step"] - larger) / smaller,
    )  # fmt: skip


def _turn(gradients: Sequence[np.ndarray], computation: Computation, rounds: int, sends: bool) -> float:
    """Seconds of a step that computes these rounds before each gradient, and sends it or not."""
    for gradient in gradients:
        gradient.fill(1.0)
    return time_of(lambda: _step(gradients, computation, rounds, sends))


def _step(gradients: Sequence[np.ndarray], computation: Computation, rounds: int, sends: bool) -> None:
    handles = []
    for index, gradient in enumerate(gradients):
        if rounds:
            computation.run(rounds)
        if sends:
            handles.append(rt.allreduce_async_(gradient, name=f"overlap.{index}", op=rt.Sum))
    for handle in handles:
        rt.synchronize(handle)


def _row(result: dict[str, Any]) -> list[str]:
    return [
        result["free_cores"],
        report.seconds_text(result["computing_seconds_median"]),
        report.seconds_text(result["sending_seconds_median"]),
        report.seconds_text(result["seconds_median"]),
        f"{result['beyond_the_larger']:.1%} of the smaller",
        report.verdict(result),
    ]
