"""Checks that need a process of their own, because it opens a driver once and its settings are in the environment.

A module registers functions with ``check`` and ends with ``main()``; ``run`` starts one of them and says how it ended.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fakes

SECONDS = 240  # longer than any check that does not hang; less than pytest gives, so that what it printed is told


class Check(NamedTuple):
    """``dies``: None, or what it prints when it ends its process, as it must."""

    body: Callable[[], None]
    settings: dict[str, object]
    dies: str | None


CHECKS: dict[str, dict[str, Check]] = {}  # by module and name


def check(dies: str | None = None, **settings: object) -> Callable:
    """Registers a function as a check that needs these settings in its environment."""

    def register(body: Callable[[], None]) -> Callable[[], None]:
        CHECKS.setdefault(body.__module__, {})[body.__name__] = Check(body, settings, dies)
        return body

    return register


def run(module: str, name: str) -> str:
    """Runs a check; "" if it ended as it should, else what it printed."""
    wanted = CHECKS[module][name]
    tests = Path(__file__).parents[1]
    environment = fakes.environment(**wanted.settings, PYTHONPATH=f"{tests.parent}:{tests}")
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, name],
            env=environment,
            timeout=SECONDS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired as late:
        return f"it did not end within {SECONDS} s:\n{(late.stdout or b'').decode()[-20000:]}"
    if wanted.dies is None:
        as_it_should = done.returncode == 0 and "passed" in done.stdout
    else:
        as_it_should = done.returncode < 0 and wanted.dies in done.stdout
    return "" if as_it_should else f"it ended with {done.returncode}:\n{done.stdout[-20000:]}"


def main() -> None:
    """Runs the check that the command line names."""
    CHECKS["__main__"][sys.argv[1]].body()
    print("passed", flush=True)
