"""``ringtrain.jax`` on two ranks that the launcher starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from environments import EACH_MPI_BUT_MPICH_FOR_LONG, rank_environment, ringtrainrun

pytest.importorskip("jax")


@pytest.mark.long
@EACH_MPI_BUT_MPICH_FOR_LONG  # the operations know no MPI
@pytest.mark.timeout(200)
def test_two_ranks(mpi: str) -> None:
    done = subprocess.run(
        ringtrainrun(mpi, 2, "python", str(Path(__file__).parent / "jax_ranks.py")),
        capture_output=True,
        text=True,
        timeout=180,
        env=rank_environment(),
        stdin=subprocess.DEVNULL,
    )
    said = done.stdout + done.stderr
    assert done.stdout.count("sums are right") == 2, said
    assert "told: ABORTED: " in done.stdout and "rank 1" in done.stdout.split("told: ABORTED: ")[1], said
    assert done.returncode != 0
