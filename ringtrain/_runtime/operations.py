"""The public collective operations, in Horovod's argument order.

Each has a form that waits and, where the table says so, ``_async`` (returns a ``Handle``), ``_`` (in place) and
``grouped_`` (several tensors, all or nothing). Tensors are NumPy arrays or anything that speaks DLPack, the buffer
protocol or the CUDA array interface; a result comes back in the library of its input, as NumPy where that library
cannot take it. With tensors on a GPU nothing here waits for the GPU: the stream on which their library works does.
docs/gpu.md says more.

The dtypes are float16 to float64, bfloat16, integers of 8 to 64 bits with and without sign, and bool; complex64 and
complex128, which reductions add and average; and floats of 8 bits, which they refuse. Every operation raises
``MismatchError`` on all ranks when they disagree, ``InvalidArgumentError`` for what this rank alone can see to be wrong
(the peers' operation fails with the same text), and another ``RingtrainError`` when a rank or the world is lost.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringtrain._binding import array_groups, device_memory, tables, tensor_memory
from ringtrain._binding._native import lib
from ringtrain._binding.cuda_arrays import CudaArray
from ringtrain._binding.tensor_memory import Buffer, HostBuffers, InPlace
from ringtrain._runtime import arguments, repeats
from ringtrain._runtime.context import current
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._runtime.submission import Submission, announce, id_of
from ringtrain.errors import InvalidArgumentError

__all__ = [
    "Adasum",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Compression",
    "Handle",
    "L2Norm",
    "Max",
    "Min",
    "PerItem",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]

Average = tables.REDUCTIONS["average"]
Sum = tables.REDUCTIONS["sum"]
Min = tables.REDUCTIONS["min"]
Max = tables.REDUCTIONS["max"]
Product = tables.REDUCTIONS["product"]
Adasum = tables.REDUCTIONS["adasum"]
L2Norm = tables.REDUCTIONS["l2norm"]
BitAnd = tables.REDUCTIONS["bitand"]
BitOr = tables.REDUCTIONS["bitor"]
BitXor = tables.REDUCTIONS["bitxor"]
PerItem = tables.REDUCTIONS["peritem"]


class WithFeedback(str):
    """A compression that makes up for what it has lost of a named tensor when that comes again."""

    @property
    def without_feedback(self) -> str:
        """The same, which makes up for nothing: for tensors that have nothing to do with those before them."""
        return tables.WITHOUT_FEEDBACK[self]


class Compression:
    """How ``allreduce`` and ``reducescatter`` send float32 and float64 between hosts; within a host nothing is lost.

    Example:
        >>> rt.allreduce(array, name="gradient", compression=rt.Compression.bf16)  # half of the bytes between hosts
    """

    none = "none"
    fp16 = "float16"
    bf16 = "bfloat16"
    int8 = WithFeedback("int8")
    int4 = WithFeedback("int4")


_Results = Callable[[Operation], Any]
_Terms = tuple[Any, Any, Any, Any, Any]  # op, prescale_factor, postscale_factor, compression, weight
# Of an operation: inputs, outputs, and its result, which is known beforehand or made when it is done.
_SameShape = tuple[Sequence[Buffer], Sequence[Buffer], Any, _Results | None]


class Handle:
    """A pending operation: what the ``_async`` forms return. Dropping it is safe; the operation goes on.

    Example:
        >>> handle = rt.allreduce_async(array, name="gradient")
        >>> mean = handle.wait(timeout=60)

    Args:
        operation, value, results: given by the operation; scripts make no handles.
    """

    __slots__ = ("_operation", "_results", "_value")

    def __init__(self, operation: Operation, value: Any, results: _Results | None):
        self._operation: Operation | None = operation
        self._value = value  # the result, unless `results` makes it when the operation is done
        self._results = results

    def done(self) -> bool:
        """Whether the operation ended, well or not, a GPU's part included."""
        return self._operation is None or self._operation.finished()

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the operation is done and returns its result; the same one when called again."""
        operation = self._operation
        if operation is not None:
            operation.wait(timeout)
            if self._results is not None:
                self._value = self._results(operation)
            self._operation = self._results = None
        return self._value


def poll(handle: Handle) -> bool:
    """Whether the operation of an ``_async`` form is done; ``synchronize`` then returns at once.

    Example:
        >>> handle = rt.allreduce_async(array, name="gradient")
        >>> is_done = rt.poll(handle)  # asks, and does not wait
        >>> mean = rt.synchronize(handle)

    Args:
        handle: what the form has returned.
    """
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Waits for an ``_async`` form and returns its result: a tensor, a list of them for the grouped forms, or None.

    Example:
        >>> handles = [rt.allreduce_async(each, name) for name, each in [("weights", weights), ("bias", bias)]]
        >>> weights, bias = map(rt.synchronize, handles)

    A second call returns the same result. Other Python threads run while it waits.

    Args:
        handle: what the form has returned.

    Raises:
        MismatchError: ranks disagree about the operation; the same text on all of them.
        RingtrainError: another one, when a rank or the world was lost.
    """
    return handle.wait()


