"""Samples that a BatchSampler deals outside of PyTorch, on real processes: each is in exactly one step that was applied.

What a step changes tells which samples are in it, and what each weighs (elastic_samples.py); no rank's own word counts.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from environments import python_with, rank_environment, transport_of

from benchmarks.jobs import Job
from ringtrain._training import sharding

pytestmark = [
    pytest.mark.tcp,
]
SECONDS = 300.0
EPOCHS, SAMPLES, BATCH, PLANNED = 2, 50, 2, 4
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
NUMPY = {"FRAME": "numpy"}
FRAMES = {
    "NumPy": NUMPY,
    "NumPy, loaders": {**NUMPY, "LOADERS": "2"},
    "TensorFlow": {"FRAME": "tape"},
    "TensorFlow, eager, loaders": {"FRAME": "tape", "EAGER": "1", "LOADERS": "2"},
    "Keras on TensorFlow": {"FRAME": "fit", "KERAS_BACKEND": "tensorflow"},
    "Keras on TensorFlow, loaders": {"FRAME": "fit", "KERAS_BACKEND": "tensorflow", "LOADERS": "2"},
    "Keras on PyTorch": {"FRAME": "fit", "KERAS_BACKEND": "torch"},
    "Keras on PyTorch, loaders": {"FRAME": "fit", "KERAS_BACKEND": "torch", "LOADERS": "2"},
}
every_frame = pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
CONSTANT = "--batch", "constant"
BALANCED = "--batch", "balanced"


def run(job: Job, frame: dict[str, str], *flags: str, ranks: int = 3, code: int = 0, **variables: str) -> str:
    """What a job of so many ranks says, where PLANNED are the most; a slot gets a rank again only if others wait for it."""
    python, script = python_with("tcp"), Path(__file__).with_name("elastic_samples.py")
    cooldown = "1" if "JOINED" in variables else "60"
    hosts = "--host-discovery-script", f"echo localhost:{ranks}"
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", f"1:{PLANNED}", *hosts]
    line += ["--blacklist-cooldown-range", cooldown, cooldown, *flags, python, str(script)]
    numbers = {"SAMPLES": str(SAMPLES), "EPOCHS": str(EPOCHS), "BATCH": str(BATCH)}
    slow = {"SLOW": "0.005"} if "balanced" in flags else {}
    environment = rank_environment(**{**QUIET, **numbers, **slow, **frame, **variables})
    done: subprocess.CompletedProcess = job.run(*line, seconds=SECONDS, env=environment)
    assert done.returncode == code, done.stdout + done.stderr[-6000:]
    assert "WorldChangedError" not in done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def steps_of(said: str) -> list[list[int]]:
    """The samples in each step, which weigh the same; all ranks have found the same ones."""
    steps: dict[int, str] = {}
    for step, parts in re.findall(r"^\[\d+\] applied (\d+) \d+ (.*)$", said, re.MULTILINE):
        assert steps.setdefault(int(step), parts) == parts, f"step {step}: {parts} and {steps[int(step)]}"
    assert sorted(steps) == list(range(len(steps))), sorted(steps)
    found = [{int(place): part for place, part in json.loads(parts).items()} for _, parts in sorted(steps.items())]
    for parts in found:
        assert list(parts.values()) == pytest.approx([1.0 / len(parts)] * len(parts), abs=1e-5), parts
    return [sorted(parts) for parts in found]


def brought(said: str) -> list[list[list[int]]]:
    """By step and rank, the samples that it has brought."""
    steps: dict[int, dict[int, list[int]]] = {}
    for step, rank, indices in re.findall(r"^\[\d+\] brings (\d+) (\d+) (.*)$", said, re.MULTILINE):
        steps.setdefault(int(step), {})[int(rank)] = json.loads(indices)
    return [[by_rank[rank] for rank in sorted(by_rank)] for _, by_rank in sorted(steps.items())]


def assert_each_once(said: str, ranks: int, epochs: int = EPOCHS) -> list[list[int]]:
    """Each sample of each epoch is in one step, and all ranks come to what one process comes to with these steps."""
    steps = steps_of(said)
    whole, position = sorted(range(SAMPLES)), 0
    for _ in range(epochs):
        dealt: list[int] = []
        while len(dealt) < SAMPLES:
            dealt += steps[position]
            position += 1
        assert sorted(dealt) == whole
    assert position == len(steps)
    ends = re.findall(r"^\[\d+\] end (\d+) (.*)$", said, re.MULTILINE)
    assert len(ends) == ranks and len(set(ends)) == 1 and int(ends[0][0]) == len(steps), said
    weights = [0.0] * SAMPLES
    for step in steps:
        for each in step:
            weights[each] += (1.0 + each / SAMPLES - weights[each]) / len(step)
    assert json.loads(ends[0][1]) == pytest.approx(weights, abs=1e-6)
    return steps


def planned_steps() -> list[list[int]]:
    """Those of one process with the whole batch, sorted."""
    whole = BATCH * PLANNED
    orders = [sharding.order(SAMPLES, 0, epoch).tolist() for epoch in range(EPOCHS)]
    return [sorted(order[first : first + whole]) for order in orders for first in range(0, SAMPLES, whole)]


def test_a_lost_ranks_samples_come_in_the_next_step(job: Job) -> None:
    """Rank 1 dies with a share of six; the others' shares are a step, and grow by what it has left."""
    said = run(job, NUMPY, FAULTS=json.dumps({"1/3/begun": KILL}))
    steps = assert_each_once(said, 2)
    assert [len(step) for step in steps[:6]] == [6, 6, 6, 4, 4, 4]
    assert said.count("change 3 2") == 2


