"""``--batch constant`` on real processes: steps have the samples that one process would take, and its gradient.

A job prints which samples each rank has brought to each step. Torch alone, in this process, makes the same steps of them,
each a mean over all its samples, and comes to the same parameters.
"""

from __future__ import annotations

import json
import re
import subprocess
import textwrap

import pytest
from environments import python_with, rank_environment, transport_of

from benchmarks.jobs import Job
from ringtrain._training import sharding

pytestmark = [
    pytest.mark.tcp,
]
SECONDS = 90.0
EPOCHS = 2
SAMPLES = 50  # the last batch of an epoch has two
BATCH = 2
PLANNED = 4
TOLERANCE = 1e-12  # in float64, where rounding makes 1e-16 in a step

MODEL = """
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return SAMPLES
        def __getitem__(self, index):
            drawn = torch.Generator().manual_seed(index)
            return index, torch.randn(3, generator=drawn).double(), torch.randn(1, generator=drawn).double()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(SAMPLES, 3, sparse=SPARSE)
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 5), NORM(5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        def forward(self, indices, x):
            return self.layers(x + self.table(indices // 2))

    def made():
        model = Net().double()
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def values(model):
        return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
"""
# Slot, step and place of a fault come from the environment, and what strikes; a file tells that it has struck.
TRAINING = """
    import json, os, signal, time
    from pathlib import Path
    import ringtrain
    import ringtrain.torch as hvd
    from ringtrain._bootstrap import membership
    from ringtrain.elastic.order import BatchOrder

    slot, folder = os.environ.get("RINGTRAIN_RANK", "0"), Path(os.environ["TMPDIR"])
    faults = json.loads(os.environ.get("FAULTS", "{}"))  # statement by "slot/step/place"
    exec(os.environ.get("PLANTED", ""))
    model, optimizer = made()
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)  # the parameters stay the same objects
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(Data(), **json.loads(os.environ.get("BOUNDS", "{}")).get(slot, {}))
    loader = torch.utils.data.DataLoader(Data(), BATCH, sampler=sampler, **json.loads(os.environ.get("LOADER", "{}")))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, len(loader), 0.5)  # which no number of ranks may change
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, schedule=schedule)

    def fault(place):
        mark = folder / f"struck-{slot}-{state.step}"
        statement = faults.get(f"{slot}/{state.step}/{place}")
        if statement and not mark.exists():
            mark.touch()
            exec(statement)

    model.layers[0].weight.register_hook(lambda gradient: fault("backward"))
    for epoch in state.epochs(EPOCHS):
        for indices, x, y in loader:
            while state.step == 5 and hvd.size() < int(os.environ.get("JOINED", 1)):
                if membership.current().wants_pause:  # the rank that joins is there
                    break
                time.sleep(0.02)
            rank = hvd.rank()  # within the step others may die, but those that are left keep their order
            optimizer.zero_grad()
            time.sleep(float(os.environ.get("SLOW", 0)) * len(indices) * 2 ** (2 - int(slot)))  # that of slot 2 is the fastest
            (model(indices, x) - y).square().mean().backward()
            print("applied", state.step, rank, sampler.weight(None), *indices.tolist(), flush=True)
            fault("released")
            optimizer.step()
            assert sum(share.samples for share in ringtrain.stats().shares) in (0, sampler.batch), ringtrain.stats().shares
            schedule.step()
    print("end", json.dumps(values(model)), flush=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LATER = "--blacklist-cooldown-range", "60", "60"  # no rank comes back within the test


def program(norm: str, sparse: bool) -> str:
    constants = f"SAMPLES, BATCH, EPOCHS, SPARSE = {SAMPLES}, {BATCH}, {EPOCHS}, {sparse}\n"
    return constants + textwrap.dedent(MODEL).replace("NORM(", f"{norm}(")


def run(
    job: Job, ranks: int, *flags: str, norm: str = "torch.nn.Identity", sparse: bool = False, **variables: str
) -> str:
    """What a job of so many ranks says, where PLANNED are the most."""
    python = python_with("tcp")
    hosts = "--host-discovery-script", f"echo localhost:{ranks}"
    source = program(norm, sparse) + textwrap.dedent(TRAINING)
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", f"1:{PLANNED}", *hosts, *flags]
    environment = rank_environment(OMP_NUM_THREADS="1", **variables)
    done: subprocess.CompletedProcess = job.run(*line, python, "-c", source, seconds=SECONDS, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(said: str) -> list[list[list[int]]]:
    """By step and rank, the samples that it has brought; each step once by each rank."""
    steps: dict[int, dict[int, list[int]]] = {}
    for line in re.findall(r"^\[\d+\] applied (.*)$", said, re.MULTILINE):
        step, rank, weight, *indices = map(int, line.split())
        by_rank = steps.setdefault(step, {})
        assert rank not in by_rank, f"step {step} twice on rank {rank}"
        assert weight in (len(indices), 0) and indices, line
        by_rank[rank] = indices[:weight]
    assert sorted(steps) == list(range(len(steps))), sorted(steps)
    return [[by_rank[rank] for rank in sorted(by_rank)] for _, by_rank in sorted(steps.items())]


def planned_steps() -> list[list[int]]:
    """Those of one process, sorted."""
    whole = BATCH * PLANNED
    orders = [sharding.order(SAMPLES, 0, epoch).tolist() for epoch in range(EPOCHS)]
    return [sorted(order[first : first + whole]) for order in orders for first in range(0, SAMPLES, whole)]


def trained_alone(steps: list[list[int]], norm: str = "torch.nn.Identity", sparse: bool = False) -> list[float]:
    """The parameters after these steps, each the mean over its samples, by torch alone."""
    import torch

    names: dict = {}
    exec(program(norm, sparse), names)
    model, optimizer = names["made"]()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, -(-SAMPLES // (BATCH * PLANNED)), 0.5)
    for step in steps:
        indices, x, y = torch.utils.data.default_collate([names["Data"]()[index] for index in step])
        optimizer.zero_grad()
        (model(indices, x) - y).square().mean().backward()
        optimizer.step()
        schedule.step()
    return names["values"](model)


def assert_as_alone(said: str, ranks: int, norm: str = "torch.nn.Identity", sparse: bool = False) -> list[list[int]]:
    """All replicas have the same bits, and to rounding what one process has after the same steps; each sample came once."""
    ends = re.findall(r"^\[\d+\] end (.*)$", said, re.MULTILINE)
    assert len(ends) == ranks and len(set(ends)) == 1, said
    steps = [sorted(index for samples in step for index in samples) for step in steps_of(said)]
    assert json.loads(ends[0]) == pytest.approx(trained_alone(steps, norm, sparse), abs=TOLERANCE), said
    assert sorted(index for step in steps for index in step) == sorted([*range(SAMPLES)] * EPOCHS)
    return steps


def test_a_state_that_cannot_follow_the_flag_says_so(job: Job) -> None:
    """In the ranks, which the launcher has told of it: the script deals the samples, and not a sampler."""
    python = python_with("tcp")
    source = "import ringtrain as rt, ringtrain.elastic; rt.init(); rt.elastic.State(weights=1)"
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", "1", "--batch", "constant"]
    done = job.run(*line, python, "-c", source, seconds=SECONDS, env=rank_environment())
    assert done.returncode == 1
    assert "InvalidArgumentError: --batch constant: elastic.State must have one BatchSampler" in done.stderr


def test_a_job_waits_for_what_its_last_rank_has_to_say(job: Job) -> None:
    """The rank says that it fails before its traceback is written: here half a second before."""
    python = python_with("tcp")
    source = (
        "import sys, time; write = sys.excepthook; sys.excepthook = lambda *error: (time.sleep(0.5), write(*error))\n"
        "import ringtrain as rt; rt.init(); raise RuntimeError('the whole of its last words')"
    )
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", "1"]
    done = job.run(*line, python, "-c", source, seconds=SECONDS, env=rank_environment())
    assert done.returncode == 1
    assert "RuntimeError: the whole of its last words" in done.stderr


@pytest.mark.long
def test_a_death_within_a_step_of_unequal_shares(job: Job) -> None:
    """The step is the mean over what is left of its batch, and what is lost is in the next one."""
    faults = json.dumps({"2/3/backward": KILL})
    said = run(job, 3, *LATER, "--batch", "constant", FAULTS=faults)
    steps = assert_as_alone(said, 2)
    assert steps[:3] == planned_steps()[:3]
    assert [[len(samples) for samples in step] for step in steps_of(said)[2:5]] == [[3, 3, 2], [3, 3], [4, 4]]


@pytest.mark.parametrize(
    "faults, loader",
    [
        ({"1/8/backward": KILL}, {}),
        pytest.param({}, {"num_workers": 2}, marks=pytest.mark.long),
        pytest.param({"0/8/released": KILL}, {"num_workers": 2}, marks=pytest.mark.long),
        pytest.param({"2/7/backward": KILL, "1/10/backward": KILL}, {}, marks=pytest.mark.long),
    ],
    ids=["a death", "workers", "a death, workers", "two deaths"],
)
def test_shares_that_follow_how_fast_ranks_are(faults: dict[str, str], loader: dict, job: Job) -> None:
    """The same steps as one process, though the shares are others from the sixth on; what is lost comes again."""
    said = run(job, 3, *LATER, "--batch", "balanced", FAULTS=json.dumps(faults), LOADER=json.dumps(loader), SLOW="0.02")
    assert_as_alone(said, 3 - len(faults))
    sizes = [[len(samples) for samples in step] for step in steps_of(said)]
    assert sizes[:4] == [[3, 3, 2]] * 4 and sizes[4] in ([1, 2, 5], [1, 3, 4]), sizes


MISSES_A_DECISION = """
import numpy as np
import ringtrain.elastic.sample_shares as shares
from ringtrain.errors import PeerLostError
asks = shares.allgather
def heard_too_late(*given, **named):
    told = asks(*given, **named)
    if slot == "1" and told[:, 0].all() and not (folder / "missed").exists():
        (folder / "missed").touch()
        raise PeerLostError("planted")
    return told
