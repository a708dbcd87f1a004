"""Keras 3 on JAX: the same training as one process. In a process of its own, since Keras has one backend in each."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.timeout(700)
@pytest.mark.parametrize("which", ["short", pytest.param("all", marks=pytest.mark.long)])
def test_jax_below_keras(which):
    script = pathlib.Path(__file__).with_name("jax_keras_run.py")
    environment = dict(os.environ, KERAS_BACKEND="jax")
    command = [sys.executable, script, *([which] if which == "short" else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=650)
    assert done.returncode == 0 and done.stdout.endswith("trained\n"), done.stdout + done.stderr[-6000:]
