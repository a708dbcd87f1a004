"""Elastic jobs that lose no step, on real processes: what they learn is what a planned run with the same members learns.

A job prints which samples each rank has brought to each step. The plan is replayed by jobs of a fixed size, each of which
goes on from the state of the one before, and ends with the same bits.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
from environments import python_with, rank_environment, transport_of
from worlds import LAUNCHED

from ringtrain.bench.jobs import Job

pytestmark = [
    pytest.mark.tcp,
    pytest.mark.timeout(180),
    pytest.mark.skipif(LAUNCHED, reason="starts jobs of its own"),
]
SECONDS = 90.0
EPOCHS = 2
SAMPLES = 120
BATCH = 4

# Slot and step of a fault come from the environment, and what strikes; a file tells that it has struck.
PROGRAM = """
    import hashlib, json, os, signal, sys, time
    from pathlib import Path
    import torch
    import ringtrain.torch as hvd

    slot, folder = os.environ.get("RINGTRAIN_RANK", "0"), Path(os.environ["TMPDIR"])
    faults = json.loads(os.environ.get("FAULTS", "{}"))  # statement by "slot/step"
    torch.manual_seed(int(slot))  # the ranks begin with different parameters
    hvd.init()

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return SAMPLES
        def __getitem__(self, index):
            drawn = torch.Generator().manual_seed(index)
            return index, torch.randn(3, generator=drawn), torch.randn(1, generator=drawn)

    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    if slot == "0":
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)

    def fault(place):
        mark = folder / f"struck-{slot}-{state.step}"
        statement = faults.get(f"{slot}/{state.step}/{place}")
        if statement and not mark.exists():
            mark.touch()
            exec(statement)

    model[0].weight.register_hook(lambda gradient: fault("backward"))

    def train_on(indices, x, y):
        rank = hvd.rank()  # within the step others may die, but those that are left keep their order
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        print("applied", state.step, rank, *indices.tolist(), flush=True)
        fault("released")
        optimizer.step()
        schedule.step()

    def end():
        bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        print("end", state.step, hashlib.sha256(bits).hexdigest(), optimizer.param_groups[0]["lr"], flush=True)
"""
TRAINING = """
    sampler = hvd.elastic.ElasticSampler(Data())
    loader = torch.utils.data.DataLoader(Data(), batch_size=BATCH, sampler=sampler)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, schedule=schedule)
    state.on_change(lambda old, new: print("change", old, new, flush=True))
    for epoch in state.epochs(EPOCHS):
        print("epoch", epoch, state.step, hvd.size(), flush=True)
        for indices, x, y in loader:
            train_on(indices, x, y)
            while state.step == 8 and hvd.size() < int(os.environ.get("JOINED", 1)):
                time.sleep(0.05)
                if (Path(os.environ["TMPDIR"]) / "joins").exists():
                    break
    end()
