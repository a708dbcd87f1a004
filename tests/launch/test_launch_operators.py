"""Hosts that an operator names: by the variable of a host file, or SageMaker's list; and those that come up late."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from environments import python_with, transport_of

from ringtrain.launch.hosts import Host, HostsError
from ringtrain.launch.operators import HOSTFILE_VARIABLES, named_hosts

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
def test_a_host_of_the_user_is_there_or_misspelt(tmp_path: Path) -> None:
    done = launch(tmp_path, "-np", "2", "-H", "late-worker:2")
    assert done.returncode == 125 and "its name cannot be resolved" in done.stderr
    assert (tmp_path / "asked").read_text().count("asked") == 1
