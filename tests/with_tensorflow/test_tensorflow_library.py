"""The library of operations against TensorFlow itself: each release that it serves, and the headers of the C API."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from environments import rank_environment

from ringtrain._binding import _native
from ringtrain._training.adapter.slots import core_functions
from ringtrain.errors import UnsupportedError
from ringtrain.tensorflow.library import TESTED_RELEASES

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
pytestmark = pytest.mark.timeout(700)


def python_with_release(release: str) -> str:
    """The Python of the environment with this release of TensorFlow; skips the test if there is none."""
    if tf.__version__.startswith(f"{release}."):
        return sys.executable
    python = os.environ.get("RINGTRAIN_TEST_TENSORFLOW")
    if python is None or not os.path.exists(python):
        pytest.skip(
            f"needs an environment with TensorFlow {release}: bin/test --long makes one and names it in RINGTRAIN_TEST_TENSORFLOW"
        )
    return python


def test_a_library_built_with_another_header_is_refused():
    """It would call the core's functions with structs of another layout."""

    with pytest.raises(UnsupportedError, match=f"must be {_native.ABI_VERSION}, .* is {_native.ABI_VERSION - 1}"):
        core_functions("TensorFlow", _native.ABI_VERSION - 1)


@pytest.mark.long  # all other tests run with the last one, and the earlier ones have an environment of their own
@pytest.mark.parametrize("release", TESTED_RELEASES)
def test_release(release):
    done = subprocess.run(
        [python_with_release(release), HERE / "tensorflow_release.py"],
        capture_output=True,
        text=True,
        timeout=600,
        env=rank_environment(),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.strip().startswith(f"{release}.")


HEADER_CHECK = """
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_datatype.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"
#include <type_traits>
#define RT_TF(result, name, parameters) static_assert(std::is_same_v<decltype(&::name), result(*) parameters>, #name);
#include "tensorflow/kernel_api.def"
{enumerators}
"""


def compile_against_headers(table: Path, tmp_path: Path) -> subprocess.CompletedProcess:
    """Compiles a check of our table and of our enumerators against TensorFlow's headers."""
    header = (NATIVE / "tensorflow" / "kernel_api.h").read_text()
    pairs = re.findall(r"\b(TF_[A-Z_0-9]+) = (\d+)", header)
    assert len(pairs) > 15
    asserts = "\n".join(f'static_assert(::{name} == {value}, "{name}");' for name, value in pairs)
    source = tmp_path / "check.cc"
    source.write_text(HEADER_CHECK.replace("{enumerators}", asserts))
    includes = [f"-I{table.parents[1]}", f"-I{tf.sysconfig.get_include()}"]
    return subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++17", "-fsyntax-only", "-w", *includes, source],
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_c_api_is_as_the_headers_say(tmp_path):
    done = compile_against_headers(NATIVE / "tensorflow" / "kernel_api.def", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_wrong_declaration_is_found(tmp_path):
    """The check has teeth: a parameter of another width fails to compile, and names the function."""
    table = tmp_path / "tensorflow" / "kernel_api.def"
    table.parent.mkdir()
    text = (NATIVE / "tensorflow" / "kernel_api.def").read_text()
    table.write_text(
        text.replace("RT_TF(int64_t, TF_Dim, (const TF_Tensor*, int))", "RT_TF(int, TF_Dim, (const TF_Tensor*, int))")
    )
    done = compile_against_headers(table, tmp_path)
    assert done.returncode != 0 and "TF_Dim" in done.stderr


def test_library_needs_the_run_time_alone():
    library = HERE.parents[1] / "ringtrain" / "tensorflow" / "libringtrain_tensorflow.so"
    needed = re.findall(
        r"\(NEEDED\).*\[(.*)\]", subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    )
    assert needed and not [
        name for name in needed if not re.fullmatch(r"lib(c|m|stdc\+\+|gcc_s|pthread|dl)\.so\.\d+", name)
    ]


def test_it_refuses_to_load_without_what_it_needs():
    """A release that lacks a function registers nothing and is told apart from one that has everything."""
    script = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); "
        "library.rt_tensorflow_missing.restype = ctypes.c_char_p; "
        "print(library.rt_tensorflow_missing().decode())"
    )
    library = HERE.parents[1] / "ringtrain" / "tensorflow" / "libringtrain_tensorflow.so"
    said = subprocess.run([sys.executable, "-c", script, library], capture_output=True, text=True, timeout=600)
    assert said.stdout == "libtensorflow_framework.so.2, which is not loaded\n", said.stderr
