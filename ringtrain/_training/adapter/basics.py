"""What every adapter exports beside its operations: the reductions, the world's basics, and what is built in.

This is the list of them: each adapter takes all. ``loads_later`` is how an adapter has further names.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ringtrain._bootstrap.probes import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ringtrain._bootstrap.start import shutdown
from ringtrain._runtime.context import is_initialized
from ringtrain._runtime.flight_recorder import flight_record
from ringtrain._runtime.operations import (
    Adasum,
    Average,
    BitAnd,
    BitOr,
    BitXor,
    L2Norm,
    Max,
    Min,
    PerItem,
    Product,
    Sum,
)
from ringtrain._runtime.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ringtrain._runtime.statistics import stats
from ringtrain._runtime.world import (
    cross_rank,
    cross_size,
    is_homogeneous,
    local_rank,
    local_size,
    rank,
    size,
    start_timeline,
    stop_timeline,
)
from ringtrain.errors import HorovodInternalError

__all__ = [
    "Adasum",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "HorovodInternalError",
    "L2Norm",
    "Max",
    "Min",
    "PerItem",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "flight_record",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
]


def loads_later(
    namespace: dict[str, Any], later: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module some names of which are loaded when they are asked for, and found at once from then on.

    ``dir()`` shows the public names alone, those of ``__all__``: what the module imports is no part of its interface.

    Args:
        namespace: the module's.
        later: where each name is: a module that has it, or the module of that name itself.
    """

    def get(name: str) -> object:
        if name not in later:
            raise AttributeError(f"module '{namespace['__name__']}' has no attribute '{name}'")
        found: Any = importlib.import_module(later[name])
        value = namespace[name] = found if later[name].endswith(f".{name}") else getattr(found, name)
        return value

    def names() -> list[str]:
        return sorted(namespace["__all__"])

    return get, names
