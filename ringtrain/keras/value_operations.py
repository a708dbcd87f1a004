"""Operations on numbers, arrays and tensors, for what scripts compute beside ``fit``, also within a ``tf.function``.

As in Horovod they return a tensor of the framework under Keras: ``.numpy()``, ``float()`` and NumPy's functions take
it, and a Python number becomes float32 or int32 as everywhere there. In a graph of TensorFlow 1 they work at once, as
Horovod does with a session, and return a NumPy array.
"""

from numpy.typing import ArrayLike

from ringtrain._runtime.operations import Average, Sum
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.backends import backend
from ringtrain.keras.types import Compression, Tensor

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "reducescatter",
]


@backend.unconverted
def allreduce(
    value: ArrayLike,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compression = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combines a value of one shape over all ranks; the same on every rank.

    Example:
        >>> accuracy = float(hvd.allreduce(model.evaluate(x, y)[1], name="accuracy"))

    Args:
        value: a number, an array or a tensor.
        name: identity among the ranks; without one, calls are matched in their order.
        average: Horovod's older spelling: True for ``op=Average``, False for ``op=Sum``.
        prescale_factor: factor on each contribution.
        postscale_factor: factor on the result.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        compression: how it travels: ``Compression.none`` (default), ``fp16``, ``bf16``, ``int8`` or a class like them.
        process_set: the ranks that take part.

    Returns:
        A tensor of the shape and dtype of the value.

    Raises:
        InvalidArgumentError: both ``average`` and ``op`` were given.
    """
    if average is not None and op is not None:
        raise InvalidArgumentError("allreduce: either average or op may be given, but both are. Use op.")
    if average is not None:
        op = Average if average else Sum
    travels = {} if compression is None or not _is_tensor(value) else {"compression": compression}
    return _run(
        "allreduce", value, name, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        process_set=process_set, **travels,
    )  # fmt: skip


@backend.unconverted
def allgather(value: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the ranks' values along the first dimension, in rank order; all other dimensions must be equal.

    Example:
        >>> accuracies = hvd.allgather(np.array([0.9]), name="accuracies")  # a number of each rank

    Args:
        value: a number, an array or a tensor; the first dimension may differ between ranks.
        name: identity among the ranks; without one, calls are matched in their order.
        process_set: the ranks that take part.

    Returns:
        A tensor of the same dtype, equal on all ranks.
    """
    return _run("allgather", value, name, process_set=process_set)


@backend.unconverted
def broadcast(
    value: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's value on every rank, which must have one of the same shape and dtype.

    Example:
        >>> seed = int(hvd.broadcast(np.array(1234 + hvd.rank()), root_rank=0, name="seed"))

    Args:
        value: a number, an array or a tensor.
        root_rank: global rank of the root.
        name: identity among the ranks; without one, calls are matched in their order.
        process_set: the ranks that take part.
    """
    return _run("broadcast", value, name, root_rank=root_rank, process_set=process_set)


@backend.unconverted
def reducescatter(
    value: ArrayLike, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Combines a value as ``allreduce`` does and leaves each rank its rows of the first dimension.

    Example:
        >>> own_rows = hvd.reducescatter(np.ones((4, 3), np.float32), name="sums", op=hvd.Sum)
    """
    return _run("reducescatter", value, name, op=op, process_set=process_set)


def _run(operation: str, value: ArrayLike, name: str | None, **arguments: object) -> Tensor:
    run = getattr(backend.operations_for(value), operation)
    return run(backend.tensor(value), name=backend.own_name(name), **arguments)


def _is_tensor(value: ArrayLike) -> bool:
    return backend.operations_for(value) is backend.hvd
