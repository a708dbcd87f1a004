"""``python -m benchmarks overlap``: a step that computes while gradients travel, beside computing and sending alone.

The step computes as many times as there are tensors and submits one after each, as a backward pass does. It cannot take
less than the larger of both; what it takes beyond is printed as a share of the smaller. ``shaped`` makes the hosts, all
on this machine, and starts this on their ranks: once with a core left free of computing, once with none.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import ringtrain as rt
from benchmarks.computing import Computation, backward, cores_to_compute_on
from ringtrain._runtime.operations import Handle
from ringtrain.bench import ranks, report
from ringtrain.bench.command import bytes_text
from ringtrain.bench.measured_worlds import MeasuredWorld
from ringtrain.bench.turns import time_in_turn, time_of

PARTS = ("computing", "sending", "step")
LIMIT = 0.15  # of the smaller; what a good overlap stays below if a core is free


def run(size_bytes: int, tensors: int, transports: Sequence[str], repetitions: int,
        addresses: Mapping[str, Sequence[str]], json: str | None, **_of_the_hosts: Any) -> bool:  # fmt: skip
    """Runs the benchmark on this rank; returns whether all sums were right."""
    worlds = [MeasuredWorld(transport, addresses) for transport in transports]
    worlds[0].enter()
    hosts = rt.cross_size()
    gradients = [np.zeros(max(1, size_bytes // tensors // 4), np.float32) for _ in range(tensors)]
    cases = cores_to_compute_on()
    results = [
        result
        for free, computing_on in cases.items()
        for result in _measure(free, computing_on, worlds, gradients, repetitions)
    ]
    total = bytes_text(sum(gradient.nbytes for gradient in gradients))
    report.say(f"{total} of gradients in {tensors} tensors, {ranks.size()} ranks on {hosts} hosts, "
               f"{len(cases['none'])} cores in all")  # fmt: skip
    beyond = f"beyond the larger (at most {LIMIT:.0%})"
    report.print_table(["free cores", "system", "computing", "sending", "step", beyond, "result"],
                       [_row(result) for result in results])  # fmt: skip
    report.write_json(json, results, hosts=hosts)
    for world in worlds:
        world.close()
    return all(result["verified"] for result in results)


def _measure(
    free: str,
    cores: Collection[int],
    worlds: Sequence[MeasuredWorld],
    gradients: Sequence[np.ndarray],
    repetitions: int,
) -> list[dict[str, Any]]:
    computation = Computation(cores)
    turn = partial(_turn, gradients, computation)
    for world in worlds:
        turn(world, 0, sends=True)  # connects
    sending = float(np.median(ranks.slowest([turn(worlds[0], 0, sends=True) for _ in range(2)])))
    rounds = computation.rounds_for(sending / len(gradients))
    timed = {(world.transport, part): partial(_one, turn, world, rounds, part) for part in PARTS for world in worlds}
    seconds = time_in_turn(timed, repetitions)
    computation.close()
    verified = ranks.all_true(all(np.all(gradient == ranks.size()) for gradient in gradients))
    results = []
    for world in worlds:
        medians = {part: float(np.median(seconds[world.transport, part])) for part in PARTS}
        smaller, larger = sorted([medians["computing"], medians["sending"]])
        results.append(
            report.result(
                f"ringtrain-{world.transport}", "overlap", seconds[world.transport, "step"], verified,
                bytes=sum(gradient.nbytes for gradient in gradients), tensors=len(gradients), free_cores=free,
                threads=computation.threads, computing_seconds_median=medians["computing"],
                sending_seconds_median=medians["sending"], beyond_the_larger=(medians["step"] - larger) / smaller,
            )
        )  # fmt: skip
    return results


def _one(turn: Callable[..., float], world: MeasuredWorld, rounds: int, part: str) -> list[float]:
    return [turn(world, rounds if part != "sending" else 0, sends=part != "computing")]


def _turn(
    gradients: Sequence[np.ndarray], computation: Computation, world: MeasuredWorld, rounds: int, sends: bool
) -> float:
    """Seconds of a step that computes these rounds before each gradient, and sends it or not."""
    for gradient in gradients:
        gradient.fill(1.0)

    def step() -> None:
        world.enter()  # only now: waiting for the others takes place in a world of its own
        backward(gradients, computation, rounds, _submit if sends else None)

    return time_of(step)


def _submit(index: int, gradient: np.ndarray) -> Handle:
    return rt.allreduce_async_(gradient, name=f"overlap.{index}", op=rt.Sum)


def _row(result: dict[str, Any]) -> list[str]:
    return [
        result["free_cores"],
        result["system"],
        report.seconds_text(result["computing_seconds_median"]),
        report.seconds_text(result["sending_seconds_median"]),
        report.seconds_text(result["seconds_median"]),
        f"{result['beyond_the_larger']:.1%} of the smaller",
        report.verdict(result),
    ]
