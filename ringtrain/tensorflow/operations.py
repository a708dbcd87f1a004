"""The collective operations for TensorFlow, in the argument order that Horovod's scripts for it use.

They run at once in eager mode and become nodes of the graph inside a ``tf.function``, where operations are matched by
name and may be under way by the hundred, in any order. All are differentiable. A failed operation raises TensorFlow's
exception class for its kind with ringtrain's text: InvalidArgumentError for what ranks or arguments make impossible,
AbortedError for a lost rank, FailedPreconditionError after ``shutdown``, DeadlineExceededError for a deadline,
UnimplementedError and InternalError.

Tensors may live on a GPU: TensorFlow copies them to the host and back.
"""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringtrain import tables
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.operations import Adasum, Average, Sum
from ringtrain.process_sets import ProcessSet, global_process_set, id_of
from ringtrain.tensorflow import nodes, sparse
from ringtrain.tensorflow.compression import Compression, Compressor
from ringtrain.tensorflow.nodes import as_it_is

_Dense = tf.Tensor | tf.Variable


@as_it_is
def allreduce(
    tensor: Any,
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

    Example:
        >>> loss = hvd.allreduce(loss, name="loss")
    """
    return _allreduce_all(
        [tensor], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor, name,
        process_set, ignore_name_scope,
    )[0]  # fmt: skip


@as_it_is
def grouped_allreduce(
    tensors: Sequence[Any],
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

    The dtypes may differ. ``tf.IndexedSlices`` among them travel one by one beside the others.
    """
    return _allreduce_all(
        tensors, average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor, name,
        process_set, ignore_name_scope,
    )  # fmt: skip


@as_it_is
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Concatenates the ranks' tensors along the first dimension, which may differ; see ``ringtrain.allgather``."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@as_it_is
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """``allgather`` of several tensors as one operation, all or nothing."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    name = name or _scopeless("allgather", tensors, ignore_name_scope)
    return nodes.run("allgather", [tensors], name, id_of(process_set))


@as_it_is
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the root's tensor on every rank; see ``ringtrain.broadcast``. ``root_rank`` is a global rank."""
    tensors = [tf.convert_to_tensor(tensor)]
    name = name or _scopeless("broadcast", tensors, ignore_name_scope)
    return nodes.run("broadcast", [tensors], name, id_of(process_set), root=root_rank)[0]


@as_it_is
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Variable]:
    """Puts the root's values into variables, in one operation, and returns them."""
    variables = list(variables)
    if not variables:
        return variables
    inputs = [tf.convert_to_tensor(variable) for variable in variables]
    values = nodes.run("broadcast", [inputs], name, id_of(process_set), root=root_rank)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return variables


@as_it_is
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Sends rows of the first dimension to each rank and concatenates what came; see ``ringtrain.alltoall``.

    Args:
        tensor: at least one dimension; all but the first are the same on all ranks.
        splits: rows for each rank, integers in rank order within the set; None for equal parts.
        name: identity among the ranks.
        ignore_name_scope: leave the scope out of a name that is made from the tensor's.
        process_set: the ranks that take part.

    Returns:
        The rows received; with ``splits`` a pair of them and of the rows received from each rank (int32).
    """
    tensor = tf.convert_to_tensor(tensor)
    name = name or _scopeless("alltoall", [tensor], ignore_name_scope)
    rows = tf.constant([], tf.int64) if splits is None else tf.cast(splits, tf.int64)
    output, received = nodes.run("alltoall", [tensor, rows], name, id_of(process_set))
    return output if splits is None else (output, tf.cast(received, tf.int32))


@as_it_is
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Combines a tensor as ``allreduce`` does and leaves each rank its rows; see ``ringtrain.reducescatter``."""
    name = name or _scopeless("reducescatter", [tensor], ignore_name_scope)
    with _on(device_dense):
        return _reduce(
            "reducescatter", [tensor], name, process_set, compression, op, prescale_factor, postscale_factor
        )[0]


@as_it_is
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """``reducescatter`` of several tensors as one operation, all or nothing."""
    if not tensors:
        return []
    with _on(device_dense):
        return _reduce("reducescatter", tensors, name, process_set, compression, op, prescale_factor, postscale_factor)


@as_it_is
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns once every member of the process set has called it; in a graph, once every member's has come here."""
    nodes.run("barrier", [], None, id_of(process_set))


@as_it_is
def join() -> tf.Tensor:
    """Says that this rank has no more data, waits until all ranks said so, and returns the last one (int32 scalar)."""
    return nodes.run("join", [], None, id_of(global_process_set))[0]


def _allreduce_all(
    tensors: Sequence[Any], average: bool | None, device_dense: str, device_sparse: str, compression: type[Compressor],
    op: int | None, prescale: float, postscale: float, name: str | None, process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[Any]:  # fmt: skip
    """The dense tensors in one operation, each of the sparse ones in one of its own."""
    op = _op(average, op)
    results = list(tensors)
    dense = [index for index, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    for index, tensor in enumerate(tensors):
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
    operation: str, tensors: Sequence[Any], name: str | None, process_set: ProcessSet, compression: type[Compressor],
    op: int, prescale: float, postscale: float,
) -> list[tf.Tensor]:  # fmt: skip
    _check_reduction(operation, name, op)
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    sent = [(tensor, None) if compression.wire else compression.compress(tensor) for tensor in tensors]
    results = nodes.run(
        operation, [[tensor for tensor, _ in sent]], name, id_of(process_set),
        reduction=op, prescale_bits=nodes.bits(prescale), postscale_bits=nodes.bits(postscale),
        compression=tables.COMPRESSIONS[compression.wire or "none"],
    )  # fmt: skip
    if compression.wire:
        return results
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)]


def _check_reduction(operation: str, name: str | None, op: Any) -> None:
    if op in tables.REDUCTION_BY_ID:
        return
    known = ", ".join(f"{text.capitalize()} ({identity})" for text, identity in tables.REDUCTIONS.items())
    subject = f"{operation} '{name or 'unnamed'}'"
    if op == Adasum:
        raise UnsupportedError(f"{subject}: op must be one of {known}, but is Adasum, which this release lacks.")
    raise InvalidArgumentError(f"{subject}: op must be one of {known}, but is {op!r}.")


def _op(average: bool | None, op: int | None) -> int:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise InvalidArgumentError("allreduce: expected op or the deprecated average but found both. Pass op alone.")
    warnings.warn("average has become op: pass op=Average or op=Sum.", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


def _scopeless(operation: str, tensors: Sequence[Any], ignore_name_scope: bool) -> str | None:
    """A name without its scope where the caller asked for one; None otherwise: ``nodes`` makes it."""
    if not ignore_name_scope or tf.executing_eagerly():
        return None
    return nodes.unique_name(operation, tensors, ignore_name_scope=True)


def _on(device: str) -> contextlib.AbstractContextManager:
    return tf.device(device) if device else contextlib.nullcontext()
