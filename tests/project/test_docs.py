"""The programs in the documentation run as they stand there: on two ranks, block after block."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from environments import python_with_trainers, rank_environment

import ringtrain.torch
from ringtrain._binding import tables
from ringtrain.testing import World

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PATIENCE = 400.0  # seconds; only a program that hangs, or a machine that does, takes so long

pytestmark = pytest.mark.timeout(PATIENCE + 20)


def blocks(name: str, language: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def run_on_two_ranks(*programs: str, page: str) -> list[dict]:
    """Runs programs one after the other in one namespace, which is returned for each rank."""
    codes = [compile(program, page, "exec") for program in programs]

    def on_rank(rank: int) -> dict:
        namespace: dict = {"__name__": "__main__"}
        for code in codes:
            exec(code, namespace)
        return namespace

    with World(2) as world:
        return world.run(on_rank)


def assert_replicas_equal(first: dict, second: dict) -> None:
    for mine, theirs in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where its checkpoint is
    rates = "rates = [base_rate * hvd.size() * warm_up(update) for update in (0, 250, 500, 10_000)]"
    first, second = run_on_two_ranks(*blocks("training.md", "python"), rates, page="training.md")
    assert_replicas_equal(first, second)
    assert first["step"] == second["step"] == 14 and first["seen"] == 100 and first["accuracy"] == second["accuracy"]
    assert first["rates"] == pytest.approx([0.01, 0.015, 0.02, 0.02])
    assert first["schedule"].last_epoch == 14  # 2 epochs of 7 updates
    assert first["sampler"].epoch == 2 and [each.name for each in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_validation():
    """The figures are those of one process that sees all samples at once, on both ranks."""
    ranks = run_on_two_ranks(*blocks("validation.md", "python"), page="validation.md")
    model, (x, y) = ranks[0]["model"].eval(), ranks[0]["dataset"].tensors
    with torch.no_grad():
        scores = model(x)
    expected = [torch.nn.functional.cross_entropy(scores, y).item(), (scores.argmax(1) == y).double().mean().item()]
    for rank in ranks:
        assert [rank["loss"], rank["accuracy"]] == pytest.approx(expected, rel=1e-5)
    assert [len(rank["sampler"]) for rank in ranks] == [52, 51]


def test_one_process():
    program, _ = blocks("one-process.md", "python")
    first, second = run_on_two_ranks(program, page="one-process.md")
    assert_replicas_equal(first, second)
    assert 0 <= first["difference"] < 1e-14


def test_what_one_process_would_not_compute_is_found():
    """The page's program with a loss that is a sum, as one of its reasons has it."""
    program = blocks("one-process.md", "python")[0].replace("model(x), y)", 'model(x), y, reduction="sum")')
    with pytest.raises(AssertionError, match="more than rounding"):
        run_on_two_ranks(program, page="one-process.md")


def test_ranks_and_threads(capsys):
    first, _ = run_on_two_ranks(*blocks("ranks-and-threads.md", "python"), page="ranks-and-threads.md")
    assert first["batch"] == 128 and re.search(r"2 ranks x \d+ threads: \d+ samples a second", capsys.readouterr().out)


def test_unequal_machines() -> None:
    whole, bounds, by_cost = blocks("unequal-machines.md", "python")
    first, second = run_on_two_ranks(whole, bounds, page="unequal-machines.md")
    assert_replicas_equal(first, second)
    assert first["state"].epoch == 2
    with World(1) as world:  # where a rank shares a batch with nobody; with others it wants a constant batch
        world.run(lambda _: exec(by_cost, {"hvd": ringtrain.torch, "data": first["data"]}))


def test_unequal_batches() -> None:
    programs = blocks("unequal-batches.md", "python")
    first, second = run_on_two_ranks(*programs, page="unequal-batches.md")
    for mine, theirs in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    losses = "found = loss_of(torch.ones(3 + hvd.rank()), torch.tensor(3.0 + hvd.rank())).item()"
    first, second = run_on_two_ranks(*programs, losses, page="unequal-batches.md")
    assert (first["found"], second["found"]) == pytest.approx((6 / 7, 8 / 7))


def test_accumulation():
    first, second = run_on_two_ranks(*blocks("accumulation.md", "python"), page="accumulation.md")
    assert_replicas_equal(first, second)
    # Not all counters: threads may still wake, and answer for the step before. benchmarks accumulation counts those bytes.
    silent = ("operations", "batches", "bytes", "cache_hits", "cache_misses", "shared_bytes", "wire_bytes_sent")
    for rank in (first, second):
        assert all(rank["before"][name] == rank["quiet"][name] for name in silent)
        assert rank["before"]["operations"] > 0
        assert rank["number"] == 10


