"""The operations for torch tensors that move rows, in the argument order of Horovod's scripts for PyTorch.

These are allgather, broadcast, alltoall and reducescatter; ``reductions`` has allreduce, and its head says what holds
for all of them. Errors are those of ``ringtrain._runtime.operations``.
"""

from collections.abc import Iterable, Sequence

import torch

from ringtrain._runtime import operations as arrays
from ringtrain._runtime.operations import Average, Handle
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._runtime.submission import preparing
from ringtrain.torch.autograd import Forward, carries_gradients, differentiable
from ringtrain.torch.compression import Compression, Compressor, compressed
from ringtrain.torch.eager import eager
from ringtrain.torch.handles import AlltoallHandle, InPlaceHandle
from ringtrain.torch.tensors import check_tensors, listed, writable

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

_Tensors = Sequence[torch.Tensor]


# ---- allgather ----


@eager
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates the ranks' tensors along the first dimension, which may differ; arguments and result as of ``ringtrain.allgather``.

    Example:
        >>> own = torch.full((1 + hvd.rank(),), hvd.rank())  # another number of rows on each rank
        >>> hvd.allgather(own, name="own").tolist()  # with two ranks
        [0, 1, 1]
    """
    with preparing("allgather", name, process_set):
        check_tensors([tensor])

    forward = Forward("allgather", [tensor], name, process_set)
    return differentiable(forward, lambda: [arrays.allgather(tensor, name, process_set)])[0]


@eager
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``allgather`` that returns a handle at once.

    Example:
        >>> handle = hvd.allgather_async(labels, name="labels")
        >>> labels_of_all = hvd.synchronize(handle)
    """
    return arrays.allgather_async(tensor, name, process_set)


