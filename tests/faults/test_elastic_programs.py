"""Ways from batches to an update, beside the plain one, in jobs that lose no step: their end is that of a planned run.

Overflows that a GradScaler skips, clipping, sums over passes, groups, sparse gradients, compressors, two backward passes:
each is killed where a window begins, in its backward pass, while some hold results and others do not, and when they are
released. A job prints which samples each rank has brought to each window; the windows of each of its worlds are done once
more in a world of that size, which goes on from the state of the one before, and ends with the same bits.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import elastic_kinds
import needs
import pytest
import torch
from environments import PATHS, python_with, rank_environment, transport_of

from benchmarks.jobs import Job
from ringtrain._training import sharding
from ringtrain.bench.namespaces import HostNetwork
from ringtrain.testing import World

pytestmark = [
    pytest.mark.tcp,
]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("elastic_torch.py")
SECONDS = 300.0
SAMPLES = 128  # of which no rank of four, three or two has one twice, whatever strikes
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# Rank 2 loses the results of a window and has rank 1 killed, while rank 0 holds them.
PART = "os.kill(int((folder / 'pid-1').read_text()), signal.SIGKILL); raise PeerLostError('in the test')"
# What strikes, and how many ranks are in the first windows then.
LOSES = {
    "begun, and released": ({"2/1/begun": KILL, "1/3/released": KILL}, [4, 3, 3, 3, 2]),
    "holding, and rank 0 in its backward pass": ({"2/1/holding": PART, "0/3/backward": KILL}, [4, 3, 3, 2, 2]),
}
KINDS = [
    "plain",
    "scaled",
    "clipped",
    "summed",
    "silent",
    "grouped",
    "buckets",
    "cast",
    "sparse",
    "sparseasdense",
    "factors",
    "halves",
]


class Window(NamedTuple):
    """What a job says of a window: the slots of its ranks, and what each has brought, batch by batch."""

    slots: list[int]
    batches: list[list[list[int]]]


def run(
    job: Job, kind: str, *flags: str, ranks: int, samples: int = 120, **variables: str
) -> subprocess.CompletedProcess:
    """Runs the job on this host, where a slot gets a rank again only if others wait for it."""
    python = python_with("tcp")
    cooldown = "1" if "JOINED" in variables else "60"
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", f"1:{ranks}"]
    line += ["--blacklist-cooldown-range", cooldown, cooldown, *flags, python, str(SCRIPT)]
    done = job.run(*line, seconds=SECONDS, env=rank_environment(KIND=kind, SAMPLES=str(samples), **variables))
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done


def run_on_hosts(network: HostNetwork, folder: Path, kind: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs it with each of three ranks on a host of its own."""
    python = python_with("tcp")
    variables |= {"TMPDIR": str(folder), "PYTHONPATH": PATHS, "KIND": kind, "SAMPLES": "120"}
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", "1:3"]
    line += ["--blacklist-cooldown-range", "60", "60", "-H", "node-a:1,node-b:1,node-c:1", python, str(SCRIPT)]
    done = network["node-a"].run(*line, env=rank_environment(**variables), timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done


def applied(done: subprocess.CompletedProcess) -> list[Window]:
    """The windows of a job; each once by each rank."""
    windows: dict[int, dict[int, tuple[int, list[list[int]]]]] = {}
    for line in re.findall(r"^\[\d+\] applied (.*)$", done.stdout, re.MULTILINE):
        number, rank, slot, batches = line.split(maxsplit=3)
        by_rank = windows.setdefault(int(number), {})
        assert int(rank) not in by_rank, f"window {number} twice on rank {rank}"
        by_rank[int(rank)] = int(slot), json.loads(batches)
    assert sorted(windows) == list(range(len(windows))), sorted(windows)
    ordered = [[by_rank[rank] for rank in sorted(by_rank)] for _, by_rank in sorted(windows.items())]
    return [Window([slot for slot, _ in each], [batches for _, batches in each]) for each in ordered]


def ends(done: subprocess.CompletedProcess) -> list[str]:
    """The last word of each rank: windows, bits of what is trained and of the optimizer, learning rate and scale."""
    return re.findall(r"^\[\d+\] end (.*)$", done.stdout, re.MULTILINE)


def replayed(kind: str, plan: Iterable[Window], poisoned: Iterable[int], each_on_a_host: bool) -> str:
    """The end of the same windows in worlds that were planned so: each is one of threads, and goes on from the former."""
    saved: dict[str, Any] = {}
    kept: dict[int, Any] = {}  # by slot: what is its rank's own
    end = ""
    for slots, windows in itertools.groupby(plan, key=lambda window: window.slots):
        layout = "+".join("1" * len(slots)) if each_on_a_host else None
        with World(len(slots), layout=layout) as world:
            told = world.run(take_windows, kind, slots, list(windows), set(poisoned), saved, kept)
        (end,) = {end for end, _, _ in told}
        saved, kept = told[0][1], {slot: own for slot, (_, _, own) in zip(slots, told, strict=True)}
    return end


def take_windows(
    rank: int,
    kind: str,
    slots: list[int],
    windows: list[Window],
    poisoned: set[int],
    saved: dict[str, Any],
    kept: dict[int, Any],
) -> tuple[str, dict[str, Any], Any]:
    """On one rank; returns its end, what the next world goes on from, and what is its own."""
    learner = elastic_kinds.Learner(kind, lambda place: None, poisoned)
    for number, parameter in enumerate(learner.kind.model.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    learner.distribute()
    if saved:
        learner.window = saved["window"]
        for name, value in learner.values.items():
            value.load_state_dict(copy.deepcopy(saved[name]))
    if slots[rank] in kept:
        learner.kind.load_local(kept[slots[rank]])
    data = elastic_kinds.Data(SAMPLES)
    for window in windows:
        for indices in window.batches[rank]:
            if learner.train_on(*torch.utils.data.default_collate([data[index] for index in indices])):
                learner.update()
        if learner.gathered:
            learner.cut_short(learner.update)
    ended = {name: copy.deepcopy(value.state_dict()) for name, value in learner.values.items()}
    return learner.end(), {"window": learner.window, **ended}, learner.kind.local()


def assert_once(plan: Iterable[Window], samples: int) -> None:
    """Each sample of an epoch was in one window."""
    drawn = sorted(index for window in plan for rank in window.batches for batch in rank for index in batch)
    assert drawn == sorted([*range(samples)] * elastic_kinds.EPOCHS)


def assert_alike(done: subprocess.CompletedProcess, ranks: int) -> list[Window]:
    """All ranks that came to the end have the same, and none has heard of a lost world."""
    assert len(set(ends(done))) == 1 and len(ends(done)) == ranks, done.stdout + done.stderr[-6000:]
    assert "WorldChangedError" not in done.stdout + done.stderr
    return applied(done)


def assert_as_planned(
    done: subprocess.CompletedProcess,
    kind: str,
    ranks: int,
    samples: int = 120,
    poisoned: Iterable[int] = (),
    each_on_a_host: bool = False,
) -> list[Window]:
    """They have the bits of the planned worlds."""
    plan = assert_alike(done, ranks)
    assert ends(done)[0] == replayed(kind, plan, poisoned, each_on_a_host)
    assert_once(plan, samples)
    return plan


def sizes(plan: Iterable[Window]) -> list[int]:
    """How many ranks were in each window."""
    return [len(window.slots) for window in plan]


def poisoned_in(window: int, rank: int) -> list[int]:
    """The sample that a rank of three draws first in a window of the first epoch, if nothing has happened before."""
    return [int(sharding.order(120, 0, 0)[window * 3 * elastic_kinds.BATCH + rank])]


@pytest.mark.long
@pytest.mark.parametrize("faults", LOSES)
@pytest.mark.parametrize("kind", KINDS)
def test_whoever_dies_wherever(kind: str, faults: str, job: Job) -> None:
    """Two of four ranks, one after the other; where sums are over two passes the first has been done."""
    strikes, expected = LOSES[faults]
    done = run(job, kind, ranks=4, samples=SAMPLES, FAULTS=json.dumps(strikes))
    plan = assert_as_planned(done, kind, 2, SAMPLES)
    assert sizes(plan)[:5] == expected


@pytest.mark.long
@pytest.mark.parametrize("faults", LOSES)
def test_whoever_dies_wherever_in_a_step_of_adasum(faults: str, job: Job) -> None:
    """Who dies before its step has sent what that has changed is not in it; the others send theirs once more."""
    strikes, _ = LOSES[faults]
    done = run(job, "combined", ranks=4, samples=SAMPLES, FAULTS=json.dumps(strikes))
    assert sizes(assert_as_planned(done, "combined", 2, SAMPLES))[:5] == [4, 3, 3, 2, 2]


@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS, "combined"])
def test_a_rank_that_comes_back(kind: str, job: Job) -> None:
    """It takes over what the others have, and brings its share from there on."""
    at = 2 if elastic_kinds.KINDS[kind].passes == 2 else 4
    done = run(job, kind, ranks=3, FAULTS=json.dumps({f"1/{at}/backward": KILL}), JOINED="3")
    plan = assert_as_planned(done, kind, 3)
    assert sizes(plan) == [3] * at + [2] * (10 - at) + [3] * (len(plan) - 10)


