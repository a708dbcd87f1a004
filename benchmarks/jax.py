"""``python -m benchmarks jax``: gradients added up within a compiled program, beside ``psum`` over jax.distributed.

The gradients are temporaries of the program, as in training, so what adding them up costs is the difference to the same
program that adds up nothing: the floor.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.jax_systems import Gradients, Identity, Ringtrain, System, open_systems
from ringtrain.bench import machine, ranks, report
from ringtrain.bench.command import bytes_text
from ringtrain.bench.turns import time_in_turn, time_of

FACTOR = 2.0  # what makes a gradient of a weight


def run(floats: int, tensors: int, peers: Sequence[str], repetitions: int | None, json: str | None) -> bool:
    """Runs the benchmark on this rank; returns whether every sum was right."""
    systems = open_systems(peers)
    results = _measure(systems, floats, tensors, repetitions or 20)
    _print(results, floats, tensors)
    report.write_json(json, results, jax=jax.__version__)
    for system in systems:
        system.close()
    return all(result["verified"] for result in results)


def _measure(systems: Sequence[System], floats: int, tensors: int, repetitions: int) -> list[dict[str, Any]]:
    verified: dict[str, bool] = {}
    turns: dict[str, Callable[[], list[float]]] = {}
    for system in systems:
        weights = [system.place(_weight(index, floats // tensors)) for index in range(tensors)]
        step = system.compile(partial(_gradients, system))
        verified[system.name] = ranks.all_true(_are_right(system, step(weights)))
        turns[system.name] = _turn_of(step, weights)
    seconds = time_in_turn(turns, repetitions)
    floor = float(np.median(seconds[Identity.name]))
    return [
        report.result(
            name, "gradients", times, verified[name], bytes=4 * floats, tensors=tensors,
            seconds_beyond_identity=float(np.median(times)) - floor,
        )
        for name, times in seconds.items()
    ]  # fmt: skip


def _gradients(system: System, weights: Gradients) -> Gradients:
    return system.add_up([FACTOR * weight for weight in weights])


def _weight(index: int, floats: int) -> np.ndarray:
    """What this rank has of a tensor: small integers, whose sums float32 holds exactly."""
    return np.full(floats, (index % 7 + 1) * (ranks.rank() + 1), np.float32)


def _are_right(system: System, results: Sequence[jax.Array]) -> bool:
    added = ranks.size() * (ranks.size() + 1) // 2 if system.sums else ranks.rank() + 1
    return all(
        np.array_equal(system.taken(result), np.full(result.size, FACTOR * (index % 7 + 1) * added, np.float32))
        for index, result in enumerate(results)
    )


def _turn_of(step: Callable[..., Any], weights: Sequence[jax.Array]) -> Callable[[], list[float]]:
    return lambda: [time_of(lambda: jax.block_until_ready(step(weights)))]


def _print(results: Sequence[dict[str, Any]], floats: int, tensors: int) -> None:
    facts = machine.describe()
    report.say(f"JAX {jax.__version__}, {ranks.size()} ranks on {facts['cores']} cores ({facts['processor']})")
    report.say(
        f"{tensors} arrays of together {bytes_text(4 * floats)}, float32, sum; beyond: what it adds to the "
        "program that adds up nothing"
    )
    ours = next(each for each in results if each["system"] == Ringtrain.name)
    rows = [
        [
            each["system"],
            report.seconds_text(each["seconds_median"]),
            report.seconds_text(each["seconds_min"]),
            report.seconds_text(max(each["seconds_beyond_identity"], 0.0)),
            f"{each['seconds_median'] / ours['seconds_median']:.2f}",
            f"{each['seconds_beyond_identity'] / ours['seconds_beyond_identity']:.2f}",
            report.verdict(each),
        ]
        for each in results
    ]
    report.print_table(["system", "median", "fastest", "beyond", "x our time", "x ours beyond", "result"], rows)