def test_modes():
    first, _ = run_on_two_ranks(*blocks("modes.md", "python"), page="modes.md")
    assert first["optimizer"].mode.every == 8


def test_one_step_late():
    first, second = run_on_two_ranks(*blocks("one-step-late.md", "python"), page="one-step-late.md")
    assert_replicas_equal(first, second)


def test_local_steps():
    with_torch, with_numpy = blocks("local-steps.md", "python")
    first, second = run_on_two_ranks(with_torch, page="local-steps.md")
    assert_replicas_equal(first, second)
    first, second = run_on_two_ranks(with_numpy, page="local-steps.md")
    assert first["weights"].tobytes() == second["weights"].tobytes()
    assert abs(first["weights"] - first["target"]).max() < 0.5


def test_local_steps_whose_fragments_travel():
    first, second = run_on_two_ranks(*blocks("local-steps-fragments.md", "python"), page="local-steps-fragments.md")
    assert np.concatenate(first["layers"]).tobytes() == np.concatenate(second["layers"]).tobytes()
    assert 0.2 < np.concatenate(first["layers"]).mean() < 2.0


def versions(diff: str) -> tuple[str, str]:
    """The program before and after a diff."""
    lines = diff.splitlines()
    assert all(line[:1] in "+- " for line in lines)
    before, after = (
        "".join(line[1:] + "\n" for line in lines if not line.startswith(other)) for other in "+-"
    )  # fmt: skip
    return before, after


@pytest.mark.parametrize("page", ["migrate-from-horovod.md", "migrate-from-ddp.md"])
def test_migration(page):
    program, commands = blocks(page, "diff")
    before, after = versions(program)
    compile(before, page, "exec")
    first, second = run_on_two_ranks(after, page=page)
    assert_replicas_equal(first, second)
    assert versions(commands)[1].startswith("ringtrainrun -np 16")


def test_variables_of_horovod_that_are_read_are_those_of_the_options():
    section = (DOCS / "migrate-from-horovod.md").read_text().split("\n## Variables\n")[1].split("\n## ")[0]
    read, ignored = section.split("All others are ignored")
    rows = dict(re.findall(r"^\| `(HOROVOD_\w+)` \| `(\w+)`", read, re.MULTILINE))
    assert rows == {option.horovod: option.name for option in tables.OPTIONS if option.horovod}
    assert "HOROVOD_STALL_CHECK_DISABLE" in ignored
    assert not set(re.findall(r"HOROVOD_\w+", ignored)) & rows.keys()


def test_what_ddp_users_come_from_is_a_program():
    """In a process that ends at once: gloo's threads and whoever lets go of a process group may wait for each other for ever."""
    before, _ = versions(blocks("migrate-from-ddp.md", "diff")[0])
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }  # 0: any
    program = f"{before}\nos._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(os.environ, **place), capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr.decode()


def of_observability(part: str) -> list[str]:
    """The beginning of that page's programs, and the one that has this in it."""
    programs = blocks("observability.md", "python")
    (found,) = [program for program in programs if part in program]
    return [programs[1], found]


def test_observability(tmp_path, monkeypatch, capsys):
    """Without a library of others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEXTFILE_FOLDER", str(tmp_path))
    run_on_two_ranks(blocks("observability.md", "python")[0], page="observability.md")
    assert capsys.readouterr().out.splitlines()[1].startswith("allreduce  256 KiB     20  7.629 MiB")
    run_on_two_ranks(*of_observability("def write_metrics"), page="observability.md")
    for rank in range(2):
        lines = (tmp_path / f"ringtrain.{rank}.prom").read_text().splitlines()
        assert f'ringtrain_operations_total{{rank="{rank}"}} 0' in lines


def test_timelines(tmp_path, monkeypatch):
    """Of the steps between both calls; a rank's file has its number behind the name."""
    monkeypatch.chdir(tmp_path)
    run_on_two_ranks(*blocks("timelines.md", "python"), page="timelines.md")
    for name in ("trace.json", "trace.json.1"):
        events = json.loads((tmp_path / name).read_text())
        assert len([event for event in events if event["name"] == "ALLREDUCE"]) == 100


def test_observability_prometheus(monkeypatch):
    """On one rank, since a process has one registry."""
    import prometheus_client as client

    monkeypatch.setattr(client, "REGISTRY", client.CollectorRegistry(auto_describe=True))

    def on_rank(rank: int) -> str:
        namespace: dict = {}
        for program in of_observability("prometheus_client"):
            exec(program, namespace)
        namespace["rt"].allreduce(np.ones(3))
        return client.generate_latest(client.REGISTRY).decode()

    with World(1) as world:
        assert 'ringtrain_operations_total{rank="0"} 1.0' in world.run(on_rank)[0]


