"""The Python environments that tests run ranks in: one with Open MPI, one with MPICH.

bin/test makes both and names their Pythons in RINGTRAIN_TEST_OPENMPI and RINGTRAIN_TEST_MPICH. Without them the
environment that pytest runs in serves for the MPI it has, and tests of the other one are skipped.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

# PYTHONPATH of what tests start: ringtrain, and beside this module what spares TensorFlow some of its imports.
PATHS = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parent)))

EACH_MPI = pytest.mark.parametrize(
    "mpi", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("openmpi", "mpich")]
)
# Whatever starts the ranks: an MPI's engine, or the launcher's agents, which have TCP connect them.
EACH_STARTER = pytest.mark.parametrize(
    "mpi", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("openmpi", "mpich", "tcp")]
)
LIBRARY = (
    "from ringtrain.launch.mpi_installation import find_installation as f; i = f(); print(i.engine.__name__, i.library)"
)


@functools.cache
def library_of(python: str) -> tuple[str, str]:
    """The MPI that an environment has: "openmpi", "mpich" or "" for none, and the path of its library."""
    answer = subprocess.run([python, "-c", LIBRARY], capture_output=True, text=True)
    engine, _, library = answer.stdout.strip().partition(" ")
    return engine.rpartition(".")[2], library


def python_with(mpi: str) -> str:
    """The Python of the environment with this MPI, or of any for "tcp"; skips the test if there is none.

    Where one is named, as bin/test does, and has another MPI, the test fails.
    """
    if mpi == "tcp":
        return os.environ.get("RINGTRAIN_TEST_OPENMPI", sys.executable)
    variable = f"RINGTRAIN_TEST_{mpi.upper()}"
    python = os.environ.get(variable, sys.executable)
    if library_of(python)[0] == mpi:
        return python
    if variable in os.environ:
        pytest.fail(f"{variable}={python}, but this environment has no {mpi}", pytrace=False)
    pytest.skip(f"needs an environment with {mpi}: run bin/test, or name its Python in {variable}")


def python_with_trainers(library: str) -> str:
    """The Python of the environment that has Ignite, Ray, Spark and others; skips the test if it lacks this library."""
    python = os.environ.get("RINGTRAIN_TEST_TRAINERS", sys.executable)
    if not _has(python, library):
        pytest.skip(
            f"needs an environment with {library}: run bin/test --long, or name its Python in RINGTRAIN_TEST_TRAINERS"
        )
    return python


@functools.cache
def _has(python: str, library: str) -> bool:
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({library!r}) is None)"
    return os.path.exists(python) and subprocess.run([python, "-c", program]).returncode == 0


def ringtrainrun(mpi: str, ranks: int, *command: str) -> list[str]:
    """The command line that runs a command on some ranks under an MPI, or without one: "tcp"."""
    return [python_with(mpi), "-m", "ringtrain.launch", *transport_of(mpi), "-np", str(ranks), *command]


def transport_of(mpi: str) -> list[str]:
    """The flags that choose the transport."""
    return ["--transport", "tcp" if mpi == "tcp" else "mpi"]


def rank_environment(**variables: str) -> dict[str, str]:
    """The environment for jobs of several ranks: one thread for each, so that ranks do not crowd each other out."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}
