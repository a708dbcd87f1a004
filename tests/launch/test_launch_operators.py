"""Hosts that an operator names: by the variable of a host file, or SageMaker's list; and those that come up late."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import needs
import pytest
from environments import python_with, transport_of

from ringtrain.bench.namespaces import find_program
from ringtrain.launch import preflight
from ringtrain.launch.host_errors import HostNotThereError
from ringtrain.launch.hosts import Host, HostsError
from ringtrain.launch.mpi_installation import Installation
from ringtrain.launch.operators import HOSTFILE_VARIABLES, named_hosts
from ringtrain.launch.plan import Plan

SECONDS = 60


def no_file(variable: str, path: str) -> str:
    raise AssertionError(f"{path} was read")


@pytest.mark.parametrize("variable", HOSTFILE_VARIABLES)
@pytest.mark.parametrize(
    "text", ["train-worker-0.train.ml.svc slots=4\nb slots=2\n", "train-worker-0.train.ml.svc:4\nb:2\n"]
)
def test_a_default_host_file_names_hosts(variable: str, text: str) -> None:
    found = named_hosts(
        {variable: "/etc/mpi/hostfile"}, 1, lambda *given: text if given == (variable, "/etc/mpi/hostfile") else ""
    )
    assert found is not None and found.hosts == [Host("train-worker-0.train.ml.svc", 4), Host("b", 2)]
    assert found.source == f"/etc/mpi/hostfile, of {variable}"


@pytest.mark.parametrize(
    "variables, slots",
    [({}, 1), ({"SM_NUM_GPUS": "8"}, 8), ({"SM_NUM_GPUS": "0"}, 1), ({"SM_NUM_GPUS": "none"}, 1)],
)
def test_hosts_of_sagemaker(variables: dict[str, str], slots: int) -> None:
    found = named_hosts({"SM_HOSTS": '["algo-1", "algo-2"]', **variables}, 1, no_file)
    assert found is not None and found.hosts == [Host("algo-1", slots), Host("algo-2", slots)]


def test_one_host_of_sagemaker_starts_the_job() -> None:
    """The first; each of the others would start a job on all of them as well."""
    hosts = {"SM_HOSTS": '["algo-1", "algo-2"]'}
    assert named_hosts({**hosts, "SM_CURRENT_HOST": "algo-1"}, 1, no_file) == named_hosts(hosts, 1, no_file)
    with pytest.raises(HostsError, match="SM_CURRENT_HOST 'algo-2': one host must start the job, 'algo-1'"):
        named_hosts({**hosts, "SM_CURRENT_HOST": "algo-2"}, 1, no_file)


@pytest.mark.parametrize("text", ["", "algo-1", "[]", "[1]", '{"a": 1}', '["a", "a"]'])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(HostsError):
        named_hosts({"SM_HOSTS": text}, 1, no_file)


def test_nobody_names_hosts() -> None:
    assert named_hosts({"OMPI_MCA_orte_default_hostfile": "", "HOME": "/root"}, 1, no_file) is None


# A host that is not there before it was asked so many times; then it is this machine.
LATE_SSH = """\
#!/bin/sh
echo asked >> "$LATE/asked"
if [ "$(wc -l < "$LATE/asked")" -le 2 ]; then
    echo "ssh: Could not resolve hostname late-worker: Name or service not known" >&2
    exit 255
