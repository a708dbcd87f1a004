"""The parts of bin/test that decide something."""

from __future__ import annotations

import subprocess
from pathlib import Path

import budget
import pytest
import run

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("arguments, passed", [
    ([], ["-m", "not long"]),
    (["allreduce"], ["-m", "not long", "-k", "allreduce"]),
    (["tests/test_bin.py"], ["-m", "not long", "tests/test_bin.py"]),
    (["tests/test_bin.py::test_x", "-x"], ["-m", "not long", "tests/test_bin.py::test_x", "-x"]),
    (["--tsan", "--asan", "wire"], ["-m", "tsan or asan", "-k", "wire"]),
    (["--native"], ["-m", "plain"]),
    (["--long", "--", "-m", "long and mpich"], ["-m", "long", "-m", "long and mpich"]),
])
def test_arguments_select_tests(arguments: list[str], passed: list[str]) -> None:
    assert run.selection(arguments) == passed


def test_tests_are_counted_in_one_group_each() -> None:
    assert budget.group_of("tests/test_native.py", {"tsan", "parametrize"}) == "sanitizers"
    assert budget.group_of("tests/test_launch_runs.py", {"mpich"}) == "MPICH"
    assert budget.group_of("tests/test_torch_optimizer.py", set()) == "torch"
    assert budget.group_of("tests/test_operations.py", set()) == "python"
    groups = {*budget.GROUP_OF_MARKER.values(), *budget.GROUP_OF_FILE.values(), "python", "install", "build"}
    assert groups == set(budget.BUDGETS)
    assert budget.WHOLE_RUN <= 25.0


def test_help_lists_the_selections() -> None:
    said = subprocess.run([ROOT / "bin" / "test", "--help"], capture_output=True, text=True, check=True).stdout
    for selection in run.SELECTIONS:
        assert selection in said