shares.allgather = heard_too_late
"""


@pytest.mark.long  # test_elastic_samples has it with arrays
def test_a_rank_that_misses_a_decision_learns_how_the_others_were_dealt_to(job: Job) -> None:
    """They have drawn by shares of which it has not heard when it leaves that world; the next one begins with their step."""
    said = run(job, 3, *LATER, "--batch", "balanced", PLANTED=MISSES_A_DECISION, SLOW="0.02")
    assert_as_alone(said, 3)
    sizes = [[len(samples) for samples in step] for step in steps_of(said)]
    assert sizes[:4] == [[3, 3, 2]] * 4 and sizes[4] in ([1, 2, 5], [1, 3, 4]), sizes


def test_shares_within_bounds(job: Job) -> None:
    """Of two samples or a multiple, but for an epoch's last batch; the fastest rank has room for two."""
    bounds = json.dumps({"0": {"multiple_of": 2}, "1": {"multiple_of": 2}, "2": {"multiple_of": 2, "most": 2}})
    said = run(job, 3, *LATER, "--batch", "balanced", BOUNDS=bounds, SLOW="0.02")
    assert_as_alone(said, 3)
    sizes = [[len(samples) for samples in step] for step in steps_of(said) if sum(map(len, step)) == BATCH * PLANNED]
    assert sizes[0] in ([4, 2, 2], [2, 4, 2]) and sizes[5] == [2, 4, 2], sizes


