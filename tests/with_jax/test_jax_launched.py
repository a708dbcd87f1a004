"""``ringtrain.jax`` on two ranks that the launcher starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from environments import rank_environment, ringtrainrun


@pytest.mark.long
@pytest.mark.tcp  # an MPI's launcher ends the others before they can tell
@pytest.mark.timeout(200)
def test_two_ranks() -> None:
    done = subprocess.run(
        ringtrainrun("tcp", 2, "python", str(Path(__file__).parent / "jax_ranks.py")),
        capture_output=True,
        text=True,
        timeout=180,
        env=rank_environment(RINGTRAIN_DEAD_AFTER_SECONDS="2"),
        stdin=subprocess.DEVNULL,
    )
    said = done.stdout + done.stderr
    assert done.stdout.count("sums are right") == 2, said
    assert "told: " in done.stdout and "rank 1 on host" in done.stdout.split("told: ")[1], said
    last = done.stderr.splitlines()[-1]
    assert done.returncode != 0 and "because of another rank: rank 1 on host" in last, said
