"""ringtrain.tensorflow with ranks as processes, under each MPI; one start for all checks, as imports take seconds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from environments import EACH_MPI, rank_environment, ringtrainrun


@EACH_MPI  # the operations know no MPI
@pytest.mark.timeout(700)
def test_two_ranks(mpi: str) -> None:
    script = Path(__file__).parent / "tensorflow_ranks.py"
    done = subprocess.run(
        ringtrainrun(mpi, 2, "python", str(script)),
        capture_output=True,
        text=True,
        timeout=600,
        env=rank_environment(TF_CONFIG='{"cluster": {}}', TF_CPP_MIN_LOG_LEVEL="3"),
        stdin=subprocess.DEVNULL,
    )
    said = done.stdout + done.stderr
    assert {"[0] weight 1.494140625", "[1] weight 1.494140625"} <= set(done.stdout.splitlines()), said
    assert said.count("TF_CONFIG is set, and ignored") == 1, said
    assert "rank 0 raised the cause" in done.stdout, said
    assert done.returncode != 0 and "LookupError: this batch is broken" in done.stderr
