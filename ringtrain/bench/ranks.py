"""What the ranks of a benchmark do together outside of the system under test: wait for each other, compare times.

It goes through mpi4py, so that no system under test measures itself.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def rank() -> int:
    """This process's rank."""
    return WORLD.Get_rank()


def size() -> int:
    """Number of ranks."""
    return WORLD.Get_size()


def wait_for_all() -> None:
    """Returns on all ranks at almost the same time: that of a last one, and some microseconds."""
    WORLD.Barrier()


def slowest(seconds: Sequence[float]) -> np.ndarray:
    """For each repetition the time of the rank that took longest; the same on all ranks."""
    times = np.array(seconds)
    WORLD.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return times


def all_true(mine: bool) -> bool:
    """Whether it is true on every rank."""
    return bool(WORLD.allreduce(mine, MPI.LAND))


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in rank order, on every rank."""
    return WORLD.allgather(value)


def shared_folder() -> Path:
    """A fresh folder of one host, the same on all its ranks."""
    return Path(WORLD.bcast(tempfile.mkdtemp(prefix="ringtrain-bench-") if rank() == 0 else None))
