"""Elastic jobs that lose no step, on real processes: what they learn is what a planned run with the same members learns.

A job prints which samples each rank has brought to each step. The plan is replayed in worlds of a fixed size, each of which
goes on from the state of the one before, and ends with the same bits. Ranks of a replay are threads of the test: nobody dies
there, and bits depend on tensors and world alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import textwrap
import threading
import time
from pathlib import Path

import pytest
from environments import python_with, rank_environment, transport_of

from benchmarks.jobs import Job
from ringtrain.testing import World

pytestmark = [
    pytest.mark.tcp,
]
SECONDS = 90.0
EPOCHS = 2
SAMPLES = 120
BATCH = 4
CONSTANTS = f"SAMPLES, BATCH, EPOCHS = {SAMPLES}, {BATCH}, {EPOCHS}\n"

# Slot and step of a fault come from the environment, and what strikes; a file tells that it has struck.
PLACE = """
    import json, os
    from pathlib import Path
    slot, folder = os.environ.get("RINGTRAIN_RANK", "0"), Path(os.environ["TMPDIR"])
    faults = json.loads(os.environ.get("FAULTS", "{}"))  # statement by "slot/step"
    weighs = os.environ.get("WEIGHS", "")  # "items" of each pass, or "samples" of each step
"""
PROGRAM = """
    import hashlib, json, os, signal, sys, time
    from pathlib import Path
    import torch
    import ringtrain.torch as hvd
    from ringtrain._bootstrap import membership
    from ringtrain.elastic.transaction import Transaction
    from ringtrain.errors import PeerLostError
    from ringtrain.torch.bursts import Bursts
    from ringtrain.torch.gradients import Group

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
    op = hvd.PerItem if weighs == "items" else hvd.Average
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)

    def fault(place):
        mark = folder / f"struck-{slot}-{state.step}"
        statement = faults.get(f"{slot}/{state.step}/{place}")
        if statement and not mark.exists():
            mark.touch()
            exec(statement)

    model[0].weight.register_hook(lambda gradient: fault("backward"))
    (folder / f"pid-{slot}").write_text(str(os.getpid()))
    hold = Group.hold

    def hold_or_fail(group):
        problem = hold(group)
        fault("holding")
        return problem

    if faults:
        Group.hold = hold_or_fail
    exec(os.environ.get("PLANTED", ""))

    def train_on(indices, x, y):
        rank = hvd.rank()  # within the step others may die, but those that are left keep their order
        optimizer.zero_grad()
        loss, weight = (model(x) - y).square().mean(), 1 + int(indices.sum()) % 3
        if weighs == "items":
            optimizer.count(weight)
            loss = loss * weight
        elif weighs == "samples":
            optimizer.count_samples(weight)
        loss.backward()
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
    loader = torch.utils.data.DataLoader(Data(), BATCH, sampler=sampler, **json.loads(os.environ.get("LOADER", "{}")))
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, schedule=schedule)
    state.on_change(lambda old, new: print("change", old, new, flush=True))
    for epoch in state.epochs(EPOCHS):
        print("epoch", epoch, state.step, hvd.size(), flush=True)
        for indices, x, y in loader:
            while state.step == 9 and hvd.size() < int(os.environ.get("JOINED", 1)):
                if membership.current().wants_pause:  # the rank that joins is there
                    break
                time.sleep(0.02)
            train_on(indices, x, y)
    end()
"""
REPLAY = """
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
LATER = "--blacklist-cooldown-range", "60", "60"  # no rank comes back within the test


def run(job: Job, *flags: str, program: str, code: int | None = 0, **variables: str) -> subprocess.CompletedProcess:
    """Runs a program under the launcher, which ends with a code, None for any; a slot gets a rank again after a second."""
    python = python_with("tcp")
    cooldown = (
        ["--blacklist-cooldown-range", "1", "1"]
        if "--elastic" in flags and "--blacklist-cooldown-range" not in flags
        else []
    )
    source = CONSTANTS + textwrap.dedent(PLACE) + textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), *cooldown, *flags, python, "-c", source]
    done = job.run(*line, seconds=SECONDS, env=rank_environment(OMP_NUM_THREADS="1", **variables))
    assert code in (None, done.returncode), done.stdout + done.stderr
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


