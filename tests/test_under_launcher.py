"""Runs the tests that use a world once more under ringtrainrun, where the world is the launcher's.

Every run takes 2 ranks under one MPI, and for what lies nearest to the core 4 under the other; the combinations that are left
take longer and find what one of the first two does, so they are run by bin/test --long.
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
NEEDS_TORCH = re.compile(r"test_(torch|training)")
USES_A_WORLD = re.compile(r"^(import|from) worlds|^def test_.*\bworld\b", re.MULTILINE)
FILES = sorted(path.name for path in HERE.glob("test_*.py")
               if path.name not in STARTS_RANKS_ITSELF and USES_A_WORLD.search(path.read_text()))
SECONDS = 600
# What the number of ranks and the library below bear on most; the other files take 2 ranks alone.
ON_FOUR_RANKS_TOO = {"test_compression.py", "test_context.py", "test_join.py", "test_operations.py", "test_order.py",
                     "test_process_sets.py", "test_torch_passes.py", "test_training_steps.py"}
# A job takes many files, since ranks need seconds to import what they test.
SUBJECTS = {"core": [name for name in FILES if not NEEDS_TORCH.match(name)],
            "torch": [name for name in FILES if NEEDS_TORCH.match(name)]}


def cases() -> list:
    """The files of a subject under each MPI with 2 and 4 ranks, and what of this bin/test --long runs alone."""
    found = []
    for subject, names in SUBJECTS.items():
        near = [name for name in names if name in ON_FOUR_RANKS_TOO]
        far = [name for name in names if name not in ON_FOUR_RANKS_TOO]
        jobs = [("openmpi", 2, "all", names, False), ("mpich", 4, "near", near, False),
                ("openmpi", 4, "all", names, True), ("mpich", 2, "all", names, True), ("mpich", 4, "far", far, True)]
        for mpi, ranks, part, files, long in jobs:
            marks = [getattr(pytest.mark, mpi), *([pytest.mark.long] if long else [])]
            found.append(pytest.param(files, mpi, ranks, marks=marks, id=f"{subject}-{part}-{mpi}-{ranks}"))
    return found


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("files, mpi, ranks", cases())
def test_files_on_ranks(files: list[str], mpi: str, ranks: int) -> None:
    paths = [f"tests/{name}" for name in files]
    command = ringtrainrun(mpi, ranks, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths)
    try:
        done = subprocess.run(command, cwd=HERE.parent, env=rank_environment(), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        pytest.fail(f"{paths} on {ranks} ranks were not done after {SECONDS} s:\n{said[-20000:]}", pytrace=False)
    if done.returncode != 0:
        pytest.fail(f"{paths} on {ranks} ranks returned {done.returncode}:\n{done.stdout[-20000:]}", pytrace=False)
    counts = re.findall(r"^\[\d+\] .*?(\d+) passed", done.stdout, re.MULTILINE)
    assert len(counts) == ranks and len(set(counts)) == 1, f"every rank must run the same tests, but ran {counts}"


def test_files_are_found() -> None:
    assert "test_operations.py" in SUBJECTS["core"] and "test_training.py" in SUBJECTS["torch"]
    assert ON_FOUR_RANKS_TOO <= set(FILES)
