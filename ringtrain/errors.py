"""Exceptions: one class per row of ``native/tables/status.def``, each also a built-in type that callers may catch.

``RingtrainError`` is what Horovod calls ``HorovodInternalError``; elastic scripts catch it under that name.
"""

import builtins

__all__ = [
    "ClosedError",
    "ForkedError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "InternalError",
    "InvalidArgumentError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSetLostError",
    "RingtrainError",
    "RowsLostError",
    "TimeoutError",
    "UnsupportedError",
    "WorldChangedError",
]


class RingtrainError(RuntimeError):
    """Base of all errors of this package."""


HorovodInternalError = RingtrainError


class InvalidArgumentError(RingtrainError, ValueError):
    """An argument that this rank alone can see to be wrong: a root out of range, splits that do not add up, a bad dtype."""


class MismatchError(RingtrainError, ValueError):
    """Ranks submitted different things under one name; the text is the same on all of them."""


class UnsupportedError(RingtrainError, NotImplementedError):
    """Something that this build, machine or release does not offer."""


class TimeoutError(RingtrainError, builtins.TimeoutError):
    """A deadline passed: other ranks did not start, did not submit, or a ``wait`` was given too little time."""


class PeerLostError(RingtrainError, ConnectionError):
    """Another rank died or aborted; the text names it and tells its cause."""


class WorldChangedError(PeerLostError):
    """The world of an elastic job has ended, and another one follows; the text says why. ``elastic.run`` goes on from there."""


class ProcessSetLostError(WorldChangedError):
    """A process set has lost a member, in a world before this one, which goes on; the text says which. It is not done again."""


class RowsLostError(RingtrainError):
    """All ranks that kept some rows of a sharded embedding are gone; the text says which rows, the same on all ranks."""


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks wait to join an elastic job, or to leave it. Raised between two steps, on all ranks at once.

    Attributes:
        skip_sync: whether the state may stay as it is. All ranks take part in what follows, so it is never set here.
    """

    def __init__(self, skip_sync: bool = False):
        super().__init__(f"hosts were updated (skip_sync={skip_sync})")
        self.skip_sync = skip_sync


class ClosedError(RingtrainError):
    """The world was shut down, here or by another rank, before the operation was done."""


class ForkedError(ClosedError):
    """The world belongs to the process that has called ``init()``, but a child that it has forked uses it, such as a loader's
    worker. No other rank has to do with it."""


class InternalError(RingtrainError):
    """A fault of this package or of the machine; the text is for a report."""


class NotInitializedError(RingtrainError, ValueError):
    """``ringtrain.init()`` was not called. Horovod raises ValueError from ``rank()`` and its own error from operations."""


_BY_STATUS = {
    2: InvalidArgumentError,
    3: MismatchError,
    4: UnsupportedError,
    5: TimeoutError,
    6: PeerLostError,
    7: ClosedError,
    8: InternalError,
}


def of_status(status: int) -> type[RingtrainError]:
    """The class for a status of the native library."""
    return _BY_STATUS.get(status, InternalError)


def status_of_refusal(problem: Exception) -> int:
    """The status with which the peers are told of what one rank refuses; that of an InvalidArgumentError for other classes."""
    return next((status for status in (3, 4) if isinstance(problem, _BY_STATUS[status])), 2)


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