def replayed(plan: list[list[list[int]]], folder: Path, weighs: str = "") -> str:
    """The end of a run whose members were planned so."""
    code = compile(CONSTANTS + textwrap.dedent(PROGRAM) + textwrap.dedent(REPLAY), "replay", "exec")

    def end_of(rank: int, steps: list[list[list[int]]]) -> str:
        said: list[str] = []
        given = {"slot": str(rank), "folder": folder, "faults": {}, "plan": steps, "weighs": weighs}
        exec(code, {**given, "print": lambda *words, **_: said.append(" ".join(map(str, words)))})
        return said[-1].removeprefix("end ")

    for size, steps in itertools.groupby(plan, key=len):
        with World(size) as world:
            ends = set(world.run(end_of, list(steps)))
    (end,) = ends
    return end


def assert_as_planned(
    job: Job, done: subprocess.CompletedProcess, ranks: int, folder: Path, weighs: str = ""
) -> list[list[list[int]]]:
    """All ranks that came to the end have the bits of the planned run, and each sample was in one step of an epoch."""
    plan = applied(done)
    assert len(set(ends(done))) == 1 and len(ends(done)) == ranks, done.stdout + done.stderr
    assert ends(done)[0] == replayed(plan, folder, weighs)
    drawn = sorted(index for step in plan for samples in step for index in samples)
    assert drawn == sorted([*range(SAMPLES)] * EPOCHS)
    return plan


WORKERS = {"num_workers": 2}


# A number that all ranks have behind each epoch, as the loss of a validation.
MEASURED = TRAINING.replace(
    "    end()\n",
    '        fault("metric")\n        state.survive(lambda: hvd.allreduce(torch.ones(1), name="metric"))\n    end()\n',
)


REFUSED = """
    from ringtrain.errors import RingtrainError

    def try_state(optimizer):
        try:
            hvd.elastic.State(model=model, optimizer=optimizer)
        except RingtrainError as problem:
            print("refused", type(problem).__name__, problem, flush=True)
        else:
            print("taken", flush=True)

    def another(**settings):
        layer = torch.nn.Linear(1, 1)
        return hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters(), **settings)

    second = another()
    try_state(optimizer)
    del second
    try_state(another(mode=hvd.OneStepLate()))
    try_state(another(mode=hvd.LocalSteps(every=2)))
    try_state(another(process_set=hvd.add_process_set([0, 1])))
    try_state(optimizer)
"""


@pytest.mark.long
def test_what_would_not_go_on_in_another_world_is_refused(job: Job) -> None:
    """Before the training begins; an optimizer that is in use no more does not count."""
    said = re.findall(
        r"^\[1\] (refused \w+|taken)(.*)$", run(job, "--elastic", "-np", "2", program=REFUSED).stdout, re.M
    )
    assert [kind for kind, _ in said] == ["refused InvalidArgumentError", *["refused UnsupportedError"] * 3, "taken"]
    assert "all optimizers from DistributedOptimizer in this process but found 1 more" in said[0][1]
    modes = ("OneStepLate", "LocalSteps")
    assert all(f"{mode} cannot be used with" in words for mode, (_, words) in zip(modes, said[1:3], strict=True))
    assert "with elastic.State all ranks must take part" in said[3][1]


@pytest.mark.parametrize("loader", [{}, pytest.param(WORKERS, marks=pytest.mark.long)], ids=["", "workers"])
def test_a_death_within_a_step_costs_no_step(loader: dict, job: Job, tmp_path: Path) -> None:
    """The others have submitted their gradients; the step is done with theirs, and the lost samples come again."""
    faults = json.dumps({"1/4/backward": KILL})
    done = run(job, "--elastic", "-np", "2:3", program=TRAINING, FAULTS=faults, LOADER=json.dumps(loader))
    plan = assert_as_planned(job, done, 2, tmp_path)
    assert [len(step) for step in plan[:6]] == [3, 3, 3, 3, 2, 2]
    assert done.stdout.count("change 3 2") == 2
    assert "WorldChangedError" not in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("weighs", ["items", "samples"])
def test_after_a_death_a_step_weighs_what_those_count_who_are_left(weighs: str, job: Job, tmp_path: Path) -> None:
    faults = json.dumps({"1/4/backward": KILL})
    done = run(job, "--elastic", "-np", "1:3", *LATER, program=TRAINING, FAULTS=faults, WEIGHS=weighs)
    assert_as_planned(job, done, 2, tmp_path, weighs)


