"""Elastic loops of NumPy, TensorFlow and Keras that lose no step, on real processes: their end is that of a planned run.

Each contribution depends on slot and step, and carries the mark of its slot, so that every result tells who is in it. The
steps of a job are taken once more by jobs of a fixed size, each from where the one before has ended, to the same bits.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path

import fakes
import pytest
from environments import PATHS, python_with, rank_environment, transport_of

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
    pytest.mark.timeout(900),
]
SECONDS = 400.0
STEPS = 24  # of two epochs
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
NUMPY = "elastic_arrays.py", {}
FRAMES = {
    "NumPy": NUMPY,
    "TensorFlow": ("elastic_tape.py", {"KERAS_BACKEND": "tensorflow"}),
    "TensorFlow, eager": ("elastic_tape.py", {"KERAS_BACKEND": "tensorflow", "EAGER": "1"}),
    "Keras on TensorFlow": ("elastic_fit.py", {"KERAS_BACKEND": "tensorflow"}),
    "Keras on PyTorch": ("elastic_fit.py", {"KERAS_BACKEND": "torch"}),
}
every_frame = pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# Rank 2 loses the results of step 4 and has rank 1 killed, while rank 0 holds them.
PART = {
    "2/4/holding": "os.kill(int((folder / 'pid-1').read_text()), signal.SIGKILL); raise PeerLostError('in the test')"
}


def run(
    job: Job, frame: tuple[str, dict[str, str]], *flags: str, code: int | None = 0, **variables: str
) -> subprocess.CompletedProcess:
    """Runs a program under the launcher, which ends with a code, None for any; a slot gets a rank again only if others wait for it."""
    program, own = frame
    python, script = python_with("tcp"), Path(__file__).with_name(program)
    cooldown = "1" if "JOINED" in variables else "60"
    pauses = ["--blacklist-cooldown-range", cooldown, cooldown] if "--elastic" in flags else []
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), *pauses, *flags, python, str(script)]
    done = job.run(*line, seconds=SECONDS, env=rank_environment(**{**QUIET, **own, **variables}))
    assert code in (None, done.returncode), done.stdout + done.stderr[-6000:]
    return done


def applied(done: subprocess.CompletedProcess) -> list[list[int]]:
    """By step, the slots whose contributions are in it, in the order of their ranks; each step once by each rank."""
    ranks: dict[int, dict[int, int]] = {}
    contributors: dict[int, set[tuple[int, ...]]] = {}
    for line in re.findall(r"^\[\d+\] applied (.*)$", done.stdout, re.MULTILINE):
        step, rank, slot, *slots = map(int, line.split())
        assert slot not in ranks.setdefault(step, {}), f"step {step} twice in slot {slot}"
        ranks[step][slot] = rank
        contributors.setdefault(step, set()).add(tuple(slots))
    assert sorted(ranks) == list(range(len(ranks))), sorted(ranks)
    plan = []
    for step, found in sorted(contributors.items()):
        (slots,) = found  # all have the same ones
        plan.append(sorted(slots, key=lambda slot, step=step: (ranks[step].get(slot, slot), slot)))
    return plan


def ends(done: subprocess.CompletedProcess) -> list[str]:
    """The last word of each rank: steps, bits of the state."""
    return re.findall(r"^\[\d+\] end (.*)$", done.stdout, re.MULTILINE)


def replayed(job: Job, frame: tuple[str, dict[str, str]], plan: list[list[int]], folder: Path) -> str:
    """The end of a run whose members were planned so."""
    for number, (size, steps) in enumerate(itertools.groupby(plan, key=len)):
        place = folder / f"plan-{number}.json"
        place.write_text(json.dumps(list(steps)))
        done = run(job, frame, "-np", str(size), PLAN=str(place))
    (end,) = set(ends(done))
    return end


def assert_as_planned(
    job: Job, frame: tuple[str, dict[str, str]], done: subprocess.CompletedProcess, ranks: int, folder: Path
) -> list[list[int]]:
    """All ranks that came to the end have the bits of the planned run, and no step was lost."""
    plan = applied(done)
    assert len(plan) == STEPS
    assert len(set(ends(done))) == 1 and len(ends(done)) == ranks, done.stdout + done.stderr[-6000:]
    assert ends(done)[0] == replayed(job, frame, plan, folder)
    assert "WorldChangedError" not in done.stdout + done.stderr
    return plan


def test_a_death_within_a_step_costs_arrays_no_step(job: Job, tmp_path: Path) -> None:
    """The others have submitted theirs; the step is done with these."""
    done = run(job, NUMPY, "--elastic", "-np", "2:3", FAULTS=json.dumps({"1/4/begun": KILL}))
    plan = assert_as_planned(job, NUMPY, done, 2, tmp_path)
    assert plan == [[0, 1, 2]] * 4 + [[0, 2]] * (STEPS - 4)
    assert done.stdout.count("change 3 2") == 2


# Rank 1 dies a moment after its NCCL has begun what it does not end, so that it is in flight on all GPUs.
IN_FLIGHT = {"1/4/begun": "import threading; threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()"}


@pytest.mark.parametrize(
    "faults, hangs",
    [
        (IN_FLIGHT, {"FAKE_NCCL_HANG": "ncclAllGather:5=1", "FAKE_NCCL_RANK": "1"}),
        pytest.param({"1/4/begun": KILL}, {}, marks=pytest.mark.long),
    ],
    ids=["in flight", "before"],
)
def test_a_death_costs_arrays_on_gpus_no_step(job: Job, tmp_path: Path, faults: dict, hangs: dict) -> None:
    """The others go on through the host until NCCL is open for them, and then by NCCL again."""
    gpus = {"FAKE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,1,2", "PYTHONPATH": PATHS,
            "RINGTRAIN_NCCL_ALGORITHM": "ordered", "RINGTRAIN_LOG_LEVEL": "info"}  # fmt: skip
    libraries = ("RINGTRAIN_CUDA_LIB", "RINGTRAIN_NCCL_LIB")
    gpus |= {name: value for name, value in fakes.environment().items() if name in libraries}
    done = run(job, NUMPY, "--elastic", "-np", "2:3", "--share-gpus", FAULTS=json.dumps(faults), **gpus, **hangs)
    plan = assert_as_planned(job, (NUMPY[0], gpus), done, 2, tmp_path)
    assert plan == [[0, 1, 2]] * 4 + [[0, 2]] * (STEPS - 4)
    said = re.findall(r"are exchanged by NCCL (?:from now on|[\d.]+ from [^ ,]+(, and through the host)?)", done.stderr)
    assert said == ["", ", and through the host", ""], done.stderr


@pytest.mark.long
@every_frame
@pytest.mark.parametrize(
    "faults",
    [
        {"0/4/begun": KILL},
        {"1/4/released": KILL},
        {"1/4/begun": "raise ValueError('the data are broken')"},
        {"1/4/begun": "time.sleep(1.0)", "2/4/begun": KILL},
        {"0/3/begun": KILL, "2/12/begun": KILL},
        {"1/11/released": KILL, "2/23/begun": KILL},
    ],
    ids=lambda faults: " ".join(faults),
)
def test_whoever_dies_wherever(
    faults: dict[str, str], frame: tuple[str, dict[str, str]], job: Job, tmp_path: Path
) -> None:
    """Also the rank that holds the lead, in the first and the last step of an epoch, and two."""
    done = run(job, frame, "--elastic", "-np", "1:3", FAULTS=json.dumps(faults))
    lost = {fault.split("/")[0] for fault, statement in faults.items() if "sleep" not in statement}
    assert_as_planned(job, frame, done, 3 - len(lost), tmp_path)


@pytest.mark.long
@every_frame
def test_a_rank_joins_in_the_middle_of_an_epoch(frame: tuple[str, dict[str, str]], job: Job, tmp_path: Path) -> None:
    """It has the state of the others, and takes the rest of the epoch's steps with them."""
    done = run(job, frame, "--elastic", "-np", "2:3", FAULTS=json.dumps({"1/4/begun": KILL}), JOINED="3")
    plan = assert_as_planned(job, frame, done, 3, tmp_path)
    assert plan == [[0, 1, 2]] * 4 + [[0, 2]] * 6 + [[0, 2, 1]] * (STEPS - 10)
    assert "[1] epoch 0 10 3" in done.stdout
    assert (done.stdout.count("change 3 2"), done.stdout.count("change 2 3")) == (2, 3)  # the one that joins, too


