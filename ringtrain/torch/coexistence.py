"""Refuses what would average gradients twice or never: other data-parallel wrappers around the same optimizer or model.

``DistributedOptimizer`` calls it when it is made, and in its first step, as Accelerate and Lightning wrap models later.
torch.distributed itself may be used beside ringtrain, for whatever else a script does with it.
"""

import gc
import sys
import weakref
from collections.abc import Collection, Iterator

import torch

from ringtrain.errors import InvalidArgumentError, UnsupportedError

# module and class of a wrapper whose step() calls that of an optimizer below; what to do instead
_WRAPPERS = [
    ("accelerate.optimizer", "AcceleratedOptimizer", "Call accelerator.prepare() with the distributed optimizer."),
    ("lightning.pytorch.core.optimizer", "LightningOptimizer", "Distribute it in configure_optimizers()."),
    ("pytorch_lightning.core.optimizer", "LightningOptimizer", "Distribute it in configure_optimizers()."),
]
_SHARDS = [
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.fsdp._flat_param", "FlatParameter"),
]


_resting: "weakref.WeakSet[torch.nn.parallel.DistributedDataParallel]" = weakref.WeakSet()


def let_rest(wrapper: torch.nn.parallel.DistributedDataParallel) -> None:
    """From now on a ``DistributedDataParallel`` averages nothing by itself, and may have a distributed optimizer."""
    wrapper.require_backward_grad_sync = False  # as within its no_sync()
    wrapper.require_forward_param_sync = False
    _resting.add(wrapper)


def refuse_wrapped_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises InvalidArgumentError for another library's wrapper, on which step hooks would never run."""
    for module, name, advice in _WRAPPERS:
        if _is_of(optimizer, module, name):
            raise InvalidArgumentError(
                f"DistributedOptimizer: expected the optimizer itself but found a {name} around it. {advice}"
            )


def refuse_shared_parameters(parameters: Collection[torch.Tensor]) -> None:
    """Raises where another library already averages the gradients of some parameters, or holds only shards of them.

    Raises:
        InvalidArgumentError: a parameter belongs to a ``DistributedDataParallel`` of several ranks.
        UnsupportedError: a parameter is sharded, as by FSDP.
    """
    for parameter in parameters:
        if kind := shard_kind(parameter):
            raise UnsupportedError(
                f"DistributedOptimizer: expected whole parameters but found a shard, a {kind}. "
                "Use either ringtrain or sharded data parallelism, not both."
            )
    ours = set(parameters)
    for wrapper in _data_parallel_wrappers():
        if any(parameter in ours for parameter in wrapper.parameters()):
            raise InvalidArgumentError(
                "DistributedOptimizer: expected parameters that nobody else averages but found those of a "
                f"DistributedDataParallel on {wrapper.process_group.size()} ranks. Pass the module without that "
                "wrapper; Accelerate and Lightning leave it out when they are told to use one process."
            )


def shard_kind(parameter: torch.Tensor) -> str:
    """Of a parameter of which each rank has a part, its class; "" of others."""
    return next((name for module, name in _SHARDS if _is_of(parameter, module, name)), "")


def _is_of(value: object, module: str, name: str) -> bool:
    """Whether a value is of a class of a module; what was never imported has no instances."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _data_parallel_wrappers() -> Iterator[torch.nn.parallel.DistributedDataParallel]:
    """All live ones of several ranks. A parameter does not know its wrapper, so they are looked for among all objects;
    only where torch.distributed is in use, and then it takes some 50 ms."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for value in gc.get_objects():
        if issubclass(type(value), torch.nn.parallel.DistributedDataParallel):
            group = getattr(value, "process_group", None)  # None while another thread makes it
            if group is not None and group.size() > 1 and value not in _resting:
                yield value
