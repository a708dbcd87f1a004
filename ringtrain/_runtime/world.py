"""The world of the calling thread's rank: who it is, and what it tells. Horovod calls these the basics."""

import contextlib
import os
from collections.abc import Iterator

from ringtrain._binding._native import as_path, check, ffi, lib
from ringtrain._runtime.context import Context, current, of_thread, raise_unusable
from ringtrain.errors import InvalidArgumentError


def _of_this_process() -> Context:
    """The context of which a process that was forked off knows the numbers, too, as the worker of a loader."""
    context = of_thread()
    if context is None or not (context.usable or context.forked):
        raise_unusable(context)
    return context


def rank() -> int:
    """This process's rank in the world, from 0. Raises NotInitializedError (a ValueError) before ``init``.

    Example:
        >>> if rt.rank() == 0:
        ...     print(f"{rt.size()} ranks")
    """
    return _of_this_process().rank


def size() -> int:
    """Number of ranks in the world.

    Example:
        >>> learning_rate = 0.01 * rt.size()
    """
    return _of_this_process().size


def local_rank() -> int:
    """This rank among those of its host; the usual index of its GPU.

    Example:
        >>> device = f"cuda:{rt.local_rank()}"
    """
    return _of_this_process().local_rank


def local_size() -> int:
    """Number of ranks on this host.

    Example:
        >>> is_last_of_its_host = rt.local_rank() == rt.local_size() - 1
    """
    return _of_this_process().local_size


def cross_rank() -> int:
    """Place of this host among the hosts that have this local rank.

    Example:
        >>> host = rt.cross_rank()
    """
    return _of_this_process().cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank.

    Example:
        >>> print(f"host {rt.cross_rank()} of {rt.cross_size()}")
    """
    return _of_this_process().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks.

    Example:
        >>> hosts = rt.size() // rt.local_size() if rt.is_homogeneous() else None
    """
    return _of_this_process().is_homogeneous


def counters() -> dict[str, int]:
    """What this rank has done since ``init``, such as ``operations``, ``wire_bytes_sent`` and ``cache_hits``.

    Example:
        >>> before = rt.counters()["wire_bytes_sent"]
        >>> train_one_epoch()
        >>> sent = rt.counters()["wire_bytes_sent"] - before
    """
    return current().counters()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to write a Chrome/Perfetto trace of this rank; the file is valid JSON at any time.

    Example:
        >>> rt.start_timeline("trace.json")
        >>> train_one_epoch()
        >>> rt.stop_timeline()

    Events have the names that Horovod's readers search for (``NEGOTIATE_ALLREDUCE``, ``ALLREDUCE``, ``QUEUE``), and the
    stage as their category. ``ringtrain merge-timelines`` makes one file of those of all ranks.

    Args:
        file_path: rank 0 writes this file, another rank one with its number behind it; ``{rank}`` in it is replaced by
            the rank.
        mark_cycles: writes an event ``CYCLE_START`` where a batch begins.

    Raises:
        InvalidArgumentError: the file cannot be made, or another trace is open.
    """
    error = ffi.new("char **")
    path = as_path("start of timeline", os.fspath(file_path))
    check(lib.rt_timeline_start(current().native, path, bool(mark_cycles), error), error)


def stop_timeline() -> None:
    """Ends the trace; without one it does nothing.

    Example:
        >>> rt.start_timeline("trace.json")
        >>> train_one_epoch()
        >>> rt.stop_timeline()  # now the file is complete
    """
    error = ffi.new("char **")
    check(lib.rt_timeline_stop(current().native, error), error)


@contextlib.contextmanager
def long_phase(seconds: float) -> Iterator[None]:
    """Tells all ranks that this one will submit nothing for a while: a validation, a checkpoint, a download.

    Example:
        >>> with rt.long_phase(3600):
        ...     if rt.rank() == 0:
        ...         prepare_dataset()

    What waits for this rank is neither reported nor given up until ``seconds`` have passed or the block has ended; then
    the usual times begin anew. Death is still noticed at once.

    Args:
        seconds: how long it may take, at most.

    Returns:
        A context manager.

    Raises:
        InvalidArgumentError: ``seconds`` that cannot be.
    """
    if not 0 <= seconds < 1e9:
        raise InvalidArgumentError(f"long_phase: seconds must be in [0, 1e9), but is {seconds!r}.")
    context = current()
    context.expect_silence(seconds)
    try:
        yield
    finally:
        context.expect_silence(0.0)