@pytest.mark.long  # what it costs the others is that of a death, above; test_stalls has the words
def test_a_rank_that_stands_still_takes_nobody_along(job: Job) -> None:
    """The others hear nothing of it, and of each other in the next world, where the ranks have other numbers."""
    stopped = {"2/4/backward": "os.kill(os.getpid(), signal.SIGSTOP)"}
    silence = {"RINGTRAIN_DEAD_AFTER_SECONDS": "2"}
    done = run(job, "--elastic", "-np", "2:4", *LATER, program=TRAINING, FAULTS=json.dumps(stopped), **silence)
    assert re.findall(r"slot (\d) .* was evicted", done.stderr) == ["2"], done.stderr
    plan = applied(done)
    assert {len(step) for step in plan[:4]} == {4} and {len(step) for step in plan[4:]} == {3}
    assert len(ends(done)) == 3 and len(set(ends(done))) == 1


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
@pytest.mark.parametrize("loader", [{}, WORKERS], ids=["", "workers"])
def test_whoever_dies_wherever(loader: dict, faults: dict[str, str], job: Job, tmp_path: Path) -> None:
    """Also the rank that holds the lead, in the first and the last step of an epoch, and several."""
    done = run(
        job,
        "--elastic",
        "-np",
        "1:3",
        *LATER,
        program=TRAINING,
        FAULTS=json.dumps(faults),
        LOADER=json.dumps(loader),
    )
    lost = {fault.split("/")[0] for fault, statement in faults.items() if "sleep" not in statement}
    assert_as_planned(job, done, 3 - len(lost), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_behind_an_epoch_costs_no_sample_of_the_next(victim: int, job: Job, tmp_path: Path) -> None:
    """The others notice it in an operation of their own, and the next epoch has each sample once, too."""
    faults = json.dumps({f"{victim}/10/metric": KILL})
    done = run(job, "--elastic", "-np", "1:3", *LATER, program=MEASURED, FAULTS=faults)
    plan = assert_as_planned(job, done, 2, tmp_path)
    assert [len(step) for step in plan] == [3] * 10 + [2] * 15


def test_a_death_behind_an_epoch_is_told_before_the_next_begins(job: Job) -> None:
    faults = json.dumps({"1/10/metric": KILL})
    done = run(job, "--elastic", "-np", "1:3", *LATER, program=MEASURED, FAULTS=faults)
    for slot in (0, 2):
        said = re.findall(rf"^\[{slot}\] (epoch \d|change.*)", done.stdout, re.M)
        assert said == ["epoch 0", "change 3 2", "epoch 1"]


@pytest.mark.long
@pytest.mark.parametrize("loader", [{}, {**WORKERS, "persistent_workers": True}], ids=["", "workers"])
def test_a_rank_that_joins_goes_on_in_the_middle_of_the_epoch(loader: dict, job: Job, tmp_path: Path) -> None:
    """It has the parameters, the momentum and the schedule of the others, and its share of what is left."""
    faults = json.dumps({"1/4/backward": KILL})
    done = run(job, "--elastic", "-np", "2:3", program=TRAINING, FAULTS=faults, JOINED="3", LOADER=json.dumps(loader))
    plan = assert_as_planned(job, done, 3, tmp_path)
    assert [len(step) for step in plan] == [3] * 4 + [2] * 6 + [3] * (len(plan) - 10)
    assert "[1] epoch 0 10 3" in done.stdout
    assert (done.stdout.count("change 3 2"), done.stdout.count("change 2 3")) == (2, 3)  # the one that joins, too


@pytest.mark.long
def test_below_the_minimum_a_step_waits_for_the_rank_that_comes(job: Job, tmp_path: Path) -> None:
    """The launcher says so once; the step that was begun is done by the rank that has waited, and no step is lost."""
    done = run(job, "--elastic", "-np", "2", program=TRAINING, FAULTS=json.dumps({"1/4/backward": KILL}))
    plan = assert_as_planned(job, done, 2, tmp_path)
    assert [len(step) for step in plan] == [2] * 4 + [1] + [2] * (len(plan) - 5)
    assert done.stderr.count("A world must have 2 ranks, but 1 is left.") == 1, done.stderr


# Rank 2 loses the results of step 4 and has rank 1 killed, while rank 0 holds them.
PART = {
    "2/4/holding": "os.kill(int((folder / 'pid-1').read_text()), signal.SIGKILL); raise PeerLostError('in the test')"
}


@pytest.mark.long
def test_a_step_that_not_all_hold_is_done_again(job: Job, tmp_path: Path) -> None:
    """What rank 0 held is dropped, and its kept gradients travel again."""
    done = run(job, "--elastic", "-np", "2:3", *LATER, program=TRAINING, FAULTS=json.dumps(PART))
    plan = assert_as_planned(job, done, 2, tmp_path)
    assert [len(step) for step in plan[:6]] == [3, 3, 3, 3, 2, 2]


@pytest.mark.long
def test_a_release_before_all_are_whole_would_be_found(job: Job) -> None:
    """A planted fault: rank 0 uses what rank 2 does not hold. They notice that in the next world."""
    planted = "import ringtrain.elastic.vote as vote; vote.Vote.cast = lambda self, drawn: iter(())"
    done = run(
        job,
        "--elastic",
        "-np",
        "2:3",
        *LATER,
        program=TRAINING,
        code=None,
        FAULTS=json.dumps(PART),
        PLANTED=planted,
    )
    assert "a window was released that not all ranks held" in done.stderr


@pytest.mark.long
def test_inputs_that_are_not_kept_would_be_found(job: Job, tmp_path: Path) -> None:
    """A planted fault: results overwrite the gradients, which then travel as inputs of the same step."""
    planted = "Bursts.keeps_inputs = property(lambda self: False, lambda self, value: None)"
    done = run(job, "--elastic", "-np", "2:3", *LATER, program=TRAINING, FAULTS=json.dumps(PART), PLANTED=planted)
    with pytest.raises(AssertionError):
        assert_as_planned(job, done, 2, tmp_path)


NORMALIZED = """
    from ringtrain.torch.sync_batch_norm import SyncBatchNorm

    layers = [torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)]
    model = SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(*layers, torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    model[2].register_forward_pre_hook(lambda *_: fault("forward"))
    model[0].weight.register_hook(lambda gradient: fault("first"))  # after the hooks and sums of the layers behind it
    model[2].weight.register_hook(lambda gradient: fault("between"))
    model[4].weight.register_hook(lambda gradient: fault("last"))

    def end():
        bits = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
        print("end", state.step, hashlib.sha256(bits).hexdigest(), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("place", ["forward", "last", "between", "first", "released"])
def test_statistics_of_all_ranks_within_a_step_are_done_again(place: str, slot: int, job: Job) -> None:
    """Some layers of that step have them with the rank that dies, and some without; but all ranks the same."""
    faults = json.dumps({f"{slot}/4/{place}": KILL})
    program = textwrap.dedent(NORMALIZED) + textwrap.dedent(TRAINING)
    done = run(job, "--elastic", "-np", "2:3", *LATER, program=program, FAULTS=faults)
    plan = applied(done)
    assert len(ends(done)) == 2 and len(set(ends(done))) == 1, done.stdout + done.stderr
    assert [len(step) for step in plan[:6]] == ([3, 3, 3, 3, 3, 2] if place == "released" else [3, 3, 3, 3, 2, 2])
    drawn = sorted(index for step in plan for samples in step for index in samples)
    assert drawn == sorted([*range(SAMPLES)] * EPOCHS)
    assert "WorldChangedError" not in done.stdout + done.stderr


RANDOM = """
    import hashlib, os, time
    import torch
    import ringtrain.torch as hvd
    steps, slot = int(os.environ["STEPS"]), os.environ.get("RINGTRAIN_RANK", "0")
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.25 if slot == "0" else 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    data = torch.utils.data.TensorDataset(torch.zeros(512, 1))
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=1, sampler=sampler)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
    for epoch in state.epochs(10**9):
        for _ in loader:
            optimizer.zero_grad()
            model(torch.full((4, 1), 0.5)).square().mean().backward()  # the same on all ranks
            optimizer.step()
            print("step", state.step, os.getpid(), hvd.size(), time.monotonic(), flush=True)
            time.sleep(0.01)
            if state.step == steps:
                break
        if state.step == steps:
            break
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("end", state.step, hashlib.sha256(bits).hexdigest(), flush=True)
"""


def trained_alone(steps: int) -> str:
    """The end of RANDOM, by torch alone."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 1), 0.5)).square().mean().backward()
        optimizer.step()
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return f"{steps} {hashlib.sha256(bits).hexdigest()}"