@pytest.mark.long
def test_no_rank_has_more_than_it_has_room_for(job: Job) -> None:
    """From the first step on, and what it leaves goes to the others, however fast they are."""
    bounds = json.dumps({"0": {"most": 2}, "2": {"most": 3}})
    said = run(job, 3, *LATER, "--batch", "balanced", BOUNDS=bounds, SLOW="0.02")
    assert_as_alone(said, 3)
    sizes = [[len(samples) for samples in step] for step in steps_of(said)]
    assert sizes[:4] == [[2, 3, 3]] * 4 and sizes[4] in ([1, 4, 3], [2, 3, 3]), sizes


@pytest.mark.long
def test_shares_that_are_multiples(job: Job) -> None:
    """Of two samples, but for an epoch's last batch."""
    bounds = json.dumps({slot: {"multiple_of": 2} for slot in "012"})
    said = run(job, 3, *LATER, "--batch", "balanced", BOUNDS=bounds, SLOW="0.02")
    assert_as_alone(said, 3)
    sizes = [[len(samples) for samples in step] for step in steps_of(said) if sum(map(len, step)) == BATCH * PLANNED]
    assert sizes[0] in ([4, 2, 2], [2, 4, 2]) and sizes[5] == [2, 2, 4], sizes


@pytest.mark.parametrize(
    "way, faults",
    [
        ("constant", {}),
        pytest.param(
            "balanced", {"1/8/backward": KILL}, marks=pytest.mark.long
        ),  # test_elastic_samples has it with arrays
    ],
)
def test_shares_of_equal_cost(way: str, faults: dict[str, str], job: Job) -> None:
    """Of samples that cost 1 or 5; the same steps as one process."""
    cost = {"cost": [5 if index % 4 == 0 else 1 for index in range(SAMPLES)]}
    bounds = json.dumps(dict.fromkeys("012", cost))
    said = run(job, 3, *LATER, "--batch", way, BOUNDS=bounds, FAULTS=json.dumps(faults))
    steps = assert_as_alone(said, 3 - len(faults))
    assert steps[:7] == planned_steps()[:7]
    for step in steps_of(said)[: 6 if way == "constant" else 4]:  # by speed later
        work = [sum(cost["cost"][index] for index in samples) for samples in step]
        assert max(work) - min(work) <= 5, step


