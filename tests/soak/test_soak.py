"""Four ranks do random operations for a while: results stay right, and no rank's memory, descriptors or threads grow.

tests/soak/soak_run.py is what they run. When it is over nothing of the job may be left, neither processes nor shared memory.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from environments import python_with, rank_environment, ringtrainrun

from benchmarks.jobs import Job

RANKS = 4
SECONDS, LONG_SECONDS, PLANT_SECONDS = 1, 1800, 1
ALLOWANCE = 540.0  # on a busy machine, for the rounds that are done in any case
ENDS_WITHIN = 60.0  # all processes of the job, twice the time that is promised
# Blocks as large as these tensors go back to the kernel when they are freed. In glibc's heaps, where blocks of random
# sizes leave holes, memory would grow for minutes without any leak.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def soak(seconds: int, seed: int, *plant: str) -> subprocess.CompletedProcess:
    """The ranks' exit code and words, once nothing of them is left."""
    program = str(Path(__file__).with_name("soak_run.py"))
    command = ringtrainrun("openmpi", RANKS, python_with("openmpi"), program, str(seconds), str(seed), *plant)
    job = Job()
    try:
        done = job.run(
            *command, env=rank_environment(**ENVIRONMENT), seconds=seconds + ALLOWANCE, stdin=subprocess.DEVNULL
        )
        left = job.await_end(ENDS_WITHIN)
    finally:
        job.close()
    assert not left, f"left over:\n{left}"
    return done


def check(done: subprocess.CompletedProcess) -> None:
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert done.stdout.count("growth") == RANKS, said


@pytest.mark.timeout(SECONDS + ALLOWANCE + ENDS_WITHIN + 60)
def test_some_seconds_of_random_operations() -> None:
    check(soak(SECONDS, seed=1))


@pytest.mark.long
@pytest.mark.timeout(LONG_SECONDS + ALLOWANCE + ENDS_WITHIN + 60)
def test_half_an_hour_of_random_operations() -> None:
    check(soak(LONG_SECONDS, seed=int.from_bytes(os.urandom(4), "little")))


@pytest.mark.long
@pytest.mark.timeout(PLANT_SECONDS + ALLOWANCE + ENDS_WITHIN + 60)
@pytest.mark.parametrize("plant", ["handles", "arrays", "descriptors"])
def test_a_planted_leak_is_found(plant: str) -> None:
    done = soak(PLANT_SECONDS, 1, plant)
    assert done.returncode == 1 and done.stdout.count("growth") == RANKS, done.stdout + done.stderr
