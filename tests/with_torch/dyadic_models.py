"""A network and data of which every sum is exact, so that results are compared bit for bit.

They are dyadic: small integers times powers of two.
"""

import torch
from modes import in_mode
from torch_models import assert_replicas_equal, assert_same_bits, parameters

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._training.rounds import BYTES_BEHIND_CODES

RATE = 0.25


def dyadic(*shape):
    return (torch.arange(torch.Size(shape).numel()) % 5 - 2).reshape(shape).double() / 4


class Net(torch.nn.Module):
    """A trunk and two heads, without a function that rounds."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(3, 3, bias=False)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(3, 2, bias=False) for _ in range(2))
        for parameter in self.parameters():
            parameter.data = dyadic(*parameter.shape)

    def forward(self, x, head=0, wrap=lambda layer, value: layer(value)):
        return wrap(self.heads[head], wrap(self.trunk, wrap(self.trunk, x)))


def inputs(rank, count=1):
    """One or several micro-batches of a rank."""
    return [torch.roll(dyadic(2, 3), rank + micro, 1).requires_grad_() for micro in range(count)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def wrapped(**arguments):
    model = Net()
    return model, hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), op=hvd.Sum, **in_mode(arguments)
    )


def alone(size, run):
    """What one process makes of the passes of all ranks."""
    model = Net()
    optimizer = sgd(model.parameters())
    for rank in range(size):
        run(model, rank)
    optimizer.step()
    return model


def assert_equal(model, expected, rounding=0.0):
    """Parameters, and gradients where there are any; bit for bit where nothing is rounded."""
    if rounding:
        torch.testing.assert_close(parameters(model), parameters(expected), rtol=rounding, atol=rounding)
    else:
        assert_same_bits(parameters(model), parameters(expected))
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in expected.parameters()]
    assert_replicas_equal(parameters(model))


def reductions(optimizer, run):
    """How many gradients travelled, rounds not counted."""
    before = rt.counters()["bytes"]
    run()
    rounds = len(parameters_of(optimizer)) + BYTES_BEHIND_CODES
    return (rt.counters()["bytes"] - before - rounds) // 8


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
