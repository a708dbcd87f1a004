"""Whoever looks after the ranks is killed; two jobs run at once; a killed rank has workers."""

import os
import re
import signal
import socket
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import python_with, rank_environment, ringtrainrun, transport_of

from benchmarks.jobs import Job
from ringtrain.launch.agent import processes

SECONDS = 90.0

# Works until it is ended, beside children that are in its process group and do not care about SIGTERM.
ENDLESS = """
    import signal, subprocess, sys, numpy as np, ringtrain as rt
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-c", deaf])
    rt.init()
    print("at work", flush=True)
    while True:
        rt.allreduce(np.ones(1000), name="step")
"""


def start(job: Job, mpi: str, ranks: int, program: str = ENDLESS, **variables: str) -> subprocess.Popen:
    """Starts ranks and waits until all are at work."""
    command = ringtrainrun(mpi, ranks, python_with(mpi), "-c", textwrap.dedent(program))
    launcher = job.start(*command, stdout=subprocess.PIPE, text=True, env=rank_environment(**variables))
    assert sorted(launcher.stdout.readline() for _ in range(ranks)) == [f"[{rank}] at work\n" for rank in range(ranks)]
    return launcher


# Who is killed, and how its command line begins.
KEEPERS = {
    "launcher": r"\S+ -m ringtrain.launch ",
    "mpirun": r"\S+/(prterun|mpiexec.hydra) ",
    "agent": r"\S+ -I -S \S+/agent/__main__.py ",
    "supervisor": r"\S+ -I -S \S+/rank.py ",
}


# Under MPICH most are for bin/test --long, and a killed agent leaves MPICH's segment (docs/reliability.md).
@pytest.mark.parametrize(
    "mpi, keeper",
    [
        *(pytest.param("openmpi", keeper, marks=pytest.mark.openmpi) for keeper in KEEPERS),
        pytest.param("mpich", "launcher", marks=pytest.mark.mpich),
        *(
            pytest.param("mpich", keeper, marks=[pytest.mark.mpich, pytest.mark.long])
            for keeper in ("mpirun", "supervisor")
        ),
    ],
)
def test_a_killed_keeper_leaves_no_rank(keeper: str, mpi: str, job: Job) -> None:
    """That nothing is left is what the fixture asserts."""
    launcher = start(job, mpi, 2)
    killed = min(pid for pid, line in job.processes().items() if re.match(KEEPERS[keeper], line))
    os.kill(killed, signal.SIGKILL)
    assert launcher.wait(SECONDS) != 0


@pytest.mark.openmpi
def test_two_jobs_at_once_know_nothing_of_each_other(watch: Callable[..., Job]) -> None:
    """Of the same user on the same host; one is killed, the other ends well, with the right sums until then."""
    endless, other = watch(), watch()
    start(endless, "openmpi", 2)
    survivor = start(
        other,
        "openmpi",
        2,
        """
        import os, sys, time, numpy as np, ringtrain as rt
        rt.init()
        print("at work", flush=True)
        while not rt.broadcast_object(os.path.exists("/dev/shm/enough"), root_rank=0):
            assert rt.allreduce(np.full(1000, rt.rank() + 1.0), name="step", op=rt.Sum)[0] == 3
        os.unlink("/dev/shm/enough") if rt.rank() == 0 else None
    """,
    )
    endless.started[0].kill()
    assert not endless.await_end(SECONDS)
    (other.shared_memory / "enough").touch()
    assert survivor.wait(SECONDS) == 0


@pytest.mark.openmpi
def test_workers_of_a_data_loader_end_with_their_killed_rank(job: Job) -> None:
    launcher = start(
        job,
        "openmpi",
        2,
        """
        import os, signal, numpy as np, torch, ringtrain as rt
        rt.init()
        workers = iter(torch.utils.data.DataLoader(range(10**9), num_workers=2))
        next(workers)
        print("at work", flush=True)
        rt.barrier()
        if rt.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            next(workers), rt.allreduce(np.ones(10), name="step")
    """,
    )
    assert launcher.wait(SECONDS) == 128 + signal.SIGKILL


@pytest.mark.tcp
@pytest.mark.long
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
def test_what_killed_workers_listen_on_goes_with_them(end: str, job: Job) -> None:
    """Sockets of multiprocessing in the folder for temporary files, one folder for each worker of a loader."""
    program = f"""
        import os, signal, torch
        workers = iter(torch.utils.data.DataLoader(range(10**9), num_workers=2))
        next(workers)
        print(sum(name.startswith("pymp-") for name in os.listdir(os.environ["TMPDIR"])), flush=True)
        {end}
    """
    python = python_with("tcp")
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "-np", "1", python, "-c", textwrap.dedent(program)]
    done = job.run(*line, seconds=SECONDS, env=rank_environment())
    assert done.stdout == "[0] 2\n" and done.returncode != 0, done.stdout + done.stderr
    assert not list(Path(job.temporary).glob("pymp-*"))


