"""Sharded embeddings in elastic jobs, on real processes: rows outlive the ranks that kept them, and learn as in a planned run.

A job prints which samples each rank has brought to each step. The plan is replayed by ranks that are threads here, in worlds
of a fixed size, each of which goes on from the tables that the one before has saved; rows, what the optimizer keeps of
them, and the rest of the model end with the same bits. In each job all copies of a row are compared at the end.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import elastic_tables
import pytest
import torch
from elastic_tables import COMMITS, EPOCHS, SAMPLES, Data, Learner, digest, samples_of
from environments import python_with, rank_environment, transport_of

import ringtrain.torch as hvd
from benchmarks.jobs import Job
from ringtrain.bench.namespaces import HostNetwork
from ringtrain.testing import World

pytestmark = [
    pytest.mark.tcp,
]
torch.set_num_threads(1)
SCRIPT = Path(elastic_tables.__file__)
ROOT = SCRIPT.parents[2]
SECONDS = 120.0
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LOSE = "raise PeerLostError('planted')"


def run(job: Job, np: str, kind: str = "adagrad", pause: str = "60", code: int = 0, **variables: str):
    """A job under the launcher, which ends with a code; a slot gets a rank again after so many seconds."""
    python = python_with("tcp")
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", np]
    line += ["--blacklist-cooldown-range", pause, pause, python, str(SCRIPT)]
    environment = rank_environment(OMP_NUM_THREADS="1", KIND=kind, **variables)
    done = job.run(*line, seconds=SECONDS, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def plan_of(done: subprocess.CompletedProcess, words: str = "applied") -> list[list[list[int]]]:
    """By step and rank, the samples; each step once by each rank."""
    steps: dict[int, dict[int, list[int]]] = {}
    for line in re.findall(rf"^\[\d+\] (?:{words}) (.*)$", done.stdout, re.MULTILINE):
        step, rank, *indices = map(int, line.split())
        assert rank not in steps.setdefault(step, {}), f"step {step} twice on rank {rank}"
        steps[step][rank] = indices
    assert sorted(steps) == list(range(len(steps))), sorted(steps)
    return [[by_rank[rank] for rank in sorted(by_rank)] for _, by_rank in sorted(steps.items())]


def ends(done: subprocess.CompletedProcess) -> list[str]:
    """The last word of each rank: steps and bits."""
    return re.findall(r"^\[\d+\] end (.*)$", done.stdout, re.MULTILINE)


def replayed(
    plan: list[list[list[int]]], folder: Path, kind: str, dealing: str = "modulo", first: Path | None = None
) -> dict[str, torch.Tensor]:
    """What a run with the planned members has at the end; ``first`` has the tables that it begins with."""
    values: list[dict[str, torch.Tensor]] = []
    for number, (size, steps) in enumerate(itertools.groupby(plan, key=len)):

        def on_rank(rank: int, number: int = number, steps: list = list(steps)) -> dict[str, torch.Tensor]:
            learner = Learner(kind, dealing)
            both = learner.optimizers
            before, after = folder / f"tables-{number}", folder / f"tables-{number + 1}"
            if number:
                dense, *states = torch.load(before / "dense.pt")
                learner.model.load_state_dict(dense, strict=False)
                for each, state in zip(both, states, strict=True):
                    each.load_state_dict(state)
                hvd.load_tables(before, learner.model, both[-1])
            elif first is not None:
                hvd.load_tables(first, learner.model, both[-1])
            for step in steps:
                _, ids, y = torch.utils.data.default_collate([Data()[index] for index in step[rank]])
                learner.train_on(ids, y)
            after.mkdir(parents=True, exist_ok=True)
            hvd.save_tables(after, learner.model, both[-1])
            if rank == 0:
                kept = [hvd.dense_state_dict(learner.model), *(hvd.dense_state_dict(each) for each in both)]
                torch.save(kept, after / "dense.pt")
            return learner.end()

        with World(size) as world:
            values = world.run(on_rank)
    return values[0]


def assert_as_planned(
    job: Job, done: subprocess.CompletedProcess, ranks: int, folder: Path, kind: str = "adagrad", **how
):
    """All ranks that came to the end have the bits of the planned run, and each sample was in one step of an epoch."""
    plan = plan_of(done)
    assert len(set(ends(done))) == 1 and len(ends(done)) == ranks, done.stdout + done.stderr
    expected = replayed(plan, folder, kind, **how)
    found = torch.load(Path(job.temporary) / "end.pt")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert ends(done)[0].split()[1] == digest(expected)
    drawn = {index for step in plan for samples in step for index in samples}
    assert drawn == set(range(SAMPLES)) and sum(map(len, itertools.chain(*plan))) >= SAMPLES * EPOCHS
    return plan


def test_a_death_within_a_step_loses_no_row(job: Job, tmp_path: Path) -> None:
    done = run(job, "1:2", FAULTS=json.dumps({"1/4/backward": KILL}))
    plan = assert_as_planned(job, done, 1, tmp_path)
    assert [len(step) for step in plan[:6]] == [2, 2, 2, 2, 1, 1]


@pytest.mark.long
@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("place", ["forward", "fetched", "backward", "holding", "released"])
def test_wherever_in_a_step_a_rank_dies(place: str, slot: int, job: Job, tmp_path: Path) -> None:
    done = run(job, "2:3", FAULTS=json.dumps({f"{slot}/4/{place}": KILL}))
    if place == "holding":  # the others use its share if all of them hold the results, too
        told = replayed(plan_of(done, "applied|perhaps"), tmp_path / "with", "adagrad")
        if ends(done)[0].split()[1] == digest(told):
            return
    plan = assert_as_planned(job, done, 2, tmp_path)
    assert [len(plan[3]), len(plan[5])] == [3, 2]


@pytest.mark.long
@pytest.mark.parametrize("dealing", ["modulo", "blocks"])
@pytest.mark.parametrize("kind", ["momentum", "adam", "two"])
def test_with_any_optimizer(kind: str, dealing: str, job: Job, tmp_path: Path) -> None:
    faults = {"1/3/backward": KILL, "0/6/released": KILL}
    done = run(job, "2:4", kind, DEALING=dealing, FAULTS=json.dumps(faults))
    assert_as_planned(job, done, 2, tmp_path, kind, dealing=dealing)


@pytest.mark.long
@pytest.mark.parametrize("storage", ["memory", "file"])
def test_a_rank_that_joins_takes_rows_over(storage: str, job: Job, tmp_path: Path) -> None:
    done = run(job, "2:3", pause="1", STORAGE=storage, JOINED="3", FAULTS=json.dumps({"1/4/backward": KILL}))
    plan = assert_as_planned(job, done, 3, tmp_path)
    assert [len(plan[3]), len(plan[5]), len(plan[-1])] == [3, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize(
    "others", [{"2/4/holding": LOSE}, {"0/4/holding": LOSE, "2/4/backward": "time.sleep(0.5)"}], ids=str
)
def test_sums_that_not_all_hold_are_made_again(others: dict[str, str], job: Job, tmp_path: Path) -> None:
    done = run(job, "2:3", FAULTS=json.dumps({"1/4/backward": KILL, **others}))
    assert_as_planned(job, done, 2, tmp_path)


@pytest.mark.long
def test_a_norm_is_that_of_each_row_once(job: Job, tmp_path: Path) -> None:
    """A rank dies before the norm is known: the others count its rows, whose gradients they have."""
    done = run(job, "2:3", "clipped", FAULTS=json.dumps({"1/4/released": KILL}))
    expected = replayed(plan_of(done), tmp_path, "clipped")
    found = torch.load(Path(job.temporary) / "end.pt")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    unclipped = replayed(plan_of(done), tmp_path / "other", "momentum")
    assert not torch.allclose(unclipped["weight"], expected["weight"], rtol=1e-3)


@pytest.mark.long
def test_a_host_that_is_lost_loses_no_row(network: HostNetwork, tmp_path: Path) -> None:
    """Both ranks of a host die at once: on one host they would keep a part alone."""
    python = python_with("tcp")
    variables = {"TMPDIR": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)), "KIND": "adagrad"}
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", "2:4"]
    line += ["--blacklist-cooldown-range", "60", "60", "-H", "node-a:2,node-b:2", python, str(SCRIPT)]
    faults = {f"{slot}/4/backward": KILL for slot in (2, 3)}
    environment = rank_environment(OMP_NUM_THREADS="1", FAULTS=json.dumps(faults), **variables)
    done = network["node-a"].run(*line, env=environment, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = plan_of(done)
    assert [len(plan[3]), len(plan[5])] == [4, 2] and len(set(ends(done))) == 1 and len(ends(done)) == 2


@pytest.mark.long
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize(
    "ranks, replicas, slots, words",
    [
        ("2:4", "2", (2, 3), "rows 2 to 22 in steps of 4 (of former rank 2 and 3)"),
        ("1:3", "1", (1,), "rows 1 to 22 in steps of 3 (of former rank 1)"),
    ],
    ids=["both keepers", "one copy"],
)
def test_lost_rows_are_named_on_all_ranks_alike(
    ranks: str, replicas: str, slots: tuple, words: str, place: str, job: Job
) -> None:
    faults = {f"{slot}/4/{place}": KILL for slot in slots}
    done = run(job, ranks, code=137, REPLICAS=replicas, FAULTS=json.dumps(faults))
    told = re.findall(r"^\[\d+\] raised (\d) 4 RowsLostError (.*)$", done.stdout, re.MULTILINE)
    assert sorted(slot for slot, _ in told) == ["0", "1" if slots == (2, 3) else "2"], done.stdout + done.stderr
    assert len({text for _, text in told}) == 1 and words in told[0][1], told


@pytest.mark.long
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_lost_rows_come_from_a_checkpoint(place: str, job: Job, tmp_path: Path) -> None:
    """It was written right before the step, so that nothing is behind."""
    saved = tmp_path / "saved"
    saved.mkdir()
    variables = {"SAVED_AT": "4", "SAVED_IN": str(saved), "LOST_FROM": str(saved), "REPLICAS": "1"}
    done = run(job, "2:3", FAULTS=json.dumps({f"1/4/{place}": KILL}), **variables)
    plan = assert_as_planned(job, done, 2, tmp_path)
    assert [len(plan[3]), len(plan[5])] == [3, 2] and done.stdout.count("RowsLostError") == 2


@pytest.mark.long
def test_a_job_begins_with_saved_tables(job: Job, tmp_path: Path) -> None:
    """Of another number of ranks, with what the optimizer keeps; a rank that joins reads what the others have learnt."""
    first = tmp_path / "first"
    first.mkdir()

    def on_rank(rank: int) -> None:
        learner = Learner("adagrad")
        _, ids, y = torch.utils.data.default_collate([Data()[index] for index in range(4 * rank, 4 * rank + 4)])
        learner.train_on(ids, y)
        hvd.save_tables(first, learner.model, learner.optimizer)

    with World(2) as world:
        world.run(on_rank)
    faults = json.dumps({"1/4/backward": KILL})
    done = run(job, "2:3", pause="1", JOINED="3", ROWS_FROM=str(first), FAULTS=faults)
    assert_as_planned(job, done, 3, tmp_path, first=first)


@pytest.mark.long
def test_a_job_goes_on_from_its_files_with_another_number_of_ranks(job: Job, tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    faults = json.dumps({f"{slot}/7/forward": KILL for slot in range(3)})
    first = run(job, "3:3", code=137, SAVES=str(saves), FAULTS=faults)
    second = run(job, "2:2", SAVES=str(saves))
    begun = [line for line in first.stdout.splitlines() if re.match(r"\[\d+\] applied [0-5] ", line)]
    both = subprocess.CompletedProcess([], 0, "\n".join([*begun, second.stdout]), second.stderr)
    plan = assert_as_planned(job, both, 2, tmp_path)
    assert [len(step) for step in plan[:8]] == [3] * 6 + [2] * 2


@pytest.mark.long
@pytest.mark.parametrize("slot", [0, 2])
def test_a_death_while_rows_are_written_spoils_no_file(slot: int, job: Job, tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()
    done = run(job, "2:3", SAVES=str(saves), FAULTS=json.dumps({f"{slot}/6/saving": KILL}))
    assert_as_planned(job, done, 2, tmp_path)
    written = sorted(path.name for path in saves.iterdir() if path.suffix == ".pt")
    folders = [torch.load(saves / name, weights_only=True)["sharded embeddings"] for name in written]
    assert len(written) == 2 and sorted(path.name for path in saves.iterdir()) == sorted([*written, *folders])
    for folder in folders:
        assert hvd.plain_weight(saves / folder, "model.0").shape[0] == elastic_tables.ROWS


def assert_committed(
    job: Job, done: subprocess.CompletedProcess, ranks: int, folder: Path, kind: str = "adagrad"
) -> list[int]:
    """As ``assert_as_planned`` under ``elastic.run``; the ranks of each step, as it was done last."""
    sizes: dict[int, int] = {}
    for step, size in re.findall(r"^\[\d+\] attempt (\d+) (\d+)$", done.stdout, re.MULTILINE):
        sizes[int(step)] = min(int(size), sizes.get(int(step), 99))
    assert sorted(sizes) == list(range(COMMITS)), sizes
    plan = [[samples_of(step, size, rank) for rank in range(size)] for step, size in sorted(sizes.items())]
    assert len(set(ends(done))) == 1 and len(ends(done)) == ranks, done.stdout + done.stderr
    expected = replayed(plan, folder, kind)
    found = torch.load(Path(job.temporary) / "end.pt")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    return [sizes[step] for step in range(COMMITS)]


@pytest.mark.long
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("place", ["forward", "fetched", "backward", "released", "stepped", "copied", "committed"])
def test_under_elastic_run_no_row_is_lost_wherever_a_rank_dies(place: str, slot: int, job: Job, tmp_path: Path) -> None:
    """Steps are done again from the last commit, each in the commit of all or of none."""
    done = run(job, "2:3", COMMITS="1", FAULTS=json.dumps({f"{slot}/4/{place}": KILL}))
    sizes = assert_committed(job, done, 2, tmp_path)
    assert sizes[:3] == [3, 3, 3] and sizes[4:] == [2] * (COMMITS - 4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["momentum", "adam", "two"])
def test_under_elastic_run_with_any_optimizer(kind: str, job: Job, tmp_path: Path) -> None:
    faults = {"1/3/backward": KILL, "0/6/released": KILL}
    done = run(job, "2:4", kind, COMMITS="1", FAULTS=json.dumps(faults))
    assert_committed(job, done, 2, tmp_path, kind)


HALF = {"1/4/copied": KILL, "0/4/copied": LOSE}  # rank 0 does not know that all have copied their rows


@pytest.mark.long
def test_a_commit_that_rank_0_has_not_made_is_nobodys(job: Job, tmp_path: Path) -> None:
    sizes = assert_committed(job, run(job, "2:4", COMMITS="1", FAULTS=json.dumps(HALF)), 3, tmp_path)
    assert sizes == [4] * 3 + [3] * (COMMITS - 3)


@pytest.mark.long
@pytest.mark.parametrize(
    "planted, faults",
    [
        ("committed_rows.CommittedRows.restore = lambda self: None", {"1/4/stepped": KILL}),
        ("committed_rows.copied = lambda table: lambda: None", {"1/4/stepped": KILL}),
        (
            "committed_rows.CommittedRows._go_back_to = lambda self, number: self._commits[-1].go_back[0]()",
            HALF,
        ),
    ],
    ids=["rows stay as they are", "nothing is copied", "each goes back to its own last one"],
)
def test_faults_of_commits_are_found(planted: str, faults: dict, job: Job, tmp_path: Path) -> None:
    try:
        done = run(job, "2:4", COMMITS="1", PLANTED_IN_TABLES=planted, FAULTS=json.dumps(faults))
        assert_committed(job, done, 3, tmp_path)
    except AssertionError:
        return
    pytest.fail("not found")


@pytest.mark.long
@pytest.mark.parametrize(
    "planted",
    [
        "row_gradients.with_copies = lambda layouts, rank, sums, name: list(sums)",
        "row_gradients.RowGradients.take_back = row_gradients.RowGradients.forget",
        "embedding.ShardedEmbedding.lines = lambda table, gradients=True: {}",
    ],
    ids=["second copies do not learn", "gradients are not sent again", "what the optimizer keeps stays behind"],
)
def test_faults_of_the_product_are_found(planted: str, job: Job, tmp_path: Path) -> None:
    try:
        done = run(job, "2:3", PLANTED_IN_TABLES=planted, FAULTS=json.dumps({"1/4/backward": KILL}))
        assert_as_planned(job, done, 2, tmp_path)
    except AssertionError:
        return
    pytest.fail("not found")
