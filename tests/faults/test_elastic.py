"""Elastic jobs on real processes: ranks are killed, stopped and raise, others join, and the training comes to the same end.

The sums here are exact, and each rank brings the same, so that their average is the same for any number of ranks: a
step that was done twice, or left out, changes the result.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import textwrap
import threading
import time
from pathlib import Path

import needs
import pytest
from environments import PATHS, python_with, rank_environment, transport_of
from eventually import eventually

from benchmarks.jobs import Job
from ringtrain.bench.namespaces import HostNetwork

pytestmark = [
    pytest.mark.tcp,
]
ROOT = Path(__file__).parents[2]
SECONDS = 60.0
STEPS = 40
RESULT = sum(range(STEPS))

# Slot and step of a fault come from the environment; it strikes once, as a file tells.
PROGRAM = """
    import os, signal, sys, time
    from pathlib import Path
    import numpy as np
    import ringtrain as rt, ringtrain.elastic

    slot, folder = int(os.environ.get("RINGTRAIN_RANK", 0)), Path(os.environ["TMPDIR"])
    steps, pause = int(os.environ["STEPS"]), float(os.environ.get("PAUSE", "0.02"))

    def fault(step):
        if step != int(os.environ.get("AT", -1)) or str(slot) not in os.environ.get("SLOTS", "").split():
            return
        mark = folder / f"struck-{slot}"
        if mark.exists() and not os.environ.get("AGAIN"):
            return
        mark.touch()
        print(f"struck {time.monotonic()}", flush=True)
        exec(os.environ["FAULT"])

    rt.init()

    @rt.elastic.run
    def train(state):
        try:
            return work(state)
        except rt.elastic.WorldChangedError as change:
            print(f"heard: {change}", flush=True)
            raise

    def work(state):
        print(f"world of {rt.size()}: rank {rt.rank()} at {state.step} {os.getpid()} {time.monotonic()}", flush=True)
        while state.step < steps:
            while state.step == 30 and rt.size() < int(os.environ.get("JOINED", 1)):
                state.check_host_updates()
                time.sleep(0.05)
            operation = rt.allreduce_async(np.full(1000, float(state.step)), name="gradient")
            fault(state.step)
            state.weights += rt.synchronize(operation)
            state.step += 1
            time.sleep(pause)
            state.commit()
        return "returned"

    state = rt.elastic.ObjectState(weights=np.zeros(1000), step=0)
    said = train(state)
    print(f"{said} {state.step} {state.weights.min()} {state.weights.max()}", flush=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def command(*flags: str, program: str = PROGRAM) -> list[str]:
    """The launcher's command line; a slot gets a rank again after a second."""
    python = python_with("tcp")
    cooldown = ["--blacklist-cooldown-range", "1", "1"] if "--elastic" in flags else []
    return [
        python,
        "-m",
        "ringtrain.launch",
        *transport_of("tcp"),
        *cooldown,
        *flags,
        python,
        "-c",
        textwrap.dedent(program),
    ]


def run(job: Job, *flags: str, program: str = PROGRAM, **variables: str) -> subprocess.CompletedProcess:
    """Runs it to its end."""
    variables = {"STEPS": str(STEPS), **variables}
    return job.run(*command(*flags, program=program), seconds=SECONDS, env=rank_environment(**variables))


def worlds(done: subprocess.CompletedProcess) -> list[tuple[int, int, int, float]]:
    """(slot, size, step, time) of each beginning of a world on a rank."""
    found = re.findall(r"^\[(\d+)\] world of (\d+): rank \d+ at (\d+) \d+ ([\d.]+)$", done.stdout, re.MULTILINE)
    return [(int(slot), int(size), int(step), float(at)) for slot, size, step, at in found]


def assert_right(done: subprocess.CompletedProcess, ranks: int) -> None:
    """All ranks that came to the end have every step, once."""
    ends = re.findall(r"^\[\d+\] returned (\d+) ([\d.]+) ([\d.]+)$", done.stdout, re.MULTILINE)
    assert ends == [(str(STEPS), f"{RESULT:.1f}", f"{RESULT:.1f}")] * ranks, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_the_others_go_on_without_a_killed_rank_until_another_one_joins(job: Job) -> None:
    """In the middle of an operation; and it takes the state of the living, though it is the lowest slot's."""
    done = run(job, "--elastic", "-np", "2:4", AT="10", SLOTS="0", FAULT=KILL, JOINED="4")
    assert_right(done, 4)
    began = worlds(done)
    assert sorted(began[:4])[0][1:3] == (4, 0)
    without, joined = [each for each in began if each[1] == 3], [each for each in began if each[1] == 4 and each[2]]
    step = without[0][2]  # it may have done its share of step 10 before
    assert step in (10, 11) and [each[:3] for each in sorted(without)] == [(slot, 3, step) for slot in (1, 2, 3)]
    assert sorted(each[0] for each in joined) == [0, 1, 2, 3] and len({each[2] for each in joined}) == 1
    struck = float(re.search(r"struck ([\d.]+)", done.stdout)[1])
    assert max(each[3] for each in without) - struck < 2.0
    killed = "The rank in slot 0 of host 'localhost' was killed by signal 9."
    assert killed in done.stderr
    heard = re.findall(r"^\[\d\] heard: (.*)$", done.stdout, re.MULTILINE)
    assert heard == [f"{killed} The other ranks go on without it, from what they committed last."] * 3


TORCH_PROGRAM = """
    import os, signal, sys, time, hashlib
    from pathlib import Path
    import torch
    import ringtrain.torch as hvd

    torch.manual_seed(int(os.environ.get("RINGTRAIN_RANK", 0)))  # the ranks begin with different parameters
    steps, slot = int(os.environ["STEPS"]), os.environ.get("RINGTRAIN_RANK", "")
    hvd.init()
    data = torch.utils.data.TensorDataset(torch.arange(4096.0).reshape(-1, 1) % 7 / 8)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    if slot in ("", "0"):
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
    mark = Path(os.environ["TMPDIR"], "struck")

    def strike(gradient):
        if state.step == 10 and slot == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model[2].weight.register_hook(strike)

    @hvd.elastic.run
    def train(state):
        print("world of", hvd.size(), "at", state.step, flush=True)
        while state.step < steps:
            read = [sampler.dataset[i][0] for i in list(sampler)[:4]]
            sampler.record_batch(state.step, 4)
            loss = model(torch.full((4, 1), 0.5)).square().mean()  # the same on all ranks, whatever they read
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            state.step += 1
            state.commit()
            while state.step == 30 and hvd.size() == 1 and slot != "":  # until another one has joined
                state.check_host_updates()
                time.sleep(0.05)

    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, sampler=sampler, step=0)
    train(state)
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    lr = optimizer.param_groups[0]["lr"]
    print("end", state.step, hashlib.sha256(bits).hexdigest(), lr, sampler.processed_num > 4 * steps, flush=True)
"""


def trained_without_a_world() -> str:
    """The last line of TORCH_PROGRAM, up to the learning rate, by torch alone."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((4, 1), 0.5)).square().mean().backward()
        optimizer.step()
        schedule.step()
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return f"end {STEPS} {hashlib.sha256(bits).hexdigest()} {optimizer.param_groups[0]['lr']}"


def test_a_model_is_that_of_a_run_without_a_fault(job: Job) -> None:
    """Parameters, momentum and schedule, bit for bit, on the survivor and on the rank that joins."""
    end = trained_without_a_world()
    done = run(job, "--elastic", "-np", "1:2", program=TORCH_PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^\[\d\] (end \d+ \w+ [\d.]+) True$", done.stdout, re.MULTILINE) == [end] * 2, done.stdout
    assert done.stdout.count("world of 1 at 10") == 1, done.stdout
    assert len(re.findall(r"world of 2 at 30", done.stdout)) == 2, done.stdout


FAULTS = {
    "an exception": (
        "raise ValueError('the data is broken')",
        "has ended with exit code 1",
        "ValueError: the data is broken",
    ),
    "an exit code": ("sys.exit(3)", "has ended with exit code 3", ""),
    "an exit without a word": ("os._exit(7)", "has ended with exit code 7", ""),
    "a crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by signal 11", ""),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_ends_a_rank(fault: str, job: Job) -> None:
    statement, account, words = FAULTS[fault]
    done = run(job, "--elastic", "-np", "2:3", AT="10", SLOTS="1", FAULT=statement, JOINED="3")
    assert_right(done, 3)
    assert f"The rank in slot 1 of host 'localhost' {account}." in done.stderr and words in done.stderr
    without = sorted(each[:3] for each in worlds(done) if each[1] == 2)
    assert without in ([(0, 2, step), (2, 2, step)] for step in (10, 11))  # it may have done its share of a step before


def test_a_rank_that_has_failed_and_does_not_end_is_killed(job: Job) -> None:
    """It is stopped, or waits for ever in what it does at its exit; its slot gets a rank again only once it is gone."""
    statement = "import atexit; atexit.register(os.kill, os.getpid(), signal.SIGSTOP); " + FAULTS["an exception"][0]
    done = run(job, "--elastic", "-np", "2:3", "--notice-grace", "1", AT="10", SLOTS="1", FAULT=statement, JOINED="3")
    assert_right(done, 3)
    assert re.search(r"rank 1 \(host \S+\) has not ended within 1 s of its failure, and is killed\.", done.stderr)


@pytest.mark.long
def test_a_script_may_ask_for_another_world_itself(job: Job) -> None:
    """As scripts for Horovod do by its error: the others follow, nobody has died, and no rank is started."""
    done = run(job, "--elastic", "-np", "2:3", AT="10", SLOTS="1", FAULT="raise rt.RingtrainError('once more')")
    assert_right(done, 3)
    assert sorted({each[1:3] for each in worlds(done)}) in ([(3, 0), (3, step)] for step in (10, 11))


@pytest.mark.long
def test_a_slot_has_one_file_for_its_output_whoever_runs_there(job: Job, tmp_path: Path) -> None:
    flags = "--elastic", "-np", "2:3", "--output-filename", str(tmp_path / "said")
    done = run(job, *flags, AT="10", SLOTS="1", FAULT=KILL, JOINED="3")
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr
    said = (tmp_path / "said" / "rank.1" / "stdout").read_text()
    assert said.count("world of 3") == 2 and said.count("struck") == 1 and said.count("returned") == 1, said


TWO_OPTIMIZERS = """
    import os, signal, time
    from pathlib import Path
    import torch
    import ringtrain.torch as hvd
    hvd.init()
    slot, mark = os.environ.get("RINGTRAIN_RANK", ""), Path(os.environ["TMPDIR"], "struck")
    models = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 4)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.125), m.named_parameters()) for m in models
    ]

    @hvd.elastic.run
    def train(state):
        sets.append(hvd.add_process_set(hvd.ProcessSet(range(hvd.size()))))
        while state.step < 20:
            if state.step == 5 and slot == "0" and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            for model, optimizer in list(zip(models, optimizers))[:: -1 if state.step % 2 else 1]:
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            hvd.allreduce(torch.ones(1), process_set=sets[-1])
            state.step += 1
            state.commit()
            while state.step == 15 and hvd.size() == 1:
                state.check_host_updates()
                time.sleep(0.05)

    sets = []
    state = hvd.elastic.TorchState(second=optimizers[1], first=optimizers[0], a=models[0], b=models[1], step=0)
    train(state)
    print("end", state.step, [optimizer._mode.order() for optimizer in optimizers], flush=True)
