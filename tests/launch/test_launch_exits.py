"""How ranks end under ringtrainrun: by any of Python's ways, several at once, without their engine, as a child of a rank."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from environments import (
    EACH_MPI,
    EACH_STARTER,
    python_with,
    rank_environment,
    ringtrainrun,
)
from eventually import eventually

from ringtrain.launch.agent import connections, processes

PATIENCE = 60.0
HOST = os.uname().nodename
# Rank 1 ends in the way that is asked for, while the others wait for it.
ENDING = """
import os, sys, threading
from sys import exit as exit_from_before
import numpy as np, ringtrain as rt
rt.init()
rt.barrier()

def fail():
    raise ValueError("in a thread")

def thread(target):
    started = threading.Thread(target=target)
    started.start()
    started.join()

if rt.rank() == 1:
    {ending}
rt.allreduce(np.ones(10), name="step")
"""


def run(mpi: str, ranks: int, program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ringtrainrun(mpi, ranks, "python", "-c", textwrap.dedent(program), *arguments),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(),
    )


# ---- exit codes ----

ENDINGS = [("exit(9)", 9), ("raise SystemExit(7)", 7), ("os._exit(5)", 5), ("thread(fail); sys.exit()", 1)]
RARER_ENDINGS = [
    ("exit_from_before(8)", 8),
    ("sys.exit('text')", 1),
    ("quit(9)", 9),
    ("sys.exit(4)", 4),
    ("sys.exit(256 + 6)", 6),
    ("raise SystemExit('text')", 1),
]


@EACH_STARTER
@pytest.mark.parametrize(
    "ending, code", [*ENDINGS, *(pytest.param(*case, marks=pytest.mark.long) for case in RARER_ENDINGS)]
)
def test_the_rank_that_ended_is_blamed_with_its_code(mpi: str, ending: str, code: int) -> None:
    done = run(mpi, 2, ENDING.format(ending=ending))
    assert done.returncode == code, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("ringtrainrun: rank")]
    assert said[-1].startswith(f"ringtrainrun: rank 1 (host {HOST}) failed with exit code {code}"), done.stderr


@pytest.mark.long
@EACH_MPI
@pytest.mark.parametrize("ending", ["thread(lambda: sys.exit(9))", "try: sys.exit(9)\n    except SystemExit: pass"])
def test_an_exit_that_ends_no_process_is_no_failure(mpi: str, ending: str) -> None:
    """Such a rank waits for the others to come to their end, which one that failed does for some seconds only."""
    done = run(mpi, 2, ENDING.format(ending=ending) + "if rt.rank() == 0:\n    import time; time.sleep(9)")
    assert done.returncode == 0 and "ringtrainrun: rank" not in done.stderr, done.stderr


@EACH_STARTER
def test_ranks_that_are_killed_together_are_all_named(mpi: str) -> None:
    program = """
        import os, signal, numpy as np, ringtrain as rt
        rt.init()
        others = rt.allgather_object(os.getpid())
        if rt.rank() == 0:
            for process in others[1:]:
                os.kill(process, signal.SIGKILL)
        while True:
            rt.allreduce(np.ones(10), name="step")
    """
    done = run(mpi, 3, program)
    assert done.returncode == 128 + signal.SIGKILL
    last = next(line for line in done.stderr.splitlines() if line.startswith("ringtrainrun: rank"))
    assert re.search(
        rf"rank [12] \(host {HOST}\) was killed by signal 9, .*, rank [12] \(host {HOST}\) too[;.]", last
    ), done.stderr


@EACH_MPI
def test_the_engines_death_is_no_ranks_fault(mpi: str) -> None:
    """Under MPICH some ranks then crash by themselves."""
    work = "import numpy as np, ringtrain as rt\nrt.init()\nprint('at work')\nwhile True: rt.allreduce(np.ones(10), name='step')"
    launcher = subprocess.Popen(
        ringtrainrun(mpi, 2, "python", "-c", work),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=rank_environment(),
    )
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] at work\n", "[1] at work\n"]
    os.kill(engine_beside_the_ranks(launcher.pid), signal.SIGKILL)
    _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode != 0
    last = said.splitlines()[-1]
    assert last.startswith(f"ringtrainrun: host {HOST}: {'Open MPI' if mpi == 'openmpi' else 'MPICH'}"), said
    assert "has ended there while its ranks still ran" in last


def engine_beside_the_ranks(launcher: int) -> int:
    """Process id of the engine's program that has started the ranks of this host: mpirun itself, or MPICH's proxy."""
    parents = {}
    for folder in Path("/proc").iterdir():
        try:
            parents[int(folder.name)] = processes.Status(int(folder.name))
        except (OSError, ValueError):
            pass
    below = [launcher]
    for process in below:
        below += [child for child, status in parents.items() if status.parent == process]
    return next(
        process
        for process in reversed(below)
        if parents[process].name in ("hydra_pmi_proxy", "prterun", "mpirun", "prte")
    )


def test_a_process_that_cannot_be_killed_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in the state D: here nobody kills it."""
    monkeypatch.setattr(processes, "SECONDS_TO_TIDY", 0.1)
    monkeypatch.setattr(processes, "SECONDS_TO_DIE", 0.2)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        monkeypatch.setattr(processes.os, "kill", lambda *_: None)
        assert processes.kill_all({process.pid}, b"") == {process.pid: ("sleep", process.pid)}
    finally:
        monkeypatch.undo()
        process.kill()
        process.wait()
    assert processes.kill_all({process.pid}, b"") == {}


