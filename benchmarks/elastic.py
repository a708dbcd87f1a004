"""``python -m benchmarks faults --elastic``: what a fault costs a job that goes on, beside torchrun and TorchFT.

Four ranks train on this host until a fault strikes, at a moment drawn at random, and again when all are back. The seconds
run from the fault until the first step is applied that nobody had made before it, by a world without those who were
struck. At the end the replicas must be equal, and for ours equal to those of a job of a fixed size that was given the same
samples and members in each step. `goodput` strikes at fixed times, ready or not; `overhead` strikes nobody.
"""

import json as encoding
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import elastic_records as notes
from benchmarks.elastic_records import Member
from benchmarks.elastic_systems import RANKS, SYSTEMS
from benchmarks.elastic_trials import LOOK_SECONDS, Trial
from benchmarks.faults import has_ended
from benchmarks.jobs import Job
from ringtrain.bench import documents
from ringtrain.bench.command import bytes_text
from ringtrain.bench.machine import describe

PACE_OF_FAULTS = 0.02  # seconds of a step at least; short, so that many faults strike while gradients travel
PACE_OF_GOODPUT = 0.1  # long, so that ranks which share cores are no quicker when one is missing
CALM_SECONDS = 15.0  # without faults, in which goodput has its rate measured
STATE_OF_NETWORK = 2  # the state is the network and its momentum

Strike = Callable[[list[Member], random.Random, Path], list[Member]]


@dataclass(frozen=True)
class Fault:
    """What is done to whom, and within how many seconds training shall go on.

    Attributes:
        strike: does it, with the members by rank; returns those whom it struck.
        silent: whether it is found out by silence alone, which adds the bound of that.
    """

    name: str
    strike: Strike
    seconds: float
    silent: bool = False


def _kill(struck: list[Member], number: int = signal.SIGKILL) -> list[Member]:
    for member in struck:
        os.kill(member.pid, number)
    return struck


def _kill_during_recovery(members: list[Member], drawn: random.Random, folder: Path) -> list[Member]:
    first, second = drawn.sample(members, 2)
    _kill([first])
    time.sleep(drawn.uniform(0.0, 0.15))
    return [first, *_kill([second])]


def _fail(members: list[Member], drawn: random.Random, folder: Path) -> list[Member]:
    struck = drawn.choice(members)
    (folder / f"fail-{struck.slot}").touch()
    return [struck]


FAULTS = [
    Fault("rank killed", lambda members, drawn, _: _kill([drawn.choice(members)]), 2.0),
    Fault("rank 0 killed", lambda members, *_: _kill(members[:1]), 2.0),
    Fault("exception", _fail, 2.0),
    Fault("two killed at once", lambda members, drawn, _: _kill(drawn.sample(members, 2)), 2.0),
    Fault("another killed within 150 ms", _kill_during_recovery, 4.0),
    Fault("rank stopped", lambda members, drawn, _: _kill([drawn.choice(members)], signal.SIGSTOP), 2.0, silent=True),
]
SECONDS_OF_SILENCE = 5.0  # that count as death in an elastic job


def run(
    elastic: Sequence[str],
    runs: int,
    only: str,
    systems: Sequence[str],
    sizes: Sequence[int],
    minutes: float,
    every: float,
    pace_ms: float | None,
    checkpoint_steps: int,
    together: bool,
    seed: int,
    json: str | None = None,
) -> bool:
    """Runs the chosen parts and prints a table of each; returns whether every promise of ours was kept.

    Args:
        elastic: parts.
        runs: of each fault; turns of the overhead.
        only: a word of the faults to be done; "" for all.
        systems: names.
        sizes: bytes of the network, one after the other.
        minutes, every: of goodput; seconds from fault to fault.
        pace_ms: a step takes at least so long; None for what suits the part.
        checkpoint_steps: from checkpoint to checkpoint of torchrun.
        together: whether the systems' goodput is measured at the same time, with the same faults.
        seed: of victims and moments.
        json: file for all figures, in seconds.
    """
    results: list[dict[str, Any]] = []
    pace = None if pace_ms is None else pace_ms / 1e3
    if "faults" in elastic:
        chosen = [fault for fault in FAULTS if only in fault.name]
        settings = (PACE_OF_FAULTS if pace is None else pace, checkpoint_steps)
        results += _measure_faults(chosen, runs, systems, sizes, settings, seed)
    if "goodput" in elastic:
        settings = (PACE_OF_GOODPUT if pace is None else pace, checkpoint_steps)
        results += _measure_goodput(systems, sizes, minutes * 60, every, settings, together, seed)
    if "overhead" in elastic:
        results += _measure_overhead(sizes, runs)
    if json:
        documents.write(json, documents.make(describe(), results))
    return all(result["kept"] for result in results if result["system"] == "ringtrain")


