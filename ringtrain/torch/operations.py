"""The operations for torch tensors that move rows, in the argument order of Horovod's scripts for PyTorch.

These are allgather, broadcast, alltoall and reducescatter; ``reductions`` has allreduce, and its head says what holds
for all of them. Errors are those of ``ringtrain.operations``.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ringtrain import operations as arrays
from ringtrain.context import current
from ringtrain.errors import UnsupportedError
from ringtrain.operations import Average, Handle, Sum
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.torch.autograd import backward_name, differentiable, require_linear
from ringtrain.torch.compilation import eager
from ringtrain.torch.compression import Compression, Compressor, compressed
from ringtrain.torch.handles import AlltoallHandle, InPlaceHandle
from ringtrain.torch.reductions import allreduce
from ringtrain.torch.tensors import listed, writable

_Tensors = Sequence[torch.Tensor]


# ---- allgather ----


@eager
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates the ranks' tensors along the first dimension, which may differ; see ``ringtrain.allgather``."""

    def adjoint(gradients: _Tensors) -> _Tensors:
        return [_own_rows(tensor, gradients[0], name, process_set)]

    return differentiable([tensor], lambda: [arrays.allgather(tensor, name, process_set)], adjoint)[0]


@eager
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``allgather`` that returns a handle at once."""
    return arrays.allgather_async(tensor, name, process_set)


@eager
def grouped_allgather(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """``allgather`` of several tensors as one operation, all or nothing."""
    tensors = listed(tensors)

    def adjoint(gradients: _Tensors) -> _Tensors:
        names = [None if name is None else f"{name}.{index}" for index in range(len(tensors))]
        members = zip(tensors, gradients, names, strict=True)
        return [_own_rows(tensor, gradient, member, process_set) for tensor, gradient, member in members]

    return differentiable(tensors, lambda: arrays.grouped_allgather(tensors, name, process_set), adjoint)


@eager
def grouped_allgather_async(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``grouped_allgather`` that returns one handle at once."""
    tensors = listed(tensors)
    return arrays.grouped_allgather_async(tensors, name, process_set)


# ---- broadcast ----


@eager
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the root's tensor on every rank; see ``ringtrain.broadcast``."""

    def adjoint(gradients: _Tensors) -> _Tensors:
        mean = allreduce(gradients[0], name=backward_name(name), op=Average, process_set=process_set)
        return [mean if current().rank == root_rank else torch.zeros_like(mean)]

    return differentiable([tensor], lambda: [arrays.broadcast(tensor, root_rank, name, process_set)], adjoint)[0]


@eager
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``broadcast`` that returns a handle at once."""
    return arrays.broadcast_async(tensor, root_rank, name, process_set)


@eager
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """``broadcast`` that puts the root's values into the tensor, and returns it."""
    arrays.broadcast_(writable(tensor), root_rank, name, process_set)
    return tensor


@eager
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> InPlaceHandle:
    """``broadcast_`` that returns a handle at once."""
    return InPlaceHandle(arrays.broadcast_async_(writable(tensor), root_rank, name, process_set), tensor)


# ---- alltoall ----


@eager
def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends rows of the first dimension to each rank and concatenates what came; see ``ringtrain.alltoall``.

    Returns:
        The rows received; with ``splits`` a pair of them and of the rows received from each rank (an int32 tensor).
    """
    received = None

    def run() -> _Tensors:
        nonlocal received
        rows, received = alltoall_async(tensor, splits, name, process_set).wait()
        return [rows]

    def adjoint(gradients: _Tensors) -> _Tensors:
        return [alltoall(gradients[0], received, backward_name(name), process_set)[0]]

    rows = differentiable([tensor], run, adjoint)[0]
    return rows if splits is None else (rows, received)


@eager
def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AlltoallHandle:
    """``alltoall`` that returns a handle at once; its result is always the pair."""
    return AlltoallHandle(arrays.alltoall_async(tensor, splits, name, process_set))


# ---- reducescatter ----


@eager
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: int | None = None,
) -> torch.Tensor:
    """Combines a tensor as ``allreduce`` does and leaves each rank its rows; see ``ringtrain.reducescatter``."""
    scales = prescale_factor, postscale_factor

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return [arrays.reducescatter(*sent, name, op, process_set, *scales, by_core, weight)]

    def adjoint(gradients: _Tensors) -> _Tensors:
        require_linear("reducescatter", name, op)
        return _spread([tensor], gradients, name, op, process_set, scales, weight)

    return differentiable([tensor], lambda: compressed(compression, [tensor], operate), adjoint)[0]


@eager
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: int | None = None,
) -> Handle:
    """``reducescatter`` that returns a handle at once."""
    scales = prescale_factor, postscale_factor
    return arrays.reducescatter_async(tensor, name, op, process_set, *scales, weight=weight)


@eager
def grouped_reducescatter(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: int | None = None,
) -> list[torch.Tensor]:
    """``reducescatter`` of several tensors as one operation, all or nothing."""
    tensors = listed(tensors)
    scales = prescale_factor, postscale_factor

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return arrays.grouped_reducescatter(sent, name, op, process_set, *scales, by_core, weight)

    def adjoint(gradients: _Tensors) -> _Tensors:
        require_linear("grouped_reducescatter", name, op)
        return _spread(tensors, gradients, name, op, process_set, scales, weight)

    return differentiable(tensors, lambda: compressed(compression, tensors, operate), adjoint)


@eager
def grouped_reducescatter_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: int | None = None,
) -> Handle:
    """``grouped_reducescatter`` that returns one handle at once."""
    tensors = listed(tensors)
    scales = prescale_factor, postscale_factor
    return arrays.grouped_reducescatter_async(tensors, name, op, process_set, *scales, weight=weight)


# ---- adjoints ----


def _own_rows(tensor: torch.Tensor, gradient: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """This rank's rows of the averaged gradient of an allgather."""
    mean = allreduce(gradient, name=backward_name(name), op=Average, process_set=process_set)
    place, count = process_set.rank(), tensor.shape[0]
    counts = arrays.allgather(torch.tensor([[place, count]]), None if name is None else f"{name}.rows", process_set)
    start = int(counts[counts[:, 0] < place, 1].sum())  # members that have joined have no rows
    return mean[start : start + count]


def _spread(
    tensors: _Tensors, gradients: _Tensors, name: str | None, op: int, process_set: ProcessSet,
    scales: tuple[float, float], weight: int | None,
) -> _Tensors:  # fmt: skip
    """Everyone's gradients of the rows of reducescatters: Horovod's factor is ``size`` times the exact one.

    Raises:
        UnsupportedError: on every rank that still takes part, if one has joined: nobody has the gradients of its rows.
    """
    factor = scales[0] * scales[1] * (process_set.size() if op == Sum or weight is not None else 1)
    weights = [] if weight is None else [torch.tensor([weight])]
    sent = [gradient * factor for gradient in gradients]
    gathered = grouped_allgather([*sent, *weights], backward_name(name), process_set)
    spread = gathered[: len(tensors)]
    for tensor, gradient in zip(tensors, spread, strict=True):
        if gradient.shape != tensor.shape:
            raise UnsupportedError(
                f"backward of reducescatter '{name or 'unnamed'}': expected the gradients of all {tensor.shape[0]} rows "
                f"but found {gradient.shape[0]}, as some ranks have joined. Use allreduce where ranks may join."
            )
    if weight is None:
        return spread
    share = weight / gathered[-1].sum().item()
    return [gradient * share for gradient in spread]
