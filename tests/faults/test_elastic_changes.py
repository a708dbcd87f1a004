"""What a training makes of another number of ranks, with ranks that join; and what ranks must have alike from the start."""

from __future__ import annotations

import json
import re

import pytest
import test_elastic_frameworks as frameworks
from test_elastic_steps import KILL, LATER, TRAINING, ends, run

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
]
# The learning rate follows the number of ranks, by a factor that they agree on.
FOLLOWING = """
    sampler = hvd.elastic.ElasticSampler(Data())
    loader = torch.utils.data.DataLoader(Data(), BATCH, sampler=sampler)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, schedule=schedule)

    def follow(old, new):
        factor = state.survive(lambda: hvd.allreduce(torch.tensor([new / old]), name="factor")).item()
        for group in optimizer.param_groups:
            group["lr"] *= factor
        print("change", old, new, flush=True)

    state.on_change(follow)
    for epoch in state.epochs(EPOCHS):
        for indices, x, y in loader:
            while state.step == 9 and hvd.size() < 3:
                if membership.current().wants_pause:  # the rank that joins is there
                    break
                time.sleep(0.02)
            train_on(indices, x, y)
    end()
"""


@pytest.mark.long  # test_elastic has ranks that join
def test_a_rank_that_joins_follows_the_change_too(job: Job) -> None:
    """It has the rate from before the change, as the others had, and replicas end alike."""
    faults = json.dumps({"1/4/backward": KILL})
    done = run(job, "--elastic", "-np", "2:3", program=FOLLOWING, FAULTS=faults)
    assert len(ends(done)) == 3 and len(set(ends(done))) == 1, done.stdout + done.stderr
    assert (done.stdout.count("change 3 2"), done.stdout.count("change 2 3")) == (2, 3)


LINGERING = """
def linger():
    time.sleep(2)
    print("left", flush=True)

import atexit
atexit.register(linger)
raise LookupError("batch 4 is missing")
"""


@pytest.mark.parametrize("frame", ["arrays", pytest.param("PyTorch", marks=pytest.mark.long)])
def test_a_rank_that_raises_is_left_before_its_process_ends(frame: str, job: Job) -> None:
    """Its Python may take long to end, for which nobody waits."""
    if frame == "arrays":
        faults = json.dumps({"1/4/begun": LINGERING})
        done = frameworks.run(job, frameworks.NUMPY, "--elastic", "-np", "2:3", FAULTS=faults)
    else:
        faults = json.dumps({"1/4/backward": LINGERING})
        done = run(job, "--elastic", "-np", "2:3", *LATER, program=TRAINING, FAULTS=faults)
    assert len(ends(done)) == 2 and len(set(ends(done))) == 1, done.stdout + done.stderr
    before, change, _ = done.stdout.rpartition("change 3 2")
    assert change and "left" not in before, done.stdout  # it may still linger when the others have come to the end
    assert "LookupError: batch 4 is missing" in done.stderr


OTHERS = """
    from ringtrain.errors import RingtrainError

    other = torch.nn.Linear(3, 1)
    tries = {
        "state": lambda: (model, None),
        "model": lambda: (other, hvd.elastic.ElasticSampler(Data())),
        "seed": lambda: (model, hvd.elastic.ElasticSampler(Data(), seed=hvd.rank())),
        "shuffle": lambda: (model, hvd.elastic.ElasticSampler(Data(), shuffle=hvd.rank() == 0)),
    }
    its_model, sampler = tries[os.environ["TRY"]]()
    try:
        if os.environ["TRY"] == "state":
            first = hvd.elastic.State(model=model, optimizer=optimizer)
            hvd.elastic.State(model=model, optimizer=optimizer)
            next(first.epochs(1))
        next(hvd.elastic.State(model=its_model, optimizer=optimizer, sampler=sampler).epochs(1))
    except RingtrainError as problem:
        print("refused", problem, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "what, words",
    [
        ("model", "expected the models of all parameters that its optimizers train but found 4 of none"),
        ("state", "expected one State of an optimizer but found another one"),
        ("seed", "sampler is ElasticSampler of 120 samples, shuffled by seed 1 there, and .* seed 0 on rank 0"),
        ("shuffle", "sampler is ElasticSampler of 120 samples, in their order there"),
    ],
)
def test_what_would_part_the_ranks_is_refused(what: str, words: str, job: Job) -> None:
    """By all of them, in the same words."""
    said = run(job, "--elastic", "-np", "2", program=OTHERS, TRY=what).stdout
    refusals = re.findall(r"^\[\d\] refused (.*)$", said, re.M)
    assert len(refusals) == 2 and len(set(refusals)) == 1, said
    assert re.search(words, refusals[0]), refusals[0]
