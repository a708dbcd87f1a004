"""Login shells of other hosts, and their start-up files: they do no harm, or ringtrainrun says what they do."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path

import needs
import pytest
from environments import EACH_MPI, python_with, ringtrainrun

from ringtrain.bench.namespaces import HostNetwork, NamespaceHost

ROOT = Path(__file__).parents[2]
START_UP_FILE = Path.home() / ".bashrc"
PATIENCE = 60.0
SAYS = "ringtrainrun: host 'node-b': "
_HAS_BASH = START_UP_FILE.exists() and pwd.getpwuid(os.getuid()).pw_shell.endswith("bash")
pytestmark = [
    needs.hosts,
    needs.machine(
        "" if _HAS_BASH else "needs a user with the login shell bash, and a ~/.bashrc: chsh, touch ~/.bashrc"
    ),
]
SUM = "import numpy, ringtrain as rt; rt.init(); print(rt.allreduce(numpy.ones(2), op=rt.Sum))"


def launch(network: HostNetwork, mpi: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    options = {"env": dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"), "timeout": PATIENCE, **options}
    return network["node-a"].run(
        python_with(mpi), "-m", "ringtrain.launch", "-np", "2", "-H", "node-a:1,node-b:1", *arguments, **options
    )


def end_all_that_run(host: NamespaceHost, command: str) -> None:
    """A shell that has become another program is ended by nobody, and other tests ask what is left on this host."""
    for process in [pid for pid, line in host.processes().items() if line.startswith(command)]:
        host.run("kill", "-9", str(process))


@EACH_MPI
def test_a_start_up_file_may_print(mpi: str, three_hosts: HostNetwork) -> None:
    """At the beginning, in the midst of the job from what it has left running, and at the end."""
    text = "trap 'echo bye' EXIT; (for i in 1 2 3 4 5 6 7 8; do /bin/sleep 0.2; echo mail; done) &\n"
    text += "echo welcome; echo '{\"rank\": 0}'; /usr/bin/yes | /usr/bin/head -c 200000; /usr/bin/yes | /usr/bin/head -c 200000 >&2\n"
    with three_hosts["node-b"].replaced(START_UP_FILE, text):
        done = launch(three_hosts, mpi, "python", "-c", SUM)
    assert done.returncode == 0 and {"[0] [2. 2.]", "[1] [2. 2.]"} <= set(done.stdout.splitlines()), done.stderr[-2000:]


@pytest.mark.openmpi
@pytest.mark.parametrize(
    "text, words",
    [
        ("exit 3\n", " ended with code 3"),
        (
            "unset HOME\n",
            "variable 'HOME': it must be set there, for MPI, but a start-up file of the shell has removed it.",
        ),
        ("read line\n", "a start-up file of the shell there may wait, read its input, or run another program"),
        (
            "exec /bin/sleep 100\n",
            "a start-up file of the shell there may wait, read its input, or run another program",
        ),
    ],
    ids=["exits", "unsets HOME", "reads", "waits"],
)
def test_what_a_start_up_file_must_not_do_is_told(text: str, words: str, three_hosts: HostNetwork) -> None:
    with three_hosts["node-b"].replaced(START_UP_FILE, text):
        done = launch(three_hosts, "openmpi", "--start-timeout", "6", "echo", "started")
    end_all_that_run(three_hosts["node-b"], "/bin/sleep 100")
    assert done.returncode == 125 and "started" not in done.stdout
    assert SAYS in done.stderr and words in done.stderr and "Traceback (" not in done.stderr, done.stderr


def test_a_shell_whose_start_up_file_waits_for_ever_is_ended(three_hosts: HostNetwork) -> None:
    """sshd leaves it where it waits, and it would have run the agent once it went on."""
    before = three_hosts["node-b"].processes()  # what an earlier start-up file has become
    with three_hosts["node-b"].replaced(START_UP_FILE, "/bin/sleep 5000\n/bin/sleep 5001\n"):
        done = launch(three_hosts, "tcp", "--transport", "tcp", "--start-timeout", "2", "true")
        assert done.returncode == 125 and "it gave no answer within the start timeout. Raise" in done.stderr
        assert three_hosts["node-b"].processes().keys() <= before.keys()


@pytest.mark.parametrize("text, stays", [("exec /bin/sleep 30\n", True), ("/bin/sleep 30\n", False)])
def test_what_a_start_up_file_turns_the_shell_into_is_named(text: str, stays: bool, three_hosts: HostNetwork) -> None:
    """Without a terminal nothing ends it, and no command can be run beside it."""
    with three_hosts["node-b"].replaced(START_UP_FILE, text):
        done = launch(three_hosts, "tcp", "--transport", "tcp", "--start-timeout", "2", "true")
    named = (
        "host 'node-b': a start-up file of the shell there turns the shell into another program, as exec does"
        in done.stderr
    )
    end_all_that_run(three_hosts["node-b"], "/bin/sleep 30")
    assert done.returncode == 125 and named == stays, done.stderr


@EACH_MPI
@needs.package("tcsh", "tcsh")
def test_csh_may_be_the_login_shell(mpi: str, three_hosts: HostNetwork) -> None:
    users = Path("/etc/passwd").read_text()
    shell = pwd.getpwuid(os.getuid()).pw_shell
    own = next(line for line in users.splitlines() if line.startswith(pwd.getpwuid(os.getuid()).pw_name + ":"))
    with three_hosts["node-b"].replaced(
        "/etc/passwd", users.replace(own, own.removesuffix(shell) + shutil.which("tcsh"))
    ):
        done = launch(three_hosts, mpi, "python", "-c", SUM)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["[0] [2. 2.]", "[1] [2. 2.]"], done.stderr


# ---- nobody reads, on several hosts ----

FLOOD = "import os, time\nwhile True: print('x' * 1000)"


def start_flood(network: HostNetwork, **options) -> subprocess.Popen:
    launcher = network["node-a"].start(
        *ringtrainrun("openmpi", 2, "-H", "node-a:1,node-b:1", "python", "-c", FLOOD),
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        **options,
    )
    assert launcher.stdout.read(1) == b"["
    time.sleep(3.0)  # until all that can take something is full
    return launcher


def await_empty(network: HostNetwork, *names: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := {name: network[name].processes() for name in names if network[name].processes()}:
        assert time.monotonic() < deadline, f"left over: {left}"
        time.sleep(0.1)


@pytest.mark.openmpi
def test_a_signal_ends_all_hosts_of_a_job_that_nobody_reads(three_hosts: HostNetwork) -> None:
    launcher = start_flood(three_hosts)
    three_hosts["node-a"].signal_to(launcher, signal.SIGINT)
    assert launcher.wait(28) == 130  # before the agents give up themselves
    launcher.stdout.close()
    await_empty(three_hosts, "node-a", "node-b")


@pytest.mark.openmpi
@pytest.mark.long
def test_an_agent_whose_launcher_stands_still_ends_its_ranks(three_hosts: HostNetwork) -> None:
    """Half a minute later, though it cannot write a byte to it."""
    launcher = start_flood(three_hosts)
    three_hosts["node-a"].signal_to(launcher, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE
    while any(FLOOD[:20] in line for line in three_hosts["node-b"].processes().values()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    three_hosts["node-a"].signal_to(launcher, signal.SIGKILL)
    launcher.send_signal(signal.SIGCONT)  # nsenter stands still with its child
    launcher.wait(PATIENCE)
    launcher.stdout.close()
    await_empty(three_hosts, "node-a", "node-b")
