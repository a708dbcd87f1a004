"""Runs the tests that use a world once more under ringtrainrun, where the world is the launcher's.

Every run takes 2 ranks under one MPI, and for what lies nearest to the core 4 under the other; the combinations that are left
take as long again and find what one of the first two does, so they are run by bin/test --long.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import worlds
from environments import rank_environment, ringtrainrun

if worlds.LAUNCHED:
    pytest.skip("these tests start ranks themselves", allow_module_level=True)

HERE = Path(__file__).parent
STARTS_RANKS_ITSELF = {Path(__file__).name, "test_mpi_world.py"}
USES_A_WORLD = re.compile(r"^(import|from) worlds|^def test_.*\bworld\b", re.MULTILINE)
FILES = sorted(path.name for path in HERE.glob("test_*.py")
               if path.name not in STARTS_RANKS_ITSELF and USES_A_WORLD.search(path.read_text()))
SECONDS = 240
# What the number of ranks and the library below bear on most; the other files take 2 ranks alone.
ON_FOUR_RANKS_TOO = {"test_compression.py", "test_context.py", "test_join.py", "test_operations.py", "test_order.py",
                     "test_process_sets.py", "test_torch_amp.py", "test_torch_operations.py", "test_torch_optimizer.py",
                     "test_torch_window.py", "test_training.py"}


def cases() -> list:
    """Each file under each MPI with 2 and 4 ranks, and which of these bin/test --long runs alone."""
    found = []
    for name in FILES:
        always = {("openmpi", 2)} | ({("mpich", 4)} if name in ON_FOUR_RANKS_TOO else set())
        for mpi in ("openmpi", "mpich"):
            for ranks in (2, 4):
                marks = [getattr(pytest.mark, mpi), *([] if (mpi, ranks) in always else [pytest.mark.long])]
                found.append(pytest.param(name, mpi, ranks, marks=marks))
    return found


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("name, mpi, ranks", cases())
def test_file_on_ranks(name: str, mpi: str, ranks: int) -> None:
    command = ringtrainrun(mpi, ranks, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{name}")
    try:
        done = subprocess.run(command, cwd=HERE.parent, env=rank_environment(), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{name} on {ranks} ranks was not done after {SECONDS} s:\n{late.stdout[-20000:]}", pytrace=False)
    if done.returncode != 0:
        pytest.fail(f"{name} on {ranks} ranks returned {done.returncode}:\n{done.stdout[-20000:]}", pytrace=False)
    counts = re.findall(r"^\[\d+\] .*?(\d+) passed", done.stdout, re.MULTILINE)
    assert len(counts) == ranks and len(set(counts)) == 1, f"every rank must run the same tests, but ran {counts}"


def test_files_are_found() -> None:
    assert "test_operations.py" in FILES