@pytest.mark.long
@pytest.mark.parametrize(
    "norm, sparse, loader",
    [("torch.nn.Identity", True, {}), ("torch.nn.BatchNorm1d", False, {"num_workers": 2})],
    ids=["sparse", "norm and workers"],
)
def test_any_number_of_ranks_trains_as_one_process(norm: str, sparse: bool, loader: dict, job: Job) -> None:
    """The same samples in each step, the same parameters to rounding, whole batches and the last one of two samples."""
    for ranks in 4, 3, 2, 1:
        said = run(job, ranks, "--batch", "constant", norm=norm, sparse=sparse, LOADER=json.dumps(loader))
        assert assert_as_alone(said, ranks, norm, sparse) == planned_steps()


@pytest.mark.long
@pytest.mark.parametrize(
    "faults, steps",
    [
        ({"0/6/backward": KILL}, 14),  # of the last batch, where rank 2 computes the same
        ({"1/6/released": KILL}, 14),
        ({"0/6/backward": KILL, "1/6/backward": KILL}, 15),
        ({"0/0/backward": KILL, "1/1/backward": KILL}, 15),
        ({"0/13/backward": KILL}, 14),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("loader", [{}, {"num_workers": 2}], ids=["", "workers"])
def test_whoever_dies_wherever(loader: dict, faults: dict[str, str], steps: int, job: Job) -> None:
    """Also where there are fewer samples than ranks."""
    said = run(job, 3, *LATER, "--batch", "constant", FAULTS=json.dumps(faults), LOADER=json.dumps(loader))
    assert len(assert_as_alone(said, 3 - len(faults))) == steps


@pytest.mark.long
def test_a_rank_that_joins_makes_shares_smaller(job: Job) -> None:
    flags = "--blacklist-cooldown-range", "1", "1", "--batch", "constant"
    said = run(job, 3, *flags, FAULTS=json.dumps({"1/2/backward": KILL}), JOINED="3")
    assert_as_alone(said, 3)
    sizes = [[len(samples) for samples in step] for step in steps_of(said)]
    assert sizes[1:6] == [[3, 3, 2], [3, 2], [4, 4], [4, 4], [4, 4]] and sizes[7] == [3, 3, 2], sizes
