"""``python -m benchmarks accumulation``: what a batch costs when several make a step: bytes, operations and seconds.

All numbers of passes take turns, and beside each a rank that trains alone with as many passes, since it too steps less
often. Bytes are those of the native counters on this rank, and none may move before a step's last backward pass.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import ringtrain as rt
from ringtrain.bench import machine, ranks, report
from ringtrain.bench.command import bytes_text
from ringtrain.bench.torch_networks import NETWORKS, Batch, loss_of
from ringtrain.bench.torch_systems import NoExchange, RingtrainTorch, replicas_are_equal
from ringtrain.bench.turns import time_in_turn, time_of

# Everything that this rank lets others see: tensors by shared memory and by the transport, and negotiation.
SENT = ("shared_bytes", "wire_bytes_sent", "frame_bytes_sent")


def run(passes: Sequence[int], network: str, repetitions: int | None, json: str | None) -> bool:
    """Runs the benchmark on this rank; returns whether nothing was sent too early and the replicas stayed equal."""
    torch.manual_seed(0)
    start = NETWORKS[network].make()
    batch = NETWORKS[network].batches(ranks.rank())
    ours, alone = RingtrainTorch(), NoExchange()
    for system in (ours, alone):
        system.use(copy.deepcopy(start))
        system.step(batch)  # the first is not typical
    sent = {count: _count_sent(ours, count, batch) for count in passes}
    timed = {(system.name, count): partial(_turn, system, count, batch) for count in passes for system in (ours, alone)}
    seconds = time_in_turn(timed, repetitions or 15)
    equal = replicas_are_equal(ours.network)
    results = [
        report.result(
            "ringtrain", "accumulation", seconds["ringtrain", count],
            equal and ranks.all_true(sent[count]["early_bytes"] == sent[count]["early_operations"] == 0),
            network=network, passes=count,
            alone_seconds_median=float(np.median(seconds["alone", count])), **sent[count],
        )
        for count in passes
    ]  # fmt: skip
    _print(results)
    ours.close()
    report.write_json(json, results)
    return all(result["verified"] for result in results)


def _turn(system: NoExchange, passes: int, batch: Batch) -> list[float]:
    system.accumulate(passes)
    return [time_of(lambda: system.step(batch)) / passes]


def _count_sent(system: RingtrainTorch, passes: int, batch: Batch) -> dict[str, float]:
    """What one step lets this rank send, for each of its batches, and what of it before the last of them."""
    system.accumulate(passes)
    ranks.wait_for_all()
    before = rt.counters()
    system.optimizer.zero_grad()
    for _ in range(passes - 1):
        loss_of(system.network, batch).backward()
    early = rt.counters()
    ranks.wait_for_all()  # so that nobody's last pass shows up in another's early counters
    loss_of(system.network, batch).backward()
    system.optimizer.step()
    ranks.wait_for_all()
    after = rt.counters()
    return {
        "bytes_sent": _bytes(before, after) / passes,
        "operations": _operations(before, after) / passes,
        "early_bytes": _bytes(before, early),
        "early_operations": _operations(before, early),
    }


def _bytes(before: dict[str, int], after: dict[str, int]) -> int:
    return sum(after[name] - before[name] for name in SENT)


def _operations(before: dict[str, int], after: dict[str, int]) -> int:
    return after["operations"] - before["operations"]


def _print(results: Sequence[dict[str, Any]]) -> None:
    facts, first = machine.describe(), results[0]["seconds_median"]
    report.say(
        f"{results[0]['network']}, {ranks.size()} ranks on {facts['cores']} cores and {rt.cross_size()} hosts; "
        "each figure for one batch"
    )
    rows = [
        [
            str(each["passes"]),
            bytes_text(round(each["bytes_sent"])),
            f"{each['operations']:.1f}",
            report.seconds_text(each["seconds_median"]),
            report.seconds_text(each["alone_seconds_median"]),
            f"{each['seconds_median'] / first:.2f}",
            report.verdict(each),
        ]
        for each in results
    ]
    report.print_table(["passes", "sent by a rank", "operations", "time", "alone", "x first", "result"], rows)
