"""What a rank that joins gets beside the values of the state: schedules that were not given, what is frozen, later groups.

And in Keras what callbacks remember. Ranks that lack it would step otherwise than the others, in silence.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import test_elastic_frameworks as frameworks
from environments import python_with, rank_environment, transport_of
from test_elastic_steps import KILL, ends, run

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
]
ROOT = Path(__file__).resolve().parents[2]
GROWING = """
    if folder.joinpath("struck-1-6").exists():  # the rank that comes again has wrapped an optimizer before, and dropped it
        another = torch.nn.Linear(1, 1)
        hvd.DistributedOptimizer(torch.optim.SGD(another.parameters(), lr=0.1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model.named_parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    vars(schedule)  # has it keep its attributes in a dict, behind which it is looked for then
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    model.append(torch.nn.Linear(1, 1))  # which the optimizer does not train yet
    body, head = list(model[0].parameters()), list(model[3].parameters())
    for parameter in body:
        parameter.requires_grad_(False)
    sampler = hvd.elastic.ElasticSampler(Data())
    loader = torch.utils.data.DataLoader(Data(), BATCH, sampler=sampler)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler)  # and neither of the schedules
    for epoch in state.epochs(EPOCHS):
        for indices, x, y in loader:
            while state.step == 9 and hvd.size() < 3 and not membership.current().wants_pause:
                time.sleep(0.02)
            if state.step == 2:
                for parameter in body:
                    parameter.requires_grad_(True)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            fault("released")
            optimizer.step()
            schedule.step()
            plateau.step(1.0)
            if state.step == 4:
                optimizer.add_param_group({"params": head, "lr": 0.01, "initial_lr": 0.01})
                schedule.base_lrs.append(0.01)
                plateau.min_lrs.append(0)
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    print("has", frozen, groups, schedule.last_epoch, plateau.num_bad_epochs, flush=True)
    end()
"""


def test_a_rank_that_joins_gets_what_the_state_was_not_given(job: Job) -> None:
    """Two schedules, layers that were unfrozen, and a group of parameters that was added meanwhile."""
    done = run(job, "--elastic", "-np", "2:3", program=GROWING, FAULTS=json.dumps({"1/6/released": KILL}))
    assert len(ends(done)) == 3 and len(set(ends(done))) == 1, done.stdout + done.stderr
    assert re.search(
        r"^ringtrainrun: slot 1 of host 'localhost' starts again, \d+\.\d s after the end of its last rank",
        done.stderr,
        re.M,
    )
    assert re.search(r"^\[1\] ringtrain: rank 2 has joined after step 10, \d+\.\d s after", done.stderr, re.M), (
        done.stderr
    )
    found = re.findall(r"^\[\d\] has (.*)$", done.stdout, re.M)
    assert len(found) == 3 and len(set(found)) == 1 and found[0].startswith("[] [4, 2] "), found


LOADING = """
import sys
import torch
import ringtrain.torch as hvd

hvd.init()
loaded = set(sys.modules)
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(2))
loader = torch.utils.data.DataLoader(range(2), sampler=sampler)
state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
for _ in state.epochs(1):
    for x in loader:
        optimizer.zero_grad(), model(torch.ones(1, 1)).backward(), optimizer.step()
late = sorted(name for name in set(sys.modules) - loaded if name.split(".")[0] == "ringtrain" or name == "torch._dynamo")
print("late", late, flush=True)
"""


def test_a_rank_has_loaded_what_it_needs_before_others_wait_for_it(job: Job) -> None:
    """From `init` on, in which a rank joins. It took half a second, in which nobody trained.

    PyTorch's compiler is among it, which sitecustomize.py spares all other ranks.
    """
    python = python_with("tcp")
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", "1", python, "-c", LOADING]
    done = job.run(*line, seconds=60, env=rank_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)))
    assert re.findall(r"^\[0\] late (.*)$", done.stdout, re.M) == ["[]"], done.stdout + done.stderr


def rates(text: str) -> dict[int, set[str]]:
    """Of each step, on whichever rank."""
    found: dict[int, set[str]] = {}
    for step, rate in re.findall(r"^\[\d+\] rate (\d+) (\S+)$", text, re.M):
        found.setdefault(int(step), set()).add(rate)
    return found


@pytest.mark.parametrize("backend", ["torch", pytest.param("tensorflow", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "warmup", [{}, pytest.param({"WARMUP": "1"}, marks=pytest.mark.long)], ids=["plateau", "warmup"]
)
def test_callbacks_of_a_rank_that_joins_remember_what_others_do(warmup: dict[str, str], backend: str, job: Job) -> None:
    """A scheduler, a plateau that halves the rate, early stopping, which all do together; a checkpoint and a log of rank 0 alone."""
    frame = "elastic_callbacks.py", {"KERAS_BACKEND": backend}
    done = frameworks.run(
        job,
        frame,
        "--elastic",
        "-np",
        "2:3",
        FAULTS=json.dumps({"0/12/begun": KILL}),
        JOINED="3",
        AWAITED_AT="[13]",
        **warmup,
    )
    assert all(len(each) == 1 for each in rates(done.stdout).values()), done.stdout
    assert len(rates(done.stdout)) == 4 * 8  # it stops behind the fourth of five epochs
    assert len(ends(done)) == 3 and len(set(ends(done))) == 1, done.stdout + done.stderr
    assert ends(done)[0].startswith("4 32 4 3 ")
    assert all(f"epoch-{epoch}.weights.h5" in ends(done)[0] for epoch in (1, 2, 3, 4)), ends(done)
    assert ends(done)[0].endswith("['epoch', '0', '1', '2', '3']"), ends(done)  # of two processes that were rank 0


OF_ANOTHER_SHAPE = """
import sys
from ringtrain.errors import MismatchError