def allreduce(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
    weight: int | None = None,
) -> Any:
    """Combines a tensor of one shape over all ranks: ``postscale * op(prescale * tensor)``, the same bits on every rank.

    Example:
        >>> rt.allreduce(np.array([1.0, 2.0]), name="loss", op=rt.Sum)
        array([1., 2.])

    Args:
        tensor: any shape, the same on all ranks; not changed.
        name: identity among the ranks; unnamed operations are matched in the order of submission.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product``, ``L2Norm`` or ``PerItem``. Integers average toward
            zero; bool has no average. ``L2Norm`` is the root of the sum of squares, of float32 and float64: of the norm of each
            rank's part it makes that of the whole.
        prescale_factor: factor on each contribution.
        postscale_factor: factor on the result.
        process_set: the ranks that take part.
        compression: ``Compression.none``, or ``fp16`` or ``bf16`` for 16 bits between hosts: each host's sum is
            rounded, the sum of those is taken in float32 and rounded once, and all ranks get the same bits. ``int8``
            and ``int4``, for ``Sum`` and ``Average``: the same in 8 bits with a scale for each 256 elements, or 4 bits
            with one for each 128, of tensors that have 4,096 or more. What both roundings lose of a tensor is added to
            the next one of its name, so that it comes late and is not lost; ``int8.without_feedback`` keeps nothing,
            as do operations without a name.
        weight: with ``Average``, what this rank's tensor counts, such as its number of samples: the result is
            ``sum(weight * tensor) / sum(weight)``. A rank whose weight is 0 contributes nothing. All ranks or none. With
            ``PerItem``, of how many items this rank's tensor is the sum: the result is ``sum(tensor) / sum(weight)``.
    """
    return _reduce_now(tensor, name, process_set, (op, prescale_factor, postscale_factor, compression, weight))


def allreduce_async(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
    weight: int | None = None,
) -> Handle:
    """``allreduce`` that returns a handle at once; leave the tensor unchanged until it is done.

    Example:
        >>> handle = rt.allreduce_async(array, name="gradient")
        >>> prepare_dataset()  # meanwhile
        >>> mean = rt.synchronize(handle)
    """
    return _reduce(tensor, name, process_set, (op, prescale_factor, postscale_factor, compression, weight))


def allreduce_(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
    weight: int | None = None,
) -> Any:
    """``allreduce`` that puts the result into the tensor, and returns it.

    Example:
        >>> rt.allreduce_(weights, name="weights")  # now has the average
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _reduce_now(tensor, name, process_set, terms, in_place=True)


def allreduce_async_(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
    weight: int | None = None,
) -> Handle:
    """``allreduce_`` that returns a handle at once.

    Example:
        >>> handle = rt.allreduce_async_(weights, name="weights")
        >>> rt.synchronize(handle)  # weights has the average
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _reduce(tensor, name, process_set, terms, in_place=True)


def grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
    weight: int | None = None,
) -> list[Any]:
    """``allreduce`` of several tensors as one operation, all or nothing; returns a list in their order.

    Example:
        >>> weights, bias = rt.grouped_allreduce([weights, bias], name="parameters")

    Args:
        tensors: as many on all ranks; their shapes and dtypes may differ from one to the next. The other arguments are those of
            ``allreduce``.
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _reduce(tensors, name, process_set, terms, grouped=True, waits=True).wait()


def grouped_allreduce_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
    weight: int | None = None,
) -> Handle:
    """``grouped_allreduce`` that returns one handle at once.

    Example:
        >>> handle = rt.grouped_allreduce_async([weights, bias], name="parameters")
        >>> weights, bias = rt.synchronize(handle)
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _reduce(tensors, name, process_set, terms, grouped=True)


def grouped_allreduce_(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
    weight: int | None = None,
) -> list[Any]:
    """``grouped_allreduce`` that puts the results into the tensors.

    Example:
        >>> rt.grouped_allreduce_([weights, bias], name="parameters")  # now have the averages
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _reduce(tensors, name, process_set, terms, True, True, True).wait()


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
    weight: int | None = None,
) -> Handle:
    """``grouped_allreduce_`` that returns one handle at once.

    Example:
        >>> handle = rt.grouped_allreduce_async_([weights, bias], name="parameters")
        >>> rt.synchronize(handle)  # weights and bias have the averages
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _reduce(tensors, name, process_set, terms, grouped=True, in_place=True)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the ranks' tensors along the first dimension, in rank order.

    Example:
        >>> own = np.full(1 + rt.rank(), rt.rank())  # another number of rows on each rank
        >>> rt.allgather(own, name="own").tolist()  # with two ranks
        [0, 1, 1]

    Args:
        tensor: at least one dimension; the first may differ between ranks, the others must not.
        name: identity among the ranks.
        process_set: the ranks that take part.

    Returns:
        A tensor of the same dtype, equal on all ranks; its first dimension is the sum of theirs.
    """
    return _rows("allgather", tensor, name, process_set, waits=True).wait()


def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """``allgather`` that returns a handle at once.

    Example:
        >>> handle = rt.allgather_async(array, name="rows")
        >>> rows = rt.synchronize(handle)
    """
    return _rows("allgather", tensor, name, process_set)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """``allgather`` of several tensors as one operation, all or nothing; returns a list in their order.

    Example:
        >>> images, labels = rt.grouped_allgather([images, labels], name="batch")

    Args:
        tensors: as many on all ranks, each as in ``allgather``.
    """
    return _rows("allgather", tensors, name, process_set, grouped=True, waits=True).wait()


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``grouped_allgather`` that returns one handle at once.

    Example:
        >>> handle = rt.grouped_allgather_async([images, labels], name="batch")
        >>> images, labels = rt.synchronize(handle)
    """
    return _rows("allgather", tensors, name, process_set, grouped=True)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's tensor on every rank.

    Example:
        >>> weights = rt.broadcast(weights, root_rank=0, name="weights")

    Args:
        tensor: same shape and dtype on all ranks; not changed.
        root_rank: global rank of the root, also within a process set.
        name: identity among the ranks.
        process_set: the ranks that take part.
    """
    return _broadcast(tensor, root_rank, name, process_set, waits=True).wait()


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``broadcast`` that returns a handle at once.

    Example:
        >>> handle = rt.broadcast_async(weights, root_rank=0, name="weights")
        >>> weights = rt.synchronize(handle)
    """
    return _broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """``broadcast`` that puts the root's values into the tensor, and returns it.

    Example:
        >>> rt.broadcast_(weights, root_rank=0, name="weights")  # now has the values of rank 0
    """
    return _broadcast(tensor, root_rank, name, process_set, in_place=True, waits=True).wait()


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``broadcast_`` that returns a handle at once.

    Example:
        >>> handles = [rt.broadcast_async_(each, root_rank=0) for each in (weights, bias)]
        >>> for handle in handles:
        ...     rt.synchronize(handle)
    """
    return _broadcast(tensor, root_rank, name, process_set, in_place=True)


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rows of the first dimension to each rank and concatenates what came, in rank order.

    Example:
        >>> rows = np.arange(4) + 10 * rt.rank()
        >>> received = rt.alltoall(rows, name="rows")  # with two ranks rank 0 gets 0, 1, 10, 11, and rank 1 the others
        >>> received, counts = rt.alltoall(rows, splits=[1, 3], name="uneven")  # a row for rank 0, three for rank 1

    Args:
        tensor: at least one dimension; all but the first are the same on all ranks.
        splits: rows for each rank, in rank order within the set, adding up to the first dimension; None for equal
            parts.
        name: identity among the ranks.
        process_set: the ranks that take part.

    Returns:
        The rows received; with ``splits`` a pair of them and of the rows received from each rank (an int32 array).
    """
    rows, received = _alltoall(tensor, splits, name, process_set, waits=True).wait()
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """``alltoall`` that returns a handle at once; its result is always the pair.

    Example:
        >>> handle = rt.alltoall_async(np.arange(4), name="rows")
        >>> received, counts = rt.synchronize(handle)
    """
    return _alltoall(tensor, splits, name, process_set)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
    weight: int | None = None,
) -> Any:
    """Combines a tensor as ``allreduce`` does and leaves each rank its rows of the first dimension.

    Example:
        >>> own = rt.reducescatter(np.ones((4, 3)), name="gradient", op=rt.Sum)
        >>> own.shape  # with two ranks
        (2, 3)

    Args:
        tensor: at least one dimension, the same shape on all ranks. Of n rows each of k ranks gets ``n // k``, the
            first ``n % k`` ranks one more.
        name: identity among the ranks.
        op: as in ``allreduce``.
        process_set: the ranks that take part.
        prescale_factor: factor on each contribution.
        postscale_factor: factor on the result.
        compression: as in ``allreduce``.
        weight: as in ``allreduce``.
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _rows("reducescatter", tensor, name, process_set, terms, waits=True).wait()


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
    weight: int | None = None,
) -> Handle:
    """``reducescatter`` that returns a handle at once.

    Example:
        >>> handle = rt.reducescatter_async(x, name="gradient")
        >>> own_rows = rt.synchronize(handle)
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _rows("reducescatter", tensor, name, process_set, terms)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
    weight: int | None = None,
) -> list[Any]:
    """``reducescatter`` of several tensors as one operation, all or nothing; returns a list in their order.

    Example:
        >>> own_images, own_labels = rt.grouped_reducescatter([images, labels], name="sums", op=rt.Sum)

    Args:
        tensors: as many on all ranks, each as in ``reducescatter``.
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _rows("reducescatter", tensors, name, process_set, terms, grouped=True, waits=True).wait()


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
    weight: int | None = None,
) -> Handle:
    """``grouped_reducescatter`` that returns one handle at once.

    Example:
        >>> handle = rt.grouped_reducescatter_async([images, labels], name="sums", op=rt.Sum)
        >>> own_images, own_labels = rt.synchronize(handle)
    """
    terms = op, prescale_factor, postscale_factor, compression, weight
    return _rows("reducescatter", tensors, name, process_set, terms, grouped=True)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns once every member of the process set has called it.

    Example:
        >>> if rt.rank() == 0:
        ...     prepare_dataset()
        >>> rt.barrier()  # behind it the data set is there, on every rank

    Args:
        process_set: the ranks that wait for each other.
    """
    with Submission("barrier", None, process_set, waits=True) as submission:
        operation = submission.start((), ())
    operation.wait()


