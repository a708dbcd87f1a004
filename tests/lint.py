"""Runs the linters, the formatters and the type checker, which change nothing.

    python tests/lint.py [NAME ...]      all of them, or those named: ruff, format, types, clang-format

They are wheels among the test requirements, of the versions in tests/constraints.txt; .pre-commit-config.yaml calls this
before a commit, tests/project/test_lint.py in bin/test. Their settings stand in pyproject.toml and .clang-format. clang-tidy,
which takes minutes, is run by tests/project/test_lint.py alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ("ringtrain", "benchmarks", "ringtrain-horovod", "tests", "docs", "examples", "setup.py")
NATIVE = ("native", "tests")


def python_files(root: Path) -> list[str]:
    """What ruff looks at; not build/ and the environments."""
    return [name for name in PYTHON if (root / name).exists()]


def native_files(root: Path) -> list[str]:
    """Sources and headers in C++."""
    return sorted(str(path) for folder in NATIVE for end in ("h", "cc") for path in (root / folder).rglob(f"*.{end}"))


def clang_format() -> str:
    """The program in the wheel of that name."""
    import clang_format

    return str(clang_format.get_executable("clang-format"))


# Command lines, run in a tree.
TOOLS: dict[str, Callable[[Path], list[str]]] = {
    "ruff": lambda root: [sys.executable, "-m", "ruff", "check", *python_files(root)],
    "format": lambda root: [sys.executable, "-m", "ruff", "format", "--check", *python_files(root)],
    "types": lambda root: [sys.executable, "-m", "mypy"],
    "clang-format": lambda root: [clang_format(), "--dry-run", "--Werror", *native_files(root)],
}


def look(tool: str, root: Path = ROOT) -> str:
    """What a tool finds wrong in a tree; "" if nothing."""
    done = subprocess.run(TOOLS[tool](root), cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout or f"{tool} ended with code {done.returncode}" if done.returncode else ""


def main(names: list[str]) -> int:
    """Prints what each tool finds; returns 1 if there is something."""
    unknown = sorted(set(names) - set(TOOLS))
    if unknown:
        print(
            f"tests/lint.py: expected names among {', '.join(TOOLS)}, but found {', '.join(unknown)}.", file=sys.stderr
        )
        return 2
    found = {name: look(name) for name in names or TOOLS}
    for name, text in found.items():
        print(f"{name}: {text or 'nothing'}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
