"""Gradients of the operations: each backward pass is an operation of its own, on the gradients of all ranks.

``reductions`` and ``operations`` call ``differentiable`` from the forms that wait and return a new tensor. Which
operation carries the gradients, and their factors, ``ringtrain._training.adapter.adjoints`` says for every adapter; here it is performed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ringtrain._binding import tables
from ringtrain._runtime import operations as arrays
from ringtrain._runtime.context import current
from ringtrain._runtime.operations import Average, Sum
from ringtrain._runtime.process_sets import ProcessSet, size_of
from ringtrain._training.adapter.adjoints import Takes, adjoint_of, factor, require_linear
from ringtrain.errors import UnsupportedError

_Tensors = Sequence[torch.Tensor]
_Carrier = TypeVar("_Carrier", bound=Callable[..., object])
_carriers: dict[str, Callable] = {}  # by name


def carries_gradients(operation: _Carrier) -> _Carrier:
    """Decorates an operation of the modules above by which backward passes send gradients."""
    _carriers[operation.__name__] = operation
    return operation


@dataclasses.dataclass(slots=True)
class Forward:
    """The operation that a backward pass belongs to, and what it was called with.

    Attributes:
        operation: name of the public function, such as ``grouped_allreduce``.
        tensors: its inputs, which ``check_tensors`` has seen.
        name: identity among the ranks.
        process_set: the ranks that take part.
        reduction: op, prescale and postscale factor, and weight or None, where it reduces.
        travels: further arguments that the reduction of the gradients takes over.
        root: global rank, where it is rooted.
        received: the rows that came from each rank, where they are exchanged; known after the run.
    """

    operation: str
    tensors: _Tensors
    name: str | None
    process_set: ProcessSet
    reduction: tuple[int, float, float, int | None] = (Average, 1.0, 1.0, None)
    travels: dict[str, type] = dataclasses.field(default_factory=dict)
    root: int = -1
    received: torch.Tensor | None = None

    @property
    def row(self) -> tables.OperationCode:
        """The operation's row in the tables."""
        return tables.OPERATIONS[self.operation.removeprefix("grouped_")]

    def name_of(self, part: str) -> str | None:
        """The name of an operation of the backward pass."""
        return None if self.name is None else f"{self.name}.{part}"


class _Operation(torch.autograd.Function):
    """An operation on some tensors, and what takes the results' gradients to theirs."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, run: Callable[[], _Tensors], forward: Forward, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.forward = forward
        results = tuple(run())
        ctx.mark_non_differentiable(*(each for each in results if not (each.is_floating_point() or each.is_complex())))
        return results

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_backward(ctx.forward, gradients)


def differentiable(forward: Forward, run: Callable[[], _Tensors]) -> list[torch.Tensor]:
    """Results of ``run()``, which gradients flow through back to the inputs where anyone asked for that."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in forward.tensors):
        return list(_Operation.apply(run, forward, *forward.tensors))
    return list(run())


def _backward(forward: Forward, gradients: _Tensors) -> _Tensors:
    """Gradients of the results to gradients of the inputs, in their order."""
    adjoint = adjoint_of(forward.row.name)
    if forward.row.reduces:
        _require_linear(forward)
    carried = _BACKWARD[adjoint.carrier](forward, gradients)
    if adjoint.takes is Takes.ROOTS:
        return [each if current().rank == forward.root else torch.zeros_like(each) for each in carried]
    return _own_rows(forward, carried) if adjoint.takes is Takes.OWN_ROWS else carried


def _require_linear(forward: Forward) -> None:
    """Raises UnsupportedError for the reductions whose gradient is no reduction."""
    require_linear(f"{forward.operation} '{forward.name or 'unnamed'}'", forward.reduction[0], "Detach the tensor")


# ---- carriers: each on the gradients of all ranks, with torch's forms, so that it has a gradient itself ----


def _by_allreduce(forward: Forward, gradients: _Tensors) -> _Tensors:
    grouped_allreduce = _carriers["grouped_allreduce"]
    name, process_set = forward.name_of("gradient"), forward.process_set
    if adjoint_of(forward.row.name).averages:
        return grouped_allreduce(gradients, name=name, op=Average, process_set=process_set)
    op, prescale, postscale, weight = forward.reduction
    if weight is None:
        scales: dict[str, float] = {"prescale_factor": prescale, "postscale_factor": postscale}
        return grouped_allreduce(gradients, name=name, op=op, process_set=process_set, **scales, **forward.travels)
    # A weighted average gives this rank the sum of all gradients, times its share of the weights.
    own = torch.tensor(float(weight), dtype=torch.float64, device=gradients[0].device)
    *sums, total = grouped_allreduce([*gradients, own], name=name, op=Sum, process_set=process_set)
    share = prescale * postscale * weight / total.item()
    return [gradient * share for gradient in sums]


def _by_allgather(forward: Forward, gradients: _Tensors) -> _Tensors:
    """Everyone's gradients of their shares of the rows.

    Raises:
        UnsupportedError: on every rank that still takes part, if one has joined: nobody has the gradients of its rows.
    """
    op, prescale, postscale, weight = forward.reduction
    by = factor(op, prescale, postscale, size_of(forward.process_set), weight is not None)
    weights = [] if weight is None else [torch.tensor([weight])]
    sent = [gradient * by for gradient in gradients]
    gathered = _carriers["grouped_allgather"]([*sent, *weights], forward.name_of("gradient"), forward.process_set)
    spread = gathered[: len(forward.tensors)]
    for tensor, gradient in zip(forward.tensors, spread, strict=True):
        if gradient.shape != tensor.shape:
            raise UnsupportedError(
                f"backward of {forward.row.name} '{forward.name or 'unnamed'}': expected the gradients of all "
                f"{tensor.shape[0]} rows but found {gradient.shape[0]}, as some ranks have joined. "
                "Use allreduce where ranks may join."
            )
    if weight is None:
        return spread
    share = weight / gathered[-1].sum().item()
    return [gradient * share for gradient in spread]


def _by_alltoall(forward: Forward, gradients: _Tensors) -> _Tensors:
    """Every row goes back where it came from."""
    back, _ = _carriers["alltoall"](gradients[0], forward.received, forward.name_of("gradient"), forward.process_set)
    return [back]


_BACKWARD = {"allreduce": _by_allreduce, "allgather": _by_allgather, "alltoall": _by_alltoall}


def _own_rows(forward: Forward, carried: _Tensors) -> _Tensors:
    """Of tensors that have all ranks' rows, those that this rank contributed."""
    place = forward.process_set.rank()
    own = torch.tensor([[place, *(tensor.shape[0] for tensor in forward.tensors)]])
    counts = arrays.allgather(own, forward.name_of("rows"), forward.process_set)
    starts = counts[counts[:, 0] < place, 1:].sum(0).tolist()  # members that have joined have no rows
    return [
        each[start : start + tensor.shape[0]]
        for each, start, tensor in zip(carried, starts, forward.tensors, strict=True)
    ]