@pytest.mark.parametrize("flags", [CONSTANT, BALANCED], ids=["constant", "balanced"])
def test_a_constant_batch_is_that_of_one_process(flags: tuple[str, ...], job: Job) -> None:
    """Three ranks have shares of eight samples, and of two in the last step, where one of them weighs nothing."""
    assert assert_each_once(run(job, NUMPY, *flags), 3) == planned_steps()


@pytest.mark.parametrize(
    "most, flags, words",
    [
        ("2", BALANCED, "must hold a batch of 8 samples, but most= allows 2 + 2"),
        ("2", CONSTANT, "must come with --batch balanced"),
        ("0", BALANCED, "must be 1 at least, but are 0 and 1"),
    ],
)
def test_bounds_that_cannot_be_kept(most: str, flags: tuple[str, ...], words: str, job: Job) -> None:
    bounds = json.dumps({slot: {"most": int(most)} for slot in "01"})
    assert words in run(job, NUMPY, *flags, ranks=2, code=1, BOUNDS=bounds)


def test_shares_of_equal_cost(job: Job) -> None:
    """Of samples that cost 1 or 5, also behind a death; the same steps as one process until then."""
    cost = [5 if index % 4 == 0 else 1 for index in range(SAMPLES)]
    bounds = json.dumps({slot: {"cost": cost} for slot in "012"})
    said = run(job, NUMPY, *BALANCED, BOUNDS=bounds, FAULTS=json.dumps({"1/8/begun": KILL}))
    assert assert_each_once(said, 2)[:7] == planned_steps()[:7]
    for step in brought(said)[:4]:  # by speed later
        work = [sum(cost[index] for index in samples) for samples in step]
        assert len(work) == 3 and max(work) - min(work) <= 5, step


MISSES_A_DECISION = """
import ringtrain.elastic.sample_shares as shares
asks = shares.allgather
def heard_too_late(*given, **named):
    told = asks(*given, **named)
    if slot == 1 and told[:, 0].all() and not (folder / "missed").exists():
        (folder / "missed").touch()
        raise PeerLostError("planted")
    return told
shares.allgather = heard_too_late
"""


def test_a_rank_that_misses_a_decision_learns_how_the_others_were_dealt_to(job: Job) -> None:
    """They have drawn by shares of which it has not heard when it leaves that world; the next one begins with their step."""
    said = run(job, NUMPY, *BALANCED, PLANTED=MISSES_A_DECISION, SLOW="0.02")
    assert assert_each_once(said, 3) == planned_steps()
    assert (Path(job.temporary) / "missed").exists()
    sizes = [[len(samples) for samples in step] for step in brought(said)]
    assert sizes[:4] == [[3, 3, 2]] * 4 and sizes[4] in ([1, 2, 5], [1, 3, 4]), sizes


