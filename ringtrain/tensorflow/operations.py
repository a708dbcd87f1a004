"""The collective operations for TensorFlow, in the argument order that Horovod's scripts for it use.

They run at once in eager mode and become nodes of the graph inside a ``tf.function``, where operations are matched by
name and may be under way by the hundred, in any order. All are differentiable. A failed operation raises the exception
class of TensorFlow that Horovod raises, with ringtrain's text: FailedPreconditionError where ranks disagree or there is
no world, InvalidArgumentError for what a rank alone can see to be wrong, UnknownError for a lost rank and an ended
world, DeadlineExceededError for a deadline, UnimplementedError and InternalError.

Tensors may live on a GPU: TensorFlow copies them to the host and back.
"""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from ringtrain._binding import tables
from ringtrain._runtime import arguments
from ringtrain._runtime.operations import Average
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of
from ringtrain._training.optimizer_arguments import check_compressor, chosen_op
from ringtrain.errors import InvalidArgumentError
from ringtrain.tensorflow import names, nodes, sparse
from ringtrain.tensorflow.compression import Compression, Compressor
from ringtrain.tensorflow.nodes import as_it_is, preparing
from ringtrain.tensorflow.types import Takes

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

_Dense = tf.Tensor | tf.Variable


@as_it_is
def allreduce(
    tensor: Takes,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """Combines a tensor of one shape over all ranks; see ``ringtrain.allreduce``.

    Example:
        >>> loss = hvd.allreduce(loss, name="loss")

    Args:
        tensor: the same shape and dtype on all ranks; or ``tf.IndexedSlices``, of which the rows of all ranks are
            gathered and those of one index summed.
        average: deprecated; True is ``op=Average``, False ``op=Sum``.
        device_dense: device on which the operation on a tensor is placed.
        device_sparse: the same for ``tf.IndexedSlices``.
        compression: how the tensor travels.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``; the first two for ``tf.IndexedSlices``.
        prescale_factor: factor on each contribution.
        postscale_factor: factor on the result.
        name: identity among the ranks; without one, operations are matched in their order, in a graph by what goes in.
        process_set: the ranks that take part.
        ignore_name_scope: leave the scope out of a name that is made from the tensor's.
    """
    return _allreduce_all(
        [tensor], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor, name,
        process_set, ignore_name_scope,
    )[0]  # fmt: skip


@as_it_is
def grouped_allreduce(
    tensors: Sequence[Takes],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """``allreduce`` of several tensors as one operation, all or nothing; returns a list in their order, empty for none.

    Example:
        >>> first, second = hvd.grouped_allreduce([tf.ones(3), tf.ones([2, 2])], name="both")

    The dtypes may differ. ``tf.IndexedSlices`` among them travel one by one beside the others.

    Args:
        tensors: as many on all ranks; their shapes and dtypes may differ from one to the next. The other arguments are those of
            ``allreduce``.
    """
    return _allreduce_all(
        tensors, average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor, name,
        process_set, ignore_name_scope,
    )  # fmt: skip


@as_it_is
def allgather(
    tensor: Takes,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates the ranks' tensors along the first dimension, which may differ; arguments and result as of ``ringtrain.allgather``.

    Example:
        >>> rows = hvd.allgather(tf.fill([1 + hvd.rank()], hvd.rank()), name="rows")  # 0, 1, 1 with two ranks

    Args:
        ignore_name_scope: whether an operation without a name leaves TensorFlow's name scope out of the name that it gets.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@as_it_is
def grouped_allgather(
    tensors: Sequence[Takes],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """``allgather`` of several tensors as one operation, all or nothing; returns a list in their order.

    Example:
        >>> images, labels = hvd.grouped_allgather([images, labels], name="batch")

    Args:
        tensors: as many on all ranks, each as in ``allgather``.
    """
    with preparing("allgather", name, process_set):
        tensors, members = [tf.convert_to_tensor(tensor) for tensor in tensors], id_of(process_set)
    if not tensors:
        return []
    name = name or _scopeless("allgather", tensors, ignore_name_scope)
    return nodes.run("allgather", [tensors], name, members)


@as_it_is
def broadcast(
    tensor: Takes,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the root's tensor on every rank; see ``ringtrain.broadcast``.

    Example:
        >>> seed = hvd.broadcast(tf.constant(1234 + hvd.rank()), root_rank=0, name="seed")

    Args:
        root_rank: global rank of the root.
        ignore_name_scope: as for ``allgather``.
    """
    with preparing("broadcast", name, process_set):
        tensors, root, members = [tf.convert_to_tensor(tensor)], arguments.root(root_rank), id_of(process_set)
    name = name or _scopeless("broadcast", tensors, ignore_name_scope)
    return nodes.run("broadcast", [tensors], name, members, root=root)[0]


@as_it_is
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Variable]:
    """Puts the root's values into variables, in one operation, and returns them.

    Example:
        >>> hvd.broadcast_(model.variables, root_rank=0)  # now have the values of rank 0

    In a graph for sessions of TensorFlow 1 nothing has been done yet when it returns: what it returns there are the
    variables' new values, and a session that computes one of them assigns to all.

    Args:
        variables: as many on all ranks, of the same shapes and dtypes.
        root_rank, name, process_set: as for ``broadcast``.
    """
    with preparing("broadcast", name, process_set):
        variables = list(variables)
        inputs = [tf.convert_to_tensor(variable) for variable in variables]
        root, members = arguments.root(root_rank), id_of(process_set)
    if not variables:
        return variables
    values = nodes.run("broadcast", [inputs], name, members, root=root)
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    if not names.in_session_graph():
        return variables
    with tf.control_dependencies(assigned):
        return [tf.identity(value) for value in values]


@as_it_is
def alltoall(
    tensor: Takes,
    splits: Takes | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Sends rows of the first dimension to each rank and concatenates what came; see ``ringtrain.alltoall``.

    Example:
        >>> received = hvd.alltoall(tf.range(4), name="rows")  # with two ranks the first half of both goes to rank 0
        >>> received, counts = hvd.alltoall(tf.range(4), splits=[1, 3], name="uneven")

    Args:
        tensor: at least one dimension; all but the first are the same on all ranks.
        splits: rows for each rank, integers in rank order within the set; None for equal parts.
        name: identity among the ranks.
        ignore_name_scope: leave the scope out of a name that is made from the tensor's.
        process_set: the ranks that take part.

    Returns:
        The rows received; with ``splits`` a pair of them and of the rows received from each rank (int32).
    """
    with preparing("alltoall", name, process_set):
        tensor, members = tf.convert_to_tensor(tensor), id_of(process_set)
        rows = tf.constant([], tf.int64) if splits is None else tf.cast(_whole_numbers(splits), tf.int64)
    name = name or _scopeless("alltoall", [tensor], ignore_name_scope)
    output, received = nodes.run("alltoall", [tensor, rows], name, members)
    return output if splits is None else (output, tf.cast(received, tf.int32))


@as_it_is
def reducescatter(
    tensor: Takes,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Combines a tensor as ``allreduce`` does and leaves each rank its rows; see ``ringtrain.reducescatter``.

    Example:
        >>> own_rows = hvd.reducescatter(tf.ones([4, 3]), name="sums", op=hvd.Sum)  # two of them with two ranks
    """
    name = name or _scopeless("reducescatter", [tensor], ignore_name_scope)
    with _on(device_dense):
        return _reduce(
            "reducescatter", [tensor], name, process_set, compression, op, prescale_factor, postscale_factor
        )[0]


@as_it_is
def grouped_reducescatter(
    tensors: Sequence[Takes],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """``reducescatter`` of several tensors as one operation, all or nothing; returns a list in their order.

    Example:
        >>> own_images, own_labels = hvd.grouped_reducescatter([images, labels], name="sums", op=hvd.Sum)

    Args:
        tensors: as many on all ranks, each as in ``reducescatter``.
    """
    if not tensors:
        return []
    with _on(device_dense):
        return _reduce("reducescatter", tensors, name, process_set, compression, op, prescale_factor, postscale_factor)


@as_it_is
def barrier(process_set: ProcessSet = global_process_set) -> tf.Operation | None:
    """Returns once every member of the process set has called it; in a graph, once every member's has come here.

    Example:
        >>> if hvd.rank() == 0:
        ...     model.save("model.keras")
        >>> hvd.barrier()  # behind it the file is there

    In a graph for sessions of TensorFlow 1 it returns the operation that waits, for a session to run.

    Args:
        process_set: the ranks that wait for each other.
    """
    with preparing("barrier", None, process_set):
        members = id_of(process_set)
    done = nodes.run("barrier", [], None, members)
    return done[0] if names.in_session_graph() else None


@as_it_is
def join() -> tf.Tensor:
    """Says that this rank has no more data, waits until all ranks said so, and returns the last one (int32 scalar).

    Example:
        >>> for _ in range(3 - hvd.rank()):  # a batch less on rank 1 than on rank 0
        ...     mean = hvd.allreduce(loss, name="loss")
        >>> last = hvd.join()
    """
    return nodes.run("join", [], None, id_of(global_process_set))[0]


def _allreduce_all(
    tensors: Sequence[Takes], average: bool | None, device_dense: str, device_sparse: str, compression: type[Compressor],
    op: int | None, prescale: float, postscale: float, name: str | None, process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[tf.Tensor | tf.IndexedSlices]:  # fmt: skip
    """The dense tensors in one operation, each of the sparse ones in one of its own."""
    with preparing("allreduce", name, process_set):
        op, results = chosen_op(average, op), list(tensors)
    dense = [index for index, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    for index, tensor in enumerate(list(results)):
        if isinstance(tensor, tf.IndexedSlices):
            own = name if name is None or len(results) == 1 else f"{name}.{index}"
            with _on(device_sparse):
                results[index] = sparse.allreduce(tensor, own, op, prescale, postscale, compression, process_set)
    if dense:
        inputs = [results[index] for index in dense]
        name = name or _scopeless("allreduce", inputs, ignore_name_scope)
        with _on(device_dense):
            reduced = _reduce("allreduce", inputs, name, process_set, compression, op, prescale, postscale)
        for index, tensor in zip(dense, reduced, strict=True):
            results[index] = tensor
    return results


def _reduce(
    operation: str, tensors: Sequence[Takes], name: str | None, process_set: ProcessSet, compression: type[Compressor],
    op: int, prescale: float, postscale: float,
) -> list[tf.Tensor]:  # fmt: skip
    with preparing(operation, name, process_set):
        arguments.check_reduction(op)
        check_compressor(compression)
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        sent = [(tensor, None) if compression.wire else compression.compress(tensor) for tensor in tensors]
        factors = {"prescale_bits": nodes.bits(prescale), "postscale_bits": nodes.bits(postscale)}
        wire, members = tables.COMPRESSIONS[compression.wire or "none"], id_of(process_set)
    results = nodes.run(
        operation, [[tensor for tensor, _ in sent]], name, members, reduction=op, compression=wire, **factors
    )
    if compression.wire:
        return results
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)]


def _scopeless(operation: str, tensors: Sequence[Takes], ignore_name_scope: bool) -> str | None:
    """A name without its scope where the caller asked for one; None otherwise: then ``nodes`` makes it."""
    if not ignore_name_scope or tf.executing_eagerly():
        return None
    return names.claim_for(operation, tensors, ignore_name_scope=True)


def _whole_numbers(splits: Takes) -> tf.Tensor:
    splits = tf.convert_to_tensor(splits)
    if not splits.dtype.is_integer or splits.shape.rank not in (1, None):
        raise InvalidArgumentError(
            f"splits must be a row of whole numbers, but is of shape {splits.shape} and {splits.dtype.name}. "
            "Give the rows for each rank."
        )
    return splits


def _on(device: str) -> contextlib.AbstractContextManager:
    return tf.device(device) if device else contextlib.nullcontext()