"""


@pytest.mark.long
def test_two_optimizers_and_a_process_set(job: Job) -> None:
    """Names are the same on a rank that stayed and on one that joins; sets are made anew."""
    done = run(job, "--elastic", "-np", "1:2", program=TWO_OPTIMIZERS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] end 20 [0, 1]", "[1] end 20 [0, 1]"], done.stdout


LOCAL_STEPS = """
import os, pathlib, signal, sys
import torch
import ringtrain.torch as hvd

mark = pathlib.Path(os.environ["TMPDIR"], "struck")
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=hvd.LocalSteps(every=2, warmup=int(os.environ["WARMUP"])))

@hvd.elastic.run
def train(state):
    while state.step < 12:
        if state.step == 5 and hvd.rank() == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
        state.step += 1
        if state.step % 2 == 0:
            state.commit()
    optimizer.synchronize()

state = hvd.elastic.TorchState(model, optimizer, step=0)
train(state)
print("end", state.step, *(float(each.double().sum()).hex() for each in model.parameters()), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("warmup", ["0", "8"])
def test_a_rank_joins_others_in_local_steps(warmup: str, job: Job) -> None:
    """Or in the exact steps before; they do not compare their terms where it makes its optimizer, but before the next local step."""
    done = run(job, "--elastic", "-np", "2", program=LOCAL_STEPS, WARMUP=warmup)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = re.findall(r"^\[\d\] (end 12 .*)$", done.stdout, re.MULTILINE)
    assert len(ends) == 2 and len(set(ends)) == 1, done.stdout


@pytest.mark.long
@pytest.mark.parametrize("slots", ["0 1", "0 1 2", "3", "1 2 3"])
def test_several_at_once(slots: str, job: Job) -> None:
    """One rank goes on alone; and rank 0 is always one that has the state."""
    done = run(job, "--elastic", "-np", "1:4", AT="10", SLOTS=slots, FAULT=KILL, JOINED="4")
    assert_right(done, 4)


@pytest.mark.long
def test_a_stopped_rank_is_given_up_and_killed(job: Job) -> None:
    """In the middle of an operation. Its silence is found by the others, the launcher asks, and it does not answer."""
    done = run(
        job, "--elastic", "-np", "2:3", AT="10", SLOTS="1", FAULT="os.kill(os.getpid(), signal.SIGSTOP)", JOINED="3"
    )
    assert_right(done, 3)
    assert "The rank in slot 1 of host 'localhost' was evicted: it has not answered." in done.stderr
    struck = float(re.search(r"struck ([\d.]+)", done.stdout)[1])
    seconds = max(each[3] for each in worlds(done) if each[1] == 2) - struck
    print(f"after {seconds:.1f} s the others went on")
    assert seconds < 20.0


NOTICE = "os.kill(os.getpid(), signal.SIGTERM)"


def assert_left(done: subprocess.CompletedProcess, slot: int, stayed: int) -> None:
    """The rank of that slot has left with code 0: nobody calls it dead, and no step was done twice."""
    assert_right(done, stayed)
    assert f"The rank in slot {slot} of host 'localhost' leaves on notice." in done.stderr
    assert f"[{slot}] ringtrain: this rank has left on notice" in done.stderr
    assert not re.search("evicted|killed|failed|exit code", done.stderr), done.stderr
    assert "heard" not in done.stdout  # which says that a world was broken off
    assert slot not in {each[0] for each in worlds(done) if each[1] == stayed}


def test_a_rank_that_gets_a_notice_leaves_between_two_steps(job: Job) -> None:
    """Nothing is computed again, and nobody comes to its slot."""
    done = run(job, "--elastic", "-np", "1:3", AT="10", SLOTS="1", FAULT=NOTICE)
    assert_left(done, slot=1, stayed=2)
    assert not re.search(r"^\[1\] returned", done.stdout, re.MULTILINE)


NOTICES = {
    "another signal": (NOTICE.replace("SIGTERM", "SIGUSR1"), ("--notice-signal", "USR1")),
}


@pytest.mark.long
@pytest.mark.parametrize("notice", NOTICES)
def test_notices(notice: str, job: Job) -> None:
    statement, flags = NOTICES[notice]
    done = run(job, "--elastic", "-np", "1:3", *flags, AT="10", SLOTS="1", FAULT=statement)
    assert_left(done, slot=1, stayed=2)


@pytest.mark.long
def test_several_leave_at_once_and_rank_0_is_among_them(job: Job) -> None:
    done = run(job, "--elastic", "-np", "1:4", AT="10", SLOTS="0 2 3", FAULT=NOTICE)
    assert_left(done, slot=0, stayed=1)


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--notice-grace", "1")], ids=["told twice", "too late"])
def test_who_does_not_leave_is_ended(flags: tuple[str, ...], job: Job) -> None:
    """The second signal, or the end of its time, finds it computing; the others lose that step."""
    twice = "" if flags else "time.sleep(0.5); " + NOTICE + "; "
    statement = NOTICE + "; " + twice + "time.sleep(20)"
    done = run(job, "--elastic", "-np", "1:3", *flags, AT="10", SLOTS="1", FAULT=statement)
    assert_right(done, 2)
    number = 9 if flags else 15
    assert f"The rank in slot 1 of host 'localhost' was killed by signal {number}." in done.stderr
    assert ("has not left within 1 s of its notice, and is ended." in done.stderr) == bool(flags)


@pytest.mark.long
def test_a_rank_that_is_killed_when_it_has_left_is_not_said_to_come_again(job: Job) -> None:
    statement = "import atexit; atexit.register(os.kill, os.getpid(), signal.SIGKILL); " + NOTICE
    done = run(job, "--elastic", "-np", "1:3", AT="10", SLOTS="1", FAULT=statement)
    assert_right(done, 2)
    assert "when it had left on notice. Its slot stays empty." in done.stderr
    assert "starts again" not in done.stderr and "is started there" not in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("told", ["agent()", "keeper()", "each of agent(), keeper(), os.getpid()"])
def test_a_notice_to_all_ends_the_job(told: str, job: Job) -> None:
    """To the agent of its only host, its keeper, or all that Slurm finds; that the training has not come to its end is said, and
    the code tells it."""
    statement = f"time.sleep(0.5); [os.kill(process, signal.SIGTERM) for process in ({told.removeprefix('each of ')},)]"
    keeper = "keeper = lambda: int(Path(f'/proc/{os.getppid()}/stat').read_text().split()[3])"
    program = PROGRAM.replace("rt.init()", f"agent = os.getppid; {keeper}\n    rt.init()")
    done = run(job, "--elastic", "-np", "1:2", program=program, AT="10", SLOTS="1", FAULT=statement)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Host 'localhost' leaves on notice" in done.stderr
    assert "All ranks have left on notice, before the training came to its end." in done.stderr
    assert not re.search("evicted|killed|failed|exit code|MPI_Abort", done.stderr), done.stderr


@pytest.mark.long
def test_a_rank_that_computes_for_long_is_waited_for(job: Job) -> None:
    """Its thread takes part in forming the next world, which it takes when it comes back."""
    program = PROGRAM.replace(
        "fault(state.step)", "fault(state.step)\n            if state.step == 10 and slot == 2: time.sleep(12)"
    )
    done = run(job, "--elastic", "-np", "2:3", program=program, AT="10", SLOTS="1", FAULT=KILL)
    assert "evicted" not in done.stderr
    went_on = sorted(each[:3] for each in worlds(done) if each[1] == 2)[:2]
    assert went_on in ([(0, 2, step), (2, 2, step)] for step in (10, 11))
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_below_the_minimum_the_job_waits_and_then_ends_with_the_reason(job: Job) -> None:
    """The launcher's code is that of the rank that failed."""
    flags = "--elastic", "-np", "2", "--elastic-timeout", "3", "--blacklist-cooldown-range", "60", "60"
    done = run(job, *flags, AT="10", SLOTS="1", FAULT=KILL)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr
    assert "A world must have 2 ranks, but has fewer." in done.stderr
    assert re.search(r"rank 1 \(host .*\) was killed by signal 9", done.stderr)


@pytest.mark.long
def test_below_the_minimum_the_others_wait_for_the_rank_that_comes(job: Job) -> None:
    done = run(job, "--elastic", "-np", "2", AT="10", SLOTS="1", FAULT=KILL)
    assert_right(done, 2)
    assert sorted(each[1:3] for each in worlds(done)) in ([(2, 0)] * 2 + [(2, step)] * 2 for step in (10, 11))


@pytest.mark.long
def test_the_reset_limit_ends_the_job(job: Job) -> None:
    done = run(job, "--elastic", "-np", "1:3", "--reset-limit", "1", AT="10", SLOTS="1", FAULT=KILL, JOINED="3")
    assert done.returncode == 1, done.stderr  # it has survived the death
    assert "The reset limit of 1 worlds is reached." in done.stderr
    assert "was killed by signal" not in done.stderr.partition("The reset limit")[2]


@pytest.mark.long
def test_what_fails_on_all_ranks_ends_the_job(job: Job) -> None:
    done = run(job, "--elastic", "-np", "1:3", AT="10", SLOTS="0 1 2", FAULT="sys.exit(5)", AGAIN="1")
    assert done.returncode == 5, done.stderr
    assert "All ranks that held the state of the training are gone." in done.stderr


@pytest.mark.parametrize(
    "program, code", [("import nothing_of_this_name", 1), ("raise SystemExit(4)", 4), ("print('hi')", 0)]
)
def test_before_the_first_world_all_is_as_without_the_flag(program: str, code: int, job: Job) -> None:
    done = run(job, "--elastic", "-np", "1:2", program=program)
    assert done.returncode == code, done.stderr
    assert not code or "ringtrainrun: rank" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("flags", [("-np", "2"), ("-np", "1"), ("--elastic", "-np", "1")], ids=" ".join)
def test_the_script_runs_without_a_change_of_the_world(flags: tuple[str, ...], job: Job) -> None:
    assert_right(run(job, *flags), int(flags[-1]))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_launchers_end_is_that_of_the_job(number: int, job: Job) -> None:
    """That nothing is left is what the fixture asserts."""
    line = command("--elastic", "-np", "2:3", "--launcher-grace", "0")
    launcher = job.start(*line, stdout=subprocess.PIPE, text=True, env=rank_environment(STEPS="100000"))
    for _ in range(3):
        assert "world of 3" in launcher.stdout.readline()
    (leader,) = (pid for pid in job.find("-m ringtrain.launch"))
    os.kill(leader, number)
    assert launcher.wait(SECONDS) in (128 + number, -number)


@pytest.mark.long
def test_kills_at_any_moment(job: Job, tmp_path: Path) -> None:
    """Again and again, at random moments of a step, of forming a world, and of joining; the result is right to the bit."""
    line = command("--elastic", "-np", "1:4")
    variables = {"STEPS": str(steps := 4000), "PAUSE": "0.005"}
    complaints = tmp_path / "stderr"
    with complaints.open("w") as stderr:
        launcher = job.start(*line, stdout=subprocess.PIPE, stderr=stderr, text=True, env=rank_environment(**variables))
    drawn, pauses, lines = random.Random(7), [], []
    reader = threading.Thread(target=lambda: lines.extend(launcher.stdout))
    reader.start()
    await_line(lines, 0, "world of 4")
    for _ in range(20):
        time.sleep(drawn.uniform(0.3, 1.5))
        ranks = [pid for pid in job.find("-c") if b"RINGTRAIN_ELASTIC" in environment_of(pid)]
        members = holders(lines)
        if not ranks or len(members) < 2:  # the last one that has the state is left alone
            continue
        seen, at, victim = len(lines), time.monotonic(), drawn.choice(ranks)
        os.kill(victim, signal.SIGKILL)
        if victim in members and (found := await_line(lines, seen, "world of", 5.0)) is not None:
            pauses.append(float(found.split()[-1]) - at)
    reader.join(SECONDS * 5)
    text = "".join(lines)
    assert launcher.wait(SECONDS) == 0, text[-3000:] + complaints.read_text()
    ends = re.findall(r"^\[\d+\] returned (\d+) ([\d.]+) ([\d.]+)$", text, re.MULTILINE)
    exact = f"{sum(range(steps)):.1f}"
    assert ends and set(ends) == {(str(steps), exact, exact)}
    pauses.sort()
    print(f"median {pauses[len(pauses) // 2]:.3f} s, worst {pauses[-1]:.3f} s of {len(pauses)}")
    assert pauses[len(pauses) // 2] < 2.0


def holders(lines: list[str]) -> set[int]:
    """The processes that have got the state in the last world; none while not all of them have said so."""
    worlds = [words.groups() for line in lines if (words := re.search(r"world of (\d+): rank \d+ at \d+ (\d+) ", line))]
    size = worlds[-1][0] if worlds else "0"
    last = worlds[-int(size) :] if worlds else []
    return {int(process) for _, process in last} if all(each[0] == size for each in last) else set()


def environment_of(process: int) -> bytes:
    """Variables of a process that may have ended."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


def await_line(lines: list[str], first: int, words: str, seconds: float = SECONDS) -> str | None:
    """The first line from a place on that has these words; None if none comes in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in lines[first:]:
            if words in line:
                return line
        time.sleep(0.005)
    return None


@pytest.mark.long
def test_a_joiner_with_another_option_is_given_up_until_it_has_the_same(job: Job) -> None:
    """The others go on without it, however often it comes; and with it, once it can be connected."""
    differs = "slot == 1 and (folder / 'struck-1').exists() and not (folder / 'come-1-1').exists()"
    program = PROGRAM.replace(
        "    rt.init()",
        f"""    lives = len(list(folder.glob(f"come-{{slot}}-*")))
    (folder / f"come-{{slot}}-{{lives - 1}}").touch()
    rt.init(**({{"cache_capacity": 2048}} if {differs} else {{}}))""",
        1,
    )
    done = run(job, "--elastic", "-np", "1:3", program=program, SLOTS="1", AT="10", FAULT=KILL, JOINED="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(rf"returned {STEPS} {RESULT}.0 {RESULT}.0", done.stdout)) == 3, done.stdout
    given_up = (
        "ringtrainrun: The rank in slot 1 of host 'localhost' was evicted: the others could not be connected with it"
    )
    assert done.stderr.count(given_up) == 1, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("loss", ["a rank is killed", "an agent is killed", "the network is cut"])
@needs.hosts
def test_three_hosts(loss: str, network: HostNetwork, tmp_path: Path) -> None:
    """The ranks of the others go on, whatever is lost of one; where only a rank is, another one joins."""
    python = python_with("tcp")
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    variables = {"STEPS": "150", "PAUSE": "0.1", "TMPDIR": str(tmp_path), "PYTHONPATH": PATHS}
    command = [
        *(python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", "2:6"),
        *(
            "--blacklist-cooldown-range",
            "1",
            "1",
            "--launcher-grace",
            "5",
        ),  # so long a cut host waits for the job's end
        *("-H", "node-a:2,node-b:2,node-c:2", python, str(program)),
    ]
    launcher = network["node-a"].start(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=rank_environment(**variables)
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(launcher.stdout))
    reader.start()
    assert await_line(lines, 0, "world of 6")
    time.sleep(1.0)
    seen = len(lines)
    if loss == "the network is cut":
        network.unplug("node-c")
    else:
        words = "train.py" if loss == "a rank is killed" else "agent/__main__.py"
        killed = min(pid for pid, line in network["node-c"].processes().items() if words in line)
        network["node-c"].run("kill", "-9", str(killed))
    lost = time.monotonic()
    smaller = "world of 5" if loss == "a rank is killed" else "world of 4"
    found = await_line(lines, seen, smaller, 40.0)
    assert found, "".join(lines)
    seconds = float(found.split()[-1]) - lost
    print(f"after {seconds:.2f} s the others went on")
    assert seconds < (15.0 if loss == "the network is cut" else 2.0)  # nobody waits for silence where a death is told
    if loss != "the network is cut":  # else the host is tried again later
        assert await_line(lines, seen, "world of 6", 40.0), "".join(lines)
    complaints = launcher.stderr.read()
    assert launcher.wait(SECONDS) == 0, complaints
    reader.join()
    assert len(re.findall(r"returned 150 11175.0 11175.0", "".join(lines))) == (
        4 if loss == "the network is cut" else 6
    )
    assert "node-c" in complaints


class NamedHosts:
    """A job from node-a whose hosts a script names, which reads a file: its launcher, and what it and its ranks have said."""

    def __init__(self, network: HostNetwork, folder: Path, named: str, *flags: str):
        python = python_with("tcp")
        program, self.named, self.stderr = folder / "train.py", folder / "hosts", folder / "stderr"
        program.write_text(textwrap.dedent(PROGRAM))
        self.named.write_text(named)
        variables = {"STEPS": "100000", "PAUSE": "0.05", "TMPDIR": str(folder), "PYTHONPATH": PATHS}
        line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", *flags]
        line += ["--host-discovery-script", f"cat {self.named}", python, str(program)]
        with self.stderr.open("w") as stderr:
            self.launcher = network["node-a"].start(
                *line, stdout=subprocess.PIPE, stderr=stderr, text=True, env=rank_environment(**variables)
            )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.launcher.stdout))
        self._reader.start()
        self._network = network

    @property
    def complaints(self) -> str:
        return self.stderr.read_text()

    def name(self, text: str) -> int:
        """Names other hosts; returns how many lines there were before."""
        seen = len(self.lines)
        Path(f"{self.named}.new").write_text(text)
        os.replace(f"{self.named}.new", self.named)
        return seen

    def interrupt(self) -> None:
        self._network["node-a"].signal_to(self.launcher, signal.SIGINT)
        assert self.launcher.wait(SECONDS) != 0
        self._reader.join()


@pytest.mark.long
@needs.hosts
def test_hosts_come_and_go_as_a_script_names_them(network: HostNetwork, tmp_path: Path) -> None:
    """Nobody dies and no step is lost; a host that cannot be used, and a script that fails, are told once."""
    job = NamedHosts(
        network, tmp_path, "node-a:2\n", "-np", "1:4", "--slots-per-host", "2", "--blacklist-cooldown-range", "60", "60"
    )
    launcher, lines, named = job.launcher, job.lines, job.named

    def name(text: str, words: str) -> None:
        assert await_line(lines, job.name(text), words, 40.0), "".join(lines[-20:]) + job.complaints

    def kept() -> int:
        return len(os.listdir(f"/proc/{launcher.pid}/fd"))

    assert await_line(lines, 0, "world of 2"), job.complaints
    before = kept()
    name("node-a:2\nnobody:2\nnode-b\n", "world of 4")
    name("node-b:2\n", "world of 2: rank 0")  # those who stay have the state
    eventually(lambda: kept() <= before, "nothing is kept of a host that has left")
    name("node-b:2\nnode-c:1\n", "world of 3")
    named.unlink()
    failed = "--host-discovery-script"
    deadline = time.monotonic() + SECONDS
    while failed not in job.complaints.split("names it no longer")[-1] and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = len(lines)
    time.sleep(2.5)  # in which the script fails twice more
    assert not await_line(lines, seen, "world of", 0.1)
    job.interrupt()
    said = job.complaints
    assert not re.search("evicted|killed|exit code [1-9]|is lost", said.split("stopped by")[0]), said
    assert said.count("host 'nobody'") == 1 and said.count("leaves on notice: --host-discovery-script names it") == 1, (
        said
    )
    assert said.count("it must end with code 0, but has ended with 1") == 1, said
    assert "heard" not in "".join(lines)


@pytest.mark.long  # the decisions are tested in authority_test
@needs.hosts
def test_the_only_host_waits_for_the_one_that_takes_its_place(network: HostNetwork, tmp_path: Path) -> None:
    """It leaves when that has its state, and not before: its check and its imports take seconds."""
    job = NamedHosts(network, tmp_path, "node-b:1\n", "-np", "1:1")
    lines = job.lines
    assert await_line(lines, 0, "world of 1"), job.complaints
    seen = job.name("node-c:1\n")
    assert await_line(lines, seen, "world of 2", 40.0), job.complaints
    alone = await_line(lines, seen, "world of 1: rank 0", 40.0)
    assert alone and int(alone.split()[7]) > 0, "".join(lines) + job.complaints
    job.interrupt()
    assert "have left on notice" not in job.complaints and "heard" not in "".join(lines), job.complaints


def test_a_world_of_one_waits_until_it_is_open(job: Job) -> None:
    """The launcher answers before this rank has opened the world; such a rank was once in a world that it had not."""
    program = """
        import time
        from ringtrain._bootstrap.member import Member

        def hears_slowly(member, told, hear=Member._hear):
            hear(member, told)
            time.sleep(0.5)

        Member._hear = hears_slowly
        import ringtrain as rt
        rt.init()
        print(rt.size())
    """
    assert "[0] 1\n" in run(job, "--elastic", "-np", "1", program=program).stdout
