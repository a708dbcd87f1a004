"""Option autotune under DistributedOptimizer: training keeps its bits, and bursts of gradients have the size that holds."""

import copy

import pytest
import torch
from torch_models import assert_same_bits

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.testing import World
from ringtrain.torch import exchange
from ringtrain.torch.bursts import Bursts

pytestmark = pytest.mark.timeout(120)


MODEL = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())))


def trained(rank, steps):
    """Parameters after some steps, and what was tuned in them."""
    model = copy.deepcopy(MODEL)  # ranks are threads, and torch's random numbers are the process'
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], rt.tuning()


@pytest.mark.parametrize(("size", "layout"), [(2, None), (3, "2+1")])
def test_training_keeps_its_bits(size, layout, tmp_path):
    with World(size, layout) as world:
        plain = world.run(trained, 60)
    chosen = {"autotune": 1, "autotune_steps_per_sample": 2, "autotune_cache": tmp_path / "cache"}
    with World(size, layout, **chosen) as world:
        tuned = world.run(trained, 60)
    changes = tuned[0][1].changes
    assert len({change.settings["burst_bytes"] for change in changes}) > 1, "no other burst was tried"
    for parameters, found in tuned:
        assert_same_bits(parameters, plain[0][0])
        assert found.changes == changes


@pytest.mark.parametrize(("burst_bytes", "times"), [(1, 8), (1 << 30, 1)])
def test_bursts_have_the_size_that_holds(burst_bytes, times, monkeypatch):
    """Of four weights and four biases each leaves at once, or all of them when the pass ends."""
    left = []
    leave = Bursts.leave
    monkeypatch.setattr(exchange, "overlap_pays", lambda session, parameters: True)
    monkeypatch.setattr(
        Bursts, "leave", lambda bursts, **how: (left.append(len(bursts._gathered)), leave(bursts, **how))[1]
    )
    with World(2, burst_bytes=burst_bytes) as world:
        world.run(trained, 1)
    assert len([gathered for gathered in left if gathered > 0]) == 2 * times
