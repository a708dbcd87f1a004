"""What the last lines of a red run say of each failure."""

import subprocess
import sys
from pathlib import Path

import failures

ROOT = Path(__file__).parents[2]
PLANTED = {
    "test_threads.py": """
        import ringtrain as rt
        from ringtrain.testing import World

        def test_a_rank_of_three_raises():
            def on_rank(rank):
                rt.barrier()
                if rank == 1:
                    raise ValueError("no such batch")
                rt.allreduce(1.0, name="waited.for")

            with World(3) as world:
                world.run(on_rank)
    """,
    "test_job.py": """
        import subprocess, sys

        def test_a_job_fails():
            program = "print('[0] first'); print('[1] second'); print('[0] third'); raise SystemExit(3)"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            assert done.returncode == 0, done
    """,
}


def told(tmp_path: Path, name: str) -> list[str]:
    """The last lines of a run of a planted test."""
    lines = PLANTED[name].splitlines()
    (tmp_path / name).write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
    line = [sys.executable, "-m", "pytest", "-p", "failures", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", name]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()[-failures.LINES :]


def test_of_a_world_of_threads_the_error_and_where_the_others_were(tmp_path: Path) -> None:
    text = "\n".join(told(tmp_path, "test_threads.py"))
    assert "==== test_threads.py::test_a_rank_of_three_raises" in text
    brief = text[text.index("==== test_threads.py::") :]
    assert brief.count("ValueError: no such batch") == 1
    assert "rank-0 was at:" in brief and "rank-2 was at:" in brief and "threading.py" not in brief
    assert brief.splitlines()[-1] == "alone: bin/test test_threads.py::test_a_rank_of_three_raises"


def test_of_a_job_its_lines_in_the_order_of_time(tmp_path: Path) -> None:
    lines = told(tmp_path, "test_job.py")
    begin = next(number for number, line in enumerate(lines) if line.startswith("==== test_job"))
    assert [line.strip() for line in lines[begin + 1 :] if "[" in line and "]" in line[:6]] == [
        "[0] first",
        "[1] second",
        "[0] third",
    ]


def test_long_texts_are_cut_in_the_middle_and_a_command_is_quoted() -> None:
    text = "\n".join(f"E   line {number}" for number in range(100))
    lines = failures.brief("tests/a.py::test_b[two words]", text)
    assert len(lines) == failures.LINES and lines[-1] == "alone: bin/test 'tests/a.py::test_b[two words]'"
    assert lines[1] == "line 0" and lines[-2] == "line 99"


def test_what_several_ranks_say_alike_is_told_once() -> None:
    lines = ["[0] Traceback", "[0] a", "[1] Traceback", "[1] a", "[1] b"]
    assert failures.once_each(iter(lines)) == ["[0] Traceback", "[0] a", "[1] b"]