@pytest.mark.long
@every_frame
@pytest.mark.parametrize(
    "faults",
    [
        {"0/0/begun": KILL},
        {"1/4/released": KILL},
        {"2/6/begun": "raise ValueError('the data are broken')"},
        {"0/8/begun": KILL},  # the last step of an epoch
        {"0/3/begun": KILL, "2/12/begun": KILL},
        {"0/5/begun": KILL, "1/5/begun": KILL},
        {
            "2/4/holding": "os.kill(int((folder / 'pid-1').read_text()), signal.SIGKILL); raise PeerLostError('in the test')"
        },
    ],
    ids=lambda faults: " ".join(faults),
)
@pytest.mark.parametrize("flags", [(), CONSTANT, BALANCED], ids=["", "constant", "balanced"])
def test_whoever_dies_wherever(flags: tuple[str, ...], faults: dict[str, str], frame: dict[str, str], job: Job) -> None:
    assert_each_once(run(job, frame, *flags, FAULTS=json.dumps(faults)), 3 - len(faults))


@pytest.mark.long
@every_frame
def test_any_number_of_ranks_trains_as_one_process(frame: dict[str, str], job: Job) -> None:
    for ranks in (4, 3, 1) if frame["FRAME"] == "numpy" else (3, 1):
        assert assert_each_once(run(job, frame, *CONSTANT, ranks=ranks), ranks) == planned_steps()
    assert assert_each_once(run(job, frame, *BALANCED), 3) == planned_steps()


@pytest.mark.long
@every_frame
@pytest.mark.parametrize("flags", [(), CONSTANT], ids=["", "constant"])
def test_a_rank_that_joins_reads_what_is_left(flags: tuple[str, ...], frame: dict[str, str], job: Job) -> None:
    """Slot 1 dies in step 4, and another rank joins there before step 10."""
    said = run(job, frame, *flags, FAULTS=json.dumps({"1/4/begun": KILL}), JOINED="3")
    steps = assert_each_once(said, 3)
    sizes = [len(step) for step in steps]
    assert sizes[3:6] == ([8, 5, 8] if flags else [6, 4, 4]), sizes
    assert flags or 6 in sizes[5:], sizes


@pytest.mark.long
@pytest.mark.parametrize(
    "frame", [FRAMES["TensorFlow"], FRAMES["Keras on TensorFlow"], NUMPY], ids=lambda each: each["FRAME"]
)
def test_without_elastic_and_alone_it_runs_too(frame: dict[str, str], job: Job) -> None:
    python, script = python_with("tcp"), Path(__file__).with_name("elastic_samples.py")
    numbers = {"SAMPLES": str(SAMPLES), "EPOCHS": str(EPOCHS), "BATCH": str(BATCH)}
    environment = rank_environment(**{**QUIET, **numbers, **frame})
    for ranks in 3, 1:
        launched = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "-np", str(ranks)]
        done = job.run(*launched, python, str(script), seconds=SECONDS, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr[-6000:]
        assert [len(step) for step in assert_each_once(done.stdout, ranks)][:2] == [BATCH * ranks] * 2


@pytest.mark.long
def test_a_sum_of_passes_is_weighed_as_a_whole(job: Job) -> None:
    """Two batches make an update; a rank that dies between them takes its shares along, and they are dealt again."""
    frame = {**FRAMES["Keras on TensorFlow"], "PASSES": "2", "SAMPLES": "48"}
    said = run(job, frame, *CONSTANT, FAULTS=json.dumps({"1/2/begun": KILL}))
    assert len(set(re.findall(r"^\[\d+\] end (.*)$", said, re.MULTILINE))) == 1, said


@pytest.mark.long
def test_sums_of_gradients_are_refused_by_name(job: Job) -> None:
    said = run(job, {"FRAME": "tape", "OP": "Sum"}, *CONSTANT, code=1)
    assert "with --batch constant gradients must be averaged, weighed by samples" in said


PLANTED = {
    "lost samples are not given back": (
        "finish = BatchSampler.finish_window; BatchSampler.finish_window = lambda self, contributors: finish(self, None)",
        (),
    ),
    "lost samples are given back that are in the step": (
        "finish = BatchSampler.finish_window\n"
        "BatchSampler.finish_window = lambda self, some: finish(self, None if some is None else set(list(some)[1:]))",
        (),
    ),
    "shares weigh the same": ("TransparentState.share = lambda self, op: None", CONSTANT),
}


@pytest.mark.long
@pytest.mark.parametrize("fault, flags", PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_would_be_found(fault: str, flags: tuple[str, ...], job: Job) -> None:
    planted = f"from ringtrain.elastic.sampler import BatchSampler\n{fault}"
    said = run(job, NUMPY, *flags, FAULTS=json.dumps({"1/3/begun": KILL}), PLANTED=planted)
    with pytest.raises(AssertionError):
        assert_each_once(said, 2)
