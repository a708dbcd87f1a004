"""The operations for torch tensors, in the argument order that Horovod's scripts for PyTorch use.

``ringtrain.operations`` does the work and describes the operations; here are the torch-only arguments (``average``,
``compression``), identity of tensors in the in-place forms, and gradients. Tensors are dense, on the CPU, of any dtype
of the core and any layout; what is not contiguous is copied. ``allreduce`` takes sparse ones too. The forms that wait
and return a new tensor are differentiable. Errors are those of ``ringtrain.operations``.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringtrain import operations as arrays
from ringtrain.context import current
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.operations import Average, Handle, Sum
from ringtrain.process_sets import ProcessSet, global_process_set, id_of
from ringtrain.torch.autograd import differentiable
from ringtrain.torch.compilation import eager
from ringtrain.torch.compression import Compression, Compressor, compression_in_the_core
from ringtrain.torch.handles import AlltoallHandle, InPlaceHandle
from ringtrain.torch.sparse import SparseAllreduce
from ringtrain.torch.tensors import writable

_Tensors = Sequence[torch.Tensor]


# ---- allreduce ----


@eager
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines a tensor of one shape over all ranks; see ``ringtrain.allreduce``.

    Args:
        tensor: the same shape and dtype on all ranks; not changed. A sparse one gives a coalesced sparse result.
        average: deprecated; True is ``op=Average``, False ``op=Sum``.
        name: identity among the ranks.
        compression: how a dense tensor travels.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: factor on each contribution.
        postscale_factor: factor on the result.
        process_set: the ranks that take part.

    Example:
        >>> accuracy = hvd.allreduce(torch.tensor(correct / total), name="accuracy")
    """
    op = _op(average, op)

    scales = prescale_factor, postscale_factor

    def run() -> _Tensors:
        if _is_sparse(tensor):
            return [_sparse(tensor, name, op, process_set, *scales).wait()]
        return _compressed(compression, [tensor], operate)

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return [arrays.allreduce(*sent, name, op, *scales, process_set, by_core)]

    def adjoint(gradients: _Tensors) -> _Tensors:
        _require_linear("allreduce", name, op)
        return [allreduce(gradients[0], None, _backwards(name), compression, op, *scales, process_set)]

    return differentiable([tensor], run, adjoint)[0]


@eager
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle | SparseAllreduce:
    """``allreduce`` that returns a handle at once; leave the tensor unchanged until it is done."""
    if _is_sparse(tensor):
        return _sparse(tensor, name, _op(average, op), process_set, prescale_factor, postscale_factor)
    return arrays.allreduce_async(tensor, name, _op(average, op), prescale_factor, postscale_factor, process_set)


@eager
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """``allreduce`` that puts the result into the tensor, and returns it."""
    arrays.allreduce_(writable(tensor), name, _op(average, op), prescale_factor, postscale_factor, process_set)
    return tensor


@eager
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> InPlaceHandle:
    """``allreduce_`` that returns a handle at once."""
    scales = prescale_factor, postscale_factor
    return InPlaceHandle(
        arrays.allreduce_async_(writable(tensor), name, _op(average, op), *scales, process_set), tensor
    )