@contextmanager
def _trial(system: str, size: int, settings: tuple[float, int]) -> Iterator[Trial]:
    with tempfile.TemporaryDirectory(prefix="ringtrain-faults-") as name, closing(Job()) as job:
        yield Trial(SYSTEMS[system](job, Path(name)), job, Path(name), size, *settings)


# ---- faults ----


def _measure_faults(
    faults: Sequence[Fault],
    runs: int,
    systems: Sequence[str],
    sizes: Sequence[int],
    settings: tuple[float, int],
    seed: int,
) -> list[dict[str, Any]]:
    heads = ["system", "state", "fault", f"next step, median of {runs}", "worst", "steps made again", "steps missing"]
    heads += ["replicas", "stall when ranks join, median", "worst"]
    print(_row(heads) + "\n" + "|---" * len(heads) + "|", flush=True)
    results = []
    for system in systems:
        for size in sizes:
            for fault in faults:
                with _trial(system, size, settings) as trial:
                    found = _strike_again_and_again(trial, fault, runs, random.Random(seed))
                results.append({"part": "faults", "system": system, "state_bytes": STATE_OF_NETWORK * size, **found})
                print(_row(_fault_cells(results[-1])), flush=True)
    return results


def _strike_again_and_again(trial: Trial, fault: Fault, runs: int, drawn: random.Random) -> dict[str, Any]:
    trial.start()
    seconds: list[float] = []
    for _ in range(runs):
        trial.await_whole_world()
        time.sleep(drawn.uniform(0.0, 0.5))
        members = trial.whole_world()
        if not members:  # one has died by itself
            raise RuntimeError(f"faults: {trial.system.name} lost a rank that nobody struck:\n{trial.said()}")
        moment = time.monotonic()
        struck = fault.strike(members, drawn, trial.folder)
        seconds.append(trial.await_next_step(moment, struck))
        if fault.silent and not trial.system.shrinks:  # who stays stopped holds up the restart
            _kill([member for member in struck if not has_ended(member.pid)])
        if seconds[-1] == float("inf"):
            break
    return {"fault": fault.name, "seconds": seconds, **_verdict(trial, fault, seconds)}


def _verdict(trial: Trial, fault: Fault, seconds: list[float]) -> dict[str, Any]:
    replicas = _replicas(trial) if seconds[-1] < float("inf") else "none"
    records = trial.records()
    again, missing = notes.recomputed(records), notes.missing(records)
    bound = fault.seconds + (SECONDS_OF_SILENCE if fault.silent else 0.0)
    return {
        "steps_recomputed": again,
        "steps_missing": missing,
        "replicas": replicas,
        "stall_seconds": notes.stalls_of_joiners(records),
        "kept": max(seconds) <= bound and again == missing == 0 and replicas == "as planned",
    }


def _replicas(trial: Trial) -> str:
    """What they are at the end, in a word."""
    digests = trial.end()
    if len(digests) > 1:
        return "DIFFER"
    if trial.system.name != "ringtrain":
        return "equal"
    return "as planned" if digests == {trial.planned()} else "NOT AS PLANNED"


def _fault_cells(result: dict[str, Any]) -> list[str]:
    stalls = result["stall_seconds"]
    return [
        result["system"],
        bytes_text(result["state_bytes"]),
        result["fault"],
        f"{statistics.median(result['seconds']):.2f} s",
        f"{max(result['seconds']):.2f} s",
        str(result["steps_recomputed"]),
        str(result["steps_missing"]),
        result["replicas"],
        *([f"{statistics.median(stalls):.2f} s", f"{max(stalls):.2f} s"] if stalls else ["", ""]),
    ]


# ---- goodput ----


