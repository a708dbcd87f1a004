"""What an elastic job says at its end, on real processes: what ended it, and not what it has survived; who was on the way."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import textwrap

import pytest
from environments import python_with, rank_environment, transport_of
from test_elastic import command

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
]
SECONDS = 90.0
# Each slot does at its step what the environment says, as often as that says; a rank that comes again does what AGAIN says.
PROGRAM = """
    import json, os, signal, sys, time
    from pathlib import Path

    slot, folder = os.environ["RINGTRAIN_RANK"], Path(os.environ["TMPDIR"])
    come = folder / f"come-{slot}"
    if come.exists():
        exec(os.environ.get("AGAIN", ""))
    come.touch()
    time.sleep(float(os.environ.get("IMPORTS", "0")))
    import numpy as np
    import ringtrain as rt, ringtrain.elastic

    rt.init()
    faults = json.loads(os.environ.get("FAULTS", "{}"))
    state = rt.elastic.State(weights=np.zeros(3))
    for step in state.steps(40):
        exec(faults.get(f"{slot}/{step}", ""))
        state.weights += state.allreduce(np.ones(3))
        time.sleep(0.02)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def run(job: Job, ranks: str, *flags: str, program: str = PROGRAM, **variables: str) -> subprocess.CompletedProcess:
    python = python_with("tcp")
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", ranks, *flags]
    environment = rank_environment(**variables)
    return job.run(*line, python, "-c", textwrap.dedent(program), seconds=SECONDS, env=environment)


def last_words(done: subprocess.CompletedProcess) -> str:
    """What the launcher says when the job has ended: behind the reason, its own lines alone."""
    assert "A world must have" in done.stderr, done.stderr
    return done.stderr[done.stderr.rindex("A world must have") :]


@pytest.mark.long
def test_the_last_words_name_what_ended_the_job(job: Job) -> None:
    """Slot 1 dies, which two others survive; slot 2 raises, which the job does not."""
    faults = json.dumps({"1/5": KILL, "2/15": "sys.exit(7)"})
    done = run(job, "2:3", "--elastic-timeout", "2", "--blacklist-cooldown-range", "60", "60", FAULTS=faults)
    assert done.returncode == 7, done.stderr
    assert re.search(r"rank 2 \(host \S+\) failed with exit code 7", last_words(done)), done.stderr
    assert "rank 1" not in last_words(done)


@pytest.mark.long
def test_a_rank_that_is_killed_before_it_joins_is_named(job: Job) -> None:
    """Where another one was, while the others go on, and come to their end."""
    flags = "--blacklist-cooldown-range", "0.1", "0.1"
    done = run(job, "1:2", *flags, FAULTS=json.dumps({"1/5": KILL, "0/20": "time.sleep(3)"}), AGAIN=KILL)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"rank 1 \(host \S+\) was killed by signal 9, SIGKILL .* before it had joined the others", done.stderr
    )


def test_a_code_that_only_the_process_end_tells_is_said_of_that_end(job: Job) -> None:
    """`raise SystemExit(3)` reaches no hook, so its rank leaves as one that has come to its end; it was said not to have joined."""
    done = run(job, "1:2", FAULTS=json.dumps({"1/5": "raise SystemExit(3)"}))
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"rank 1 \(host \S+\) failed with exit code 3 when its program had come to its end", done.stderr
    ), done.stderr
    assert "before it had joined" not in done.stderr


@pytest.mark.long
def test_who_was_on_the_way_when_the_time_was_over_is_said(job: Job) -> None:
    """Imports that take longer than --elastic-timeout: what was waited for, how long, and what to change."""
    done = run(job, "2", "--elastic-timeout", "2", IMPORTS="20")
    assert done.returncode == 1, done.stderr
    words = "waited for 2 s (--elastic-timeout) for ranks to call init(), and 2 of the 2 that run had not come to it"
    assert words in done.stderr and "give --elastic-timeout more seconds" in done.stderr


