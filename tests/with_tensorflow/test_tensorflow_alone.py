"""What a process shows that has imported nothing before TensorFlow; one for all checks, since that takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROGRAM = """
import importlib, json, sitecustomize, sys
import tensorflow as tf
found = {"spared": [name for name in sitecustomize.SPARED if name in sys.modules]}
for name in sitecustomize.SPARED:
    importlib.import_module(name)

adapters = [importlib.import_module("ringtrain." + name) for name in ("tensorflow", "tensorflow.keras")]
found["averaging"] = [name for name in sys.modules if name.startswith("ringtrain._training.averaging")]
found["rates"] = [hvd.Outer(0.7).rate for hvd in adapters if "Outer" in dir(hvd)]

tf.config.experimental.enable_op_determinism()
tf.keras.utils.set_random_seed(1)
from ringtrain.testing import World
from test_tensorflow_drift import trains
with World(2) as world:
    found["trained"] = world.run(lambda rank: trains(True, 1.0))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    """By check, what the process has found."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, Path(__file__).parent)))}
    line = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(line, env=environment, cwd=TESTS.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_tensorflow_imports_nothing_that_is_spared_and_others_do(found: dict) -> None:
    """See tests/sitecustomize.py."""
    assert not found["spared"]


def test_what_averages_local_steps_is_loaded_by_those_who_do(found: dict) -> None:
    assert not found["averaging"] and found["rates"] == [0.7, 0.7]


def test_deterministic_operations_are_no_hindrance(found: dict) -> None:
    """Which TensorFlow cannot take back."""
    first, second = found["trained"]
    assert first == second
