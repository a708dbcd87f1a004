"""What both strategies do with optimizers."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from ringtrain._training.optimizer_arguments import check_trainers_arguments
from ringtrain.torch import DistributedOptimizer, broadcast_parameters

_REFUSED = {
    "backward_passes_per_step": "Let Lightning accumulate: accumulate_grad_batches, or fabric.no_backward_sync.",
    "named_parameters": "The strategy gives them.",
}


def checked(strategy: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments for ``DistributedOptimizer``; raises InvalidArgumentError for those that a strategy cannot serve."""
    check_trainers_arguments(strategy, arguments, _REFUSED, "lightning")
    return arguments


def distributed(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """``DistributedOptimizer(optimizer)``; one that is one stays as it is.

    Args:
        optimizer: of a module.
        names: of the module's parameters, and perhaps of others.
        arguments: for all optimizers.
    """
    if hasattr(optimizer, "skip_synchronize"):
        return optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = [(names[parameter], parameter) for parameter in parameters if parameter in names]
    return DistributedOptimizer(optimizer, named if len(named) == len(parameters) else None, **arguments)


def alike(module: torch.nn.Module) -> None:
    """Gives all ranks the parameters and buffers of rank 0."""
    broadcast_parameters(module, root_rank=0)


def silenced(stack: ExitStack, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Enters ``no_sync`` of all distributed optimizers among them."""
    for optimizer in optimizers:
        if hasattr(optimizer, "no_sync"):
            stack.enter_context(optimizer.no_sync())
