"""What reads the sources without running them: linters, formatters, the type checker (see lint.py), and clang-tidy.

clang-tidy looks at native/: the checks of .clang-tidy, and that nothing touches a field without its lock (base/mutex.h).
It is the wheel of that name, one of the test requirements; it reads the headers of the g++ that is installed.
Warnings of g++ are errors too, where tests/native/build.py builds.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import clang_tidy
import lint
import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
SOURCES = sorted(NATIVE.glob("**/*.cc"))
WITH_LOCKS = [
    source for source in SOURCES if "Mutex" in source.read_text()
]  # where no test would be sure to find a race
LOCKS = "clang-diagnostic-thread-safety"
# A fault: file, what stands there, what stands there instead, the check that must find it, and the name that it must
# give.
PLANTS = [
    (
        "run/submission.cc",
        "  MutexLock lock(mutex_);\n  if (!closed_.ok()) return;",
        "  if (!closed_.ok()) return;",
        LOCKS,
        "closed_",
    ),
    ("run/driver.cc", "if (stop_.load() || !drive_mutex_.TryLock()) {", "if (stop_.load()) {", LOCKS, "drive_mutex_"),
    (
        "run/abort_request.cc",
        "  MutexLock lock(mutex_);\n  return cause_",
        "  return cause_",
        LOCKS,
        "cause_",
    ),
    ("device/driver.cc", "  MutexLock lock(opening);\n", "", LOCKS, "opening"),
    ("transport/in_process.cc", "    MutexLock lock(inbox.mutex);\n    *arrived", "    *arrived", LOCKS, "frames"),
    (
        "transport/rendezvous.cc",
        "      present[from] = true;\n      (*all)[from] = std::move(frame);\n",
        "      (*all)[from] = std::move(frame);\n      present[from] = !frame.empty();\n",
        "bugprone-use-after-move",
        "frame",
    ),
]


def tidy(source: Path, checks: str = "") -> str:
    """What clang-tidy finds wrong in a file and in the headers of its native/; empty if nothing.

    Args:
        source: the file.
        checks: as clang-tidy takes them; those of .clang-tidy by default.
    """
    native = next(folder for folder in source.parents if folder.name == "native")
    program = clang_tidy.get_executable("clang-tidy")
    compile_with = ["-std=c++17", f"-I{native}", "-Wthread-safety", f"--gcc-install-dir={gcc_folder()}"]
    chosen = [f"--checks={checks}", "--allow-no-checks"] if checks else []
    command = [program, "--quiet", f"--config-file={ROOT / '.clang-tidy'}", *chosen, source, "--", *compile_with]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout if done.returncode != 0 else ""


@functools.cache
def gcc_folder() -> Path:
    """Where g++ keeps its own part, beside which its headers are found."""
    compiler = os.environ.get("CXX", "g++").split()
    found = subprocess.run([*compiler, "-print-libgcc-file-name"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(found.stdout.strip()).parent


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sources, checks",
    [
        pytest.param(WITH_LOCKS, f"-*,{LOCKS}*", id="locks", marks=pytest.mark.long),
        pytest.param(SOURCES, "", id="all", marks=pytest.mark.long),
    ],
)
def test_checks_find_nothing(sources: list[Path], checks: str) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        findings = [text for text in pool.map(lambda source: tidy(source, checks), sources) if text]
    assert not findings, "\n".join(findings)


@pytest.mark.long
@pytest.mark.parametrize(
    "file, original, planted, check, subject", PLANTS, ids=[f"{file}-{subject}" for file, _, _, _, subject in PLANTS]
)
def test_a_planted_fault_is_found(
    file: str, original: str, planted: str, check: str, subject: str, tmp_path: Path
) -> None:
    folder = tmp_path / "native"
    shutil.copytree(NATIVE, folder)
    text = (folder / file).read_text()
    assert text.count(original) == 1, f"{file} has changed: adapt PLANTS"
    (folder / file).write_text(text.replace(original, planted))
    said = tidy(folder / file, f"-*,{LOCKS}*" if check == LOCKS else "")
    assert check in said and f"'{subject}'" in said, said or "nothing was found"


# What each tool must find: a file, and the fault in it.
FAULTS = {
    "ruff": ("ringtrain/fault.py", "import os\n", "F401"),
    "format": ("ringtrain/fault.py", "numbers = [1,2]\n", "ringtrain/fault.py"),
    "types": ("ringtrain/fault.py", "number: int = 'text'\n", "Incompatible types"),
    "clang-format": ("native/fault.h", "int  number;\n", "fault.h"),
}


@pytest.mark.parametrize("tool", lint.TOOLS)
def test_tools_find_nothing(tool: str) -> None:
    found = lint.look(tool)
    assert not found, found


@pytest.mark.long
@pytest.mark.parametrize("tool", lint.TOOLS)
def test_tools_find_a_planted_fault(tool: str, tmp_path: Path) -> None:
    file, fault, name = FAULTS[tool]
    for settings in ("pyproject.toml", ".clang-format"):
        shutil.copy(ROOT / settings, tmp_path)
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(fault)
    (tmp_path / "benchmarks").mkdir()  # mypy reads this folder, too
    (tmp_path / "benchmarks" / "__init__.py").touch()
    assert name in lint.look(tool, tmp_path)


def test_a_users_checker_sees_the_names_of_the_adapters(tmp_path: Path) -> None:
    """Which the packages list at run time; py.typed says that there are types."""
    script = tmp_path / "script.py"
    script.write_text(
        "import ringtrain.tensorflow as tf_hvd\n"
        "import ringtrain.torch as hvd\n"
        "for each in (hvd.allreduce, hvd.init, hvd.DistributedOptimizer, tf_hvd.grouped_allreduce, tf_hvd.rank):\n"
        "    print(each)\n"
        "print(hvd.no_such_name)\n"
    )
    said = subprocess.run([sys.executable, "-m", "mypy", script], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    assert (ROOT / "ringtrain" / "py.typed").exists()
    assert said.count("error:") == 1 and "no_such_name" in said, said
