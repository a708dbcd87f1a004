"""tests/sitecustomize.py spares TensorFlow packages that it needs for nothing, and nobody else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import importlib, sitecustomize, sys, tensorflow
print([name for name in sitecustomize.SPARED if name in sys.modules])
for name in sitecustomize.SPARED:
    importlib.import_module(name)
"""


def test_tensorflow_imports_nothing_that_is_spared_and_others_do():
    for name in ("tensorflow", "sklearn", "matplotlib", "jax", "scipy"):
        pytest.importorskip(name)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