@pytest.mark.long
def test_kills_at_any_moment_cost_no_step(job: Job, tmp_path: Path) -> None:
    """Ranks die at random moments and come back; each rank sees each number of a step once, and the bits are right."""
    python, steps = python_with("tcp"), 6000
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--blacklist-cooldown-range", "1", "1"]
    line += ["--elastic", "-np", "1:3", python, "-c", textwrap.dedent(RANDOM)]
    complaints = tmp_path / "stderr"
    with complaints.open("w") as stderr:
        environment = rank_environment(STEPS=str(steps), OMP_NUM_THREADS="1")
        launcher = job.start(*line, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(launcher.stdout))
    reader.start()
    drawn, pauses = random.Random(11), []
    while len(pauses) < 20 and launcher.poll() is None:
        time.sleep(drawn.uniform(0.3, 1.5))
        ranks = {int(words[3]): int(words[4]) for each in lines[-6:] if (words := each.split())[1:2] == ["step"]}
        if len(ranks) < 2 or set(ranks.values()) != {len(ranks)} or int(lines[-1].split()[2]) > steps - 300:
            if lines and lines[-1].split()[1:2] == ["step"] and int(lines[-1].split()[2]) > steps - 300:
                break
            continue
        victim = drawn.choice(sorted(ranks))
        at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        while launcher.poll() is None and time.monotonic() < at + 20.0:
            later = [words for each in lines[-6:] if (words := each.split())[1:2] == ["step"]]
            found = [float(words[5]) for words in later if int(words[4]) < len(ranks) and float(words[5]) > at]
            if found:
                pauses.append(min(found) - at)
                break
            time.sleep(0.001)
    reader.join(SECONDS * 5)
    assert launcher.wait(SECONDS) == 0, "".join(lines[-30:]) + complaints.read_text()
    found = re.findall(r"^\[\d+\] end (.*)$", "".join(lines), re.MULTILINE)
    assert set(found) == {trained_alone(steps)}, found
    seen = [tuple(each.split()[2:4]) for each in lines if each.split()[1:2] == ["step"]]
    assert len(seen) == len(set(seen))  # no rank makes an update twice
    assert {int(step) for step, _ in seen} == set(range(1, steps + 1))
    pauses.sort()
    print(f"median {pauses[len(pauses) // 2]:.3f} s, worst {pauses[-1]:.3f} s of {len(pauses)}")
    assert pauses[len(pauses) // 2] < 2.0


UNLIKE = """
    if slot == "1" and (folder / "struck-1-4").exists():  # the rank that comes back has another model
        model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        print("other", flush=True)
"""
UNTIL_IT_IS_THERE = """
    def train_on(*batch, train_on=train_on):
        while state.step == 9 and not membership.current().wants_pause:
            time.sleep(0.02)
        train_on(*batch)
"""


@pytest.mark.long
def test_a_rank_that_joins_with_another_model_is_refused_by_name(job: Job, tmp_path: Path) -> None:
    """It ends, with the first difference; the others go on, and lose no step."""
    program = textwrap.dedent(UNLIKE) + textwrap.dedent(UNTIL_IT_IS_THERE) + textwrap.dedent(TRAINING)
    done = run(job, "--elastic", "-np", "2:3", program=program, FAULTS=json.dumps({"1/4/backward": KILL}))
    plan = assert_as_planned(job, done, 2, tmp_path)
    assert [len(step) for step in plan] == [3] * 4 + [2] * (len(plan) - 4)
    assert "[1] other" in done.stdout
    words = (
        "elastic.State: rank 2 must have values of the same names, shapes and dtypes as rank 0, but model.0.weight is "
        "float32 of (6, 3) there, and float32 of (5, 3) on rank 0."
    )
    assert re.search(rf"^\[1\] .*MismatchError: {re.escape(words)}", done.stderr, re.MULTILINE), done.stderr
    assert f"elastic: not let in: {words}" in done.stderr
    assert "The rank in slot 1 of host 'localhost' has ended with exit code 1." in done.stderr
