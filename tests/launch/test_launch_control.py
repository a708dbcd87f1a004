"""Whoever reads what ringtrainrun writes may stop: the job is controlled as ever, nothing hangs, and what is lost is counted.

Real pipes that nobody reads, real terminals, full disks; signals as nohup, shells in the background and `stty tostop`
leave them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import EACH_MPI, rank_environment, ringtrainrun

from benchmarks.jobs import Job

OPENMPI = pytest.mark.openmpi
PATIENCE = 60.0
SECONDS_TO_STOP = (
    28.0  # 2 for whoever may still read, 5 for ranks to end, four times: after 30 the agents give up themselves
)
# Writes without an end, and says in a file how far it has come.
ENDLESS = """
    import os, sys, time
    rank = os.environ["RINGTRAIN_RANK"]
    for line in range(10**9):
        print(line, "x" * 1000)
        if line % 10 == 0:
            with open(f"{sys.argv[1]}/{rank}.new", "w") as file:
                file.write(str(line))
            os.replace(file.name, f"{sys.argv[1]}/{rank}")
"""


@pytest.fixture
def job() -> Job:
    """A job of which nothing may be left."""
    made = Job()
    yield made
    left = made.await_end(PATIENCE)
    made.close()
    assert not left, f"left over:\n{left}"


def python(program: str, *arguments: object) -> list[str]:
    return ["python", "-c", textwrap.dedent(program), *map(str, arguments)]


def start(job: Job, mpi: str, ranks: int, *command: str, **options) -> subprocess.Popen:
    return job.start(*ringtrainrun(mpi, ranks, *command), env=rank_environment(), **options)


def await_that(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s until {what}"
        time.sleep(0.05)


def lines_written(folder: Path) -> list[int]:
    return [int((folder / name).read_text()) if (folder / name).exists() else -1 for name in ("0", "1")]


def await_standstill(folder: Path) -> list[int]:
    """Until both ranks have written something, and for a second nothing more."""
    seen = [-1, -1]
    while -1 in seen or seen != (now := lines_written(folder)):
        seen = now if -1 not in seen else lines_written(folder)
        time.sleep(1.0)
    return seen


# ---- nobody reads ----


@EACH_MPI
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_ends_a_job_that_nobody_reads(mpi: str, number: signal.Signals, job: Job, tmp_path: Path) -> None:
    launcher = start(job, mpi, 2, *python(ENDLESS, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    stood_at = await_standstill(tmp_path)
    assert max(stood_at) < 5000, "the ranks have to wait for whoever reads, and not to fill memory"
    launcher.send_signal(number)
    assert launcher.wait(SECONDS_TO_STOP) == 128 + number


@OPENMPI
def test_a_second_signal_ends_it_at_once(job: Job, tmp_path: Path) -> None:
    launcher = start(
        job,
        "openmpi",
        2,
        *python("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + textwrap.dedent(ENDLESS), tmp_path),
        stdout=subprocess.PIPE,
    )
    await_standstill(tmp_path)
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert launcher.wait(SECONDS_TO_STOP) == 130


@OPENMPI
def test_a_rank_that_dies_ends_a_job_that_nobody_reads(job: Job, tmp_path: Path) -> None:
    """The cause is told on stderr, which is read."""
    dies = """
    import os, threading
    if os.environ["RINGTRAIN_RANK"] == "1":  # by the clock: it may be waiting for its reader before it has written much
        threading.Timer(2.0, os.kill, (os.getpid(), 9)).start()
    """
    program = textwrap.dedent(dies) + textwrap.dedent(ENDLESS)
    launcher = start(
        job, "openmpi", 2, *python(program, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    code = launcher.wait(PATIENCE)
    told = launcher.stderr.read().splitlines()
    assert code == 128 + signal.SIGKILL
    assert re.match(r"ringtrainrun: stdout: \d+ lines \(\d+ bytes\) are missing there: nobody has read it\.", told[-2])
    assert told[-1].startswith("ringtrainrun: rank 1 (host ") and "SIGKILL" in told[-1]


@OPENMPI
def test_a_pager_that_pauses_gets_every_line(job: Job, tmp_path: Path) -> None:
    """The ranks wait while it does, and nothing is lost."""
    program = "import os\nfor line in range(4000): print(line, 'x' * 1000)"
    launcher = start(job, "openmpi", 2, *python(program), stdout=subprocess.PIPE)
    time.sleep(3.0)
    assert launcher.poll() is None
    said = launcher.stdout.read().splitlines()
    assert launcher.wait(PATIENCE) == 0
    for rank in (b"[0] ", b"[1] "):
        assert [int(line.split()[1]) for line in said if line.startswith(rank)] == list(range(4000))


@OPENMPI
def test_a_terminal_that_is_stopped_is_no_reason_not_to_end(job: Job, tmp_path: Path) -> None:
    """As Ctrl-S stops it. What it has shown before goes on afterwards."""
    leader, follower = pty.openpty()
    launcher = start(job, "openmpi", 2, *python(ENDLESS, tmp_path), stdout=follower, stderr=follower)
    assert b"[" in os.read(leader, 4096)
    os.write(leader, b"\x13")  # Ctrl-S
    await_standstill(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(SECONDS_TO_STOP) == 143
    os.close(leader)
    os.close(follower)


@OPENMPI
def test_a_pipe_that_another_program_has_made_non_blocking_loses_nothing(job: Job) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    launcher = start(job, "openmpi", 2, *python("for line in range(500): print(line, 'x' * 1000)"), stdout=writer)
    os.close(writer)
    time.sleep(2.0)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().splitlines()
    assert launcher.wait(PATIENCE) == 0 and len(said) == 1000


# ---- disks that take nothing ----

TRAINS = """
    import os, sys, time
    for step in range(200):
        print(step, "x" * 1000)
    open(f"{sys.argv[1]}/{os.environ['RINGTRAIN_RANK']}", "w").close()
    if os.environ["RINGTRAIN_RANK"] == sys.argv[2]:
        raise ValueError("the cause")
