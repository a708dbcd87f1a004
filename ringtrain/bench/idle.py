"""``ringtrain bench idle``: how often our threads run while nothing is pending.

MPI is started before ringtrain, so that its own threads are known and not counted as ours.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ringtrain as rt
from ringtrain.bench import ranks, report
from ringtrain.bench.measured_worlds import MeasuredWorld

SETTLE_SECONDS = 1.0  # after the last operation a rank stays awake for a moment


def run(seconds: float, transports: Sequence[str], addresses: Mapping[str, Sequence[str]], json: str | None) -> bool:
    """Runs the benchmark on this rank; returns True, as there is no result to be wrong."""
    results = []
    for transport in transports:
        not_ours = _threads()
        world = MeasuredWorld(transport, addresses)
        world.enter()
        results += _measure(f"ringtrain-{transport}", seconds, not_ours)
        world.close()
    report.write_json(json, results)
    return True


def _measure(system: str, seconds: float, not_ours: set[int]) -> list[dict[str, Any]]:
    rt.allreduce_(np.ones(1000, np.float32), name="bench.idle", op=rt.Sum)
    ours = _threads() - not_ours
    time.sleep(SETTLE_SECONDS)
    before = {thread: _context_switches(thread) for thread in ours}
    time.sleep(seconds)
    rates = {f"{_name(thread)} {thread}": (_context_switches(thread) - before[thread]) / seconds for thread in ours}
    everyone = ranks.gathered(rates)
    rows = [
        [f"rank {rank}", thread, f"{rate:.2f}"]
        for rank, theirs in enumerate(everyone)
        for thread, rate in theirs.items()
    ]
    report.say(f"{system}: context switches per second of our threads, nothing pending, over {seconds:g} s")
    report.print_table(["rank", "thread", "per second"], rows)
    return [
        {"system": system, "op": "idle", "np": ranks.size(), "rank": rank, "seconds": seconds,
         "context_switches_per_second": sum(theirs.values()), "threads": len(theirs)}
        for rank, theirs in enumerate(everyone)
    ]  # fmt: skip


def _threads() -> set[int]:
    """Threads of this process but the main one and Python's own."""
    python = {thread.native_id for thread in threading.enumerate()}
    return {int(task.name) for task in Path("/proc/self/task").iterdir()} - python


def _context_switches(thread: int) -> int:
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def _name(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
