"""What ``ringtrain`` has for users beside its frameworks: each name here is one of ``import ringtrain``.

The package loads this file, and with it NumPy and the native library, when the first of these names is asked for.
"""

import importlib
from typing import TYPE_CHECKING

from ringtrain import errors
from ringtrain._binding import _native
from ringtrain._bootstrap.probes import gpu_libraries
from ringtrain._bootstrap.start import init, shutdown
from ringtrain._runtime import operations
from ringtrain._runtime.context import current, is_initialized
from ringtrain._runtime.flight_recorder import flight_record
from ringtrain._runtime.objects import allgather_object, broadcast_object
from ringtrain._runtime.operations import *  # noqa: F403 - the operations, listed once
from ringtrain._runtime.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ringtrain._runtime.statistics import Stats, stats
from ringtrain._runtime.world import (
    counters,
    cross_rank,
    cross_size,
    is_homogeneous,
    local_rank,
    local_size,
    long_phase,
    rank,
    size,
    start_timeline,
    stop_timeline,
)
from ringtrain._training.adapter.checks import check_finite, check_replicas
from ringtrain._training.mode import LocalSteps, OneStepLate, ShardedStep, Synchronous
from ringtrain._training.sharding import shard
from ringtrain.errors import HorovodInternalError, RingtrainError

if TYPE_CHECKING:
    from ringtrain._runtime.point_to_point import receive, receive_async, send, send_async
    from ringtrain._training.averaging.outer import Outer
    from ringtrain._training.periodic_average import PeriodicAverage


def build_info() -> str:
    """Version, compiler and processor kernels of this installation, in one line.

    Example:
        >>> print(rt.build_info())
    """
    return _native.build_info()


_LATER = {  # what few programs use, or of a layer above, by where it is
    "Outer": "ringtrain._training.averaging.outer",
    "PeriodicAverage": "ringtrain._training.periodic_average",
    "run": "ringtrain.launch.function",
    **dict.fromkeys(("receive", "receive_async", "send", "send_async"), "ringtrain._runtime.point_to_point"),
}


if not TYPE_CHECKING:  # a type checker takes all public names, which are the same
    __all__ = [
        *operations.__all__,
        *_LATER,
        "HorovodInternalError", "LocalSteps", "OneStepLate", "ProcessSet", "RingtrainError", "ShardedStep", "Stats", "Synchronous",
        "add_process_set", "allgather_object", "broadcast_object", "build_info", "check_finite", "check_replicas", "counters",
        "cross_rank", "cross_size", "current", "errors", "flight_record", "global_process_set", "gpu_libraries", "init",
        "is_homogeneous", "is_initialized", "local_rank", "local_size", "long_phase", "rank", "remove_process_set",
        "shard", "shutdown", "size", "start_timeline", "stats", "stop_timeline",
    ]  # fmt: skip

    def __dir__() -> list[str]:
        """The public names, what is loaded later among them."""
        return sorted(__all__)


def __getattr__(name: str) -> object:
    """What is loaded when it is asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(name)
