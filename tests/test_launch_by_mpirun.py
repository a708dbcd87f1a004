"""Ranks that Open MPI's own mpirun starts: what ringtrain sets before it initialises MPI, and what it says if it comes late."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from environments import python_with

pytestmark = pytest.mark.openmpi
PATIENCE = 60.0


def by_mpirun(text: str, **variables: str) -> subprocess.CompletedProcess:
    """Two ranks of a script under Open MPI's own mpirun, as hosts of their own."""
    prefix = Path(python_with("openmpi")).parent
    line = [prefix / "mpirun", "--allow-run-as-root", "-np", "2", "--oversubscribe", "--bind-to", "none", prefix / "python"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
    return subprocess.run([*line, "-c", text], capture_output=True, text=True, timeout=PATIENCE, env=clean | variables)


READS = """
import os
{first}
import ringtrain as rt
rt.init(host_layout="1+1")
print(os.environ.get("OMPI_MCA_btl_tcp_eager_limit"))
"""


def test_limits_of_tcp_are_set_before_mpi_starts_and_the_users_win() -> None:
    done = by_mpirun(READS.format(first=""))
    assert done.stdout.split() == ["2097152"] * 2 and "before ringtrain" not in done.stderr, done.stderr
    assert by_mpirun(READS.format(first=""), OMPI_MCA_btl_tcp_eager_limit="70000").stdout.split() == ["70000"] * 2


def test_mpi_that_started_with_other_limits_is_named_once() -> None:
    done = by_mpirun(READS.format(first="from mpi4py import MPI"))
    assert done.stderr.count("MPI was initialised before ringtrain") == 1, done.stderr
    assert "OMPI_MCA_btl_tcp_eager_limit=2097152" in done.stderr and done.stdout.split() == ["None"] * 2