# A launcher whose agents and supervisors kill nobody.
HARMLESS_LAUNCHER = """
import os, pathlib, re, shutil, sys
from ringtrain.launch import cli, host_errors, job, mpi_installation, reach
from ringtrain.launch.agent.link import edition

def harmless(program):
    text, changes = re.subn(r"os\\.kill\\(process, signal\\.SIGKILL\\)", "None", program.read_text())
    assert changes == 1, program
    program.unlink()
    program.write_text(text)

launch = pathlib.Path(sys.argv[1], "ringtrain", "launch")
shutil.copytree(host_errors.PACKAGE, launch.parent, copy_function=os.symlink)
reach.AGENT_PROGRAM, mpi_installation.RANK_PROGRAM = launch / "agent" / "__main__.py", launch / "rank.py"
harmless(launch / "agent" / "processes.py")
reach.EDITION = edition(launch)
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.openmpi
def test_the_launcher_says_who_could_not_be_ended(tmp_path: Path) -> None:
    deaf = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid())\ntime.sleep(300)"
    python, _, _, *arguments = ringtrainrun("openmpi", 1, "python", "-c", deaf)
    launcher = subprocess.Popen(
        [python, "-c", HARMLESS_LAUNCHER, tmp_path, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=rank_environment(),
    )
    left = int(launcher.stdout.readline().split()[1])
    try:
        launcher.send_signal(signal.SIGINT)
        said = launcher.communicate(timeout=PATIENCE)[1].splitlines()[-1]
    finally:
        os.kill(left, signal.SIGKILL)
    assert launcher.returncode == 130
    assert said.startswith(f"ringtrainrun: stopped by SIGINT; not ended: process {left} (python"), said
    assert f"of rank 0 (host {HOST})" in said


# ---- children of a rank ----

CHILDREN = """
import multiprocessing, os, subprocess, sys, numpy as np, ringtrain as rt
ASK = "import ringtrain as rt; rt.init(); print('a world of', rt.size())"

def ask():
    try:
        exec(ASK)
    except rt.RingtrainError as error:
        print(error, flush=True)

if __name__ == "__main__":
    rt.init()
    if rt.rank() == 1:
        print("rank 1 is", os.getpid(), flush=True)
        if sys.argv[1] in ("spawn", "forkserver"):
            child = multiprocessing.get_context(sys.argv[1]).Process(target=ask)
            child.start()
            child.join()
        elif sys.argv[1] == "alone":
            subprocess.run([sys.executable, "-c", ASK], env=dict(os.environ, RINGTRAIN_ALONE="1"))
        else:
            assert subprocess.run([sys.executable, "-c", ASK], stderr=subprocess.STDOUT).returncode == 1
    print(rt.allreduce(np.ones(1), op=rt.Sum), flush=True)
    if sys.argv[1] == "after":
        rt.shutdown()
        if os.fork() == 0:
            ask()
            os._exit(0)
        os.wait()
"""


@EACH_STARTER
@pytest.mark.parametrize("way", ["spawn", "subprocess", "after", pytest.param("forkserver", marks=pytest.mark.long)])
def test_a_child_of_a_rank_is_refused_by_name(mpi: str, way: str, tmp_path: Path) -> None:
    """And the job goes on: a child's failure is its parent's to judge."""
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    done = subprocess.run(
        ringtrainrun(mpi, 2, "python", str(program), way),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(),
    )
    assert done.returncode == 0, done.stderr
    parent = re.search(r"rank 1 is (\d+)", done.stdout)[1]
    assert f"must be a rank of its own, but is a child of rank 1 (process {parent}), whose variables" in done.stdout, (
        done.stdout
    )
    assert done.stdout.count("[2.]") == 2


@EACH_STARTER
def test_a_child_of_a_rank_may_be_a_world_of_one(mpi: str, tmp_path: Path) -> None:
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    done = subprocess.run(
        ringtrainrun(mpi, 2, "python", str(program), "alone"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(),
    )
    assert done.returncode == 0 and "[1] a world of 1\n" in done.stdout, done.stderr


@EACH_MPI
def test_a_child_is_refused_without_ringtrainrun_too(mpi: str, tmp_path: Path) -> None:
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    python = python_with(mpi)
    engine = Path(python).with_name("mpirun" if mpi == "openmpi" else "mpiexec")
    further = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if mpi == "openmpi" else []
    done = subprocess.run(
        [engine, *further, "-np", "2", python, program, "subprocess"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(),
    )
    assert done.returncode == 0 and "but is a child of rank 1 (process" in done.stdout, done.stdout + done.stderr


# ---- who is named when no rank has failed by itself ----

# Rank 1 does something in the middle of many steps. The others learn of it from the world, long before the engine does.
AMIDST = """
import os, signal
import numpy as np, ringtrain as rt
rt.init()
for step in range(10**9):
    if rt.rank() == 1 and step == 300:
        {deed}
    rt.allreduce(np.ones(10), name="step")
