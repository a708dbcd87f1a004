"""ringtrainrun with real ranks, under each MPI and without: placement, output, exit codes, first causes, and that nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from environments import EACH_STARTER, ringtrainrun

pytestmark = EACH_STARTER
PATIENCE = 60.0


def run(mpi: str, ranks: int, *command: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ringtrainrun(mpi, ranks, *command),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=dict(os.environ, **variables),
        input="words that no rank may read\n",
    )


def python(text: str) -> tuple[str, ...]:
    return "python", "-c", text


def members(job: str) -> list[int]:
    """Processes that carry this job's mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and job.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def await_that(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s until {what}"
        time.sleep(0.05)


# ---- placement and environment ----


def test_each_rank_knows_its_place(mpi: str) -> None:
    names = ["RINGTRAIN_RANK", "RINGTRAIN_SIZE", "RINGTRAIN_LOCAL_RANK", "RINGTRAIN_LOCAL_SIZE", "OMP_NUM_THREADS"]
    done = run(mpi, 3, *python(f"import os; print([os.environ[n] for n in {names}])"), OMP_NUM_THREADS="5")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] ['{rank}', '3', '{rank}', '3', '5']" for rank in range(3)]
    assert "OMP_NUM_THREADS" not in done.stderr


def test_threads_are_limited_and_it_is_said_once(mpi: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ringtrainrun(mpi, 4, "printenv", "OMP_NUM_THREADS"),
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE,
    )
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {threads}" for rank in range(4)]
    assert done.stderr.count("OMP_NUM_THREADS") == 1


def test_python_is_that_of_the_launcher_and_stdin_is_empty(mpi: str) -> None:
    done = run(mpi, 2, *python("import sys; print(sys.prefix, repr(sys.stdin.read()))"))
    prefix = os.path.dirname(os.path.dirname(ringtrainrun(mpi, 1)[0]))
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {prefix} ''" for rank in range(2)]