"""


@EACH_MPI
@pytest.mark.parametrize("failing", [pytest.param("none", marks=pytest.mark.long), "1"])
def test_a_full_disk_under_the_output_folder_ends_no_training(mpi: str, failing: str, job: Job, tmp_path: Path) -> None:
    """One warning, a count, and the cause last. EFBIG stands for ENOSPC and EDQUOT, which go the same way."""
    logs = tmp_path / "logs"
    command = ringtrainrun(mpi, 2, "--output-filename", str(logs), *python(TRAINS, tmp_path, failing))
    done = job.run("prlimit", "--fsize=65536", *command, seconds=PATIENCE, env=rank_environment())
    assert done.returncode == (0 if failing == "none" else 1), done.stderr
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()
    told = done.stderr.splitlines()
    warnings = [line for line in told if "must take what the ranks write, but: File too large. The job goes on" in line]
    assert len(warnings) == 1 and f"output folder '{logs}'" in warnings[0]
    lost = [re.search(r": (\d+) lines \(\d+ bytes\) are missing there: File too large\.$", line) for line in told]
    count = next(int(match[1]) for match in lost if match)
    kept = sum((logs / f"rank.{rank}" / "stdout").read_text().count("\n") for rank in range(2))
    assert 400 - kept <= count <= 402 - kept
    assert "Traceback" not in done.stderr.replace("[1] Traceback", "")
    if failing == "1":
        assert told[-1] == "[1] ValueError: the cause"


@OPENMPI
@pytest.mark.parametrize("streams", ["stdout", pytest.param("both", marks=pytest.mark.long)])
def test_a_full_disk_behind_stdout_ends_no_training(streams: str, job: Job, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        launcher = start(
            job,
            "openmpi",
            2,
            *python(TRAINS, tmp_path, "1"),
            stdout=full,
            stderr=full if streams == "both" else subprocess.PIPE,
        )
        assert launcher.wait(PATIENCE) == 1
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()
    if streams == "stdout":
        told = launcher.stderr.read().decode().splitlines()
        assert (
            sum("stdout: it must take what the ranks write, but: No space left on device." in line for line in told)
            == 1
        )
        assert "ringtrainrun: stdout: 400 lines" in "\n".join(told)
        assert told[-1] == "[1] ValueError: the cause"


@OPENMPI
def test_what_stderr_cannot_take_is_said_on_stdout(job: Job, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        launcher = start(job, "openmpi", 2, *python(TRAINS, tmp_path, "1"), stdout=subprocess.PIPE, stderr=full)
        told = launcher.stdout.read().decode()
    assert launcher.wait(PATIENCE) == 1 and "ringtrainrun: rank 1 (host " in told


@OPENMPI
def test_results_without_room_are_no_results(job: Job, tmp_path: Path) -> None:
    """Of `ringtrain.run`: its caller learns it in an error of ours."""
    program = """
        import os, ringtrain, resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        def large():
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)  # of the rank, and not of the launcher
            return bytes(1 << 20) if os.environ["RINGTRAIN_RANK"] == "1" else None
        try:
            ringtrain.run(large, np=2)
        except RuntimeError as error:
            print(type(error).__name__, error)
    """
    done = job.run(sys.executable, "-c", textwrap.dedent(program), seconds=PATIENCE, env=rank_environment())
    assert "RunError run: expected a result from each of 2 ranks" in done.stdout, done
    assert (
        "the ranks' results must have room there, but: File too large." in done.stderr
        and "Traceback" not in done.stderr
    ), done


# ---- signals ----

SHOW_SIGNALS = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]


def signals_of_ranks(said: str) -> dict[str, set[int]]:
    """Numbers of the signals that a rank blocks and ignores; of both ranks alike."""
    masks = {tuple(line.split()[1:]) for line in said.splitlines()}
    assert len(masks) == 2, said
    return {name.strip(":"): {bit + 1 for bit in range(64) if int(mask, 16) >> bit & 1} for name, mask in masks}


@EACH_MPI
@pytest.mark.parametrize(
    "before, ignored", [("", set()), ("trap '' HUP INT QUIT;", {1, 2, 3}), ("trap '' PIPE CHLD USR1;", {10})]
)
def test_ranks_start_with_the_signals_that_a_shell_would_give_them(
    mpi: str, before: str, ignored: set[int], job: Job
) -> None:
    command = ringtrainrun(mpi, 2, *SHOW_SIGNALS)
    done = job.run("sh", "-c", f'{before} exec "$@"', "sh", *command, seconds=PATIENCE, env=rank_environment())
    assert done.returncode == 0, done.stderr
    assert signals_of_ranks(done.stdout) == {"SigBlk": set(), "SigIgn": ignored}


@OPENMPI
def test_a_blocked_signal_is_heard_all_the_same(job: Job) -> None:
    launcher = start(
        job,
        "openmpi",
        2,
        "sh",
        "-c",
        "grep -E 'Sig(Blk|Ign)' /proc/self/status; exec sleep 100",
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD]),
    )
    said = "".join(launcher.stdout.readline() for _ in range(4))
    assert signals_of_ranks(said) == {"SigBlk": set(), "SigIgn": set()}
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(SECONDS_TO_STOP) == 143


@OPENMPI
@pytest.mark.parametrize(
    "prefix, number",
    [(["nohup"], signal.SIGHUP), (["sh", "-c", "trap '' INT; exec \"$@\"", "sh"], signal.SIGINT)],
    ids=["nohup", "background of a script"],
)
def test_a_signal_that_is_to_be_ignored_is_ignored(prefix: list[str], number: int, job: Job, tmp_path: Path) -> None:
    command = ringtrainrun("openmpi", 2, "sh", "-c", f"echo ready; until [ -e {tmp_path}/enough ]; do sleep 0.1; done")
    launcher = job.start(*prefix, *command, stdout=subprocess.PIPE, text=True, env=rank_environment())
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    os.kill(min(job.find("-m ringtrain.launch")), number)
    time.sleep(1.0)
    assert launcher.poll() is None
    (tmp_path / "enough").touch()
    assert launcher.wait(PATIENCE) == 0


# Runs a command in the background of its terminal, which stops whatever writes there; returns 0 if it was never
# stopped.
IN_THE_BACKGROUND = """
    import os, signal, subprocess, sys, termios
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    settings = termios.tcgetattr(1)
    settings[3] |= termios.TOSTOP
    termios.tcsetattr(1, termios.TCSANOW, settings)
    def begin():
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    launcher = subprocess.Popen(sys.argv[1:], preexec_fn=begin)
    _, status = os.waitpid(launcher.pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.killpg(launcher.pid, signal.SIGKILL)
        sys.exit(f"stopped by {signal.Signals(os.WSTOPSIG(status)).name}")
    print("code", os.waitstatus_to_exitcode(status))
"""


@OPENMPI
def test_a_job_in_the_background_is_not_stopped_when_it_writes(job: Job) -> None:
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(IN_THE_BACKGROUND),
        *ringtrainrun("openmpi", 2, "sh", "-c", "echo out; echo err >&2"),
    ]
    variables = rank_environment()
    name, _, value = job.mark.partition("=")
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe(command[0], command, {**variables, name: value})
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(terminal, 4096):
            said += data
    os.close(terminal)
    os.waitpid(process, 0)
    assert b"code 0" in said and said.count(b"out") == 2 and said.count(b"err") == 2, said


# ---- memory ----


@OPENMPI
@pytest.mark.parametrize(
    "program",
    [
        "for _ in range(15): sys.stderr.write('x' * 10_000_000 + '\\n')",
        pytest.param("for k in range(200_000): sys.stderr.write(f'\\r{k} ' + '#' * 90)", marks=pytest.mark.long),
        pytest.param("for _ in range(30): sys.stderr.buffer.write(os.urandom(1 << 20))", marks=pytest.mark.long),
    ],
    ids=["lines of 10 MB", "progress without an end", "binary garbage"],
)
def test_memory_is_bounded_whatever_ranks_write(program: str, job: Job) -> None:
    launcher = start(
        job, "openmpi", 2, *python("import os, sys\n" + program), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    peak = 0
    while launcher.poll() is None:
        for process in job.find("-m ringtrain.launch"):
            with contextlib.suppress(OSError):
                match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
                peak = max(peak, int(match[1]) if match else 0)
        time.sleep(0.05)
    assert launcher.returncode == 0
    assert 0 < peak < 120 << 10, f"{peak} KiB"


@pytest.mark.mpich
def test_a_hangup_under_nohup_does_not_switch_a_debug_log_on(job: Job) -> None:
    """UCX takes SIGHUP over for it, and unignores it so."""
    program = python("""
        import os, signal
        import numpy as np, ringtrain as rt
        rt.init()
        os.kill(os.getpid(), signal.SIGHUP)
        rt.allreduce(np.ones(10), name="step")
        print("done")
    """)
    command = ringtrainrun("mpich", 2, *program)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = job.start("nohup", *command, env=rank_environment(), **pipes)
    said, _ = started.communicate(timeout=PATIENCE)
    assert started.returncode == 0 and said.count("done") == 2
    assert "UCX" not in said