@pytest.mark.long
@every_frame
def test_a_step_that_not_all_hold_is_done_again(frame: tuple[str, dict[str, str]], job: Job, tmp_path: Path) -> None:
    """What rank 0 held is dropped, and what it kept travels again."""
    done = run(job, frame, "--elastic", "-np", "2:3", FAULTS=json.dumps(PART))
    plan = assert_as_planned(job, frame, done, 2, tmp_path)
    assert plan == [[0, 1, 2]] * 4 + [[0, 2]] * (STEPS - 4)


@pytest.mark.long
def test_a_step_of_adasum_in_tensorflow_is_done_again(job: Job, tmp_path: Path) -> None:
    """Of gradients, with a tape; the marks of the slots, which have nothing in common, add up."""
    program, own = FRAMES["TensorFlow"]
    frame = program, {**own, "OP": "Adasum"}
    done = run(job, frame, "--elastic", "-np", "2:3", FAULTS=json.dumps(PART))
    plan = assert_as_planned(job, frame, done, 2, tmp_path)
    assert plan == [[0, 1, 2]] * 4 + [[0, 2]] * (STEPS - 4)


# Rank 2 loses what it hears with step 5, and has rank 1 killed, once rank 0 has heard it.
HEARD_BY_ONE = """
from ringtrain.elastic.vote import Vote
cast = Vote.cast

def cast_and_lose(self, drawn):
    had_heard = self.all_stop
    yield from cast(self, drawn)
    if self.all_stop and not had_heard and slot == 0:
        (folder / "heard").touch()
    if self.all_stop and not had_heard and slot == 2:
        while not (folder / "heard").exists():
            time.sleep(0.01)
        self.all_stop = False
        os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
        raise PeerLostError("in the test")

Vote.cast = cast_and_lose
"""


