"""Warns of a script that uses mpi4py in a job that no MPI has started: its COMM_WORLD has one rank, and nothing would say so.

The script may load it before ``init`` or long after it. Not every program that loads it sends by it: Lightning asks MPI
where it is, and who leaves MPI uninitialised reads its version.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

from ringtrain._binding.log import logger

_MODULE = "mpi4py.MPI"
_LIGHTNING_ASKS = ("lightning.fabric.plugins.environments.mpi", "lightning_fabric.plugins.environments.mpi")


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
    if not _is_to_communicate():
        return
    logger.warning(
        "mpi4py is in use, but its COMM_WORLD has this rank alone: TCP connects the %d ranks, and no MPI has started them. "
        "Start with ringtrainrun --transport mpi if the script sends by mpi4py",
        size,
    )


def _is_to_communicate() -> bool:
    """Whether the script may send by it, as far as can be seen while it is loaded or afterwards."""
    if any(module in sys.modules for module in _LIGHTNING_ASKS):
        return False
    loaded = sys.modules.get(_MODULE)
    return loaded.Is_initialized() if loaded else sys.modules["mpi4py"].rc.initialize
