"""Elastic jobs with two optimizers, as for a generator and its critic: a death between their steps loses neither.

Each iteration has two halves, in each of which one of them learns from the same samples. A rank that dies between the two
has a share in the first alone, so the plan that is replayed goes from half to half.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from test_elastic_steps import EPOCHS, KILL, LATER, SAMPLES, applied, ends, run

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
]
HALVES = """
    critic = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    if slot == "0":
        for number, parameter in enumerate(critic.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(10 + number))
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.5)
    critic_optimizer = hvd.DistributedOptimizer(critic_optimizer, critic.named_parameters())
    half = "critic"
    critic[0].weight.register_hook(lambda gradient: fault(half))

    def train_critic(indices, x, y):
        global half
        half, rank = "critic", hvd.rank()
        critic_optimizer.zero_grad()
        decay = sum(parameter.square().sum() for parameter in critic.parameters())
        (critic(model(x).detach()).mean() - critic(y).mean() + 0.1 * decay).backward()
        print("applied", 2 * state.step, rank, *indices.tolist(), flush=True)
        fault("released")
        critic_optimizer.step()

    def train_generator(indices, x, y):
        global half
        half, rank = "generator", hvd.rank()
        optimizer.zero_grad()
        (-critic(model(x)).mean() + 0.1 * model[0].weight.square().sum()).backward()  # of the critic, too
        print("applied", 2 * state.step + 1, rank, *indices.tolist(), flush=True)
        optimizer.step()

    def end():
        values = [*model.parameters(), *critic.parameters()]
        bits = b"".join(value.detach().numpy().tobytes() for value in values)
        print("end", state.step, hashlib.sha256(bits).hexdigest(), flush=True)
"""
TRAINING = """
    sampler = hvd.elastic.ElasticSampler(Data())
    loader = torch.utils.data.DataLoader(Data(), BATCH, sampler=sampler, **json.loads(os.environ.get("LOADER", "{}")))
    state = hvd.elastic.State(
        model=model, optimizer=optimizer, sampler=sampler, critic=critic, critic_optimizer=critic_optimizer
    )
    state.on_change(lambda old, new: print("change", old, new, half, flush=True))
    for epoch in state.epochs(EPOCHS):
        for indices, x, y in loader:
            while state.step == 9 and hvd.size() < int(os.environ.get("JOINED", 1)):
                if membership.current().wants_pause:  # the rank that joins is there
                    break
                time.sleep(0.02)
            train_critic(indices, x, y)
            train_generator(indices, x, y)
    end()
"""
REPLAY = """
    plan = json.loads(Path(os.environ["PLAN"]).read_text())
    saved = folder / "state.pt"
    kept_of = {"model": model, "optimizer": optimizer, "critic": critic, "critic_optimizer": critic_optimizer}
    halves = 0
    if saved.exists():
        kept = torch.load(saved)
        halves = kept.pop("halves")
        for name, value in kept_of.items():
            value.load_state_dict(kept[name])
    else:
        for each in (model, critic):
            hvd.broadcast_parameters(each.state_dict(), root_rank=0)
    state = type("State", (), {})
    for halves, samples in enumerate(plan, halves):
        state.step = halves // 2
        batch = torch.utils.data.default_collate([Data()[index] for index in samples[hvd.rank()]])
        (train_generator if halves % 2 else train_critic)(*batch)
    halves += 1
    state.step = halves // 2
    if hvd.rank() == 0:
        torch.save({"halves": halves, **{name: value.state_dict() for name, value in kept_of.items()}}, saved)
    end()
"""
PROGRAM = HALVES + TRAINING


def assert_as_planned(job: Job, *flags: str, ranks: int, folder: Path, **variables: str) -> list[list[list[int]]]:
    """Runs it; all ranks that came to the end have the bits of the planned halves, which are returned."""
    done = run(job, "--elastic", *flags, program=PROGRAM, **variables)
    plan = applied(done)
    assert len(set(ends(done))) == 1 and len(ends(done)) == ranks, done.stdout + done.stderr
    for number, (size, halves) in enumerate(itertools.groupby(plan, key=len)):
        place = folder / f"plan-{number}.json"
        place.write_text(json.dumps(list(halves)))
        planned = run(job, "-np", str(size), program=HALVES + REPLAY, PLAN=str(place))
    assert set(ends(planned)) == set(ends(done))
    drawn = Counter(index for half in plan[::2] for samples in half for index in samples)
    twice = drawn - Counter([*range(SAMPLES)] * EPOCHS)
    assert len(drawn) == SAMPLES and min(drawn.values()) == EPOCHS and twice.total() < ranks, (
        twice
    )  # where 8 are left for 3
    assert not re.search(r"^\[\d+\] change .* critic", done.stdout, re.MULTILINE), (
        "listeners hear of it between two steps"
    )
    return plan


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        "1/4/critic",
        "0/4/critic",
        "1/4/released",
        "0/4/released",
        "2/4/generator",
        "1/4/backward",
        "0/0/generator",
        "1/9/released",
    ],
)
@pytest.mark.parametrize("loader", [{}, {"num_workers": 2}], ids=["", "workers"])
def test_a_death_costs_no_step_of_either(loader: dict, fault: str, job: Job, tmp_path: Path) -> None:
    """Before, between and within the two; in the second half gradients of both travel at the end of one pass."""
    variables = {"FAULTS": json.dumps({fault: KILL}), "LOADER": json.dumps(loader)}
    plan = assert_as_planned(job, "-np", "1:3", *LATER, ranks=2, folder=tmp_path, **variables)
    _, step, place = fault.split("/")
    halves = 2 * int(step) + {"critic": 0, "released": 1, "generator": 1, "backward": 1}[place]
    assert [len(half) for half in plan[: halves + 2]] == [3] * halves + [2, 2]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["0/4/released", "1/4/generator"])
def test_a_rank_joins_between_two_iterations(fault: str, job: Job, tmp_path: Path) -> None:
    """It has both models and both optimizers, and names their gradients as the others do."""
    variables = {"FAULTS": json.dumps({fault: KILL}), "JOINED": "3"}
    plan = assert_as_planned(job, "-np", "2:3", ranks=3, folder=tmp_path, **variables)
    assert [len(half) for half in plan[9:22]] == [2] * 11 + [3] * 2