fi
for last in "$@"; do :; done
exec sh -c "$last"
"""


def launch(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    """A job of two ranks on a host behind that ssh, which says where it is."""
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir(exist_ok=True)
    ssh.write_text(LATE_SSH)
    ssh.chmod(0o755)
    python = python_with("tcp")
    path = f"{ssh.parent}:{os.environ['PATH']}"
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), *flags, "echo", "here"]
    environment = {**os.environ, "PATH": path, "LATE": str(folder), **variables}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.tcp
def test_a_host_of_an_operator_may_come_late(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("late-worker slots=2\n")
    done = launch(tmp_path, OMPI_MCA_orte_default_hostfile=str(hostfile))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] here", "[1] here"]
    assert (tmp_path / "asked").read_text().count("asked") >= 3


@pytest.mark.tcp
def test_in_a_pod_every_host_may_come_late(tmp_path: Path) -> None:
    done = launch(tmp_path, "-np", "2", "-H", "late-worker:2", KUBERNETES_SERVICE_HOST="10.96.0.1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text().count("asked") >= 3


@pytest.mark.tcp
def test_a_host_of_the_user_is_there_or_misspelt(tmp_path: Path) -> None:
    done = launch(tmp_path, "-np", "2", "-H", "late-worker:2")
    assert done.returncode == 125 and "its name cannot be resolved" in done.stderr
    assert (tmp_path / "asked").read_text().count("asked") == 1


def test_whom_the_start_waits_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log of a pod, which is no terminal; and each time only those who are still not there."""
    said: list[str] = []

    def describe(agent, *_):
        if len(said) < {"here": 0, "late": 1, "later": 2}[agent.host.name]:
            raise HostNotThereError("", "its name cannot be resolved")
        return {"machine": [agent.host.name], "gpus": 0}

    class FakeAgent(SimpleNamespace):
        def open(self) -> None:
            pass

    hosts = [Host("here", 1, is_here=True), Host("late", 1), Host("later", 1)]
    monkeypatch.setattr(preflight, "Agent", lambda host, _: FakeAgent(host=host, awaited_for=""))
    monkeypatch.setattr(preflight, "_describe", describe)
    monkeypatch.setattr(preflight, "_test_networks", lambda *_: None)
    for name in ("SECONDS_TO_TRY_AGAIN", "SECONDS_BETWEEN_NEWS", "SECONDS_UNTIL_MORE", "SECONDS_BETWEEN_MORE"):
        monkeypatch.setattr(preflight, name, 0.05)
    plan = Plan(["true"], 3, hosts, hosts_come_late=True, start_seconds=60.0)
    preflight.check_hosts(plan, Installation("", "", None, "", ""), {}, said.append)
    first, *_, last = said
    assert first.startswith("waiting for 'late', 'later', 60 s in all (--start-timeout).")
    assert last.startswith("waiting for 'later', ") and "Why 'later' is not there: its name cannot be resolved." in last


# ---- a worker of Kubeflow's, with the files of the image ----

IMAGE = Path(__file__).parents[2] / "deploy" / "docker"
WORKER = "train-worker-0.train.ml.svc"
SECONDS_TO_COME_UP = 1.5
SUM = "import numpy, ringtrain as rt; rt.init(); print(rt.size(), rt.allreduce(numpy.ones(1), op=rt.Sum)[0])"


@contextmanager
def late_worker(folder: Path) -> Iterator[Path]:
    """A worker whose sshd comes up late, as an operator starts it: with the image's configuration and the job's key.

    Yields a folder with an ssh that has the image's configuration, and finds the worker's name on this machine.
    """
    key = folder / ".ssh" / "id_rsa"
    key.parent.mkdir(mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", key], check=True)
    shutil.copy(key.with_suffix(".pub"), key.with_name("authorized_keys"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = f"Port {listener.getsockname()[1]}\n"
    server = folder / ".sshd_config"
    server.write_text((IMAGE / "sshd_config").read_text().replace("/home/mpiuser", str(folder)) + port)
    client = folder / "ssh_config"
    client.write_text(
        f"Host {WORKER}\n    HostName 127.0.0.1\n    IdentityFile {key}\n" + (IMAGE / "ssh_config").read_text() + port
    )
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {find_program("ssh")} -F {shlex.quote(str(client))} "$@"\n')
    ssh.chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o700, exist_ok=True)
    line = [find_program("sshd"), "-De", "-f", str(server)]
    sshd = subprocess.Popen(
        ["sh", "-c", f"sleep {SECONDS_TO_COME_UP}; exec {shlex.join(line)}"], stderr=subprocess.DEVNULL
    )
    try:
        yield ssh.parent
    finally:
        sshd.terminate()
        sshd.wait()


@pytest.mark.tcp
@needs.package("openssh-server", "sshd")
def test_a_job_of_kubeflow_runs_on_a_worker_that_comes_up_late(tmp_path: Path) -> None:
    """No flag says a host, a number or a port: they stand in the operator's host file, and in the configuration of the image's ssh."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(f"{WORKER} slots=2\n")
    with late_worker(tmp_path) as programs:
        variables = {"PATH": f"{programs}:{os.environ['PATH']}", "OMPI_MCA_orte_default_hostfile": str(hostfile)}
        python = python_with("tcp")
        line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--verbose", python, "-c", SUM]
        done = subprocess.run(line, env=os.environ | variables, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^\[\d\] 2 2.0$", done.stdout, re.MULTILINE)) == ["[0] 2 2.0", "[1] 2 2.0"], done.stdout