if slot == 1 and (folder / "struck-1-4-begun").exists():
    sum_up = TransparentState.grouped_allreduce

    def sum_up_others(self, arrays, *arguments):
        try:
            return sum_up(self, [arrays[0][:7], *arrays[1:]], *arguments)
        except MismatchError as problem:
            print("refused:", problem, file=sys.stderr, flush=True)
            time.sleep(600)

    TransparentState.grouped_allreduce = sum_up_others
"""


def test_a_joiner_with_arrays_of_another_shape_is_refused_and_nobody_waits_for_its_end(job: Job) -> None:
    """Each rank hears of the difference; those that have trained together go on, though the other one does not end."""
    faults = json.dumps({"1/4/begun": KILL})
    done = frameworks.run(
        job, frameworks.NUMPY, "--elastic", "-np", "2:3", FAULTS=faults, PLANTED=OF_ANOTHER_SHAPE, JOINED="3"
    )
    assert frameworks.applied(done) == [[0, 1, 2]] * 4 + [[0, 2]] * (frameworks.STEPS - 4)
    assert len(ends(done)) == 2 and len(set(ends(done))) == 1, done.stdout + done.stderr
    assert re.search(r"^\[1\] refused: .*shape", done.stderr, re.M), done.stderr
    assert re.search(r"^\[0\] .*elastic: not let in: rank 2: ", done.stderr, re.M), done.stderr
    assert "slot 1 of host 'localhost' was evicted: it was refused, as its error says" in done.stderr, done.stderr


CRASHES = """
if slot == 1 and (folder / "struck-1-4-begun").exists():
    (folder / f"crashed-{os.getpid()}").touch()
    os._exit(3)
"""


def test_a_joiner_that_crashes_at_each_start_costs_the_others_nothing(job: Job) -> None:
    """It is told each time, and tried again; they take their steps meanwhile, and wait for it in one of the test's alone."""
    faults = {"1/4/begun": KILL, "0/9/begun": "while len(list(folder.glob('crashed-*'))) < 2: time.sleep(0.02)"}
    done = frameworks.run(
        job, frameworks.NUMPY, "--elastic", "-np", "2:3", FAULTS=json.dumps(faults), PLANTED=CRASHES, JOINED="1"
    )
    assert frameworks.applied(done) == [[0, 1, 2]] * 4 + [[0, 2]] * (frameworks.STEPS - 4)
    words = (
        "rank 1 .* failed with exit code 3 before it had joined the others. Another one is started there after a pause."
    )
    assert re.search(words, done.stderr) and "evicted" not in done.stderr, done.stderr


STOPS_AS_IT_JOINS = """
from ringtrain._bootstrap.member import Member

def stop_before(self, form, connect=Member._connect):
    os.kill(os.getpid(), signal.SIGSTOP)
    connect(self, form)

if slot == 1 and (folder / "struck-1-4-begun").exists():
    Member._connect = stop_before
"""


def test_a_rank_that_is_stopped_as_it_joins_is_left_out(job: Job) -> None:
    """The others do not wait until they have failed to connect with it, and it is killed later."""
    faults = json.dumps({"1/4/begun": KILL})
    done = frameworks.run(
        job, frameworks.NUMPY, "--elastic", "-np", "2:3", FAULTS=faults, PLANTED=STOPS_AS_IT_JOINS, JOINED="3"
    )
    assert frameworks.applied(done) == [[0, 1, 2]] * 4 + [[0, 2]] * (frameworks.STEPS - 4)
    assert "slot 1 of host 'localhost' was evicted: it has not answered." in done.stderr, done.stderr
    assert "could not be connected" not in done.stderr, done.stderr


STOPS_IN_ITS_WORLD = """
def stop_before(self, settle=Transaction._settle):
    os.kill(os.getpid(), signal.SIGSTOP)
    settle(self)

if slot == 1 and (folder / "struck-1-4-begun").exists():
    Transaction._settle = stop_before
"""


def test_a_rank_that_is_stopped_before_it_has_the_state_is_given_up_sooner_than_others(job: Job) -> None:
    """Here others have five minutes."""
    faults = json.dumps({"1/4/begun": KILL})
    variables = {"PLANTED": STOPS_IN_ITS_WORLD, "JOINED": "3", "RINGTRAIN_DEAD_AFTER_SECONDS": "300"}
    done = frameworks.run(job, frameworks.NUMPY, "--elastic", "-np", "2:3", FAULTS=faults, **variables)
    assert frameworks.applied(done) == [[0, 1, 2]] * 4 + [[0, 2]] * (frameworks.STEPS - 4)
    assert "slot 1 of host 'localhost' was evicted: it has not answered." in done.stderr, done.stderr
