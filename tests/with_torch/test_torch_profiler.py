"""torch.profiler sees ringtrain: ranges where it submits and waits, and which rank the trace is of."""

import json
from contextlib import nullcontext

import pytest
import torch
from worlds import World

import ringtrain.torch as hvd
from ringtrain._runtime import ranges

pytestmark = [pytest.mark.on_threads("the ranks are threads of one process")]
RANGES = {
    "ringtrain.hook", "ringtrain.end of backward", "ringtrain.synchronize", "ringtrain.allreduce: late", "ringtrain.wait: late",
    "ringtrain.allgather: rows", "ringtrain.wait: rows", "ringtrain.barrier: unnamed",
}  # fmt: skip


def steps():
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), mode=hvd.Synchronous(replicas="differ")
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="late"))
    hvd.allgather(torch.ones(2, 2), name="rows")
    hvd.barrier()


@pytest.mark.parametrize("is_on", [True, False])
def test_what_has_a_range(monkeypatch, is_on):
    """And that none is made while no profiler is on."""
    made = []
    monkeypatch.setattr(ranges, "wanted", lambda: is_on)
    monkeypatch.setattr(ranges, "_make", lambda name: made.append(name) or nullcontext())
    with World(2) as world:
        world.run(lambda rank: steps())
    assert (set(made) >= RANGES) if is_on else made == []


@pytest.mark.long  # torch's profiler takes seconds to begin
def test_the_profiler_has_the_ranges_and_the_rank(tmp_path):
    import torch._dynamo  # not by two threads at a time, which the profiler and an optimizer would

    def on_rank(rank):
        if rank == 0:
            return steps()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            steps()
        return profiler.export_chrome_trace(str(tmp_path / "trace.json"))

    with World(2) as world:
        world.run(on_rank)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["name"] for event in trace["traceEvents"]} >= RANGES
    assert trace["distributedInfo"] == {"backend": "ringtrain", "rank": 1, "world_size": 2}
