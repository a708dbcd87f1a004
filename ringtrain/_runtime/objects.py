"""Python objects between ranks: pickled, sent as bytes by the operations for tensors."""

import pickle
from typing import Any

import numpy as np

from ringtrain._runtime.context import current
from ringtrain._runtime.operations import allgather, broadcast
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._runtime.submission import preparing


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's object on every rank.

    Example:
        >>> config = rt.broadcast_object(load_config() if rt.rank() == 0 else None)

    Args:
        obj: anything that pickles; read on the root only.
        root_rank: global rank of the root.
        name: identity among the ranks.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: on every rank, if the root's object does not pickle; the pickler's exception is the cause
            there.
    """
    name = name or "broadcast_object"
    size_name, payload_name = f"{name}.size", f"{name}.payload"
    with preparing("broadcast", size_name, process_set):
        is_root = bool(current().rank == root_rank)
        payload = np.frombuffer(_dumps(obj), np.uint8) if is_root else np.empty(0, np.uint8)
    length = broadcast(np.array([payload.size]), root_rank, size_name, process_set)
    with preparing("broadcast", payload_name, process_set):
        if not is_root:
            payload = np.empty(int(length[0]), np.uint8)
    payload = broadcast(payload, root_rank, payload_name, process_set)
    return obj if is_root else pickle.loads(payload)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the objects of all ranks, in rank order.

    Example:
        >>> counts = rt.allgather_object({"samples": len(x)}, name="counts")
        >>> total = sum(each["samples"] for each in counts)

    Args:
        obj: anything that pickles.
        name: identity among the ranks.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: on every rank, if an object does not pickle; the pickler's exception is the cause there.
    """
    name = name or "allgather_object"
    sizes_name = f"{name}.sizes"
    with preparing("allgather", sizes_name, process_set):
        payload = np.frombuffer(_dumps(obj), np.uint8)
    lengths = allgather(np.array([payload.size]), sizes_name, process_set)
    everything = allgather(payload, f"{name}.payload", process_set)
    ends = np.cumsum(lengths)
    return [pickle.loads(everything[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _dumps(obj: Any) -> bytes:
    """cloudpickle takes lambdas and classes of the main script too, where it is installed."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj)
    return cloudpickle.dumps(obj)
