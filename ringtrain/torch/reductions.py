"""``allreduce`` and its relatives for torch tensors, in the argument order of Horovod's scripts for PyTorch.

``ringtrain.operations`` does the work and describes the operations; here are the torch-only arguments (``average``,
``compression``), identity of tensors in the in-place forms, sparse tensors, and gradients. Tensors are on the CPU or a GPU, of
any dtype of the core and any layout; what is not contiguous is copied. The forms that wait and return a new tensor are
differentiable. ``operations`` has the rest.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ringtrain import operations as arrays
from ringtrain.context import current
from ringtrain.errors import InvalidArgumentError
from ringtrain.operations import Average, Handle, Sum
from ringtrain.process_sets import ProcessSet, global_process_set, id_of
from ringtrain.torch.autograd import backward_name, differentiable, require_linear
from ringtrain.torch.compilation import eager
from ringtrain.torch.compression import Compression, Compressor, compressed
from ringtrain.torch.handles import InPlaceHandle
from ringtrain.torch.sparse import SparseAllreduce
from ringtrain.torch.tensors import listed, writable

_Tensors = Sequence[torch.Tensor]


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
    weight: int | None = None,
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
        weight: with ``Average``, what this rank's tensor counts, such as its number of samples; all ranks or none.

    Example:
        >>> accuracy = hvd.allreduce(torch.tensor(correct / total), name="accuracy")
    """
    op = _op(average, op)
    scales = prescale_factor, postscale_factor

    def run() -> _Tensors:
        if _is_sparse(tensor):
            return [_sparse(tensor, name, op, process_set, *scales, weight).wait()]
        return compressed(compression, [tensor], operate)

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return [arrays.allreduce(*sent, name, op, *scales, process_set, by_core, weight)]

    def adjoint(gradients: _Tensors) -> _Tensors:
        require_linear("allreduce", name, op)
        if weight is not None:
            return _weighted_adjoint(gradients, name, scales, process_set, weight)
        return [allreduce(gradients[0], None, backward_name(name), compression, op, *scales, process_set)]

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
    weight: int | None = None,
) -> Handle | SparseAllreduce:
    """``allreduce`` that returns a handle at once; leave the tensor unchanged until it is done."""
    scales = prescale_factor, postscale_factor
    if _is_sparse(tensor):
        return _sparse(tensor, name, _op(average, op), process_set, *scales, weight)
    return arrays.allreduce_async(tensor, name, _op(average, op), *scales, process_set, weight=weight)


@eager
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: int | None = None,
) -> torch.Tensor:
    """``allreduce`` that puts the result into the tensor, and returns it."""
    scales = prescale_factor, postscale_factor
    arrays.allreduce_(writable(tensor), name, _op(average, op), *scales, process_set, weight=weight)
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
    weight: int | None = None,
) -> InPlaceHandle:
    """``allreduce_`` that returns a handle at once."""
    scales = prescale_factor, postscale_factor
    view = writable(tensor)
    handle = arrays.allreduce_async_(view, name, _op(average, op), *scales, process_set, weight=weight)
    return InPlaceHandle(handle, tensor)


@eager
def grouped_allreduce(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: int | None = None,
) -> list[torch.Tensor]:
    """``allreduce`` of several tensors as one operation, all or nothing; returns a list in their order."""
    tensors = listed(tensors)
    op = _op(average, op)
    scales = prescale_factor, postscale_factor

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return arrays.grouped_allreduce(sent, name, op, *scales, process_set, by_core, weight)

    def adjoint(gradients: _Tensors) -> _Tensors:
        require_linear("grouped_allreduce", name, op)
        if weight is not None:
            return _weighted_adjoint(gradients, name, scales, process_set, weight)
        return grouped_allreduce(gradients, None, backward_name(name), compression, op, *scales, process_set)

    return differentiable(tensors, lambda: compressed(compression, tensors, operate), adjoint)


@eager
def grouped_allreduce_async(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: int | None = None,
) -> Handle:
    """``grouped_allreduce`` that returns one handle at once."""
    tensors = listed(tensors)
    scales = prescale_factor, postscale_factor
    return arrays.grouped_allreduce_async(tensors, name, _op(average, op), *scales, process_set, weight=weight)


@eager
def grouped_allreduce_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: int | None = None,
) -> _Tensors:
    """``grouped_allreduce`` that puts the results into the tensors, and returns them."""
    tensors = listed(tensors)
    scales = prescale_factor, postscale_factor
    views = [writable(tensor) for tensor in tensors]
    arrays.grouped_allreduce_(views, name, _op(average, op), *scales, process_set, weight=weight)
    return tensors


@eager
def grouped_allreduce_async_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: int | None = None,
) -> InPlaceHandle:
    """``grouped_allreduce_`` that returns one handle at once."""
    tensors = listed(tensors)
    scales = prescale_factor, postscale_factor
    views = [writable(tensor) for tensor in tensors]
    handle = arrays.grouped_allreduce_async_(views, name, _op(average, op), *scales, process_set, weight=weight)
    return InPlaceHandle(handle, tensors)


@eager
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> SparseAllreduce:
    """Sums or averages sparse COO tensors: each rank sends the entries that it has.

    Returns:
        A handle for ``synchronize``, which can be called too; both give the coalesced sparse result.
    """
    return _sparse(tensor, name, op, process_set)


def _sparse(tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet, *factors: Any) -> SparseAllreduce:
    return SparseAllreduce(current(), tensor, name, op, id_of(process_set), *factors)


def _is_sparse(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_sparse


# ---- arguments and adjoints ----


def _op(average: bool | None, op: int | None) -> int:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise InvalidArgumentError("allreduce: expected op or the deprecated average but found both. Pass op alone.")
    warnings.warn("average has become op: pass op=Average or op=Sum.", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


def _weighted_adjoint(
    gradients: _Tensors, name: str | None, scales: tuple[float, float], process_set: ProcessSet, weight: int
) -> _Tensors:
    """A weighted average gives this rank the sum of all gradients, times its share of the weights."""
    own = torch.tensor(float(weight), dtype=torch.float64, device=gradients[0].device)
    *sums, total = grouped_allreduce([*gradients, own], None, backward_name(name), op=Sum, process_set=process_set)
    share = scales[0] * scales[1] * weight / total.item()
    return [gradient * share for gradient in sums]
