"""``ringtrain bench wire``: allreduce, or sends, between hosts on links of a known rate, beside the floor that the rate sets.

The floor is 2(H-1)/H of the bytes over the rate measured both ways at once, however many ranks each of the H hosts has;
of a compressed sum it is that of its bytes, of sends from each rank to the next their bytes. ``shaped`` makes the hosts,
measures the rate and starts this on their ranks.

Ours runs over each of the transports, in worlds that are open at once. Processor seconds are those of the ranks'
processes, of all threads, from the common start to each rank's own end, for each GB (10^9 bytes) that a host sends.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import ringtrain as rt
from ringtrain.bench import allreduce, ranks, report
from ringtrain.bench.collectives import COLLECTIVES, OverMoves
from ringtrain.bench.collectives import PEERS as MOVING_PEERS
from ringtrain.bench.command import bytes_text
from ringtrain.bench.measured_worlds import MeasuredWorld
from ringtrain.bench.systems import PEERS, Over, System
from ringtrain.bench.turns import time_in_turn
from ringtrain.errors import UnsupportedError

HEADINGS = ["size", "system", "median", "fastest", "floor", "share of floor", "CPU s / GB", "result"]


def run(sizes: Sequence[int], transports: Sequence[str], compressions: Sequence[str], peers: Sequence[str],
        repetitions: int, measured_rate: float, addresses: Mapping[str, Sequence[str]], json: str | None, operation: str,
        tensors: int, **_of_the_hosts: Any) -> bool:  # fmt: skip
    """Runs the benchmark on this rank; returns whether every system's results were right."""
    worlds = [MeasuredWorld(transport, addresses) for transport in transports]
    systems = _systems(operation, worlds, compressions, peers, tensors)
    worlds[0].enter()
    hosts = rt.cross_size()
    results = []
    for size_bytes in sizes:
        results += measure(operation, systems, size_bytes, repetitions, hosts, measured_rate)
    what = "allreduce, float32, sum, in place" if operation == "allreduce" else "a send to the next rank"
    what += f", in {tensors} tensors" if tensors > 1 else ""
    report.say(f"{what}, {ranks.size()} ranks on {hosts} hosts, {ranks.started_by()}")
    report.print_table(HEADINGS, [row(result) for result in results])
    report.write_json(json, results, hosts=hosts, bytes_per_second=measured_rate, tensors=tensors)
    for system in reversed(systems):
        system.close()
    for world in worlds:
        world.close()
    return all(result["verified"] for result in results)


def _systems(
    operation: str, worlds: Sequence[MeasuredWorld], compressions: Sequence[str], peers: Sequence[str], tensors: int
) -> list[System]:
    if operation != "allreduce":
        if tensors > 1:
            raise UnsupportedError(
                f"--tensors: several tensors must be summed, but the operation is {operation}. Leave one out."
            )
        moved = COLLECTIVES[operation]
        return [*(OverMoves(moved, world) for world in worlds), *(MOVING_PEERS[name](moved) for name in peers)]
    ours = [Over(world, compression, tensors) for compression in ("none", *compressions) for world in worlds]
    return [*ours, *(PEERS[name](tensors) for name in peers)]


def measure(
    operation: str, systems: Sequence[System], size_bytes: int, repetitions: int, hosts: int, measured_rate: float
) -> list[dict[str, Any]]:
    """Results of each system, which take turns, for one size."""
    full = size_bytes * (2 * (hosts - 1) / hosts if operation == "allreduce" else 1)
    sent = {system.name: full / system.shrinks for system in systems}  # by each host
    work, source = allreduce.arrays(size_bytes)
    for system in systems:
        system.use(work)
    verified = {system.name: allreduce.verify(system, work, source) for system in systems}
    busy = {system.name: _Busy(partial(allreduce.turn_for(size_bytes), system, work, source)) for system in systems}
    seconds = time_in_turn(dict(busy), repetitions)
    return [
        report.result(
            name, operation, times, verified[name], bytes=size_bytes,
            floor_seconds=sent[name] / measured_rate,
            processor_seconds_per_gb=busy[name].median() / hosts / sent[name] * 1e9,
        )
        for name, times in seconds.items()
    ]  # fmt: skip


class _Busy:
    """A system's turn, and the processor time that it has taken in this process."""

    def __init__(self, turn: Callable[[], list[float]]):
        self._turn = turn
        self._seconds: list[float] = []

    def __call__(self) -> list[float]:
        before = time.process_time()
        taken = self._turn()
        self._seconds.append((time.process_time() - before) / len(taken))
        return taken

    def median(self) -> float:
        """Of its operations, the seconds of all ranks together; the same on all ranks."""
        return float(np.median(np.sum(ranks.gathered(self._seconds), axis=0)))


def row(result: dict[str, Any]) -> list[str]:
    """Of the table, one result."""
    floor = result["floor_seconds"]
    is_short = result["bytes"] <= allreduce.BACK_TO_BACK_BYTES  # its time is latency, which the rate does not bound
    return [
        bytes_text(result["bytes"]),
        result["system"],
        report.seconds_text(result["seconds_median"]),
        report.seconds_text(result["seconds_min"]),
        "-" if is_short else report.seconds_text(floor),
        "-" if is_short else f"{100 * floor / result['seconds_median']:.1f} %",
        "-" if is_short else f"{result['processor_seconds_per_gb']:.2f}",
        report.verdict(result),
    ]
