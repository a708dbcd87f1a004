"""What the ranks of a benchmark do together outside of the system under test: wait for each other, compare times.

Where an MPI has started the ranks it goes through mpi4py, else through a further world of ringtrain's own, which the
benchmark does not measure.
"""

import atexit
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import ringtrain as rt
from ringtrain._binding.options import environment
from ringtrain._bootstrap import start
from ringtrain._rendezvous import launcher
from ringtrain._runtime import context as contexts

SECONDS_TO_LEAVE = 5.0


class _World(Protocol):
    rank: int
    size: int
    started_by: str

    def wait_for_all(self) -> None: ...

    def gathered(self, value: Any) -> list[Any]: ...


class _OverMpi:
    """All ranks that the MPI has started."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank = self._world.Get_rank()
        self.size = self._world.Get_size()
        self.started_by = MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")

    def wait_for_all(self) -> None:
        self._world.Barrier()

    def gathered(self, value: Any) -> list[Any]:
        return self._world.allgather(value)


class _OfOurs:
    """All ranks of a job without an MPI, in a world beside those that the benchmark opens."""

    started_by = "no MPI"

    def __init__(self) -> None:
        self._context = start.open_beside()
        self.rank = self._context.rank
        self.size = self._context.size
        atexit.register(self._context.close, SECONDS_TO_LEAVE)

    def wait_for_all(self) -> None:
        contexts.make_current(self._context)
        try:
            rt.barrier()
        finally:
            contexts.make_current(None)

    def gathered(self, value: Any) -> list[Any]:
        contexts.make_current(self._context)
        try:
            return rt.allgather_object(value)
        finally:
            contexts.make_current(None)


IS_OVER_MPI = launcher.find(environment()) is not None
_WORLD: _World = _OverMpi() if IS_OVER_MPI else _OfOurs()


def rank() -> int:
    """This process's rank."""
    return _WORLD.rank


def size() -> int:
    """Number of ranks."""
    return _WORLD.size


def started_by() -> str:
    """The MPI that has started the ranks, with its version, or "no MPI"."""
    return _WORLD.started_by


def wait_for_all() -> None:
    """Returns on all ranks at almost the same time: that of a last one, and some microseconds."""
    _WORLD.wait_for_all()


def slowest(seconds: Sequence[float]) -> np.ndarray:
    """For each repetition the time of the rank that took longest; the same on all ranks."""
    return np.max(gathered(np.array(seconds)), axis=0)


def all_true(mine: bool) -> bool:
    """Whether it is true on every rank."""
    return all(gathered(bool(mine)))


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in rank order, on every rank."""
    return _WORLD.gathered(value)


def shared_folder() -> Path:
    """A fresh folder of one host, the same on all its ranks."""
    return Path(gathered(tempfile.mkdtemp(prefix="ringtrain-bench-") if rank() == 0 else None)[0])
