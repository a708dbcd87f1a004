"""Elastic jobs whose script has operations of its own: a death within ``State.survive`` costs nothing, and ranks still join."""

from __future__ import annotations

import json
import re

import pytest
from test_elastic_steps import KILL, LATER, ends, run

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
    pytest.mark.long,
]
# Without an ElasticSampler: ranks join where an epoch ends. Each brings the slot that it has to the metric.
PROGRAM = """
    state = hvd.elastic.State(model=model, optimizer=optimizer)

    def metric():
        fault("metric")
        total = hvd.allreduce(torch.tensor(float(slot)), op=hvd.Sum, name="total")
        return float(total), int(hvd.allreduce(torch.tensor(1), op=hvd.Sum, name="ranks"))

    for epoch in state.epochs(6):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        while epoch == 3 and hvd.size() < int(os.environ.get("JOINED", 1)):
            if membership.current().wants_pause:
                break
            time.sleep(0.02)
        print("metric", epoch, *state.survive(lambda: state.survive(metric)), flush=True)
    end()
"""


def metrics(text: str) -> dict[int, set[str]]:
    """By epoch, what the ranks say."""
    found: dict[int, set[str]] = {}
    for epoch, said in re.findall(r"^\[\d+\] metric (\d+) (.*)$", text, re.MULTILINE):
        found.setdefault(int(epoch), set()).add(said)
    return found


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_within_a_metric_leaves_that_of_the_others(victim: int, job: Job) -> None:
    """It dies in the metric of the third epoch, where the others wait for it."""
    done = run(job, "--elastic", "-np", "1:3", *LATER, program=PROGRAM, FAULTS=json.dumps({f"{victim}/9/metric": KILL}))
    assert len(ends(done)) == 2 and len(set(ends(done))) == 1
    before, after = {"3.0 3"}, {f"{3.0 - victim} 2"}
    assert metrics(done.stdout) == {epoch: before if epoch < 2 else after for epoch in range(6)}


def test_a_rank_joins_behind_a_metric(job: Job) -> None:
    """What is between two steps keeps nobody out."""
    faults = json.dumps({"1/4/backward": KILL})
    done = run(job, "--elastic", "-np", "2:3", program=PROGRAM, FAULTS=faults, JOINED="3")
    assert len(ends(done)) == 3 and len(set(ends(done))) == 1
    assert metrics(done.stdout) == {epoch: {"2.0 2"} if 0 < epoch < 4 else {"3.0 3"} for epoch in range(6)}
