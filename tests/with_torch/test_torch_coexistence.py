"""Other data-parallel libraries around the same model or optimizer are refused, and plain use beside them is not."""

import copy
import sys
import types

import pytest
import torch

import ringtrain.torch as hvd
from ringtrain.testing import World
from ringtrain.torch import coexistence


class OnTwoRanks:
    """A process group as far as the check looks at it."""

    def __init__(self, ranks: int = 2):
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def data_parallel(model: torch.nn.Module, ranks: int) -> torch.nn.parallel.DistributedDataParallel:
    """A wrapper as torch makes it, without the process group that it needs."""
    wrapper = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.module, wrapper.process_group = model, OnTwoRanks(ranks)
    return wrapper


def wrapping(module: str, name: str, monkeypatch) -> torch.optim.Optimizer:
    """A stand-in for a library's wrapper, where the library would have it."""
    kind = type(name, (torch.optim.Optimizer,), {"__init__": lambda self: None})
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name: kind}))
    return kind()


@pytest.mark.parametrize("module, name, advice", coexistence._WRAPPERS)
def test_wrappers_of_optimizers_are_refused(module, name, advice, monkeypatch):
    with pytest.raises(ValueError, match=f"found a {name}"):
        coexistence.refuse_wrapped_optimizer(wrapping(module, name, monkeypatch))
    coexistence.refuse_wrapped_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))


def test_models_of_data_parallel_wrappers_are_refused(monkeypatch):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    wrapper = data_parallel(model, 2)
    coexistence.refuse_shared_parameters(list(model.parameters()))  # torch.distributed is not in use
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="DistributedDataParallel on 2 ranks"):
        coexistence.refuse_shared_parameters(list(model.parameters()))
    coexistence.refuse_shared_parameters(list(other.parameters()))
    wrapper.process_group.ranks = 1
    coexistence.refuse_shared_parameters(list(model.parameters()))


def test_shards_are_refused(monkeypatch):
    kind = type("FlatParameter", (torch.nn.Parameter,), {})
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp._flat_param", types.SimpleNamespace(FlatParameter=kind))
    with pytest.raises(NotImplementedError, match="a shard, a FlatParameter"):
        coexistence.refuse_shared_parameters([kind(torch.ones(1))])


def test_the_distributed_optimizer_asks(monkeypatch):
    def on_rank(rank):
        with pytest.raises(ValueError, match="found a AcceleratedOptimizer"):
            hvd.DistributedOptimizer(wrapping("accelerate.optimizer", "AcceleratedOptimizer", monkeypatch))
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        model = torch.nn.Linear(2, 2)
        wrapper = data_parallel(model, 2)
        with pytest.raises(ValueError, match="DistributedDataParallel"):
            hvd.DistributedOptimizer(torch.optim.SGD(wrapper.parameters(), lr=0.1))

    with World(1) as world:
        world.run(on_rank)


def test_the_first_step_asks_again(monkeypatch):
    """A wrapper that came after the optimizer was distributed."""
    model = torch.nn.Linear(2, 2)

    def on_rank(rank):
        mine = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1))
        wrapper = data_parallel(mine, 2)
        hvd.barrier()  # what follows is of the process: from here on both ranks seem to have a process group
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        mine(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="DistributedDataParallel on 2 ranks"):
            optimizer.step()
        hvd.barrier()  # the other rank's look goes through the wrappers of this one, too
        del wrapper.module
        optimizer.step()

    with World(2) as world:
        world.run(on_rank)
