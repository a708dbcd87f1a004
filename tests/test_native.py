"""Builds the native tests and runs each executable as one case: plain, under ThreadSanitizer, under AddressSanitizer.

tests/native/build.py holds the flags. The MPI transport's test also runs on ranks under either MPI.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environments import EACH_MPI, library_of, python_with, rank_environment, ringtrainrun

sys.path.insert(0, str(Path(__file__).parent / "native"))
import build  # noqa: E402

SANITIZER_OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1",
                     "UBSAN_OPTIONS": "print_stacktrace=1"}
# The first test of a variant builds it, if bin/test has not: a minute on two free cores.
pytestmark = pytest.mark.timeout(1200)
STARTS_THREADS = re.compile(r"std::thread|RunRanks|Ranks ranks|pthread|fork\(\)")


@pytest.fixture(scope="session")
def built():
    """Builds a variant once; its folder."""
    folders: dict[str, Path | None] = {}

    def build_once(variant: str) -> Path:
        if variant not in folders:
            folders[variant] = None
            folders[variant] = build.build(variant)
        if folders[variant] is None:
            pytest.fail(f"the native tests ({variant}) do not compile: see the first failure", pytrace=False)
        return folders[variant]

    return build_once


def run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace")
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))} returned {done.returncode}:\n{done.stdout[-20000:]}", pytrace=False)


def cases() -> list:
    """Each executable in each variant; under ThreadSanitizer, one without threads has nothing to find and is for --long."""
    found = []
    for source in build.test_sources():
        for variant in build.VARIANTS:
            idle = variant == "tsan" and not STARTS_THREADS.search(source.read_text())
            marks = [getattr(pytest.mark, variant), *([pytest.mark.long] if idle else [])]
            found.append(pytest.param(source.stem, variant, marks=marks))
    return found


@pytest.mark.parametrize("name, variant", cases())
def test_native(name: str, variant: str, built) -> None:
    run([str(built(variant) / name)], dict(os.environ, **SANITIZER_OPTIONS))


@pytest.mark.tsan
@pytest.mark.parametrize("plane", ["staged", "nccl"])
def test_a_missing_wait_between_streams_is_a_data_race(plane: str, built) -> None:
    """Streams of the fake GPU that wait for nothing: the test of their order must find it, or it finds nothing at all."""
    environment = dict(os.environ, **SANITIZER_OPTIONS, FAKE_CUDA_FORGET="cuStreamWaitEvent:1+=1")
    done = subprocess.run([built("tsan") / "gpu_order_test", plane], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace")
    assert done.returncode != 0 and "ThreadSanitizer: data race" in done.stdout, done.stdout[-20000:]


@EACH_MPI
@pytest.mark.parametrize("ranks", [1, 3])
def test_mpi_transport_on_ranks(mpi: str, ranks: int, built) -> None:
    _, library = library_of(python_with(mpi))
    run(ringtrainrun(mpi, ranks, str(built("plain") / "mpi_transport_test")),
        rank_environment(RT_TEST_MPI_LIBRARY=library))


@EACH_MPI
def test_mpi_tables_agree_with_the_header(mpi: str, tmp_path: Path) -> None:
    """Our hand-written description of each ABI, compared with that MPI's mpi.h while it compiles and when it runs."""
    _, library = library_of(python_with(mpi))
    header = Path(python_with(mpi)).parents[1] / "include" / "mpi.h"
    if not header.exists():
        pytest.skip(f"no mpi.h of {mpi}: {header}")
    program = str(tmp_path / "mpi_abi_check")
    run([os.environ.get("CXX", "g++"), "-std=c++17", *build.COMMON, f"-I{header.parent}",
         str(build.ROOT / "tests/native/mpi_abi_check.cc"), library, f"-Wl,-rpath,{Path(library).parent}",
         "-Wl,--allow-shlib-undefined", "-ldl", "-o", program], dict(os.environ))
    run([program], dict(os.environ))