TORCH = """
    import os, sys, time
    import torch
    import ringtrain.torch as hvd

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 40
        def __getitem__(self, index):
            return torch.ones(3) * (hvd.rank() if "ASKS" in os.environ else 1)

    model = torch.nn.Linear(3, 1)
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(Data())
    size = 2 + hvd.rank() * int(os.environ.get("UNLIKE", "0"))
    loader = torch.utils.data.DataLoader(Data(), size, sampler=sampler, num_workers=int("ASKS" in os.environ))
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
    began = time.monotonic()
    try:
        for epoch in state.epochs(2):
            for x in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
    except Exception as problem:
        print("raised", type(problem).__name__, round(time.monotonic() - began), str(problem).splitlines()[0], flush=True)
        raise
"""


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--batch", "constant")], ids=["", "constant"])
def test_ranks_that_draw_differently_are_told_in_the_first_step(flags: tuple[str, ...], job: Job) -> None:
    """And not when one of them waits for another that is through; in the same words on all."""
    done = run(job, "2", *flags, program=TORCH, UNLIKE="1")
    raised = re.findall(r"^\[\d\] raised (\w+) (\d+) (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and len(raised) == 2, done.stdout + done.stderr
    assert {(kind, int(seconds) < 10) for kind, seconds, _ in raised} == {("MismatchError", True)}
    drawn = "1 batches of 4 samples, and rank 1 1 batches of 6 samples" if flags else "2 samples, and rank 1 3 samples"
    assert {text for _, _, text in raised} == {
        f"elastic.State: all ranks must draw the same for a step, but rank 0 has drawn {drawn}. Use one batch_size, and as many "
        "batches a step, on all ranks."
    }


@pytest.mark.long
def test_a_loaders_worker_is_not_taken_for_another_rank(job: Job) -> None:
    """It asks for its rank, which only the process has that has called init()."""
    done = run(job, "2", program=TORCH, ASKS="1")
    assert done.returncode == 1, done.stderr
    assert re.search(r"rank \d \(host \S+\) failed with exit code 1[.;]", done.stderr), done.stderr
    assert "because of another rank" not in done.stderr
    assert signal.SIGKILL.name not in done.stderr


STOPPED_AT_THE_END = """
    import os, signal
    import numpy as np
    import ringtrain as rt

    rt.init()
    last = rt.rank() == 1
    rt.allreduce(np.ones(3), name="last")
    rt.shutdown()
    if last:
        os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize(
    "flags, code", [((), 1), pytest.param(("--elastic",), 0, marks=pytest.mark.long)], ids=["plain", "elastic"]
)
def test_a_rank_that_is_stopped_when_the_others_have_ended_is_not_waited_for(flags: tuple, code: int, job: Job) -> None:
    """Nobody of the job will wake it; an elastic training has come to its end without it."""
    line = command(*flags, "-np", "2:2" if flags else "2", program=STOPPED_AT_THE_END)
    done = job.run(*line, seconds=60.0, env=rank_environment())
    assert done.returncode == code, done.stdout + done.stderr
    assert re.search(
        "rank 1 .*has been stopped for 10 s, as SIGSTOP does, while all others have come to their end", done.stderr
    )


@pytest.mark.parametrize(
    "program",
    [
        "import os, nosuchmodule",
        pytest.param("import ringtrain as rt; rt.init(); raise ValueError('in the test')", marks=pytest.mark.long),
        pytest.param(
            "import ringtrain as rt, ringtrain.elastic\n"
            "rt.init()\n"
            "for step in rt.elastic.State(n=0).steps(2):\n"
            "    if rt.rank() == 1: raise ValueError('in the test')\n"
            "    rt.barrier()",
            marks=pytest.mark.long,
        ),
    ],
    ids=["at an import", "before its loop", "in its first step"],
)
def test_a_script_that_fails_whenever_it_is_started_ends_the_job_soon(program: str, job: Job) -> None:
    done = run(job, "2", "--blacklist-cooldown-range", "1", "1", program=program)
    assert done.returncode == 1, done.stderr
    assert re.search(r"rank \d \(host \S+\) failed with exit code 1", done.stderr), done.stderr
    assert 2 <= done.stderr.count("Error: ") <= 8, done.stderr
