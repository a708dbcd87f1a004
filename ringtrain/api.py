"""What ``ringtrain`` has for users beside its frameworks: each name here is one of ``import ringtrain``.

The package loads this file, and with it NumPy and the native library, when the first of these names is asked for.
"""

import importlib
import os
from typing import TYPE_CHECKING

from ringtrain import _native, errors
from ringtrain._training.mode import LocalSteps, OneStepLate, ShardedStep, Synchronous
from ringtrain.checks import check_finite, check_replicas
from ringtrain.context import current, is_initialized
from ringtrain.errors import HorovodInternalError, RingtrainError
from ringtrain.flights import flight_record
from ringtrain.objects import allgather_object, broadcast_object
from ringtrain.operations import *  # noqa: F403 - the operations, listed once
from ringtrain.probes import gpu_libraries
from ringtrain.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ringtrain.sharding import shard
from ringtrain.stalls import long_phase
from ringtrain.start import init, shutdown
from ringtrain.statistics import Stats, stats

if TYPE_CHECKING:
    from ringtrain.averaging.arrays import PeriodicAverage
    from ringtrain.averaging.outer import Outer


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
    current().start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Ends the trace; without one it does nothing."""
    current().stop_timeline()


def build_info() -> str:
    """Version, compiler and processor kernels of this installation, in one line."""
    return _native.build_info()


_LATER = {  # what few programs use, or of a layer above, by where it is
    "Outer": "ringtrain.averaging.outer",
    "PeriodicAverage": "ringtrain.averaging.arrays",
    "run": "ringtrain.launch.function",
}


def __getattr__(name: str) -> object:
    """What is loaded when it is asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(name)


def __dir__() -> list[str]:
    """With what is loaded later."""
    return sorted({*globals(), *_LATER})