@pytest.mark.parametrize("step, last", [(4, 5), (11, 11)], ids=["in an epoch", "with its last batch"])
def test_one_rank_that_stops_within_an_epoch_stops_all(step: int, last: int, job: Job) -> None:
    """It tells the others with the step behind."""
    done = run(job, FRAMES["Keras on PyTorch"], "--elastic", "-np", "2", STOPS=f"1/{step}")
    assert applied(done) == [[0, 1]] * (last + 1)
    assert len(ends(done)) == 2 and len(set(ends(done))) == 1 and ends(done)[0].startswith(f"{last + 1} ")


def test_a_stop_that_one_rank_alone_has_heard_stops_all(job: Job) -> None:
    """Who wished for it is dead."""
    done = run(job, FRAMES["Keras on PyTorch"], "--elastic", "-np", "2:3", STOPS="1/4", PLANTED=HEARD_BY_ONE)
    assert applied(done)[:5] == [[0, 1, 2]] * 5 and len(applied(done)) == 6
    assert len(ends(done)) == 2 and len(set(ends(done))) == 1 and ends(done)[0].startswith("6 ")


@pytest.mark.long
@every_frame
def test_a_release_before_all_are_whole_would_be_found(frame: tuple[str, dict[str, str]], job: Job) -> None:
    """A planted fault: rank 0 uses what rank 2 does not hold. They notice that in the next world.

    The first that does ends. How the job ends depends on whether the other one has noticed it, too, by then.
    """
    planted = "import ringtrain.elastic.vote as vote; vote.Vote.cast = lambda self, drawn: iter(())"
    faults = json.dumps(PART)
    done = run(job, frame, "--elastic", "-np", "2:3", code=None, FAULTS=faults, PLANTED=planted)
    assert "a window was released that not all ranks held" in done.stderr


@pytest.mark.long
def test_inputs_that_are_not_kept_would_be_found(job: Job) -> None:
    """A planted fault: results overwrite the inputs, which then travel in the same step, with the mark of the lost rank."""
    planted = "from ringtrain._runtime import operations; operations.grouped_allreduce = operations.grouped_allreduce_"
    done = run(job, NUMPY, "--elastic", "-np", "2:3", FAULTS=json.dumps(PART), PLANTED=planted)
    assert applied(done)[4] == [0, 1, 2]  # and not [0, 2], as in the test of a step that is done again


@pytest.mark.long
def test_a_rank_that_joins_without_the_state_would_be_found(job: Job, tmp_path: Path) -> None:
    """A planted fault: the rank that comes again to slot 1 gets the numbers of the others, and keeps values of its own."""
    planted = (
        "copied, again = values._copied_into, (folder / 'struck-1-4-begun').exists\n"
        "values._copied_into = lambda own, value: (\n"
        "    slot == 1 and again() and hasattr(own, 'shape') or copied(own, value))"
    )
    faults = json.dumps({"1/4/begun": KILL})
    done = run(job, NUMPY, "--elastic", "-np", "2:3", FAULTS=faults, JOINED="3", PLANTED=planted)
    assert len(ends(done)) == 3
    with pytest.raises(AssertionError):
        assert_as_planned(job, NUMPY, done, 3, tmp_path)
