"""What the ``_async`` forms for torch return, and the two functions that take it.

A handle is an object where Horovod's is a number: it can be kept, compared, put into a dict or a set, and dropped.
``ringtrain._runtime.operations.Handle`` serves where the result is a tensor of its own; the others are here and in ``sparse``.
"""

from typing import Generic, Protocol, TypeVar

import torch

from ringtrain._runtime.operations import Handle
from ringtrain.errors import InvalidArgumentError

Result = TypeVar("Result")
Given = TypeVar("Given", covariant=True)


class Pending(Protocol[Given]):
    """What an ``_async`` form returns."""

    def done(self) -> bool:
        """Whether the operation ended, well or not."""

    def wait(self, timeout: float | None = None) -> Given:
        """Blocks until it is done; its result."""


class InPlaceHandle(Generic[Result]):
    """A pending in-place operation: the handle below it, and the very tensors that the caller gave."""

    __slots__ = ("_handle", "_given")

    def __init__(self, handle: Handle, given: Result):
        self._handle = handle
        self._given = given

    def done(self) -> bool:
        """Whether the operation ended, well or not."""
        return self._handle.done()

    def wait(self, timeout: float | None = None) -> Result:
        """Blocks until the operation is done and returns the caller's tensors."""
        self._handle.wait(timeout)
        return self._given


class AlltoallHandle:
    """A pending alltoall; its result is a pair of tensors."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Handle):
        self._handle = handle

    def done(self) -> bool:
        """Whether the operation ended, well or not."""
        return self._handle.done()

    def wait(self, timeout: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks until the operation is done; the rows received and how many came from each rank."""
        rows, received = self._handle.wait(timeout)
        return rows, torch.from_numpy(received)


def poll(handle: Pending) -> bool:
    """Whether the operation of an ``_async`` form is done; ``synchronize`` then returns at once.

    Example:
        >>> handle = hvd.allreduce_async(x, name="x")
        >>> is_done = hvd.poll(handle)  # asks, and does not wait
        >>> mean = hvd.synchronize(handle)

    Args:
        handle: what the form has returned.

    Raises:
        InvalidArgumentError: what is no handle.
    """
    _check("poll", handle)
    return handle.done()


def synchronize(handle: Pending[Result]) -> Result:
    """Waits for an ``_async`` form and returns its result: a tensor, a list of them, or a pair for an alltoall.

    Example:
        >>> handles = [hvd.allreduce_async(each, name=name) for name, each in [("x", x), ("y", y)]]
        >>> x, y = map(hvd.synchronize, handles)

    A second call returns the same result. Other Python threads run while it waits.

    Args:
        handle: what the form has returned.

    Raises:
        InvalidArgumentError: what is no handle.
        HorovodInternalError: the operation failed; the class tells how.
    """
    _check("synchronize", handle)
    return handle.wait()


def _check(function: str, handle: object) -> None:
    if not (hasattr(handle, "wait") and hasattr(handle, "done")):
        raise InvalidArgumentError(
            f"{function}: expected what an _async form returned but found {handle!r}. Handles are objects, not integers."
        )