def address_of_this_machine() -> str:
    """An address of a network interface; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("needs a network interface besides the loopback")
        return probe.getsockname()[0]


def test_hosts_are_handed_to_the_engine(mpi: str) -> None:
    """An address of this machine needs no ssh, nor does a name that stands for one."""
    done = run(mpi, 2, "-H", f"{address_of_this_machine()}:2", "sh", "-c", "echo here; exit $RINGTRAIN_RANK")
    assert sorted(done.stdout.splitlines()) == ["[0] here", "[1] here"]
    assert done.returncode == 1


# ---- output ----


def test_lines_of_all_ranks_are_whole_tagged_and_in_order(mpi: str) -> None:
    lines, width = 300, 3000
    done = run(mpi, 3, *python(f"import os\nfor k in range({lines}): print(k, os.environ['RINGTRAIN_RANK'] * {width})"))
    seen: dict[str, int] = {}
    for line in done.stdout.splitlines():
        tag, number, text = line.split(" ")
        assert text == tag[1:-1] * width
        assert int(number) == seen.get(tag, 0)
        seen[tag] = int(number) + 1
    assert seen == {"[0]": lines, "[1]": lines, "[2]": lines}


def test_streams_stay_apart(mpi: str) -> None:
    done = run(mpi, 2, *python("import sys; print('out'); print('err', file=sys.stderr); sys.stderr.write('no end')"))
    assert sorted(done.stdout.splitlines()) == ["[0] out", "[1] out"]
    told = sorted(line for line in done.stderr.splitlines() if not line.startswith("ringtrainrun:"))
    assert told == ["[0] err", "[0] no end", "[1] err", "[1] no end"]


def test_a_reader_that_leaves_ends_the_job(mpi: str) -> None:
    """As `ringtrainrun ... | head -1` does."""
    mark = f"job-{uuid.uuid4()}"
    launcher = subprocess.Popen(
        ringtrainrun(mpi, 2, "sh", "-c", "while echo line; do sleep 0.02; done"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ, RINGTRAIN_TEST_JOB=mark),
    )
    assert launcher.stdout.readline().endswith(b" line\n")
    launcher.stdout.close()
    assert launcher.wait(PATIENCE) == 128 + signal.SIGPIPE
    assert b"Traceback" not in launcher.stderr.read()
    launcher.stderr.close()
    await_that(lambda: not members(mark), "all processes of the job had ended")


def test_output_goes_to_private_files(mpi: str, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    (folder / "rank.0").mkdir(parents=True)
    (folder / "rank.0" / "stderr").write_text("of an earlier job")
    (folder / "rank.0" / "stdout.7").write_text("of a job before that")
    (folder / "rank.9").mkdir()
    (folder / "rank.9" / "stdout").write_text("of a larger job")
    done = run(
        mpi,
        2,
        "--output-filename",
        str(folder),
        *python(
            "import os, sys; rank = int(os.environ['RINGTRAIN_RANK']); "
            "print('out'); sys.stderr.write(rank * 'no end'); sys.exit(rank)"
        ),
    )
    assert done.returncode == 1 and done.stdout == ""
    for rank in range(2):
        assert (folder / f"rank.{rank}" / "stdout").read_text() == "out\n"
        assert (folder / f"rank.{rank}" / "stderr").read_text() == rank * "no end"
        for name in ("stdout", "stderr"):
            assert (folder / f"rank.{rank}" / name).stat().st_mode & 0o777 == 0o600
    assert (
        folder / "rank.1"
    ).stat().st_mode & 0o777 == 0o700  # rank.0 and the folder were there, and are left as they are
    assert "[1] no end" in done.stderr.splitlines()[-1]
    assert (folder / "rank.0" / "stderr.8").read_text() == "of an earlier job"
    assert (folder / "rank.9" / "stdout.8").exists() and not (folder / "rank.9" / "stdout").exists()
    assert f"output folder '{folder}': what an earlier job has written is kept as stdout.8 and stderr.8." in done.stderr


# ---- exit codes ----


@pytest.mark.parametrize(
    "code", [0, 3, 255, pytest.param(1, marks=pytest.mark.long), pytest.param(125, marks=pytest.mark.long)]
)
def test_exit_code_of_the_failing_rank(mpi: str, code: int) -> None:
    done = run(mpi, 2, "sh", "-c", f"test $RINGTRAIN_RANK = 1 || exit {code}")
    assert done.returncode == code
    said = f"ringtrainrun: rank 0 (host {os.uname().nodename}) failed with exit code {code}."
    assert (said in done.stderr.splitlines()[-1:]) == (code != 0)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.long), signal.SIGTERM]
)
def test_a_signal_becomes_128_and_its_number(mpi: str, number: signal.Signals) -> None:
    done = run(mpi, 2, "sh", "-c", f"test $RINGTRAIN_RANK = 0 || kill -{int(number)} $$; sleep 30")
    assert done.returncode == 128 + number
    assert f"rank 1 (host {os.uname().nodename}) was killed by signal {int(number)}, {number.name}" in done.stderr


# For ranks that end one after the other, however busy the machine: they tell each other by files in a folder.
AWAIT = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])

def tell(name, text=""):
    (folder / f"{name}.new").write_text(text)
    (folder / f"{name}.new").rename(folder / name)

def await_that(condition):
    until = time.monotonic() + 50
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)

def await_end_of(name):
    await_that((folder / name).exists)
    await_that(lambda: not os.path.exists("/proc/" + (folder / name).read_text()))
"""


