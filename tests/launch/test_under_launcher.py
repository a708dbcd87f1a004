"""Runs the tests that use a world once more under ringtrainrun, where the world is the launcher's.

Every run takes the core's on 2 ranks under one MPI, and on 4 under the other; PyTorch's, the combinations and the files
that are left take longer and find what one of the first two does, so they are run by bin/test --long.
"""

from __future__ import annotations

import re
import subprocess
from operator import itemgetter
from pathlib import Path

import pytest
from environments import rank_environment, ringtrainrun

TESTS = Path(__file__).parents[1]
FOLDERS = {"core": TESTS / "core", "torch": TESTS / "with_torch"}
USES_A_WORLD = re.compile(r"^(import|from) worlds|^def test_.*\bworld\b", re.MULTILINE)
SECONDS = 600
# What the number of ranks and the library below bear on most; the other files take 2 ranks alone.
ON_FOUR_RANKS_TOO = {
    "test_adasum.py",
    "test_context.py",
    "test_join.py",
    "test_operations.py",
    "test_order.py",
    "test_process_sets.py",
    "test_torch_passes.py",
    "test_training_steps.py",
}
# What is arithmetic, or is refused before anything is sent, shows on processes what it shows on threads.
ON_THREADS_IN_EVERY_RUN = {
    "test_adjoints.py",
    "test_bad_arguments.py",
    "test_buffers.py",
    "test_compression.py",
    "test_options.py",
    "test_torch_adasum.py",
    "test_torch_amp.py",
    "test_torch_autograd.py",
    "test_torch_bad_arguments.py",
    "test_torch_buckets.py",
    "test_torch_embedding_storage.py",
    "test_torch_incomplete_steps.py",
    "test_torch_sparse.py",
    "test_torch_steps.py",
    "test_training.py",
    "test_training_local_steps.py",
    "test_training_parameters.py",
}
# A job takes many files, since ranks need seconds to import what they test.
SUBJECTS = {
    subject: sorted(path for path in folder.glob("test_*.py") if USES_A_WORLD.search(path.read_text()))
    for subject, folder in FOLDERS.items()
}


def cases() -> list:
    """The files of a subject under each MPI with 2 and 4 ranks, and what of this bin/test --long runs alone."""
    found = []
    for subject, paths in SUBJECTS.items():
        near = [path for path in paths if path.name in ON_FOUR_RANKS_TOO]
        far = [path for path in paths if path.name not in ON_FOUR_RANKS_TOO]
        most = [path for path in paths if path.name not in ON_THREADS_IN_EVERY_RUN]
        others = [path for path in paths if path.name in ON_THREADS_IN_EVERY_RUN]
        jobs = [
            ("openmpi", 2, "most", most, subject == "torch"),
            ("openmpi", 2, "others", others, True),
            ("mpich", 4, "near", near, subject == "torch"),
            ("openmpi", 4, "all", paths, True),
            ("mpich", 2, "all", paths, True),
            ("mpich", 4, "far", far, True),
            ("tcp", 2, "all", paths, True),
        ]
        for mpi, ranks, part, files, long in filter(itemgetter(3), jobs):
            marks = [getattr(pytest.mark, mpi), *([pytest.mark.long] if long else [])]
            found.append(pytest.param(files, mpi, ranks, marks=marks, id=f"{subject}-{part}-{mpi}-{ranks}"))
    return found


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("files, mpi, ranks", cases())
def test_files_on_ranks(files: list[Path], mpi: str, ranks: int) -> None:
    paths = [str(path.relative_to(TESTS.parent)) for path in files]
    command = ringtrainrun(mpi, ranks, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths)
    try:
        done = subprocess.run(
            command,
            cwd=TESTS.parent,
            env=rank_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        pytest.fail(f"{paths} on {ranks} ranks were not done after {SECONDS} s:\n{said[-20000:]}", pytrace=False)
    if done.returncode != 0:
        pytest.fail(f"{paths} on {ranks} ranks returned {done.returncode}:\n{done.stdout[-20000:]}", pytrace=False)
    counts = re.findall(r"^\[\d+\] .*?(\d+) passed", done.stdout, re.MULTILINE)
    assert len(counts) == ranks and len(set(counts)) == 1, f"every rank must run the same tests, but ran {counts}"


def test_files_are_found() -> None:
    names = {subject: {path.name for path in paths} for subject, paths in SUBJECTS.items()}
    assert "test_operations.py" in names["core"] and "test_training.py" in names["torch"]
    assert names["core"] | names["torch"] >= ON_FOUR_RANKS_TOO | ON_THREADS_IN_EVERY_RUN
