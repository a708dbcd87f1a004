"""Our tables of CUDA's and NCCL's functions agree with those libraries' own headers, which come from their wheels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NCCL = "nvidia-nccl-cu13"
NCCL_RELEASES = [
    pytest.param("2.28.9", marks=pytest.mark.long),
    "2.30.7",
    pytest.param("2.32.3", marks=pytest.mark.long),
]
CUDA = ("nvidia-cuda-runtime", "13.0.96")
SECONDS_FOR_A_WHEEL = 200  # less than a test may take; 6 s are usual


def wheel_of(package: str, version: str, folder: Path) -> zipfile.ZipFile:
    """Downloads a wheel, without what it depends on; skips the test where no index has it or the way to it is slow."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        f"{package}=={version}",
    ]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS_FOR_A_WHEEL
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"needs an index that sends the wheel of {package} {version} within {SECONDS_FOR_A_WHEEL} s")
    if done.returncode != 0:
        pytest.skip(f"needs an index with a wheel of {package} {version}: {done.stdout.strip()[-300:]}")
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def extract(wheel: zipfile.ZipFile, pattern: str, folder: Path) -> list[Path]:
    """Writes the files of a wheel whose names match into one folder, without their folders."""
    folder.mkdir(exist_ok=True)
    found = [name for name in wheel.namelist() if re.search(pattern, name)]
    assert found, f"no {pattern} in {wheel.filename}"
    for name in found:
        (folder / Path(name).name).write_bytes(wheel.read(name))
    return [folder / Path(name).name for name in found]


def headers_of(package: str, version: str, pattern: str, temporary: Path) -> Path:
    """A folder with headers of a wheel: that of an earlier run, else downloaded."""
    folder = ROOT / "build" / "headers" / f"{package}-{version}"
    if not folder.exists():
        headers = extract(wheel_of(package, version, temporary), pattern, temporary / "headers")
        folder.parent.mkdir(parents=True, exist_ok=True)
        headers[0].parent.rename(folder)
    return folder


def compile_with(includes: list[Path], *arguments: object) -> subprocess.CompletedProcess:
    """Runs the compiler, with all warnings as errors."""
    paths = [f"-I{folder}" for folder in [*includes, ROOT / "native", ROOT / "tests/native"]]
    command = [
        *os.environ.get("CXX", "g++").split(),
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        *paths,
        *map(str, arguments),
    ]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def nccl_check(version: str, temporary: Path) -> Path:
    """The program that checks our table against a release of NCCL."""
    headers = headers_of(NCCL, version, r"/nccl\.h$", temporary)
    program = temporary / "nccl_abi_check"
    sources = [
        ROOT / name for name in ("tests/native/nccl_abi_check.cc", "native/device/nccl.cc", "native/tables/tables.cc")
    ]
    done = compile_with([ROOT / "tests/native/stand_ins", headers], *sources, "-pthread", "-ldl", "-o", program)
    assert done.returncode == 0, done.stdout
    return program


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", NCCL_RELEASES)
def test_table_of_nccl_agrees_with_its_header(version: str, tmp_path: Path) -> None:
    done = subprocess.run([nccl_check(version, tmp_path)], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


def driver_check(table: str, temporary: Path) -> subprocess.CompletedProcess:
    """Compiles the check of a table of the driver's functions against CUDA's headers."""
    headers = headers_of(*CUDA, r"include/cuda(Typedefs)?\.h$", temporary)
    (temporary / "device").mkdir()
    (temporary / "device" / "driver.def").write_text(table)
    return compile_with([temporary, headers], "-fsyntax-only", ROOT / "tests/native/driver_abi_check.cc")


TABLE = (ROOT / "native/device/driver.def").read_text()


def test_table_of_the_driver_agrees_with_its_header(tmp_path: Path) -> None:
    done = driver_check(TABLE, tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("MemAlloc, 3020", "MemAlloc, 2000"),
        ("(CUevent* event, unsigned flags)", "(CUevent event, unsigned flags)"),
        ("(void* memory))", "(void* memory, size_t bytes))"),
    ],
    ids=["version", "pointer", "number of parameters"],
)
def test_a_wrong_row_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    assert right in TABLE
    assert driver_check(TABLE.replace(right, wrong, 1), tmp_path).returncode != 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nccl_itself_answers_without_a_gpu(tmp_path: Path) -> None:
    """The product's loader opens the real library: it tells its version, makes an id, and says why it makes no communicator."""
    version = "2.30.7"
    program = nccl_check(version, tmp_path)
    (tmp_path / "wheel").mkdir()
    (library,) = extract(wheel_of(NCCL, version, tmp_path / "wheel"), r"/libnccl\.so\.2$", tmp_path / "library")
    done = subprocess.run([program, library], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert re.search("NCCL error 1, unhandled cuda error", done.stdout), done.stdout