def test_first_cause_wins_and_stands_last(mpi: str, tmp_path: Path) -> None:
    done = run(
        mpi,
        2,
        *python(
            AWAIT
            + """
if os.environ["RINGTRAIN_RANK"] == "1":
    tell("rank 1", str(os.getpid()))
    raise ValueError("the cause")
await_end_of("rank 1")
time.sleep(0.2)  # until this has been noted
print("lost rank 1", file=sys.stderr)
sys.exit(7)
"""
        ),
        str(tmp_path),
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "[1] ValueError: the cause" or lines[-1].startswith("ringtrainrun: rank 1 (host ")
    summary = next(line for line in lines if "failed with exit code 1" in line)
    assert summary.startswith("ringtrainrun: rank 1 (host ")
    assert all(line.startswith("[1] ") for line in lines[lines.index(summary) + 1 :])


def test_a_rank_that_announces_its_failure_first_is_the_cause(mpi: str, tmp_path: Path) -> None:
    """A rank may be slow to leave after it has told its peers; these leave before it."""
    done = run(
        mpi,
        2,
        *python(
            AWAIT
            + """
from ringtrain._rendezvous.announce import announce_failure
if os.environ["RINGTRAIN_RANK"] == "1":
    announce_failure(5)
    tell("announced")
    await_end_of("rank 0")
    sys.exit(5)
tell("rank 0", str(os.getpid()))
await_that((folder / "announced").exists)
sys.exit(7)
"""
        ),
        str(tmp_path),
    )
    assert "rank 1 (host " in done.stderr.splitlines()[-1]
    assert done.returncode == 5


def test_a_program_that_a_rank_cannot_run_is_named(mpi: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    done = run(mpi, 1, str(program))
    assert done.returncode == 127
    assert f"cannot run '{program}': No such file or directory" in done.stderr


# ---- nothing is left ----

# Each rank has a child in its group, which ignores what asks it to end, and says when both are there.
STUBBORN = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"])
print("ready")
time.sleep(300)
"""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_launchers_end_is_the_end_of_all(mpi: str, number: signal.Signals, code: int) -> None:
    mark = f"job-{uuid.uuid4()}"
    launcher = subprocess.Popen(
        ringtrainrun(mpi, 2, *python(STUBBORN)),
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, RINGTRAIN_TEST_JOB=mark),
    )
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    assert len(members(mark)) > 6
    launcher.send_signal(number)
    assert launcher.wait(PATIENCE) == code
    await_that(lambda: not members(mark), "all processes of the job had ended")


# The launcher with as good as no end to the time that ranks have after they were asked to end: only a kill at once ends
# them.
PATIENT_LAUNCHER = """
import os, pathlib, re, shutil, sys
from ringtrain.launch import cli, host_errors, job, mpi_installation, reach
from ringtrain.launch.agent.link import edition

def patient(program):
    text, changes = re.subn(r"^(SECONDS_TO_(?:KILL|END)) = .*", r"\\1 = 1e6", program.read_text(), flags=re.M)
    assert changes == 1, program
    program.unlink()
    program.write_text(text)

launch = pathlib.Path(sys.argv[1], "ringtrain", "launch")
shutil.copytree(host_errors.PACKAGE, launch.parent, copy_function=os.symlink)
reach.AGENT_PROGRAM, mpi_installation.RANK_PROGRAM = launch / "agent" / "__main__.py", launch / "rank.py"
patient(launch / "agent" / "listener.py")
patient(launch / "agent" / "rank_command.py")
reach.EDITION = edition(launch)
job.SECONDS_TO_KILL = 1e6
sys.exit(cli.main(sys.argv[2:]))
"""


def test_a_second_ctrl_c_kills_at_once(mpi: str, tmp_path: Path) -> None:
    """Nothing else can: these ranks only say that they were asked to end, and have as long as they like."""
    mark = f"job-{uuid.uuid4()}"
    deaf = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: print('asked'))\nprint('ready')\ntime.sleep(300)"
    )
    python_, _, _, *arguments = ringtrainrun(mpi, 2, *python(deaf))
    launcher = subprocess.Popen(
        [python_, "-c", PATIENT_LAUNCHER, tmp_path, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, RINGTRAIN_TEST_JOB=mark),
    )
    for word in ("ready", "asked"):
        assert sorted(launcher.stdout.readline() for _ in range(2)) == [f"[0] {word}\n", f"[1] {word}\n"]
        assert members(mark)
        launcher.send_signal(signal.SIGINT)
    try:
        assert launcher.wait(PATIENCE) == 130
        await_that(lambda: not members(mark), "all processes of the job had ended")
    finally:
        for process in members(mark):  # which are as patient as the launcher, if it failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        launcher.communicate()


def test_a_failing_rank_ends_the_others(mpi: str) -> None:
    mark = f"job-{uuid.uuid4()}"
    done = run(
        mpi,
        2,
        *python("import os, sys\nif os.environ['RINGTRAIN_RANK'] == '1': sys.exit(4)\n" + STUBBORN),
        RINGTRAIN_TEST_JOB=mark,
    )
    assert done.returncode == 4
    await_that(lambda: not members(mark), "all processes of the job had ended")


def test_the_engines_death_ends_the_ranks(mpi: str) -> None:
    mark = f"job-{uuid.uuid4()}"
    launcher = subprocess.Popen(
        ringtrainrun(mpi, 2, *python(STUBBORN)),
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, RINGTRAIN_TEST_JOB=mark),
    )
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert launcher.wait(PATIENCE) not in (0, None)
    await_that(lambda: not members(mark), "all processes of the job had ended")