@pytest.mark.tcp
def test_sockets_of_other_processes_stay(tmp_path: Path) -> None:
    """What is removed is a socket of multiprocessing's that a process of the rank's holds, and a folder that is empty then."""
    mine, theirs, other = (tmp_path / name for name in ("pymp-1", "pymp-2", "own"))
    held = []
    for folder in (mine, theirs, other):
        folder.mkdir()
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].bind(str(folder / "listener-1"))
    (theirs / "file").touch()
    found = processes.listeners_of([os.getpid()])
    assert found >= {str(mine / "listener-1"), str(theirs / "listener-1")} and str(other / "listener-1") not in found
    assert not {path for path in processes.listeners_of([1, os.getppid()]) if path.startswith(str(tmp_path))}
    for each in held:
        each.close()
    processes.remove_listeners(path for path in found if path.startswith(str(tmp_path)))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "own", "own/listener-1", "pymp-2", "pymp-2/file",
    ]  # fmt: skip


# Each rank has a child of its own session whose parent has ended, and shares memory and semaphores with another that is
# deaf.
HIDING = """
    import multiprocessing, os, signal, sys, time
    from multiprocessing import shared_memory
    import numpy as np, ringtrain as rt

    def deaf(*shared):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    if __name__ == "__main__":
        rt.init()
        if os.fork() == 0:
            os.setsid()
            deaf() if os.fork() == 0 else os._exit(0)
        os.wait()
        spawn = multiprocessing.get_context("spawn")
        memory, lock = shared_memory.SharedMemory(create=True, size=1 << 16), spawn.Lock()
        spawn.Process(target=deaf, args=(lock,), daemon=True).start()
        print("at work", flush=True)
        rt.barrier()
        if sys.argv[1] == "a rank fails" and rt.rank() == 1:
            os._exit(3)
        if sys.argv[1] == "a rank is killed" and rt.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while sys.argv[1] != "all end":
            rt.allreduce(np.ones(10), name="step")
        rt.shutdown()
        from mpi4py import MPI
        MPI.Finalize()  # since what follows lets no handler do it, and multiprocessing's would wait for the deaf child
        memory.unlink()
        os._exit(0)
"""


@pytest.mark.parametrize(
    "mpi, ending",
    [
        *(
            pytest.param("openmpi", ending, marks=pytest.mark.openmpi)
            for ending in ("a rank is killed", "Ctrl-C", "the launcher is killed")
        ),
        *(
            pytest.param("openmpi", ending, marks=[pytest.mark.openmpi, pytest.mark.long])
            for ending in ("a rank fails", "the agent is killed", "all end")
        ),
        *(
            pytest.param("mpich", ending, marks=[pytest.mark.mpich, pytest.mark.long])
            for ending in ("a rank is killed", "a rank fails", "Ctrl-C", "the launcher is killed", "all end")
        ),
    ],
)
def test_what_hides_from_its_group_ends_and_what_it_shared_is_removed(
    ending: str, mpi: str, job: Job, tmp_path
) -> None:
    """That nothing is left is what the fixture asserts, of /dev/shm too."""
    program = tmp_path / "hiding.py"
    program.write_text(textwrap.dedent(HIDING))
    command = ringtrainrun(mpi, 2, python_with(mpi), str(program), ending)
    launcher = job.start(*command, stdout=subprocess.PIPE, text=True, env=rank_environment())
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] at work\n", "[1] at work\n"]
    assert any("psm_" in name for name in job.segments()) or ending.startswith("a")
    if ending == "Ctrl-C":
        launcher.send_signal(signal.SIGINT)
    if ending.endswith("er is killed"):
        launcher.kill()
    if ending == "the agent is killed":
        os.kill(min(pid for pid, line in job.processes().items() if re.match(KEEPERS["agent"], line)), signal.SIGKILL)
    assert (launcher.wait(SECONDS) == 0) == (ending == "all end")


# Rank 0 makes the host's memory, and is killed while it waits for others to open that.
MEETING = """
    import os, signal, threading
    import ringtrain as rt

    def watch():
        known = set(os.listdir("/dev/shm"))
        while not any(name.startswith("ringtrain-") for name in set(os.listdir("/dev/shm")) - known):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RINGTRAIN_RANK"] == "0":
        threading.Thread(target=watch, daemon=True).start()
    rt.init()
    rt.barrier()
"""


@pytest.mark.tcp
def test_a_rank_that_is_killed_while_ranks_meet_leaves_no_memory(job: Job) -> None:
    """Its name would stay until the host is started again. That nothing is left is what the fixture asserts."""
    command = ringtrainrun("tcp", 3, python_with("tcp"), "-c", textwrap.dedent(MEETING))
    launcher = job.start(*command, env=rank_environment())
    assert launcher.wait(SECONDS) in (0, 128 + signal.SIGKILL)  # or all have met before
