"""Keras' sharded embeddings in elastic jobs, on real processes: rows outlive the ranks that kept them.

A job prints which samples each rank has brought to each step. Jobs of a fixed size take the same steps once more, each from
the table that the one before has saved; rows, what their rule keeps of them, and the rest of the model end with the same
bits. In each job all copies of a row are compared at the end.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments import PATHS, python_with, rank_environment, transport_of
from test_elastic_tables import ends, plan_of

from benchmarks.jobs import Job
from ringtrain.bench.namespaces import HostNetwork

pytestmark = [
    pytest.mark.tcp,
]
SCRIPT = Path(__file__).with_name("elastic_keras_tables.py")
ROOT = SCRIPT.parents[2]
SAMPLES, EPOCHS, COMMITS = 96, 2, 9
SECONDS = 300.0
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LOSE = "raise PeerLostError('planted')"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
FRAMES = {
    "TensorFlow": {"KERAS_BACKEND": "tensorflow"},
    "TensorFlow, eager": {"KERAS_BACKEND": "tensorflow", "EAGER": "1"},
    "PyTorch": {"KERAS_BACKEND": "torch"},
}
on_graphs_and_torch = pytest.mark.parametrize("frame", ["TensorFlow", "PyTorch"])


def run(job: Job, frame: str, *flags: str, ends_well: bool = True, **variables: str) -> subprocess.CompletedProcess:
    """A job under the launcher; a slot gets a rank again only if others wait for it."""
    python = python_with("tcp")
    cooldown = "1" if "JOINED" in variables else "60"
    pauses = ["--blacklist-cooldown-range", cooldown, cooldown] if "--elastic" in flags else []
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), *pauses, *flags, python, str(SCRIPT)]
    environment = rank_environment(**{"KIND": "adagrad", **QUIET, **FRAMES[frame], **variables})
    done = job.run(*line, seconds=SECONDS, env=environment)
    assert (done.returncode == 0) == ends_well, done.stdout + done.stderr[-6000:]
    return done


def replayed(job: Job, frame: str, plan: list[list[list[int]]], name: str = "plan", **variables: str) -> str:
    """The last word of jobs whose members were planned so."""
    ended, folder = 0, Path(job.temporary)
    for old in folder.glob("tables-*"):
        old.rename(folder / f"before-{name}-{old.name}")
    for number, (size, steps) in enumerate(itertools.groupby(plan, key=len)):
        place, taken = folder / f"{name}-{number}.json", list(steps)
        place.write_text(json.dumps({"number": number, "steps": taken, "done": ended}))
        done = run(job, frame, "-np", str(size), PLAN=str(place), **variables)
        ended += len(taken)
    (end,) = set(ends(done))
    return end


def assert_as_planned(
    job: Job, frame: str, done: subprocess.CompletedProcess, ranks: int, **variables: str
) -> list[list[list[int]]]:
    """All ranks that came to the end have the bits of the planned run, and each sample was in a step."""
    plan = plan_of(done)
    assert len(set(ends(done))) == 1 and len(ends(done)) == ranks, done.stdout + done.stderr[-6000:]
    found = dict(np.load(Path(job.temporary) / "end.npz"))
    end = replayed(job, frame, plan, **variables)
    expected = dict(np.load(Path(job.temporary) / "end.npz"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert ends(done)[0] == end
    taken = list(itertools.chain(*plan))
    assert {index for samples in taken for index in samples} == set(range(SAMPLES))
    assert sum(map(len, taken)) >= SAMPLES * EPOCHS
    return plan


@pytest.mark.long
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("place", ["forward", "fetched", "backward", "held", "released"])
def test_wherever_in_a_step_a_rank_dies(place: str, slot: int, frame: str, job: Job) -> None:
    done = run(job, frame, "--elastic", "-np", "2:3", FAULTS=json.dumps({f"{slot}/3/{place}": KILL}))
    if place == "held":  # the others use its share if all of them hold the results, too
        kept = (Path(job.temporary) / "end.npz").read_bytes()
        if ends(done)[0] == replayed(job, frame, plan_of(done, "applied|perhaps"), "with"):
            return
        (Path(job.temporary) / "end.npz").write_bytes(kept)
    plan = assert_as_planned(job, frame, done, 2)
    assert [len(plan[2]), len(plan[4])] == [3, 2]


@pytest.mark.long
@on_graphs_and_torch
@pytest.mark.parametrize("dealing", ["modulo", "blocks"])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "rowwise", "adam"])
def test_with_any_rule(kind: str, dealing: str, frame: str, job: Job) -> None:
    faults = {"1/3/backward": KILL, "0/6/released": KILL}
    done = run(job, frame, "--elastic", "-np", "2:4", KIND=kind, DEALING=dealing, FAULTS=json.dumps(faults))
    assert_as_planned(job, frame, done, 2, KIND=kind, DEALING=dealing)


@pytest.mark.long
@on_graphs_and_torch
@pytest.mark.parametrize("how", ["clipped", "scaled", "accumulated", "passes"])
def test_with_what_an_optimizer_does_to_gradients(how: str, frame: str, job: Job) -> None:
    """A rank dies where gradients wait for others, or before their norm is known.

    It is the first pass of an update, since files of the plan have no part of one; tests/core/test_kept_rows.py has that.
    """
    kind = f"adagrad+{how}"
    faults = {"1/4/norm" if how == "clipped" else "1/4/backward": KILL}
    done = run(job, frame, "--elastic", "-np", "2:3", KIND=kind, FAULTS=json.dumps(faults))
    assert_as_planned(job, frame, done, 2, KIND=kind)


@pytest.mark.long
@on_graphs_and_torch
@pytest.mark.parametrize("storage", ["memory", "file"])
def test_a_rank_that_joins_takes_rows_over(storage: str, frame: str, job: Job) -> None:
    faults = json.dumps({"1/3/backward": KILL})
    variables = {"STORAGE": storage, "JOINED": "3", "AWAITED_AT": "[5]", "VALIDATES": "1"}
    done = run(job, frame, "--elastic", "-np", "2:3", FAULTS=faults, **variables)
    plan = assert_as_planned(job, frame, done, 3)
    assert [len(plan[2]), len(plan[4]), len(plan[-1])] == [3, 2, 3]


@pytest.mark.long
@on_graphs_and_torch
@pytest.mark.parametrize(
    "others", [{"2/3/held": LOSE}, {"0/3/held": LOSE, "2/3/backward": "time.sleep(0.5)"}], ids=["one", "the lead"]
)
def test_sums_that_not_all_hold_are_made_again(others: dict[str, str], frame: str, job: Job) -> None:
    done = run(job, frame, "--elastic", "-np", "2:3", FAULTS=json.dumps({"1/3/backward": KILL, **others}))
    assert_as_planned(job, frame, done, 2)


@pytest.mark.long
@on_graphs_and_torch
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_lost_rows_are_named_on_all_ranks_alike(place: str, frame: str, job: Job) -> None:
    faults = json.dumps({f"1/3/{place}": KILL})
    done = run(job, frame, "--elastic", "-np", "1:3", ends_well=False, REPLICAS="1", FAULTS=faults)
    told = re.findall(
        r"^\[(\d)\] .*(embedding 'words': every row must be kept .*)$", done.stdout + done.stderr, re.MULTILINE
    )
    assert {slot for slot, _ in told} == {"0", "2"}, done.stdout + done.stderr
    assert all("rows 1 to 22 in steps of 3 (of former rank 1)" in text for _, text in told), told
    assert len({text.split("[[")[0].strip() for _, text in told}) == 1, told


@pytest.mark.long
@on_graphs_and_torch
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_lost_rows_come_from_a_checkpoint(place: str, frame: str, job: Job, tmp_path: Path) -> None:
    """It was written behind step 2, right before the step in which the rank dies, so that nothing is behind."""
    saved = tmp_path / "saved"
    saved.mkdir()
    variables = {"SAVED_AT": "2", "SAVED_IN": str(saved), "REPLICAS": "1"}
    done = run(job, frame, "--elastic", "-np", "2:3", FAULTS=json.dumps({f"1/3/{place}": KILL}), **variables)
    plan = assert_as_planned(job, frame, done, 2)
    assert [len(plan[2]), len(plan[4])] == [3, 2] and done.stderr.count("begin again with what was saved in") == 1


@pytest.mark.long
@on_graphs_and_torch
def test_a_job_begins_with_saved_tables(frame: str, job: Job, tmp_path: Path) -> None:
    """Of another number of ranks, with what the rule keeps; a rank that joins reads what the others have learnt."""
    replayed(job, frame, [[[0, 1], [2, 3]]], "first")
    first = (Path(job.temporary) / "tables-1").rename(tmp_path / "first")
    faults = json.dumps({"1/3/backward": KILL})
    variables = {"JOINED": "3", "AWAITED_AT": "[5]", "ROWS_FROM": str(first)}
    done = run(job, frame, "--elastic", "-np", "2:3", FAULTS=faults, **variables)
    assert_as_planned(job, frame, done, 3, ROWS_FROM=str(first))


@pytest.mark.long
@on_graphs_and_torch
def test_a_loop_of_ones_own_loses_no_row(frame: str, job: Job) -> None:
    faults = {"1/3/backward": KILL, "0/6/fetched": KILL}
    done = run(job, frame, "--elastic", "-np", "2:4", LOOP="1", FAULTS=json.dumps(faults))
    assert_as_planned(job, frame, done, 2, LOOP="1")


class OnTwoHosts(Job):
    """A job whose launcher is on one host, and whose ranks are on two, two on each; the folder is on both."""

    def __init__(self, network: HostNetwork, folder: Path):
        self.temporary = str(folder)
        self._host = network["node-a"]

    def run(self, *command: str | Path, seconds: float, **options: Any) -> subprocess.CompletedProcess:
        python, *rest = map(str, command)
        line = [python, *rest[:2], "-H", "node-a:2,node-b:2", *rest[2:]]
        environment = {"PYTHONPATH": PATHS, **options["env"], "FOLDER": self.temporary}
        return self._host.run(*line, env=environment, timeout=seconds)


@pytest.mark.long
@on_graphs_and_torch
@pytest.mark.parametrize("slots", [(3,), (2, 3)], ids=["a rank", "all ranks of a host"])
def test_two_hosts_lose_no_row(slots: tuple[int, ...], frame: str, network: HostNetwork, tmp_path: Path) -> None:
    """The second copy of a row is on the other host: on one host ranks 2 and 3 would keep a part alone.

    Behind three steps of four ranks, so that two and three ranks have equal shares of what is left.
    """
    faults = json.dumps({f"{slot}/3/backward": KILL for slot in slots})
    job = OnTwoHosts(network, tmp_path)
    done = run(job, frame, "--elastic", "-np", "2:4", FAULTS=faults)
    plan = assert_as_planned(job, frame, done, 4 - len(slots))
    assert [len(plan[2]), len(plan[4])] == [4, 4 - len(slots)]


def assert_committed(
    job: Job, frame: str, done: subprocess.CompletedProcess, ranks: int, **variables: str
) -> list[int]:
    """As ``assert_as_planned`` under ``elastic.run``; the ranks of each step, as it was done last."""
    sizes: dict[int, int] = {}
    for step, size in re.findall(r"^\[\d+\] attempt (\d+) (\d+)$", done.stdout, re.MULTILINE):
        sizes[int(step)] = min(int(size), sizes.get(int(step), 99))
    assert sorted(sizes) == list(range(COMMITS)), sizes
    plan = [
        [[((step * size + rank) * 4 + place) % SAMPLES for place in range(4)] for rank in range(size)]
        for step, size in sorted(sizes.items())
    ]
    assert len(set(ends(done))) == 1 and len(ends(done)) == ranks, done.stdout + done.stderr[-6000:]
    assert ends(done)[0] == replayed(job, frame, plan, COMMITS="1", **variables)
    return [sizes[step] for step in range(COMMITS)]


@pytest.mark.long
@on_graphs_and_torch
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("place", ["fetched", "backward", "stepped", "copied", "committed"])
def test_under_elastic_run_no_row_is_lost_wherever_a_rank_dies(place: str, slot: int, frame: str, job: Job) -> None:
    """Steps are done again from the last commit, each in the commit of all or of none."""
    variables = {"COMMITS": "1", "KIND": "momentum+accumulated" if place == "stepped" else "momentum"}
    done = run(job, frame, "--elastic", "-np", "2:3", FAULTS=json.dumps({f"{slot}/4/{place}": KILL}), **variables)
    sizes = assert_committed(job, frame, done, 2, KIND=variables["KIND"])
    assert sizes[:3] == [3, 3, 3] and sizes[5:] == [2] * (COMMITS - 5)


@pytest.mark.long
@pytest.mark.parametrize(
    "planted",
    [
        "row_gradients.with_copies = lambda layouts, rank, sums, name: list(sums)",
        "row_gradients.RowGradients.take_back = row_gradients.RowGradients.forget",
        "moving.MovingRows.lines = lambda table, gradients=True: "
        "{name: kept_rows.Lines(moving.Rows.around(each.array * 0), each.array.shape[1:]) for name, each in table._state.items()}",
    ],
    ids=["second copies do not learn", "gradients are not sent again", "what the rule keeps stays behind"],
)
def test_faults_of_the_product_are_found(planted: str, job: Job) -> None:
    try:
        faults = json.dumps({"1/3/backward": KILL})
        done = run(job, "PyTorch", "--elastic", "-np", "2:3", PLANTED_IN_TABLES=planted, FAULTS=faults)
        assert_as_planned(job, "PyTorch", done, 2)
    except AssertionError:
        return
    pytest.fail("not found")
