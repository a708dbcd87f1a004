"""Gradients of the operations: each backward pass is an operation of its own, on the gradients of all ranks.

``reductions`` and ``operations`` call ``differentiable`` from the forms that wait and return a new tensor. The factors
are Horovod's: an allreduce and an alltoall carry the exact gradient of the sum of all ranks' losses, an allgather and a
broadcast its average over the ranks, and a reducescatter ``size`` times the exact one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.operations import Average, Sum

_Tensors = Sequence[torch.Tensor]


class _Operation(torch.autograd.Function):
    """An operation on some tensors, and what takes the results' gradients to theirs."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], _Tensors], adjoint: Callable[[_Tensors], _Tensors], *tensors: torch.Tensor):
        ctx.adjoint = adjoint
        results = tuple(run())
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        return None, None, *ctx.adjoint(gradients)


def differentiable(
    tensors: _Tensors, run: Callable[[], _Tensors], adjoint: Callable[[_Tensors], _Tensors]
) -> list[torch.Tensor]:
    """Results of ``run()``, which gradients flow through back to ``tensors`` where anyone asked for that.

    Args:
        tensors: the operation's inputs.
        run: runs it and returns its results.
        adjoint: gradients of the results to gradients of the inputs, in their order.

    Raises:
        InvalidArgumentError: an input is no tensor.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"tensor: expected a torch.Tensor but found {type(tensor).__name__}.")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Operation.apply(run, adjoint, *tensors))
    return list(run())


def backward_name(name: str | None) -> str | None:
    """The name of the operation that carries the gradients of the one of this name."""
    return None if name is None else f"{name}.gradient"


def require_linear(operation: str, name: str | None, op: int) -> None:
    """Raises UnsupportedError for the reductions whose gradient is no reduction."""
    if op not in (Average, Sum):
        raise UnsupportedError(
            f"backward of {operation} '{name or 'unnamed'}': gradients need op Average or Sum, but it is {op}. "
            "Detach the tensor before the operation."
        )
