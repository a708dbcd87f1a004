"""What the last lines of a red run say of each failure."""

import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from types import SimpleNamespace

import failures
import fakes
import pytest

from ringtrain import testing

ROOT = Path(__file__).parents[2]
PLANTED = {
    "test_threads.py": """
        import threading
        import pytest
        import ringtrain as rt
        from eventually import eventually
        from ringtrain.testing import World, stacks

        def waits(name):
            of = {thread.name: thread.ident for thread in threading.enumerate()}
            names = [frame.name for frame in stacks.of_threads(8)[of[name]]]
            return "allreduce" in names and names[-1] == "_wait_on"

        def test_a_rank_of_four_raises():
            def on_rank(rank):
                rt.barrier()
                if rank == 1:
                    eventually(lambda: waits("rank-0") and waits("rank-2"), "both wait in one place")
                    raise ValueError("no such batch")
                if rank == 3:
                    rt.barrier()
                rt.allreduce(1.0, name="waited.for")

            with World(4) as world:
                world.run(on_rank)

        @pytest.mark.timeout(1)
        def test_two_ranks_hang():
            with World(2) as world:
                world.run(lambda rank: rank or rt.allreduce(1.0, name="alone"))
    """,
    "test_job.py": """
        import subprocess, sys
        import pytest

        def run(program, **options):
            return subprocess.run([sys.executable, "-uc", program], capture_output=True, text=True, **options)

        def test_a_job_fails():
            done = run("print('[0] first'); print('[1] second'); print('[0] third'); raise SystemExit(3)")
            assert done.returncode == 0, done

        def test_a_job_of_which_the_assertion_says_nothing():
            done = run("import sys\\nfor rank in 0, 2: print(f'[{rank}] the same', file=sys.stderr)\\nraise SystemExit(3)")
            assert not done.returncode

        @pytest.mark.timeout(30)
        def test_a_job_hangs():
            run("print('[1] waits'); import time; time.sleep(600)", timeout=3)

        @pytest.mark.timeout(3)
        def test_a_job_hangs_for_pytest():
            run("print('[1] waits'); import time; time.sleep(600)")

        @pytest.fixture
        def broken():
            raise RuntimeError("the fixture is broken")

        def test_with_a_fixture(broken):
            pass
    """,
    "test_late.py": """
        import functools, time
        import pytest

        class ToldSlowly(Exception):
            @functools.cache
            def __str__(self):
                time.sleep(1.5)
                return "told slowly"

        @pytest.mark.timeout(1)
        def test_a_report_takes_longer_than_the_test_may():
            raise ToldSlowly
    """,
    "test_imports.py": "import no_such_module",
    "test_z_crash.py": """
        import ctypes

        def test_a_crash():
            ctypes.string_at(0)
    """,
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By planted test, what the last lines of a run say of it."""
    folder = tmp_path_factory.mktemp("planted")
    for name, text in PLANTED.items():
        (folder / name).write_text(textwrap.dedent(text))
    options = [
        "-p",
        "failures",
        "-p",
        "timeouts",
        "-p",
        "no:cacheprovider",
        "-n",
        "1",
        "--max-worker-restart",
        "0",
        f"--rootdir={folder}",
    ]
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "RINGTRAIN_TEST_FAKES": str(fakes.folder()),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "."], cwd=folder, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1, done.stdout + done.stderr
    parts = done.stdout.split("\n==== ")[1:]
    return {part.split("\n")[0].rpartition("::")[2]: part.splitlines() for part in parts}


def test_of_a_world_of_threads_the_error_and_where_the_others_were(told: dict[str, list[str]]) -> None:
    lines = [line.strip() for line in told["test_a_rank_of_four_raises"]]
    assert lines[:3] == [
        "test_threads.py::test_a_rank_of_four_raises",
        "at test_threads.py:18",
        "ValueError: no such batch",
    ]
    at = [line for line in lines if re.match(r"rank-.* (was|were) at:$", line)]
    assert sorted(re.findall(r"rank-\d", "".join(at))) == ["rank-0", "rank-2", "rank-3"]
    assert lines[-1] == "alone: bin/test test_threads.py::test_a_rank_of_four_raises"
    assert len(lines) <= failures.LINES and "threading.py" not in "".join(lines)


def test_ranks_at_one_place_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = {rank: [traceback.FrameSummary("train.py", 7 + rank % 2, "step", line="x")] for rank in range(3)}
    monkeypatch.setattr(testing.stacks, "of_threads", lambda most: frames)
    threads = [SimpleNamespace(ident=rank, name=f"rank-{rank}") for rank in range(3)]
    said = testing._whereabouts(threads).splitlines()
    assert said[0] == "rank-0, rank-2 were at:" and "rank-1 was at:" in said


def test_of_a_world_that_hangs_where_the_ranks_are(told: dict[str, list[str]]) -> None:
    said = "\n".join(told["test_two_ranks_hang"])
    assert "Timeout (>1.0s)" in said and "rank-0 was at:" in said and 'name="alone"' in said and "rank-1" not in said


def test_of_a_job_its_lines_in_the_order_of_time(told: dict[str, list[str]]) -> None:
    lines = told["test_a_job_fails"]
    assert lines[lines.index("stdout:") + 1 : -1] == ["  [0] first", "  [1] second", "  [0] third"]


def test_of_a_job_what_its_ranks_wrote_whatever_the_assertion_says(told: dict[str, list[str]]) -> None:
    assert told["test_a_job_of_which_the_assertion_says_nothing"][-3:-1] == ["stderr:", "  [0,2] the same"]


@pytest.mark.parametrize("test", ["test_a_job_hangs", "test_a_job_hangs_for_pytest"])
def test_of_a_job_that_hangs_what_it_wrote_so_far(test: str, told: dict[str, list[str]]) -> None:
    assert told[test][-3:-1] == ["stdout:", "  [1] waits"]


def test_the_time_of_a_test_does_not_end_in_its_report(told: dict[str, list[str]]) -> None:
    """pytest-timeout would raise in pytest, and end the run."""
    assert told["test_a_report_takes_longer_than_the_test_may"][2].endswith("ToldSlowly: told slowly")


def test_of_what_no_test_says(told: dict[str, list[str]]) -> None:
    """A fixture, an import, and a worker that is gone."""
    assert told["test_with_a_fixture"][1:3] == ["at test_job.py:26", "    RuntimeError: the fixture is broken"]
    assert told["test_imports.py"][1:] == [
        "at test_imports.py:1", "ModuleNotFoundError: No module named 'no_such_module'", "alone: bin/test test_imports.py",
    ]  # fmt: skip
    crash = "\n".join(told["test_a_crash"])
    assert "Fatal Python error: Segmentation fault" in crash and "line 5 in test_a_crash" in crash
    assert "in string_at" in crash, "the library's own frame"
    assert re.search(r"native:\n.*_ctypes|native:\n.*libc", crash), "where it was in native code"
    assert crash.count("site-packages") <= failures.INNERMOST - 3


def test_long_texts_are_cut_in_the_middle_and_a_command_is_quoted() -> None:
    text = "\n".join(f"E   line {number}" for number in range(100))
    lines = failures.brief("tests/a.py::test_b[two words]", text)
    assert len(lines) == failures.LINES and lines[-1] == "alone: bin/test 'tests/a.py::test_b[two words]'"
    assert lines[1] == "line 0" and lines[-2] == "line 99"


def test_what_several_ranks_say_alike_is_told_once() -> None:
    parts = [["[0] Traceback", "[0] a", " [1] Traceback", "[1] a", "[1] b"], ["a", "[2] c"]]
    assert failures.once_each(parts) == [["[0,1] Traceback", "[0,1] a", "[1] b"], ["[2] c"]]


def test_each_part_has_room() -> None:
    """What failed is told, and the end of each output."""
    text = "\n".join(f"E   line {number}" for number in range(100))
    lines = failures.brief(
        "a.py::b", text, [("stdout", "\n".join(f"[0] {each}" for each in range(50))), ("stderr", "[1] x")]
    )
    assert len(lines) == failures.LINES and lines[1] == "line 0" and "line 99" in lines
    assert lines[-4:] == ["  [0] 49", "stderr:", "  [1] x", "alone: bin/test a.py::b"]