def join(device: int = -1) -> int:
    """Says that this rank has no more data; blocks until all ranks said so, and returns the one that said it last.

    Example:
        >>> for x, y in batches[rt.rank() :]:  # a batch less on rank 1 than on rank 0
        ...     weights -= 0.1 * rt.allreduce(gradient(weights, x, y), name="gradient")
        >>> last = rt.join()

    Meanwhile this rank takes part in the others' operations with nothing of its own. ``device`` is accepted for the
    sake of Horovod's scripts.
    """
    return current().join()


def _reduce(
    given: Any, name: str | None, process_set: ProcessSet, terms: _Terms,
    grouped: bool = False, in_place: bool = False, waits: bool = False,
) -> Handle:  # fmt: skip
    context = current()
    try:  # what ``Submission`` does for the others, without an object: so many calls pass here
        identity = id_of(process_set)
        attributes = _reducing(*terms)
        inputs, outputs, value, results = (_group_of_same_shape if grouped else _same_shape)(given, in_place)
    except Exception as problem:
        announce(context, "allreduce", name, process_set, problem)
    operation = context.submit_with(attributes, "allreduce", name, inputs, outputs, process_set=identity, waits=waits)
    return Handle(operation, value, results)


def _reduce_now(tensor: Any, name: str | None, process_set: ProcessSet, terms: _Terms, in_place: bool = False) -> Any:
    """An allreduce of one tensor that is waited for: the short way if it comes again, else the general one."""
    of_all = process_set is global_process_set  # the id of another set may become another set's
    if of_all and (known := repeats.again(tensor, name, terms, in_place)) is not None:
        return known
    result = _reduce(tensor, name, process_set, terms, in_place=in_place, waits=True).wait()
    if of_all and terms[-1] is None:  # a weight is another one each time
        repeats.note(tensor, name, terms, _reducing(*terms))
    return result


