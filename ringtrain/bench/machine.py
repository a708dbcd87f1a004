"""The machine and the software that a benchmark ran on: figures mean nothing without them."""

import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

import ringtrain as rt
from ringtrain._runtime.mpi import version_text
from ringtrain._training.drift import kind_of_processor
from ringtrain.bench.documents import OTHERS, command


def describe() -> dict[str, str | int | float | None]:
    """What was measured, when, processor, cores, memory, kernel and versions, for the head of a table and for JSON.

    ``others`` is the share of the cores that other programs used just before; None if nobody has looked.
    """
    return {
        "command": " ".join([command(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "others": float(os.environ[OTHERS]) if OTHERS in os.environ else None,
        "processor": kind_of_processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "mpi": _mpi_version(),
        "torch": _version("torch"),
        "ringtrain": rt.build_info(),
    }


def proportional_set_bytes() -> int:
    """Memory of this process, where a page that k processes share counts 1/k: what the process costs the machine."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no line 'Pss'.")


def _mpi_version() -> str:
    """Does not initialise MPI, which it would if mpi4py did as it does by itself."""
    try:
        import mpi4py
    except ImportError:
        return "not installed"
    initialized = mpi4py.rc.initialize
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # it finds no library
        return "not installed"
    finally:
        mpi4py.rc.initialize = initialized
    return version_text(MPI)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
