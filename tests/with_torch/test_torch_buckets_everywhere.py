"""All properties of training once more, with gradients that are views of buckets from the second step on.

In a process of its own, where conftest changes the default. Left out are the tests that count what travels one by one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = [
    "test_torch_amp.py",
    "test_torch_coexistence.py",
    "test_torch_optimizer.py",
    "test_torch_passes.py",
    "test_torch_sparse.py",
    "test_torch_incomplete_steps.py",
    "test_training.py",
    "test_training_parameters.py",
    "test_training_steps.py",
]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_properties_hold_with_buckets():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not one_by_one", *FILES]
    done = subprocess.run(
        command,
        cwd=HERE,
        env={**os.environ, "RINGTRAIN_TEST_BUCKET_VIEWS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20000:]