def _broadcast(
    given: Any, root: int, name: str | None, process_set: ProcessSet, in_place: bool = False, waits: bool = False
) -> Handle:
    with Submission("broadcast", name, process_set, waits) as submission:
        inputs, outputs, value, results = _same_shape(given, in_place)
        operation = submission.start(inputs, outputs, root=arguments.root(root))
    return Handle(operation, value, results)


def _rows(
    kind: str, given: Any, name: str | None, process_set: ProcessSet, terms: _Terms | None = None,
    grouped: bool = False, waits: bool = False,
) -> Handle:  # fmt: skip
    """Operations whose results have another first dimension than their inputs; the library allocates them."""
    with Submission(kind, name, process_set, waits) as submission:
        attributes = {} if terms is None else _reducing(*terms)
        tensors = list(given) if grouped else [given]
        inputs = [tensor_memory.as_buffer(tensor) for tensor in tensors]
        operation = submission.start(inputs, [None] * len(inputs), **attributes)

    def results(operation: Operation) -> Any:
        rows = [_allocated(tensor, operation, index) for index, tensor in enumerate(tensors)]
        return rows if grouped else rows[0]

    return Handle(operation, None, results)


def _alltoall(given: Any, splits: Any, name: str | None, process_set: ProcessSet, waits: bool = False) -> Handle:
    """An alltoall whose result is always the pair; the adapter for PyTorch needs it, too."""
    with Submission("alltoall", name, process_set, waits) as submission:
        buffer = tensor_memory.as_buffer(given)
        rows = None if splits is None else arguments.split_rows(splits)
        operation = submission.start((buffer,), (None,), splits=rows)

    def results(operation: Operation) -> tuple[Any, np.ndarray]:
        return _allocated(given, operation, 0), np.array(operation.received_splits(), np.int32)

    return Handle(operation, None, results)


def _same_shape(given: Any, in_place: bool) -> _SameShape:
    """An operation whose result looks like its input."""
    if type(given) is Buffer:  # an adapter has found where it is
        return (given,), (given,), None, None
    plain = tensor_memory.own_buffer(given, in_place)
    if plain is not None:
        if in_place:
            return (plain,), (plain,), given, None
        array, output = tensor_memory.empty_like(plain)
        return (plain,), (output,), array, None
    if in_place:
        target = InPlace(given)
        return (target.buffer,), (target.buffer,), None, _in_stream_order(given, target.buffer, target.give_back)
    source = tensor_memory.as_buffer(given)
    if source.device >= 0:
        return _same_shape_on_device(given, source)
    memory, output = tensor_memory.empty_like(source)
    return (source,), (output,), None, lambda operation: tensor_memory.wrap(given, memory, source.dtype, source.shape)


