"""Small gradients leave together."""

import copy

import pytest
import torch

import ringtrain.torch as hvd
from ringtrain._runtime.context import Context
from ringtrain.testing import World
from ringtrain.torch import exchange
from ringtrain.torch.bursts import Bursts

MODEL = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())))


def train(rank, steps):
    """Some steps of training."""
    model = copy.deepcopy(MODEL)  # ranks are threads, and torch's random numbers are the process'
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("burst_bytes", "times"), [(1, 8), (1 << 30, 1)])
def test_bursts_have_the_size_that_the_core_says(burst_bytes, times, monkeypatch):
    """Of four weights and four biases each leaves at once, or all of them when the pass ends."""
    left = []
    leave = Bursts.leave
    monkeypatch.setattr(exchange, "overlap_pays", lambda session, parameters: True)
    monkeypatch.setattr(
        Bursts, "leave", lambda bursts, **how: (left.append(len(bursts._gathered)), leave(bursts, **how))[1]
    )
    monkeypatch.setattr(Context, "burst_bytes", lambda context: burst_bytes)
    with World(2) as world:
        world.run(train, 1)
    assert len([gathered for gathered in left if gathered > 0]) == 2 * times
