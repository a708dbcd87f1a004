"""Runs bin/quickstart as a newcomer does, in the environment of the tests, and reads what it says."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
QUICKSTART = Path(__file__).parents[2] / "bin" / "quickstart"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [QUICKSTART, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ, RINGTRAIN_VENV=sys.prefix, OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_quickstart_trains_on_two_ranks_as_one_process_would() -> None:
    said = run("-np", "2")
    assert float(re.search(r"test accuracy: ([\d.]+)", said)[1]) >= 0.97
    assert all(float(rate) > 0 for rate in re.search(r"samples/s: (\d+) on 1 rank, (\d+) on 2 ranks", said).groups())
    assert "parameters of 2 ranks: equal bit for bit" in said
    assert float(re.search(r"relative difference ([\d.e+-]+)", said)[1]) < 1e-4


def test_figures_that_disappoint_are_explained() -> None:
    why = runpy.run_path(str(QUICKSTART.parents[1] / "examples" / "quickstart.py"))["why_not_faster"]
    assert why(1000, 1900, ranks=2, cores=2) == "" == why(1000, 990, ranks=1, cores=2)
    assert "not faster: other programs may use the 2 cores too" in why(3816, 3463, ranks=2, cores=2)
    assert "not faster: 4 ranks share 2 cores" in why(3816, 3463, ranks=4, cores=2)


def test_help_says_what_can_be_chosen() -> None:
    said = run("--help")
    for word in ("-np N", "RINGTRAIN_TORCH", "RINGTRAIN_VENV", "PYTHON"):
        assert word in said