def _group_of_same_shape(given: Any, in_place: bool) -> _SameShape:
    """``_same_shape`` of a group: all at once where they are plain arrays, or an adapter has found where they are."""
    if type(given) is HostBuffers:
        return given, given, None, None
    tensors = list(given)
    if in_place:
        if group := array_groups.in_place(tensors):
            return group, group, tensors, None
    elif found := array_groups.with_results(tensors):
        group, arrays = found
        return group, group, arrays, None
    members = [_same_shape(tensor, in_place) for tensor in tensors]

    def results(operation: Operation) -> list[Any]:
        return [value if result is None else result(operation) for _, _, value, result in members]

    return [inputs[0] for inputs, *_ in members], [outputs[0] for _, outputs, *_ in members], None, results


def _same_shape_on_device(given: Any, source: Buffer) -> _SameShape:
    """``_same_shape`` of one tensor on a GPU: into one of its library, or into memory that is lent to its library."""
    fresh = tensor_memory.cuda_empty_like(given)
    if fresh is not None:
        output = tensor_memory.as_buffer(fresh)
        return (source,), (output,), None, _in_stream_order(given, source, lambda operation: fresh)
    dtype, shape = source.dtype, source.shape
    memory = device_memory.allocate_on_device(
        current().native, source.device, math.prod(shape) * tables.DTYPE_BY_ID[dtype].bytes
    )
    output = Buffer(memory.address, dtype, shape, source.device, source.stream, memory)

    def results(operation: Operation) -> Any:
        return tensor_memory.wrap(given, operation.array_in(memory, dtype, shape), dtype, shape)

    return (source,), (output,), None, _in_stream_order(given, source, results)


def _in_stream_order(given: Any, source: Buffer, results: _Results) -> _Results:
    """On a GPU, has the stream on which the caller goes on wait for the operation; the CPU does not."""
    if source.device < 0:
        return results

    def ordered(operation: Operation) -> Any:
        operation.hold_back(tensor_memory.stream_of(given))
        return results(operation)

    return ordered


def _allocated(like: Any, operation: Operation, index: int) -> Any:
    memory, dtype, shape = operation.allocated(index)
    if type(memory) is CudaArray:
        operation.hold_back(tensor_memory.stream_of(like))
    return tensor_memory.wrap(like, memory, dtype, shape)


def _reducing(
    op: int | None, prescale: float, postscale: float, compression: str, weight: int | None
) -> dict[str, Any]:
    """The attributes of an operation that reduces, checked. Those of one program are few, and are remembered."""
    if type(prescale) is type(postscale) is float and weight is None and type(op) in _PLAIN_OPS:
        terms = op, prescale, postscale, compression
        try:
            return _known_terms[terms]
        except (KeyError, TypeError):  # new ones, or a compression that is none
            attributes = _checked(*terms, None)
        if prescale and postscale and len(_known_terms) < _MOST_TERMS:  # -0.0 would be taken for 0.0
            _known_terms[terms] = attributes
        return attributes
    return _checked(op, prescale, postscale, compression, weight)


_PLAIN_OPS = (int, type(None))  # bool is no reduction
_MOST_TERMS = 1024
_known_terms: dict[tuple, dict[str, Any]] = {}


def _checked(op: int | None, prescale: float, postscale: float, compression: str, weight: int | None) -> dict[str, Any]:
    if not isinstance(compression, str) or compression not in tables.COMPRESSIONS:
        known = ", ".join(tables.COMPRESSIONS)
        raise InvalidArgumentError(f"compression must be one of {known}, but is {compression!r}.")
    return {
        "reduction": arguments.reduction(op),
        "prescale": arguments.number("prescale_factor", prescale),
        "postscale": arguments.number("postscale_factor", postscale),
        "compression": compression,
        "weight": None if weight is None else _weight(weight),
    }


def _weight(value: Any) -> int:
    weight = arguments.integer("weight", value)
    if not 0 <= weight <= lib.RT_HIGHEST_WEIGHT:
        raise InvalidArgumentError(f"the weight must be in [0, {lib.RT_HIGHEST_WEIGHT}], but is {weight}.")
    return weight