@eager
def grouped_allreduce(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """``allreduce`` of several tensors as one operation, all or nothing; returns a list in their order."""
    op = _op(average, op)

    scales = prescale_factor, postscale_factor

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return arrays.grouped_allreduce(sent, name, op, *scales, process_set, by_core)

    def adjoint(gradients: _Tensors) -> _Tensors:
        _require_linear("grouped_allreduce", name, op)
        return grouped_allreduce(gradients, None, _backwards(name), compression, op, *scales, process_set)

    return differentiable(tensors, lambda: _compressed(compression, tensors, operate), adjoint)


@eager
def grouped_allreduce_async(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """``grouped_allreduce`` that returns one handle at once."""
    return arrays.grouped_allreduce_async(
        tensors, name, _op(average, op), prescale_factor, postscale_factor, process_set
    )


@eager
def grouped_allreduce_(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> _Tensors:
    """``grouped_allreduce`` that puts the results into the tensors, and returns them."""
    views = [writable(tensor) for tensor in tensors]
    arrays.grouped_allreduce_(views, name, _op(average, op), prescale_factor, postscale_factor, process_set)
    return tensors


@eager
def grouped_allreduce_async_(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> InPlaceHandle:
    """``grouped_allreduce_`` that returns one handle at once."""
    views = [writable(tensor) for tensor in tensors]
    scales = prescale_factor, postscale_factor
    return InPlaceHandle(arrays.grouped_allreduce_async_(views, name, _op(average, op), *scales, process_set), tensors)


@eager
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> SparseAllreduce:
    """Sums or averages sparse COO tensors: each rank sends the entries that it has.

    Returns:
        A handle for ``synchronize``, which can be called too; both give the coalesced sparse result.
    """
    return _sparse(tensor, name, op, process_set)


def _sparse(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet, *scales: float
) -> SparseAllreduce:
    return SparseAllreduce(current(), tensor, name, op, id_of(process_set), *scales)


def _is_sparse(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_sparse


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
    tensors: _Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """``allgather`` of several tensors as one operation, all or nothing."""

    def adjoint(gradients: _Tensors) -> _Tensors:
        names = [None if name is None else f"{name}.{index}" for index in range(len(tensors))]
        members = zip(tensors, gradients, names, strict=True)
        return [_own_rows(tensor, gradient, member, process_set) for tensor, gradient, member in members]

    return differentiable(tensors, lambda: arrays.grouped_allgather(tensors, name, process_set), adjoint)


@eager
def grouped_allgather_async(
    tensors: _Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``grouped_allgather`` that returns one handle at once."""
    return arrays.grouped_allgather_async(tensors, name, process_set)


# ---- broadcast ----


@eager
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the root's tensor on every rank; see ``ringtrain.broadcast``."""

    def adjoint(gradients: _Tensors) -> _Tensors:
        mean = allreduce(gradients[0], name=_backwards(name), op=Average, process_set=process_set)
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
        return [alltoall(gradients[0], received, _backwards(name), process_set)[0]]

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
) -> torch.Tensor:
    """Combines a tensor as ``allreduce`` does and leaves each rank its rows; see ``ringtrain.reducescatter``."""
    scales = prescale_factor, postscale_factor

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return [arrays.reducescatter(*sent, name, op, process_set, *scales, by_core)]

    def adjoint(gradients: _Tensors) -> _Tensors:
        _require_linear("reducescatter", name, op)
        return [allgather(gradients[0] * _spread_factor(op, process_set, *scales), _backwards(name), process_set)]

    return differentiable([tensor], lambda: _compressed(compression, [tensor], operate), adjoint)[0]


@eager
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """``reducescatter`` that returns a handle at once."""
    return arrays.reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor)


@eager
def grouped_reducescatter(
    tensors: _Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """``reducescatter`` of several tensors as one operation, all or nothing."""
    scales = prescale_factor, postscale_factor

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return arrays.grouped_reducescatter(sent, name, op, process_set, *scales, by_core)

    def adjoint(gradients: _Tensors) -> _Tensors:
        _require_linear("grouped_reducescatter", name, op)
        factor = _spread_factor(op, process_set, *scales)
        return grouped_allgather([gradient * factor for gradient in gradients], _backwards(name), process_set)

    return differentiable(tensors, lambda: _compressed(compression, tensors, operate), adjoint)


@eager
def grouped_reducescatter_async(
    tensors: _Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """``grouped_reducescatter`` that returns one handle at once."""
    return arrays.grouped_reducescatter_async(tensors, name, op, process_set, prescale_factor, postscale_factor)


# ---- arguments and adjoints ----


def _compressed(
    compression: type[Compressor], tensors: _Tensors, operate: Callable[[_Tensors, str], _Tensors]
) -> _Tensors:
    """Results of ``operate(tensors, compression)``, of which the core does the compression or a user's class does."""
    by_core = compression_in_the_core(compression)
    if by_core is not None:
        return operate(tensors, by_core)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = operate([sent for sent, _ in pairs], arrays.Compression.none)
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def _op(average: bool | None, op: int | None) -> int:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise InvalidArgumentError("allreduce: expected op or the deprecated average but found both. Pass op alone.")
    warnings.warn("average has become op: pass op=Average or op=Sum.", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def _backwards(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _require_linear(operation: str, name: str | None, op: int) -> None:
    if op not in (Average, Sum):
        raise UnsupportedError(
            f"backward of {operation} '{name or 'unnamed'}': gradients need op Average or Sum, but it is {op}. "
            "Detach the tensor before the operation."
        )


def _own_rows(tensor: torch.Tensor, gradient: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """This rank's rows of the averaged gradient of an allgather."""
    mean = allreduce(gradient, name=_backwards(name), op=Average, process_set=process_set)
    counts = arrays.allgather(torch.tensor([tensor.shape[0]]), None if name is None else f"{name}.rows", process_set)
    start = int(counts[: process_set.rank()].sum())
    return mean[start : start + tensor.shape[0]]


def _spread_factor(op: int, process_set: ProcessSet, prescale: float, postscale: float) -> float:
    return (process_set.size() if op == Sum else 1) * prescale * postscale
