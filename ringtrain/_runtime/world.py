"""The world of the calling thread's rank: who it is, and what it tells. Horovod calls these the basics."""

import os

from ringtrain._binding._native import as_path, check, ffi, lib
from ringtrain._runtime.context import current


def rank() -> int:
    """This process's rank in the world, from 0. Raises NotInitializedError (a ValueError) before ``init``."""
    return current().rank


def size() -> int:
    """Number of ranks in the world."""
    return current().size


def local_rank() -> int:
    """This rank among those of its host; the usual index of its GPU."""
    return current().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return current().local_size


def cross_rank() -> int:
    """Place of this host among the hosts that have this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank."""
    return current().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return current().is_homogeneous


def counters() -> dict[str, int]:
    """What this rank has done since ``init``, such as ``operations``, ``wire_bytes_sent`` and ``cache_hits``."""
    return current().counters()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to write a Chrome/Perfetto trace of this rank; the file is valid JSON at any time.

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
    """Ends the trace; without one it does nothing."""
    error = ffi.new("char **")
    check(lib.rt_timeline_stop(current().native, error), error)
