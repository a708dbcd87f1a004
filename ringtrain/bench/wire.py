"""``ringtrain bench wire``: allreduce between hosts on links of a known rate, beside the floor that the rate sets.

The floor is 2(H-1)/H of the bytes over the rate measured both ways at once, however many ranks each of the H hosts has.
16 bits on the wire halve it. ``shaped`` makes the hosts, measures the rate and starts this on their ranks.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import ringtrain as rt
from ringtrain.bench import allreduce, ranks, report
from ringtrain.bench.sizes import bytes_text
from ringtrain.bench.systems import PEERS, Ringtrain, System
from ringtrain.bench.turns import time_in_turn


class Compressed(Ringtrain):
    """Ours, with 16 bits between hosts."""

    def __init__(self):
        self.name = "ringtrain-fp16"

    def run(self) -> None:
        rt.allreduce_(self._work, name=f"{self._name}.fp16", op=rt.Sum, compression=rt.Compression.fp16)

    def close(self) -> None:
        del self._work


def run(sizes: Sequence[int], peers: Sequence[str], repetitions: int, measured_rate: float, json: str | None,
        **_of_the_hosts: Any) -> bool:  # fmt: skip
    """Runs the benchmark on this rank; returns whether every system's results were right."""
    ours = Ringtrain("auto")
    systems: list[System] = [ours, Compressed(), *(PEERS[name]() for name in peers)]
    hosts = rt.cross_size()
    results = []
    for size_bytes in sizes:
        floor = 2 * (hosts - 1) / hosts * size_bytes / measured_rate
        results += _measure(systems, size_bytes, repetitions, floor)
    report.say(f"allreduce, float32, sum, in place, {ranks.size()} ranks on {hosts} hosts")
    report.print_table(["size", "system", "median", "fastest", "floor", "share of floor", "result"],
                       [_row(result) for result in results])  # fmt: skip
    report.write_json(json, results, hosts=hosts, bytes_per_second=measured_rate)
    for system in reversed(systems):
        system.close()
    return all(result["verified"] for result in results)


def _measure(systems: Sequence[System], size_bytes: int, repetitions: int, floor: float) -> list[dict[str, Any]]:
    work, source = allreduce.arrays(size_bytes)
    for system in systems:
        system.use(work)
    verified = {system.name: allreduce.verify(system, work, source) for system in systems}
    time_turn = allreduce.turn_for(size_bytes)
    seconds = time_in_turn({system.name: partial(time_turn, system, work, source) for system in systems}, repetitions)
    return [
        report.result(
            name, "allreduce", times, verified[name], bytes=size_bytes,
            floor_seconds=floor / 2 if name == "ringtrain-fp16" else floor,
        )
        for name, times in seconds.items()
    ]  # fmt: skip


def _row(result: dict[str, Any]) -> list[str]:
    floor = result["floor_seconds"]
    is_short = result["bytes"] <= allreduce.BACK_TO_BACK_BYTES  # its time is latency, which the rate does not bound
    return [
        bytes_text(result["bytes"]),
        result["system"],
        report.seconds_text(result["seconds_median"]),
        report.seconds_text(result["seconds_min"]),
        "-" if is_short else report.seconds_text(floor),
        "-" if is_short else f"{100 * floor / result['seconds_median']:.1f} %",
        report.verdict(result),
    ]