"""
REPLAY = """
    plan = json.loads(Path(os.environ["PLAN"]).read_text())
    saved = folder / "state.pt"
    state = type("State", (), {"step": 0})
    if saved.exists():
        kept = torch.load(saved)
        state.step = kept["step"]
        for name, value in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
            value.load_state_dict(kept[name])
    else:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in plan:
        samples = [Data()[index] for index in step[hvd.rank()]]
        indices, x, y = torch.utils.data.default_collate(samples)
        train_on(indices, x, y)
        state.step += 1
    if hvd.rank() == 0:
        torch.save({"step": state.step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict()}, saved)
    end()
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def run(job: Job, *flags: str, program: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs a program under the launcher; a slot gets a rank again after a second."""
    python = python_with("tcp")
    cooldown = (
        ["--blacklist-cooldown-range", "1", "1"]
        if "--elastic" in flags and "--blacklist-cooldown-range" not in flags
        else []
    )
    constants = f"SAMPLES, BATCH, EPOCHS = {SAMPLES}, {BATCH}, {EPOCHS}\n"
    source = constants + textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), *cooldown, *flags, python, "-c", source]
    done = job.run(*line, seconds=SECONDS, env=rank_environment(OMP_NUM_THREADS="1", **variables))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def applied(done: subprocess.CompletedProcess) -> list[list[list[int]]]:
    """By step and rank, the samples; each step once by each rank."""
    steps: dict[int, dict[int, list[int]]] = {}
    for line in re.findall(r"^\[\d+\] applied (.*)$", done.stdout, re.MULTILINE):
        step, rank, *indices = map(int, line.split())
        by_rank = steps.setdefault(step, {})
        assert rank not in by_rank, f"step {step} twice on rank {rank}"
        by_rank[rank] = indices
    assert sorted(steps) == list(range(len(steps))), sorted(steps)
    return [[by_rank[rank] for rank in sorted(by_rank)] for _, by_rank in sorted(steps.items())]


def ends(done: subprocess.CompletedProcess) -> list[str]:
    """The last word of each rank: steps, bits of the parameters, learning rate."""
    return re.findall(r"^\[\d+\] end (.*)$", done.stdout, re.MULTILINE)


def replayed(job: Job, plan: list[list[list[int]]], folder: Path) -> str:
    """The end of a run whose members were planned so."""
    for number, (size, steps) in enumerate(itertools.groupby(plan, key=len)):
        place = folder / f"plan-{number}.json"
        place.write_text(json.dumps(list(steps)))
        done = run(job, "-np", str(size), program=REPLAY, PLAN=str(place))
    (end,) = set(ends(done))
    return end


def assert_as_planned(job: Job, done: subprocess.CompletedProcess, ranks: int, folder: Path) -> list[list[list[int]]]:
    """All ranks that came to the end have the bits of the planned run, and each sample was in one step of an epoch."""
    plan = applied(done)
    assert len(set(ends(done))) == 1 and len(ends(done)) == ranks, done.stdout + done.stderr
    assert ends(done)[0] == replayed(job, plan, folder)
    drawn = sorted(index for step in plan for samples in step for index in samples)
    assert drawn == sorted([*range(SAMPLES)] * EPOCHS)
    return plan


def test_a_death_within_a_step_costs_no_step(job: Job, tmp_path: Path) -> None:
    """The others have submitted their gradients; the step is done with theirs, and the lost samples come again."""
    done = run(job, "--elastic", "-np", "2:3", program=TRAINING, FAULTS=json.dumps({"1/4/backward": KILL}))
    plan = assert_as_planned(job, done, 2, tmp_path)
    assert [len(step) for step in plan[:6]] == [3, 3, 3, 3, 2, 2]
    assert done.stdout.count("change 3 2") == 2
    assert "WorldChangedError" not in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "faults",
    [
        {"0/4/backward": KILL},
        {"2/0/backward": KILL},
        {"1/4/released": KILL},
        {"0/7/released": KILL},
        {"1/4/backward": "raise ValueError('the data is broken')"},
        {"1/4/backward": "os._exit(3)"},
        {"1/4/backward": "time.sleep(1.0)", "2/4/backward": KILL},
        {"0/3/backward": KILL, "2/3/backward": KILL},
        {"0/3/backward": KILL, "1/3/released": KILL},
        {"2/3/backward": KILL, "1/4/backward": KILL},
        {"0/9/backward": KILL},
        {"1/10/released": KILL},
    ],
    ids=lambda faults: " ".join(faults),
)
def test_whoever_dies_wherever(faults: dict[str, str], job: Job, tmp_path: Path) -> None:
    """Also the rank that holds the lead, in the first and the last step of an epoch, and several."""
    done = run(
        job,
        "--elastic",
        "-np",
        "1:3",
        "--blacklist-cooldown-range",
        "60",
        "60",
        program=TRAINING,
        FAULTS=json.dumps(faults),
    )
    lost = {fault.split("/")[0] for fault, statement in faults.items() if "sleep" not in statement}
    assert_as_planned(job, done, 3 - len(lost), tmp_path)
