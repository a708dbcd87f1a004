"""``python -m benchmarks replicas``: what it costs that ranks compare what they step with, and their parameters.

Each framework trains a perceptron in three ways, which take turns: comparing nothing (``replicas="differ"``); as by default,
which compares settings in each step; and with a look at all parameters in each step, where the default has one a second at most.
A step is shown by the time that it takes, and by that of the processor in all threads of the rank that used most.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

import ringtrain as rt
from benchmarks.replicas_systems import SYSTEMS, Trainer
from ringtrain._training import drift
from ringtrain._training.adapter.checks import digest
from ringtrain.bench import machine, ranks, report
from ringtrain.bench.turns import WARM_UP, time_in_turn, time_of

BATCH = 32
STEPS = 20  # of a turn
PLAIN, SETTINGS, LOOKS = "uncompared", "settings", "parameters"


def run(frameworks: Sequence[str], layers: Sequence[int], repetitions: int | None, json: str | None) -> bool:
    """Runs the benchmark on this rank; returns whether the ranks' parameters stayed equal."""
    rt.init()
    results = [each for name in frameworks for each in _measure(name, layers, repetitions or 15)]
    _print(results)
    report.write_json(json, results)
    return all(result["verified"] for result in results)


def _measure(framework: str, layers: Sequence[int], repetitions: int) -> list[dict[str, Any]]:
    make = SYSTEMS[framework]
    batch = np.random.default_rng(ranks.rank()).normal(size=(BATCH, layers[0])).astype(np.float32)
    trainers = {way: make(layers, batch, "differ" if way == PLAIN else "equal") for way in (PLAIN, SETTINGS, LOOKS)}
    used: dict[str, list[float]] = {way: [] for way in trainers}
    turns = {way: _turn_of(trainer, way, used[way]) for way, trainer in trainers.items()}
    seconds = time_in_turn(turns, repetitions)
    processor = {way: ranks.slowest(times[WARM_UP:]) for way, times in used.items()}
    parameters = sum(array.nbytes for array in trainers[PLAIN].parameters())
    look = max(float(np.median(processor[LOOKS]) - np.median(processor[SETTINGS])), 0.0)
    return [
        report.result(
            f"{framework}-{way}", "training step", seconds[way], _are_equal(trainer), bytes=parameters, framework=framework,
            processor_seconds=float(np.median(processor[way])),
            of_uncompared=float(np.median(processor[way]) / np.median(processor[PLAIN])),
            look_seconds=look,
        )
        for way, trainer in trainers.items()
    ]  # fmt: skip


def _turn_of(trainer: Trainer, way: str, used: list[float]) -> Callable[[], list[float]]:
    def steps() -> None:
        for _ in range(STEPS):
            trainer.step()

    def turn() -> list[float]:
        with _looks_in_each_step() if way == LOOKS else nullcontext():
            began = time.process_time()
            taken = time_of(steps)
            used.append((time.process_time() - began) / STEPS)
        return [taken / STEPS]

    return turn


@contextmanager
def _looks_in_each_step() -> Iterator[None]:
    before, drift.PERIOD, drift.SHARE = (drift.PERIOD, drift.SHARE), 0.0, float("inf")
    try:
        yield
    finally:
        drift.PERIOD, drift.SHARE = before


def _are_equal(trainer: Trainer) -> bool:
    digests = [digest(np.ascontiguousarray(each).reshape(-1).view(np.uint8)) for each in trainer.parameters()]
    return len(set(map(tuple, ranks.gathered(digests)))) == 1


def _print(results: Sequence[dict[str, Any]]) -> None:
    facts = machine.describe()
    size = results[0]["bytes"] / 1e6
    report.say(f"{ranks.size()} ranks on {facts['cores']} cores ({facts['processor']}), {size:.1f} MB of parameters")
    report.say(
        "a look: what a step uses more that looks at all parameters; at most once a second, or 0.1 % of the time"
    )
    rows = [
        [
            each["system"],
            report.seconds_text(each["seconds_median"]),
            report.seconds_text(each["processor_seconds"]),
            f"{each['of_uncompared']:.3f}",
            report.seconds_text(each["look_seconds"]) if each["system"].endswith(LOOKS) else "",
            report.verdict(each),
        ]
        for each in results
    ]
    report.print_table(["system", "step", "of a core", "x uncompared", "a look", "result"], rows)
