"""The parts of bin/test that decide something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import budget
import pytest
import run
import workers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments, passed",
    [
        ([], ["-m", "not long"]),
        (["allreduce"], ["-m", "not long", "-k", "allreduce"]),
        (["tests/project/test_bin.py"], ["-m", "not long", "tests/project/test_bin.py"]),
        (["tests/project/test_bin.py::test_x", "-x"], ["-m", "not long", "tests/project/test_bin.py::test_x", "-x"]),
        (["lint"], ["-m", "not long", "tests/project/test_lint.py"]),
        (
            ["tests/native/match_test.cc"],
            ["-m", "not long or plain", "tests/native/test_native.py::test_native[match_test-plain]"],
        ),
        (["match_test", "--asan"], ["-m", "asan", "tests/native/test_native.py::test_native[match_test-asan]"]),
        (["c_api_test"], ["-m", "not long or plain", "tests/native/test_native.py::test_native[c_api_test-plain]"]),
        (["no_such_test"], ["-m", "not long", "-k", "no_such_test"]),
        (["--tsan", "--asan", "wire"], ["-m", "tsan or asan", "-k", "wire"]),
        (["--native"], ["-m", "plain"]),
        (["--quick"], ["-m", "not long", *run.QUICK]),
        (["--long", "--", "-m", "long and mpich"], ["-m", "long", "-m", "long and mpich"]),
    ],
)
def test_arguments_select_tests(arguments: list[str], passed: list[str]) -> None:
    assert run.selection(arguments) == passed


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["--nosuch"],
            "'--nosuch' must be one of --changed, --quick, --install, --native, --tsan, --asan, --long. Put options of pytest behind --",
        ),
        (["--changed", "tests/core"], "'--changed' chooses the tests, so there must be no other argument before --."),
        (["--changed=HEAD~3", "--", "-x"], ""),
        (["tests/core/test_nosuch.py"], "'tests/core/test_nosuch.py' must be a file or folder of this checkout"),
        (["--quick", "allreduce", "tests/core", "tests/native/match_test.cc", "-x", "--", "--lf", "no/file"], ""),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(arguments: list[str], said: str) -> None:
    assert run.refusal(arguments).startswith(said) and bool(run.refusal(arguments)) == bool(said)


def test_a_misspelt_pattern_is_told_with_the_nearest_word() -> None:
    misspelt = "allreduce"[:-1] + "cce"  # which must not stand in this file
    assert run.hint_for(misspelt) == f"'{misspelt}' is in the text of no test; did you mean allreduce?"
    assert not run.hint_for("allreduce") and not run.hint_for("core and not openmpi") and not run.hint_for("4ranks")
    assert run.patterns(["--tsan", "wire", "lint", "match_test", "tests/core", "--", "x"]) == ["wire"]


def test_a_run_without_tests_ends_with_a_line_that_says_so(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    for step in ("install", "build"):
        monkeypatch.setattr(run, step, lambda: None)
    monkeypatch.setattr(run, "CCACHE", Path("/nonexistent"))  # else this process would have its variables
    monkeypatch.setattr(run, "run_pytest", lambda *_: run.NO_TESTS_SELECTED)
    misspelt = "allreduce"[:-1] + "cce"
    assert run.main([misspelt]) == run.NO_TESTS_SELECTED
    first, last = capfd.readouterr().err.splitlines()
    assert first == f"bin/test: '{misspelt}' is in the text of no test; did you mean allreduce?"
    assert last.startswith("bin/test: no test was selected.") and "did you mean allreduce" in last


def test_processes_of_the_tests_keep_the_bytecode_of_what_they_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("OTHER", "kept")
    variables = run.environment_of_tests()
    assert "PYTHONDONTWRITEBYTECODE" not in variables and variables["OTHER"] == "kept"


def test_tests_are_counted_in_one_group_each() -> None:
    assert budget.group_of("tests/native/test_native.py", {"tsan", "parametrize"}) == "sanitizers"
    assert budget.group_of("tests/launch/test_launch_runs.py", {"mpich"}) == "MPICH"
    assert budget.group_of("tests/with_torch/test_torch_optimizer.py", set()) == "torch"
    assert budget.group_of("tests/core/test_operations.py", set()) == "python"
    tables = (budget.GROUP_OF_MARKER, budget.GROUP_OF_FOLDER, budget.GROUP_OF_FILE)
    assert {"python", "install", "build"}.union(*(table.values() for table in tables)) == set(budget.BUDGETS)
    assert budget.WHOLE_RUN <= 15.0


def test_each_worker_takes_what_may_run_beside_the_others() -> None:
    assert workers.lane_of("tests/faults/test_resources.py::test_x") == 0
    assert workers.lane_of("tests/core/test_mpi_world.py::test_x[mpich]") == 1
    assert workers.lane_of("tests/core/test_join.py::test_x") is None
    order = ["tests/faults/test_resources.py::a", "tests/launch/test_hosts.py::a", "tests/launch/test_launch_hosts.py::a",
             "tests/with_torch/test_training.py::a", "tests/launch/test_launch.py::a",
             "tests/native/test_native.py::test_native[tcp_test-tsan]"]  # fmt: skip
    assert [workers.place_of(name)[0] for name in order] == [0, 0, 1, 2, 3, 4]
    assert order == sorted(order, key=workers.place_of)


def test_what_no_run_has_measured_does_not_come_last() -> None:
    new, old = "tests/launch/test_new.py::test_x", "tests/launch/test_launch_exits.py::test_x"
    assert workers.place_of(new) < workers.place_of(old)


def test_long_files_are_taken_in_pieces() -> None:
    pieces = {
        "tests/native/test_native.py::test_native[frame_test-asan]": "tests/native/test_native.py[frame_test-asan]",
        "tests/native/test_native.py::test_mpi_transport_on_ranks[1-openmpi]": "tests/native/test_native.py",
        "tests/launch/test_under_launcher.py::test_files_on_ranks[a-mpich-4]": "tests/launch/test_under_launcher.py[a-mpich-4]",
        "tests/faults/test_resources.py::test_x[1]": "lane 0",
        "tests/core/test_join.py::test_x[1]": "tests/core/test_join.py",
    }
    assert {name: workers.piece_of(name) for name in pieces} == pieces


def test_calm_tests_come_last_whatever_lane_their_file_is_of() -> None:
    calm = "tests/launch/test_launch_doctor.py::test_it_finds_what_the_links_carry[tcp]"
    assert workers.is_calm(calm) and not workers.is_calm("tests/launch/test_launch_doctor.py::test_wrong_command_lines")
    assert workers.lane_of(calm) is None and workers.piece_of(calm) == workers.CALM
    assert workers.place_of(calm) > workers.place_of("tests/launch/test_launch.py::a")


def test_files_of_lanes_exist() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    for lane in workers.LANES:
        assert [name for name in files if lane.match(name)]
    assert {name for name in files if workers.BESIDE.match(name)}.isdisjoint(
        name for name in files if name.startswith(("tests/launch/", "tests/faults/", "tests/native/"))
    )


def test_who_gives_way_does_so_with_all_that_it_starts() -> None:
    program = "import os, priority; priority.give_way(3); os.system('nice; cat /proc/self/autogroup 2>/dev/null')"
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "tests", capture_output=True, text=True).stdout
    assert said.startswith(f"{os.nice(0) + 3}\n") and ("autogroup" not in said or said.endswith("nice 3\n")), said


def test_help_lists_the_selections() -> None:
    said = subprocess.run([ROOT / "bin" / "test", "--help"], capture_output=True, text=True, check=True).stdout
    for selection in ["--quick", *run.SELECTIONS]:
        assert selection in said


def test_the_quick_selection_names_tests_that_exist() -> None:
    for chosen in run.QUICK:
        file, _, name = chosen.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), chosen
