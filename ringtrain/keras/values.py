"""Operations on numbers and NumPy arrays, for what scripts compute between the calls of ``fit`` and ``evaluate``."""

from typing import Any

import numpy as np

from ringtrain import operations
from ringtrain.errors import InvalidArgumentError
from ringtrain.operations import Average, Sum
from ringtrain.process_sets import ProcessSet, global_process_set


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combines a number or an array of one shape over all ranks; the same on every rank.

    Args:
        value: a number, an array, or whatever NumPy makes one of.
        name: identity among the ranks.
        average: Horovod's older spelling: True for ``op=Average``, False for ``op=Sum``.
        prescale_factor: factor on each contribution.
        postscale_factor: factor on the result.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        compression: accepted for Horovod's sake; values travel as they are.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: both ``average`` and ``op`` were given.

    Example:
        >>> accuracy = hvd.allreduce(model.evaluate(x, y)[1], name="accuracy")
    """
    if average is not None and op is not None:
        raise InvalidArgumentError("allreduce: either average or op may be given, but both are. Use op.")
    if average is not None:
        op = Average if average else Sum
    array = np.asarray(value)
    return _like(value, operations.allreduce(array, name, op, prescale_factor, postscale_factor, process_set))


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> np.ndarray:
    """Concatenates the ranks' arrays along the first dimension, in rank order."""
    return operations.allgather(np.asarray(value), name, process_set)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's number or array on every rank, which must have one of the same shape and dtype."""
    return _like(value, operations.broadcast(np.asarray(value), root_rank, name, process_set))


def reducescatter(
    value: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> np.ndarray:
    """Combines an array as ``allreduce`` does and leaves each rank its rows."""
    return operations.reducescatter(np.asarray(value), name, op, process_set)


def _like(given: Any, result: np.ndarray) -> Any:
    return result.item() if isinstance(given, (int, float)) else result
