"""Warns of a script that uses mpi4py in a job that no MPI has started: its COMM_WORLD has one rank, and nothing would say so.

The script may load it before ``init`` or long after it.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

from ringtrain.log import logger

_MODULE = "mpi4py.MPI"


def warn_when_loaded(size: int) -> None:
    """Warns now if mpi4py is loaded already, else when it is.

    Args:
        size: number of ranks of the job.
    """
    if _MODULE in sys.modules:
        _warn(size)
    elif not any(isinstance(finder, _Witness) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Witness(size))


class _Witness:
    """Sees the first import of mpi4py.MPI, and leaves the finding to others."""

    def __init__(self, size: int):
        self._size = size

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """For Python's import: finds nothing."""
        if name == _MODULE:
            sys.meta_path.remove(self)
            _warn(self._size)


def _warn(size: int) -> None:
    logger.warning(
        "mpi4py is in use, but its COMM_WORLD has this rank alone: TCP connects the %d ranks, and no MPI has started them. "
        "Start with ringtrainrun --transport mpi if the script sends by mpi4py",
        size,
    )
