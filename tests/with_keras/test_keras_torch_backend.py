"""Keras 3 on PyTorch: the same training as one process. In a process of its own, since Keras has one backend in each."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("keras")
pytest.importorskip("torch")

from ringtrain.errors import UnsupportedError
from ringtrain.keras.backends import module_of


def test_pytorch_below_keras():
    script = pathlib.Path(__file__).with_name("torch_keras_run.py")
    environment = dict(os.environ, KERAS_BACKEND="torch")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and done.stdout.endswith("trained\n"), done.stdout + done.stderr[-6000:]


def test_other_backends_are_refused():
    with pytest.raises(UnsupportedError, match="expected Keras on tensorflow or torch but found it on 'jax'"):
        module_of("jax")