@pytest.mark.long
@pytest.mark.parametrize("place", ["backward", "holding", "released"])
@pytest.mark.parametrize("rank", [0, 1], ids=["of one that stays", "of the one that dies"])
def test_an_overflow_in_the_very_step(rank: int, place: str, job: Job) -> None:
    """All skip that step, or none: if the infinity was that of the rank that is lost, it comes again with its sample."""
    faults = {"2/2/holding": PART} if place == "holding" else {f"1/2/{place}": KILL}
    poisoned = poisoned_in(2, rank)
    done = run(job, "scaled", ranks=3, FAULTS=json.dumps(faults), POISONED=json.dumps(poisoned))
    assert_as_planned(done, "scaled", 2, poisoned=poisoned)
    skipped = {int(window) for window in re.findall(r"^\[\d+\] skipped (\d+)$", done.stdout, re.MULTILINE)}
    assert len(skipped) == elastic_kinds.EPOCHS
    assert (min(skipped) == 2) == (rank == 0 or place == "released")


@pytest.mark.long
@pytest.mark.parametrize("slot", [0, 1])
def test_a_death_between_two_backward_passes_of_a_step(slot: int, job: Job) -> None:
    """One half of the model has what the dead rank brought, the other has not; all ranks the same."""
    done = run(job, "halves", ranks=3, FAULTS=json.dumps({f"{slot}/4/between": KILL}))
    plan = assert_alike(done, 2)
    assert sizes(plan)[:6] == [3, 3, 3, 3, 2, 2]
    drawn = [index for window in plan for rank in window.batches for batch in rank for index in batch]
    assert len(drawn) == 120 * elastic_kinds.EPOCHS - elastic_kinds.BATCH  # the samples of the dead rank are done


@pytest.mark.long
@pytest.mark.parametrize(
    "strikes",
    [
        {"2/2/begun": KILL},
        {"2/3/holding": "raise PeerLostError('in the test')", "1/3/holding": KILL},
        {"0/4/released": KILL},
    ],
    ids=" ".join,
)
@needs.hosts
def test_what_rounding_has_lost_between_hosts(strikes: dict[str, str], network: HostNetwork, tmp_path: Path) -> None:
    """In whatever world: once, or it is gone with its rank; but never twice."""
    done = run_on_hosts(network, tmp_path, "rounded", FAULTS=json.dumps(strikes))
    assert_as_planned(done, "rounded", 2, each_on_a_host=True)