"""


@EACH_STARTER
def test_a_rank_that_leaves_with_code_0_amidst_steps_is_named_last(mpi: str) -> None:
    done = run(mpi, 3, AMIDST.format(deed="os._exit(0)"))
    last = [line for line in done.stderr.splitlines() if line.startswith("ringtrainrun: ")][-1]
    assert done.returncode == 1
    good_end = "shutdown()" if mpi == "tcp" else "ending MPI"
    assert last.startswith(f"ringtrainrun: rank 1 left with exit code 0, but without {good_end} and while"), done.stderr


@EACH_STARTER
def test_a_rank_that_was_stopped_is_named(mpi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTRAIN_DEAD_AFTER_SECONDS", "2")
    done = run(mpi, 3, AMIDST.format(deed="os.kill(os.getpid(), signal.SIGSTOP)"))
    named = [line for line in done.stderr.splitlines() if "because of another rank" in line]
    assert done.returncode == 1
    assert named and ": rank 1 on host " in named[-1] and "heard none for 2 s" in named[-1]


# ---- what they leave ----

KILLED_IN_INIT = """
import mmap, os, signal, sys, time
name = sys.argv[1]
with open(name, "xb+") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
time.sleep(1.0)
print("left", os.path.exists(name))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.openmpi
def test_what_a_rank_shared_before_it_was_killed_within_mpi_init_is_removed() -> None:
    """It could tell nobody, nobody else maps it, and its map is gone with it; another program's stays."""
    mine, others = (f"/dev/shm/mpich_shm_{os.getpid()}_{kind}" for kind in ("rank", "other"))
    try:
        Path(others).write_bytes(b"of another job")
        done = run("openmpi", 1, KILLED_IN_INIT, mine)
        assert done.returncode == 128 + signal.SIGKILL and "left True" in done.stdout, done.stderr
        assert not os.path.exists(mine) and os.path.exists(others)
    finally:
        for left in filter(os.path.exists, (mine, others)):
            os.unlink(left)


def test_what_removes_the_shared_memory_is_spared_though_it_waits_in_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its command line cannot be read at the first look, as while a page of it is read from a disk."""
    line = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    kept, killed = (subprocess.Popen([*line, word]) for word in ("multiprocessing.resource_tracker", "rank"))
    looks = []

    def is_waiting(process: int) -> bool:
        looks.append(process)
        return looks.count(process) == 1

    monkeypatch.setattr(processes, "is_waiting", is_waiting)
    try:
        both = [f"/proc/{each.pid}/cmdline" for each in (kept, killed)]
        eventually(lambda: all(b"sleep" in processes.read_file(each) for each in both), "both have started")
        processes.kill_once([kept.pid, killed.pid], spare=processes.TIDIERS)
        assert killed.wait(PATIENCE) == -signal.SIGKILL and kept.poll() is None
    finally:
        for each in (kept, killed):
            each.kill()
            each.wait()


def test_an_agent_hears_a_rank_out_that_has_ended_in_the_same_moment_as_another() -> None:
    """One round of the selector finds both connections; the end of the first has the second one heard out and closed."""
    agent = object.__new__(connections.RankConnections)
    agent._ranks, agent._launcher, agent._selector = {}, Told(), selectors.DefaultSelector()
    for number in range(2):
        ours, theirs = socket.socketpair()
        agent._ranks[ours] = connections.ConnectedRank()
        agent._ranks[ours].number, agent._ranks[ours].has_ended = number, True
        agent._selector.register(
            ours, selectors.EVENT_READ, lambda ours=ours: (agent._hear(ours), agent.hear_all_out())
        )
        theirs.close()
    for key, _ in agent._selector.select(0):
        key.data()
    assert not agent


class Told:
    """A launcher that is told nothing here."""

    def tell(self, facts: object) -> None:
        raise AssertionError(facts)