@pytest.mark.long
@pytest.mark.parametrize(("library", "line", "left"), [
    ("tensorboard", "from torch.utils.tensorboard import SummaryWriter", "runs/events.out.tfevents.*"),
    ("mlflow", "import mlflow", "mlruns/**/ringtrain/bus_bandwidth"),
    ("wandb", "import wandb", "wandb/offline-run-*/*.wandb"),
])  # fmt: skip
def test_observability_in_other_tools(library, line, left, tmp_path):
    """In a process of the environment that has these tools."""
    program = f"import test_docs; test_docs.run_on_two_ranks(*{of_observability(line)}, page='observability.md')"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "project")))
    environment = {
        "PYTHONPATH": paths,
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    done = subprocess.run(
        [python_with_trainers(library), "-c", program], env={**os.environ, **environment}, cwd=tmp_path,
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0 and list(tmp_path.glob(left)), done.stderr


@pytest.mark.long
def test_observability_torch_profiler(tmp_path):
    (tmp_path / "train.py").write_text(of_observability("torch.profiler.profile")[1])
    command = [sys.executable, "-m", "ringtrain.launch", "-np", "2", sys.executable, str(tmp_path / "train.py")]
    environment = dict(os.environ, OMP_NUM_THREADS="1", RINGTRAIN_TRANSPORT="auto")
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr.decode()
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace.{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        assert "ringtrain.end of backward" in {event["name"] for event in trace["traceEvents"]}


@pytest.mark.long
def test_lightning(tmp_path):
    (tmp_path / "train.py").write_text(blocks("lightning.md", "python")[0])
    command = [sys.executable, "-m", "ringtrain.launch", "-np", "2", sys.executable, str(tmp_path / "train.py")]
    environment = dict(os.environ, OMP_NUM_THREADS="1", RINGTRAIN_TRANSPORT="auto")
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr.decode()


JAX_IN_ONE_PROCESS = """
weights = hvd.allgather(parameters["weight"][None])
assert (weights == weights[0]).all() and loss < 0.1
x, y, plain = hvd.allgather(x), hvd.allgather(y), optax.adam(0.1)
state = plain.init(start)
for _ in range(100):
    updates, state = plain.update(jax.grad(loss_of)(start, x, y), state)
    start = optax.apply_updates(start, updates)
assert jnp.allclose(start["weight"], parameters["weight"], atol=1e-4), (start, parameters)
"""


@pytest.mark.long
def test_jax(tmp_path):
    """In processes of their own: ranks as threads would share XLA's threads."""
    program, loop = blocks("jax.md", "python")[0].split("\nfor _ in range(100):")
    (tmp_path / "train.py").write_text(f"{program}\nstart = parameters\nfor _ in range(100):{loop}{JAX_IN_ONE_PROCESS}")
    command = [sys.executable, "-m", "ringtrain.launch", "-np", "2", sys.executable, str(tmp_path / "train.py")]
    environment = dict(os.environ, OMP_NUM_THREADS="1", RINGTRAIN_TRANSPORT="auto")
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.long
@pytest.mark.parametrize("library, place", [("transformers", 0), ("ignite", 1), ("ray", 2), ("pyspark", 3)])
def test_other_trainers(tmp_path, library, place):
    """In the environment that has them all; Ray and Spark start the ranks themselves."""
    python = python_with_trainers(library)
    script = tmp_path / "train.py"
    script.write_text(blocks("other-trainers.md", "python")[place])
    launcher = [] if library in ("ray", "pyspark") else ["-m", "ringtrain.launch", "-np", "2", python]
    ray = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200", "RAY_AUTH_MODE": "disabled"}
    environment = rank_environment(RINGTRAIN_TRANSPORT="auto", PYSPARK_PYTHON=python, **ray)
    done = subprocess.run(
        [python, *launcher, str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["ringtrain.launch", "-np", "2", sys.executable], id="ringtrainrun"),
        pytest.param(["torch.distributed.run", "--nproc-per-node", "2"], id="torchrun", marks=pytest.mark.long),
    ],
)
def test_the_backend_of_torch_distributed(launcher, tmp_path):
    """Under the launcher's and under torchrun, in processes of their own."""
    (tmp_path / "train.py").write_text(blocks("torch-distributed.md", "python")[0])
    command = [sys.executable, "-m", *launcher, str(tmp_path / "train.py")]
    environment = dict(os.environ, OMP_NUM_THREADS="1", RINGTRAIN_TRANSPORT="auto")
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr.decode()
