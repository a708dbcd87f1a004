"""A checkout that nobody has built hides what is installed: it takes its modules from there, or says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ringtrain._core

import ringtrain
from ringtrain.launch import interpreter

PACKAGE = Path(ringtrain.__path__[0])
WHERE = "import ringtrain, ringtrain._core; print(ringtrain._core.__file__)"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the package's Python files and no library."""
    shutil.copytree(PACKAGE, tmp_path / "checkout" / "ringtrain", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path / "checkout"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the built package."""
    shutil.copytree(PACKAGE, tmp_path / "installed" / "ringtrain", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "installed"


def run(folder: Path, program: str, on_path: Path | None = None) -> subprocess.CompletedProcess:
    """Runs a program's text in a folder, with `on_path` before what is installed."""
    first = f"import sys; sys.path[1:1] = {[str(on_path)] if on_path else []!r}\n"
    return subprocess.run([sys.executable, "-c", first + program], cwd=folder, capture_output=True, text=True)


def test_an_unbuilt_checkout_takes_the_installation(checkout: Path, installed: Path) -> None:
    done = run(checkout, WHERE + "; import ringtrain.launch.rank as rank; print(rank.__file__)", on_path=installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{installed}/ringtrain/_core.")
    assert done.stdout.rstrip().endswith(f"{installed}/ringtrain/launch/rank.py")


def test_a_built_checkout_is_itself(installed: Path, tmp_path: Path) -> None:
    other = shutil.copytree(installed, tmp_path / "built checkout")
    assert run(other, WHERE, on_path=installed).stdout.startswith(f"{other}/ringtrain/_core.")


@pytest.mark.parametrize("name", ["version.py", "__init__.py"])
def test_an_installation_of_another_state_is_refused_with_the_way_out(
    name: str, checkout: Path, installed: Path
) -> None:
    with open(installed / "ringtrain" / name, "a") as file:
        file.write("# of last week\n")
    last = run(checkout, WHERE, on_path=installed).stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: ringtrain: the installation in '{installed}/ringtrain' must be of the same state"
    ), last
    assert f"its {name} differs" in last and f"-m pip install {checkout} " in last


def test_without_an_installation_it_says_how_to_build(checkout: Path) -> None:
    hidden = (
        "import os; sys.path[:] = [p for p in sys.path if p == '' or not os.path.exists(p + '/ringtrain')]; "
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
    )
    last = run(checkout, hidden + WHERE).stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: ringtrain: the library of '{checkout}/ringtrain' must be built, but is not"
    ), last
    assert last.endswith(f"-m pip install -e {checkout}")


def test_own_programs_do_not_import_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "glob.py").write_text("raise SystemExit('of the current folder')")
    (tmp_path / "only_here.py").write_text("print('found last')")
    for line in (interpreter.program("import glob, only_here"), interpreter.module("only_here")):
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "found last\n"), done.stderr
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from ringtrain.launch import mpi_installation as m; print(m.find_installation().package)",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=f"{PACKAGE.parent}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")),
    )
    assert done.returncode == 0 and done.stdout.startswith(ringtrain.__version__), done.stderr


def test_a_library_that_is_built_again_is_replaced() -> None:
    """Whoever has it open keeps the old one; if it were overwritten, they would end with SIGBUS."""
    library = Path(ringtrain._core.__file__)
    with library.open("rb") as opened:
        subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=PACKAGE.parent, check=True
        )
        assert os.fstat(opened.fileno()).st_ino != library.stat().st_ino
