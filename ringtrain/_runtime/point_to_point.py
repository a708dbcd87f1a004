"""Tensors from one rank to another: the two agree on them, and the others hear nothing of it."""

from typing import Any

from ringtrain._binding import tensor_memory
from ringtrain._runtime import arguments
from ringtrain._runtime.operations import Handle
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._runtime.submission import current_of

ANY_RANK = -1  # of a receive

__all__ = ["receive", "receive_async", "send", "send_async"]


def send(tensor: Any, to: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Sends a tensor to a rank; returns when it may be written again, which may be before the other rank has taken it.

    Example:
        >>> if rt.rank() == 0:
        ...     rt.send(array, to=1)
        ... elif rt.rank() == 1:
        ...     sender = rt.receive(array, source=0)  # which is 0

    The sends of a rank to another one with the same tag are received in their order. A send that waits for 0.1 s is
    copied and done, so that ranks which all send first do not wait for each other.

    Args:
        tensor: of any shape and dtype, in host memory.
        to: another rank of the process set, as a rank of the world.
        tag: tells messages between the same ranks apart; any integer of 64 bits.
        process_set: has both ranks; messages of different sets never meet.

    Raises:
        InvalidArgumentError: the rank is this one, or not in the process set; only this rank is told.
        MismatchError: the receive has room for another dtype or number of elements. Of a tensor up to 8 KB, which is
            sent at once, the receiver alone is told.
        ClosedError: the other rank has called ``shutdown``.
        RingtrainError: another one, when a rank or the world was lost.
    """
    _send(tensor, to, tag, process_set, waits=True).wait()


def send_async(tensor: Any, to: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> Handle:
    """``send`` that returns a handle at once; its result is None, and the tensor must stay as it is until then.

    Example:
        >>> neighbour = (rt.rank() + 1) % rt.size()
        >>> handle = rt.send_async(array, neighbour)
        >>> sender = rt.receive(np.zeros(3))
        >>> rt.synchronize(handle)
    """
    return _send(tensor, to, tag, process_set)


def receive(tensor: Any, source: int | None = None, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
    """Writes the next tensor that a rank sends into this one, and returns that rank.

    Example:
        >>> if rt.rank() > 0:
        ...     rt.send(array, to=0, tag=7)
        ... else:
        ...     senders = [rt.receive(array, tag=7) for _ in range(rt.size() - 1)]  # as they come

    Args:
        tensor: writable, in host memory, of the dtype and number of elements that are sent.
        source: a rank of the process set, as a rank of the world; None for any.
        tag, process_set: as of the send.

    Raises:
        InvalidArgumentError, MismatchError, RingtrainError: as ``send``.
        ClosedError: the other rank, or of any all others, have called ``shutdown``.
    """
    return _receive(tensor, source, tag, process_set, waits=True).wait()


def receive_async(
    tensor: Any, source: int | None = None, tag: int = 0, process_set: ProcessSet = global_process_set
) -> Handle:
    """``receive`` that returns a handle at once; its result is the sender's rank.

    Example:
        >>> handle = rt.receive_async(np.zeros(3))
        >>> rt.send(array, to=(rt.rank() + 1) % rt.size())
        >>> sender = rt.synchronize(handle)
    """
    return _receive(tensor, source, tag, process_set)


def _send(tensor: Any, to: int, tag: int, process_set: ProcessSet, waits: bool = False) -> Handle:
    context, identity = current_of(process_set)
    buffer = tensor_memory.as_buffer(tensor)
    splits, root = [_tag(tag)], arguments.root(to)
    operation = context.submit(
        "send", None, (buffer,), (buffer,), process_set=identity, splits=splits, waits=waits, root=root
    )
    return Handle(operation, None, None)


def _receive(tensor: Any, source: int | None, tag: int, process_set: ProcessSet, waits: bool = False) -> Handle:
    context, identity = current_of(process_set)
    target = tensor_memory.InPlace(tensor)
    root = ANY_RANK if source is None else arguments.root(source)
    splits = [_tag(tag)]
    operation = context.submit(
        "receive", None, (target.buffer,), (target.buffer,), process_set=identity, splits=splits, waits=waits, root=root
    )

    def sender(operation: Operation) -> int:
        target.give_back(operation)
        return operation.result()

    return Handle(operation, None, sender)


def _tag(value: Any) -> int:
    return arguments.integer("tag", value)
