"""The stand-ins for CUDA's driver and for NCCL keep their promises; fakes/checks.py has one check for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fakes
import pytest
from fakes import checks


@pytest.mark.parametrize("name", checks.CHECKS)
def test_fakes(name: str) -> None:
    check = checks.CHECKS[name]
    environment = fakes.environment(**check.settings, PYTHONPATH=Path(__file__).parent)
    done = subprocess.run([sys.executable, "-m", "fakes.checks", name], env=environment, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if check.dies is None:
        assert done.returncode == 0 and "passed" in done.stdout, done.stdout
    else:
        assert done.returncode < 0 and check.dies in done.stdout, f"{done.returncode}: {done.stdout}"
