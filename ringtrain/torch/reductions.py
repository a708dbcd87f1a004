"""``allreduce`` and its relatives for torch tensors, in the argument order of Horovod's scripts for PyTorch.

``ringtrain._runtime.operations`` does the work and describes the operations; here are the torch-only arguments (``average``,
``compression``), identity of tensors in the in-place forms, sparse tensors, and gradients. Tensors are on the CPU or a
GPU, of any dtype of the core and any layout; what is not contiguous is copied. The forms that wait and return a new
tensor are differentiable. ``operations`` has the rest.
"""

from collections.abc import Iterable, Sequence

import torch

from ringtrain._runtime import operations as arrays
from ringtrain._runtime.context import current
from ringtrain._runtime.operations import Handle
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of
from ringtrain._runtime.submission import preparing
from ringtrain._training.optimizer_arguments import chosen_op
from ringtrain.torch.autograd import Forward, carries_gradients, differentiable
from ringtrain.torch.compression import Compression, Compressor, compressed
from ringtrain.torch.eager import eager
from ringtrain.torch.handles import InPlaceHandle
from ringtrain.torch.sparse import SparseAllreduce
from ringtrain.torch.tensors import check_tensors, listed, writable_memories, writable_memory

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "sparse_allreduce_async",
]

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

    Example:
        >>> accuracy = hvd.allreduce(torch.tensor(correct / total), name="accuracy")

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
    """
    before = preparing("allreduce", name, process_set)
    with before:
        op = chosen_op(average, op)
        check_tensors([tensor])
    scales = prescale_factor, postscale_factor

    def run() -> _Tensors:
        if _is_sparse(tensor):
            return [_sparse(tensor, name, op, process_set, *scales, weight).wait()]
        return compressed(compression, [tensor], operate, before)

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return [arrays.allreduce(sent[0], name, op, *scales, process_set, by_core, weight)]

    reduction, travels = (op, *scales, weight), {"compression": compression}
    return differentiable(Forward("allreduce", [tensor], name, process_set, reduction, travels), run)[0]


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
    """``allreduce`` that returns a handle at once; leave the tensor unchanged until it is done.

    Example:
        >>> handle = hvd.allreduce_async(loss(model(x), y).detach(), name="loss")
        >>> step(x, y)  # meanwhile
        >>> mean = hvd.synchronize(handle)
    """
    with preparing("allreduce", name, process_set):
        op = chosen_op(average, op)
    scales = prescale_factor, postscale_factor
    if _is_sparse(tensor):
        return _sparse(tensor, name, op, process_set, *scales, weight)
    return arrays.allreduce_async(tensor, name, op, *scales, process_set, weight=weight)


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
    """``allreduce`` that puts the result into the tensor, and returns it.

    Example:
        >>> hvd.allreduce_(model.weight.data, name="weight")  # now has the average
    """
    with preparing("allreduce", name, process_set):
        op, view = chosen_op(average, op), writable_memory(tensor)
    scales = prescale_factor, postscale_factor
    arrays.allreduce_(view, name, op, *scales, process_set, weight=weight)
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
    """``allreduce_`` that returns a handle at once.

    Example:
        >>> handles = [hvd.allreduce_async_(each.data, name=name) for name, each in model.named_parameters()]
        >>> for handle in handles:
        ...     hvd.synchronize(handle)
    """
    with preparing("allreduce", name, process_set):
        op, view = chosen_op(average, op), writable_memory(tensor)
    scales = prescale_factor, postscale_factor
    handle = arrays.allreduce_async_(view, name, op, *scales, process_set, weight=weight)
    return InPlaceHandle(handle, tensor)


@carries_gradients
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
    """``allreduce`` of several tensors as one operation, all or nothing; returns a list in their order.

    Example:
        >>> weight, bias = hvd.grouped_allreduce([model.weight.data, model.bias.data], name="parameters")

    Args:
        tensors: as many on all ranks; their shapes and dtypes may differ from one to the next. The other arguments are those of
            ``allreduce``.
    """
    before = preparing("allreduce", name, process_set)
    with before:
        tensors, op = listed(tensors), chosen_op(average, op)
        check_tensors(tensors)
    scales = prescale_factor, postscale_factor

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return arrays.grouped_allreduce(sent, name, op, *scales, process_set, by_core, weight)

    reduction, travels = (op, *scales, weight), {"compression": compression}
    forward = Forward("grouped_allreduce", tensors, name, process_set, reduction, travels)
    return differentiable(forward, lambda: compressed(compression, tensors, operate, before))


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
    """``grouped_allreduce`` that returns one handle at once.

    Example:
        >>> handle = hvd.grouped_allreduce_async([model.weight.data, model.bias.data], name="parameters")
        >>> weight, bias = hvd.synchronize(handle)
    """
    with preparing("allreduce", name, process_set):
        tensors, op = listed(tensors), chosen_op(average, op)
    scales = prescale_factor, postscale_factor
    return arrays.grouped_allreduce_async(tensors, name, op, *scales, process_set, weight=weight)


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
    """``grouped_allreduce`` that puts the results into the tensors, and returns them.

    Example:
        >>> hvd.grouped_allreduce_([each.data for each in model.parameters()], name="parameters")  # now have the averages
    """
    with preparing("allreduce", name, process_set):
        tensors, op = listed(tensors), chosen_op(average, op)
        views = writable_memories(tensors)
    scales = prescale_factor, postscale_factor
    arrays.grouped_allreduce_(views, name, op, *scales, process_set, weight=weight)
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
    """``grouped_allreduce_`` that returns one handle at once.

    Example:
        >>> handle = hvd.grouped_allreduce_async_([each.data for each in model.parameters()], name="parameters")
        >>> hvd.synchronize(handle)  # the parameters have the averages
    """
    with preparing("allreduce", name, process_set):
        tensors, op = listed(tensors), chosen_op(average, op)
        views = writable_memories(tensors)
    scales = prescale_factor, postscale_factor
    handle = arrays.grouped_allreduce_async_(views, name, op, *scales, process_set, weight=weight)
    return InPlaceHandle(handle, tensors)


@eager
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> SparseAllreduce:
    """Sums or averages sparse COO tensors: each rank sends the entries that it has.

    Example:
        >>> rows = torch.sparse_coo_tensor([[hvd.rank()]], torch.ones(1, 4), size=(10, 4))
        >>> handle = hvd.sparse_allreduce_async(rows, name="rows", op=hvd.Sum)
        >>> of_all = hvd.synchronize(handle)

    Args:
        tensor: a sparse COO tensor; its shape and dtype are the same on all ranks.
        name: identity among the ranks.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part.

    Returns:
        A handle for ``synchronize``, which can be called too; both give the coalesced sparse result.
    """
    return _sparse(tensor, name, op, process_set)


def _sparse(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float = 1.0,
    postscale: float = 1.0,
    weight: int | None = None,
) -> SparseAllreduce:
    with preparing("allgather", name, process_set):
        identity = id_of(process_set)
    return SparseAllreduce(current(), tensor, name, op, identity, prescale, postscale, weight)


def _is_sparse(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_sparse
