"""Small networks and data for the torch tests, and the loop that makes one process the oracle of many.

Models are made once, in the main thread, and copied by the ranks: torch's seed is shared by all threads.
"""

import copy
import threading
from collections.abc import Callable, Sequence

import torch
from modes import in_mode

import ringtrain.torch as hvd

torch.set_num_threads(1)  # the ranks are threads already

PER_RANK = 4  # samples of one rank in one step
STEPS = 5  # a single one would hide what momentum gets wrong

mean_square = torch.nn.functional.mse_loss
TOLERANCES = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: {"rtol": 1e-10, "atol": 1e-11}}


_SEED = threading.Lock()  # ranks that make a network at the same time draw from one generator


def network(dtype: torch.dtype = torch.float32, width: int = 8) -> torch.nn.Module:
    with _SEED:
        torch.manual_seed(3)
        layers = (
            torch.nn.Linear(4, width),
            torch.nn.Tanh(),
            torch.nn.Linear(width, 8),
            torch.nn.Tanh(),
            torch.nn.Linear(8, 2),
        )
        return torch.nn.Sequential(*layers).to(dtype)


def batches(
    ranks: int, dtype: torch.dtype = torch.float32, steps: int = STEPS
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches, one for each step."""
    generator = torch.Generator().manual_seed(7)
    count = ranks * PER_RANK
    return [
        (
            torch.randn(count, 4, generator=generator, dtype=dtype),
            torch.randn(count, 2, generator=generator, dtype=dtype),
        )
        for _ in range(steps)
    ]


def share(batch: Sequence[torch.Tensor], rank: int, ranks: int) -> list[torch.Tensor]:
    """A rank's samples of a global batch."""
    return [tensor[rank::ranks] for tensor in batch]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, data, loss: Callable = mean_square
) -> torch.nn.Module:
    """The loop that a user writes, which knows nothing about ranks."""
    for x, y in data:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of the optimizer's state, in the order of its parameters and the state's names."""
    values = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = optimizer.state.get(parameter, {})
            values += [entries[key] for key in sorted(entries) if isinstance(entries[key], torch.Tensor)]
    return values


def assert_all_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], **tolerance: float) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def assert_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert_all_close(found, expected, rtol=0, atol=0)


def assert_replicas_equal(tensors: Sequence[torch.Tensor]) -> None:
    """Called on every rank: all hold the same bits."""
    mine = [tensor.tolist() for tensor in tensors]
    assert all(theirs == mine for theirs in hvd.allgather_object(mine, name="replicas"))


def distributed(model: torch.nn.Module, make: Callable, **arguments) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A rank's copy of the model and its distributed optimizer."""
    model = copy.deepcopy(model)
    return model, hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **in_mode(arguments))


def sgd(parameters, **arguments) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **arguments})


def alone(model, make, data, **arguments):
    """What one process makes of the global batches."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    train(model, optimizer, data, **arguments)
    return model, optimizer


class Branches(torch.nn.Module):
    """Three layers, of which a forward pass uses those it is told to."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, used):
        return sum((self.layers[index](x) for index in used), start=torch.zeros(len(x), 2, dtype=x.dtype))