def _measure_goodput(
    systems: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    every: float,
    settings: tuple[float, int],
    together: bool,
    seed: int,
) -> list[dict[str, Any]]:
    heads = ["system", "state", "a fault every", "faults", "steps", "batches, of all slots", "of those alive"]
    heads += ["steps made again", "replicas"]
    print("\n" + _row(heads) + "\n" + "|---" * len(heads) + "|", flush=True)

    def measure(system: str, size: int) -> dict[str, Any]:
        with _trial(system, size, settings) as trial:
            found = _strike_at_times(trial, seconds, every, random.Random(seed))
        result = {"part": "goodput", "system": system, "state_bytes": STATE_OF_NETWORK * size, "every": every, **found}
        print(_row(_goodput_cells(result)), flush=True)
        return result

    with ThreadPoolExecutor(len(systems) if together else 1) as pool:
        return list(pool.map(measure, *zip(*((system, size) for size in sizes for system in systems), strict=True)))


def _strike_at_times(trial: Trial, seconds: float, every: float, drawn: random.Random) -> dict[str, Any]:
    """Kills the rank of one slot after the other, as they were drawn; another one's, if that has none."""
    trial.start()
    trial.await_whole_world()
    _watch(trial, time.monotonic() + CALM_SECONDS)
    begin = time.monotonic()
    faults: list[tuple[float, int]] = []
    for number in range(1, int(seconds / every)):
        _watch(trial, begin + number * every)
        living = _living(trial)
        slot = drawn.randrange(RANKS)
        slot = slot if slot in living else min(living, default=slot)
        if slot in living:
            faults.append((time.monotonic(), slot))
            os.kill(living[slot], signal.SIGKILL)
    _watch(trial, begin + seconds)
    found = notes.goodput(trial.records(), begin, faults, begin + seconds, RANKS)
    assert found is not None  # a whole world has made steps
    replicas = _replicas(trial)
    return {"faults": len(faults), **found._asdict(), "replicas": replicas, "kept": replicas == "as planned"}


def _watch(trial: Trial, until: float) -> None:
    while time.monotonic() < until:
        trial.records()
        time.sleep(LOOK_SECONDS)


def _living(trial: Trial) -> dict[int, int]:
    """Process ids of the ranks that train, by slot."""
    records = trial.records()
    newest = {int(row["slot"]): int(row["pid"]) for row in records[-200 * RANKS :]}
    for slot in range(RANKS):
        own = records[records["slot"] == slot]
        if len(own):
            newest[slot] = int(own["pid"][own["seconds"].argmax()])
    return {slot: pid for slot, pid in newest.items() if not has_ended(pid)}


def _goodput_cells(result: dict[str, Any]) -> list[str]:
    return [
        result["system"],
        bytes_text(result["state_bytes"]),
        f"{result['every']:g} s",
        str(result["faults"]),
        *(f"{100 * result[share]:.1f} %" for share in ("steps", "of_all", "of_alive")),
        str(result["recomputed"]),
        result["replicas"],
    ]


# ---- overhead ----


def _measure_overhead(sizes: Sequence[int], runs: int) -> list[dict[str, Any]]:
    heads = ["system", "network", "step without State", "with it", "more", "", "bytes more", "of gradients"]
    print("\n" + _row(heads) + "\n" + "|---" * len(heads) + "|", flush=True)
    results = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="ringtrain-faults-") as name, closing(Job()) as job:
            found = Path(name) / "found"
            line = [sys.executable, "-m", "ringtrain.launch", "--elastic", "-np", str(RANKS)]
            line += [sys.executable, "-m", "benchmarks.elastic_overhead", str(found), str(size), str(runs)]
            done = job.run(*line, seconds=3600.0, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL)
            if done.returncode:
                raise RuntimeError(f"faults: the overhead was not measured:\n{done.stderr[-2000:]}")
            result = {"part": "overhead", "system": "ringtrain", "kept": True, **encoding.loads(found.read_text())}
        results.append(result)
        print(_row(_overhead_cells(result)), flush=True)
    return results


def _overhead_cells(result: dict[str, Any]) -> list[str]:
    plain, elastic = result["plain_seconds"], result["elastic_seconds"]
    return [
        result["system"],
        bytes_text(result["gradient_bytes"]),
        f"{plain * 1e6:.0f} us",
        f"{elastic * 1e6:.0f} us",
        f"{result['more_seconds'] * 1e6:+.0f} us",
        f"{100 * result['more_seconds'] / plain:+.1f} %",
        bytes_text(result["more_bytes"]),
        f"{result['more_bytes'] / result['gradient_bytes']:.2f}",
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
