"""TensorFlow's GPU tensors where they are, in the order of TensorFlow's stream: its own devices of type GPU, on the fakes.

gpu_device.cc is compiled against the headers of each release and loaded into it, so that executor, tensors, and the
objects in which our library looks for the stream are TensorFlow's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import fakes
import pytest
from environments import PATHS
from test_tensorflow_library import python_with_release

from ringtrain.errors import InvalidArgumentError
from ringtrain.tensorflow.library import TESTED_RELEASES, tensors_stay_on_gpus

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = """
import tensorflow as tf
flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags(), f"-DRELEASE={tf.__version__}"]
"""
pytestmark = pytest.mark.timeout(700)


# All other tests run with the last one.
RELEASES = [*(pytest.param(each, marks=pytest.mark.long) for each in TESTED_RELEASES[:-1]), TESTED_RELEASES[-1]]


@pytest.fixture(scope="module", params=RELEASES)
def release(request) -> tuple[str, Path]:
    """The Python of a release of TensorFlow, and gpu_device.cc for it."""
    python = python_with_release(request.param)
    source = HERE / "gpu_device.cc"
    flags = flags_of(python)
    library = ROOT / "build" / f"gpu_device-{zlib.crc32(source.read_bytes() + repr(flags).encode()):08x}.so"
    if not library.exists():
        compiler = ["ccache"] * bool(shutil.which("ccache")) + [os.environ.get("CXX", "g++")]
        new = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*compiler, "-shared", "-fPIC", "-O0", "-w", source, "-o", new, *flags], check=True)
        new.replace(library)
    return python, library


def flags_of(python: str) -> list[str]:
    """Of the compiler, for the release of TensorFlow that a Python has."""
    if python == sys.executable:  # whose release may be here already: it takes seconds to import
        found: dict = {}
        exec(FLAGS, found)
        return found["flags"]
    said = subprocess.run([python, "-c", FLAGS + "print(*flags)"], capture_output=True, text=True, check=True)
    return said.stdout.split()


def run(release: tuple[str, Path], plane: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """tensorflow_on_gpus.py by a plane, with copies from the host that come 20 ms late."""
    python, library = release
    environment = fakes.environment(
        FAKE_DEVICES=2, FAKE_DELAY_US=200, GPU_DEVICE_LATE=20, NCCL_MULTI_RANK_GPU_ENABLE=1,
        RINGTRAIN_TENSORFLOW_GPU="device", TF_CPP_MIN_LOG_LEVEL=2, PYTHONPATH=PATHS, **settings,
    )  # fmt: skip
    return subprocess.run(
        [python, HERE / "tensorflow_on_gpus.py", library, plane], env=environment, capture_output=True, text=True, timeout=600
    )  # fmt: skip


# The staged plane takes four times as long, and differs below what TensorFlow sees.
@pytest.mark.parametrize("plane", [pytest.param("staged", marks=pytest.mark.long), "nccl"])
def test_operations_are_in_the_order_of_tensorflows_stream(release, plane):
    done = run(release, plane)
    assert done.returncode == 0, done.stderr[-6000:]
    assert re.fullmatch(r"2\.\d+\.\d+", done.stdout.strip())


@pytest.mark.long
def test_a_missing_order_is_seen(release):
    """The check has teeth: with streams that wait for nothing results are wrong, or the fakes end the process."""
    assert run(release, "staged", FAKE_CUDA_FORGET="cuStreamWaitEvent:1+=1").returncode != 0


@pytest.mark.parametrize(
    "choice, release, with_cuda, stay",
    [
        ("", "2.21.0", True, True),
        ("auto", "2.20.0", True, True),
        ("auto", "2.21.0", False, False),  # a device that a plugin brings
        ("", "2.99.0", True, False),  # whose layout nobody has looked at
        ("device", "2.99.0", False, True),
        ("host", "2.21.0", True, False),
    ],
)
def test_where_tensors_stay(choice, release, with_cuda, stay):
    assert tensors_stay_on_gpus(choice, release, with_cuda) is stay


def test_an_unknown_choice_is_refused():
    with pytest.raises(InvalidArgumentError, match="must be auto, device or host, but is 'yes'"):
        tensors_stay_on_gpus("yes", "2.21.0", True)
