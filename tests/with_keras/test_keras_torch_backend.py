"""Keras 3 on PyTorch: the same training as one process. In a process of its own, since Keras has one backend in each."""

import os
import pathlib
import subprocess
import sys

import pytest

from ringtrain.errors import UnsupportedError
from ringtrain.keras.backends import module_of


def test_pytorch_below_keras():
    script = pathlib.Path(__file__).with_name("torch_keras_run.py")
    environment = dict(os.environ, KERAS_BACKEND="torch")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("trained\n"), done.stdout + done.stderr[-6000:]


@pytest.mark.long
def test_rows_of_tables_below_keras():
    """All that test_keras_embedding.py asks."""
    script = pathlib.Path(__file__).with_name("test_keras_embedding.py")
    environment = dict(os.environ, KERAS_BACKEND="torch")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr


def test_other_backends_are_refused():
    with pytest.raises(UnsupportedError, match="backend must be one of tensorflow, torch, jax, but is 'openvino'"):
        module_of("openvino")