@carries_gradients
@eager
def grouped_allgather(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """``allgather`` of several tensors as one operation, all or nothing; returns a list in their order.

    Example:
        >>> x, y = hvd.grouped_allgather([x, y], name="batch")

    Args:
        tensors: as many on all ranks, each as in ``allgather``.
    """
    with preparing("allgather", name, process_set):
        tensors = listed(tensors)
        check_tensors(tensors)

    forward = Forward("grouped_allgather", tensors, name, process_set)
    return differentiable(forward, lambda: arrays.grouped_allgather(tensors, name, process_set))


@eager
def grouped_allgather_async(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``grouped_allgather`` that returns one handle at once.

    Example:
        >>> handle = hvd.grouped_allgather_async([x, y], name="batch")
        >>> x, y = hvd.synchronize(handle)
    """
    with preparing("allgather", name, process_set):
        tensors = listed(tensors)
    return arrays.grouped_allgather_async(tensors, name, process_set)


# ---- broadcast ----


@eager
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the root's tensor on every rank; see ``ringtrain.broadcast``.

    Example:
        >>> seed = hvd.broadcast(torch.tensor(torch.initial_seed()), root_rank=0, name="seed")
    """
    with preparing("broadcast", name, process_set):
        check_tensors([tensor])

    forward = Forward("broadcast", [tensor], name, process_set, root=root_rank)
    return differentiable(forward, lambda: [arrays.broadcast(tensor, root_rank, name, process_set)])[0]


@eager
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``broadcast`` that returns a handle at once.

    Example:
        >>> handle = hvd.broadcast_async(x, root_rank=0, name="x")
        >>> x = hvd.synchronize(handle)
    """
    return arrays.broadcast_async(tensor, root_rank, name, process_set)


@eager
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """``broadcast`` that puts the root's values into the tensor, and returns it.

    Example:
        >>> hvd.broadcast_(model.weight.data, root_rank=0, name="weight")  # now has the values of rank 0
    """
    with preparing("broadcast", name, process_set):
        view = writable(tensor)
    arrays.broadcast_(view, root_rank, name, process_set)
    return tensor


@eager
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> InPlaceHandle:
    """``broadcast_`` that returns a handle at once.

    Example:
        >>> handles = [hvd.broadcast_async_(each.data, root_rank=0) for each in model.parameters()]
        >>> for handle in handles:
        ...     hvd.synchronize(handle)
    """
    with preparing("broadcast", name, process_set):
        view = writable(tensor)
    return InPlaceHandle(arrays.broadcast_async_(view, root_rank, name, process_set), tensor)


# ---- alltoall ----


@carries_gradients
@eager
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends rows of the first dimension to each rank and concatenates what came; see ``ringtrain.alltoall``.

    Example:
        >>> rows = torch.arange(4) + 10 * hvd.rank()
        >>> received = hvd.alltoall(rows, name="rows")  # with two ranks rank 0 gets 0, 1, 10, 11, and rank 1 the others
        >>> received, counts = hvd.alltoall(rows, splits=[1, 3], name="uneven")  # a row for rank 0, three for rank 1

    Returns:
        The rows received; with ``splits`` a pair of them and of the rows received from each rank (an int32 tensor).
    """
    with preparing("alltoall", name, process_set):
        check_tensors([tensor])
    forward = Forward("alltoall", [tensor], name, process_set)

    def run() -> _Tensors:
        rows, received = arrays._alltoall(tensor, splits, name, process_set, waits=True).wait()
        forward.received = torch.from_numpy(received)
        return [rows]

    rows = differentiable(forward, run)[0]
    return rows if splits is None else (rows, forward.received)


@eager
def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> AlltoallHandle:
    """``alltoall`` that returns a handle at once; its result is always the pair.

    Example:
        >>> handle = hvd.alltoall_async(torch.arange(4), name="rows")
        >>> received, counts = hvd.synchronize(handle)
    """
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
    """Combines a tensor as ``allreduce`` does and leaves each rank its rows; see ``ringtrain.reducescatter``.

    Example:
        >>> own = hvd.reducescatter(torch.ones(4, 3), name="gradient", op=hvd.Sum)
        >>> own.shape  # with two ranks
        torch.Size([2, 3])
    """
    before = preparing("reducescatter", name, process_set)
    with before:
        check_tensors([tensor])
    scales = prescale_factor, postscale_factor

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return [arrays.reducescatter(sent[0], name, op, process_set, *scales, by_core, weight)]

    forward = Forward("reducescatter", [tensor], name, process_set, (op, *scales, weight))
    return differentiable(forward, lambda: compressed(compression, [tensor], operate, before))[0]


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
    """``reducescatter`` that returns a handle at once.

    Example:
        >>> handle = hvd.reducescatter_async(x, name="gradient")
        >>> own_rows = hvd.synchronize(handle)
    """
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
    """``reducescatter`` of several tensors as one operation, all or nothing; returns a list in their order.

    Example:
        >>> own_x, own_y = hvd.grouped_reducescatter([x, y], name="sums", op=hvd.Sum)

    Args:
        tensors: as many on all ranks, each as in ``reducescatter``.
    """
    before = preparing("reducescatter", name, process_set)
    with before:
        tensors = listed(tensors)
        check_tensors(tensors)
    scales = prescale_factor, postscale_factor

    def operate(sent: _Tensors, by_core: str) -> _Tensors:
        return arrays.grouped_reducescatter(sent, name, op, process_set, *scales, by_core, weight)

    forward = Forward("grouped_reducescatter", tensors, name, process_set, (op, *scales, weight))
    return differentiable(forward, lambda: compressed(compression, tensors, operate, before))


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
    """``grouped_reducescatter`` that returns one handle at once.

    Example:
        >>> handle = hvd.grouped_reducescatter_async([x, y], name="sums", op=hvd.Sum)
        >>> own_x, own_y = hvd.synchronize(handle)
    """
    with preparing("reducescatter", name, process_set):
        tensors = listed(tensors)
    scales = prescale_factor, postscale_factor
    return arrays.grouped_reducescatter_async(tensors, name, op, process_set, *scales, weight=weight)
