"""tf_keras, the legacy Keras 2: its adapter trains as one process with the batches of all ranks does.

In a process of its own: ``TF_USE_LEGACY_KERAS`` is read when TensorFlow is imported.
"""

import os
import pathlib
import subprocess
import sys

import pytest


# Several in each process, which needs longer to import TensorFlow than for most of them.
@pytest.mark.parametrize(
    "parts",
    [("fit", "files", "steps"), pytest.param(("further fits", "older steps"), marks=pytest.mark.long)],
    ids=" and ".join,
)
def test_tf_keras_trains_as_one_process_does(parts):
    script = pathlib.Path(__file__).with_name("legacy_keras_run.py")
    environment = dict(os.environ, TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="2")
    done = subprocess.run(
        [sys.executable, script, *parts], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stdout.endswith("trained\n"), done.stdout + done.stderr[-6000:]


ELASTIC = "import tf_keras, elastic_checks, ringtrain.tensorflow.keras as hvd; elastic_checks.check_all(tf_keras, hvd)"
LOCAL_STEPS = "import legacy_local_steps; legacy_local_steps.check_all()"


@pytest.mark.long
@pytest.mark.parametrize("code", [pytest.param(ELASTIC, id="elastic"), pytest.param(LOCAL_STEPS, id="local-steps")])
def test_what_keras_3_has_too(code):
    """In processes of their own, so that the one above keeps its time."""
    environment = dict(os.environ, TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="2")
    code += "; print('trained')"
    folder = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stdout.endswith("trained\n"), done.stdout + done.stderr[-6000:]
