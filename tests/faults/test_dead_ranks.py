"""Ranks that die or stand still, in jobs of their own: what the survivors hear, that the job ends, and what is no death."""

import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
from environments import python_with, rank_environment, ringtrainrun
from worlds import LAUNCHED

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(LAUNCHED, reason="starts jobs of its own"),
]

# The victim ends or stops within an operation of the others; each of them says what it was told.
RANK = """
    import os, signal, sys, numpy as np, ringtrain as rt
    from ringtrain.errors import PeerLostError
    rt.init()
    rt.allreduce(np.ones(1000), name="before")
    print(f"pid of rank {rt.rank()} is {os.getpid()}.", flush=True)
    rt.barrier()
    if rt.rank() == int(sys.argv[2]):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    try:
        rt.allreduce(np.ones(1000), name="after")
    except PeerLostError as problem:
        with open(f"{sys.argv[3]}/{rt.rank()}", "w") as heard:  # an engine that gives up may swallow what is printed
            heard.write(str(problem))
"""


def heard(folder: Path) -> dict[int, str]:
    """What each rank heard, by rank."""
    return {int(path.name): path.read_text() for path in folder.iterdir()}


def is_there(pid: int) -> bool:
    """Whether a process is there and has not ended; one that has may wait for a parent that reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def processes_left(output: str, seconds: float = 30) -> list[int]:
    """The ranks' processes that are still there after so many seconds, stopped ones too; ends them.

    An engine that gives up may return a moment before the last rank has ended.
    """
    pids = [int(line.rstrip(".").split()[-1]) for line in output.splitlines() if "pid of rank" in line]
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_there(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


@pytest.mark.openmpi
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_killed_rank_are_told_which(victim, tmp_path):
    """Without the engine's help: it is told not to end the others."""
    python = python_with("openmpi")
    command = [Path(python).with_name("mpirun"), "--allow-run-as-root", "--enable-recovery", "--map-by", "slot:OVERSUBSCRIBE",
               "-np", "3", python, "-c", textwrap.dedent(RANK), "SIGKILL", str(victim), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=rank_environment())
    told = heard(tmp_path)
    assert set(told) == {0, 1, 2} - {victim}, done
    for text in told.values():
        assert f"rank {victim} on host '" in text and "its process has ended" in text, text
    assert not processes_left(done.stdout)


@pytest.mark.openmpi
@pytest.mark.parametrize("victim, layout", [pytest.param(0, "", marks=pytest.mark.long), (2, "1+1+1")])
def test_job_with_a_stopped_rank_ends(victim, layout, tmp_path):
    command = ringtrainrun("openmpi", 3, python_with("openmpi"), "-c", textwrap.dedent(RANK), "SIGSTOP", str(victim),
                          str(tmp_path))
    bound = rank_environment(RINGTRAIN_DEAD_AFTER_SECONDS="2", RINGTRAIN_HOST_LAYOUT=layout)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=bound)
    told = heard(tmp_path)
    assert set(told) >= {0, 1, 2} - {victim}, done  # the victim too, if it was woken to be ended
    for text in told.values():
        assert f"rank {victim} on host '" in text and "heard none for 2 s" in text and "DEAD_AFTER" in text, text
    assert done.returncode != 0
    assert not processes_left(done.stdout)


@pytest.mark.openmpi
@pytest.mark.parametrize("layout", [pytest.param("", marks=pytest.mark.long), "1+1"])
def test_long_computing_and_a_held_gil_are_no_death(layout):
    done = subprocess.run(ringtrainrun("openmpi", 2, python_with("openmpi"), "-c", textwrap.dedent("""
        import ctypes, time, numpy as np, ringtrain as rt
        rt.init()
        rt.allreduce(np.ones(10), name="before")
        if rt.rank() == 1:
            until = time.monotonic() + 3
            while time.monotonic() < until:
                sum(range(10000))
            ctypes.PyDLL(None).sleep(3)
        print("sum", rt.allreduce(np.ones(10), name="after", op=rt.Sum)[0], flush=True)
    """)), capture_output=True, text=True, timeout=60,
        env=rank_environment(RINGTRAIN_DEAD_AFTER_SECONDS="2", RINGTRAIN_HOST_LAYOUT=layout))  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("sum 2.0") == 2, done
