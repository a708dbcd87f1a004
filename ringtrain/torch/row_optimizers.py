"""Optimizers of rows that torch does not have."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from ringtrain._runtime.arguments import check_least
from ringtrain.errors import InvalidArgumentError

_Loss = TypeVar("_Loss")


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad that keeps one number for each row: of a table with d columns a d-th of Adagrad's memory.

    Example:
        >>> table = hvd.ShardedEmbedding(100_000_000, 64)
        >>> optimizer = hvd.RowWiseAdagrad(table.parameters(), lr=0.05)

    The number grows by the mean of the squares of the row's gradient, and divides its step by its root.

    Args:
        params: matrices; their gradients sparse, or dense, of which each row counts as one that has come.
        lr: learning rate.
        eps: added to the root.
        initial_accumulator_value: what each number begins with.

    Raises:
        InvalidArgumentError: a negative number, or a parameter that is no matrix.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        lr: float = 0.01,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
    ):
        for name, value in (("lr", lr), ("eps", eps), ("initial_accumulator_value", initial_accumulator_value)):
            check_least(f"RowWiseAdagrad: {name}", value, 0)
        super().__init__(params, {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise InvalidArgumentError(
                        f"RowWiseAdagrad: parameters must be matrices, but one has shape {tuple(parameter.shape)}."
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], _Loss] | None = None) -> _Loss | None:
        """Changes the rows that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, group)
        return loss

    def _change(self, parameter: torch.Tensor, group: Mapping[str, float]) -> None:
        state = self.state[parameter]
        if not state:
            state["sum"] = parameter.new_full((len(parameter), 1), group["initial_accumulator_value"])
        if parameter.grad.is_sparse:
            gradient = parameter.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        else:
            rows, values = torch.arange(len(parameter), device=parameter.device), parameter.grad
        total = state["sum"][rows] + values.square().mean(1, keepdim=True)
        state["sum"][rows] = total
        parameter.index_add_(0, rows, values / (total.sqrt() + group["eps"]), alpha=-group["lr"])
