"""ringtrainrun across three hosts on this machine: what is checked before the start, what travels, and what is left.

The hosts have real sshds, interfaces of different names, a docker0 that leads nowhere, and a bare PATH.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import needs
import pytest
from environments import (
    EACH_MPI,
    EACH_STARTER,
    python_with,
    ringtrainrun,
    transport_of,
)

import ringtrain.version
from ringtrain.bench.namespaces import HostNetwork, NamespaceHost

pytestmark = needs.hosts
ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
OPENMPI_OR_TCP = pytest.mark.parametrize(
    "mpi", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("openmpi", "tcp")]
)
ALL = "node-a:2,node-b:1,node-c:1"
# Says where it is, then waits; a child of it ignores what asks it to end.
STUBBORN = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"])
print("ready", flush=True)
time.sleep(300)
"""
# Says that it is at work, and never ends.
WORK = """
import time, numpy as np, ringtrain as rt
rt.init()
print("at work", flush=True)
while True:
    rt.allreduce(np.ones(9), name="step")
    time.sleep(0.01 if rt.rank() == 0 else 0)  # while the others wait in a step
"""


@pytest.fixture
def network(three_hosts: HostNetwork) -> HostNetwork:
    return three_hosts


def environment(**variables: str) -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables)


def launch(host: NamespaceHost, python: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    options = {"env": environment(), "timeout": PATIENCE, **options}
    return host.run(python, "-m", "ringtrain.launch", *arguments, **options)


def await_empty(network: HostNetwork) -> None:
    """Until no host has a process of the job, and that of ssh neither."""
    deadline = time.monotonic() + PATIENCE
    while left := {name: host.processes() for name, host in network.hosts.items() if host.processes()}:
        assert time.monotonic() < deadline, f"left over: {left}"
        time.sleep(0.1)


# ---- a job ----


@EACH_STARTER
def test_ranks_of_all_hosts_meet(mpi: str, network: HostNetwork, tmp_path: Path) -> None:
    """Relative path of the script, working directory, odd values of variables, interfaces: as on the launcher's host."""
    (tmp_path / "train.py").write_text("""
import json, os, sys, time
import numpy as np, ringtrain as rt
rt.init()
total = rt.allreduce(np.ones(100_000, np.float32), op=rt.Sum)
print(json.dumps([os.uname().nodename, rt.local_rank(), os.environ["RINGTRAIN_LOCAL_SIZE"], float(total.sum()), os.getcwd(),
                  os.environ["ODD"] == "two\\nlines, 'quotes', $(x) % \\u00e9" + 100_000 * "o", os.environ["NCCL_SOCKET_IFNAME"]]))
""")
    odd = "two\nlines, 'quotes', $(x) % \u00e9" + 100_000 * "o"
    python = python_with(mpi)
    done = launch(
        network["node-a"],
        python,
        *transport_of(mpi),
        "-np",
        "4",
        "-H",
        ALL,
        "python",
        "train.py",
        folder=tmp_path,
        env=environment(ODD=odd),
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    facts = [json.loads(line.partition(" ")[2]) for line in lines]
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] ", "[3] "]
    assert [fact[:3] for fact in facts] == [
        ["node-a", 0, "2"],
        ["node-a", 1, "2"],
        ["node-b", 0, "1"],
        ["node-c", 0, "1"],
    ]
    assert [fact[3:6] for fact in facts] == [[400_000.0, str(tmp_path), True]] * 4
    assert [fact[6] for fact in facts] == ["=eth0", "=eth0", "=ens5", "=enp3s0"]
    await_empty(network)


@EACH_STARTER
def test_hosts_that_share_only_ipv6_run_jobs_of_open_mpi(mpi: str) -> None:
    program = "import numpy, ringtrain as rt; rt.init(); print(rt.allreduce(numpy.full(3, rt.rank() + 1.0), op=rt.Sum))"
    with HostNetwork({"node-a": "eth0", "node-b": "ens5"}, ipv6=True) as network:
        done = launch(
            network["node-a"],
            python_with(mpi),
            *transport_of(mpi),
            "-np",
            "2",
            "-H",
            "node-a:1,node-b:1",
            "--port-range",
            "21000-21019",
            "python",
            "-c",
            program,
        )
    if mpi == "mpich":
        assert done.returncode == 125 and "hosts 'node-a,node-b': they must share an IPv4 network" in done.stderr, (
            done.stderr
        )
        assert "only fd77::/64. Open MPI supports IPv6" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["[0] [3. 3. 3.]", "[1] [3. 3. 3.]"]


@pytest.mark.mpich
def test_a_network_between_some_hosts_alone_is_left_alone(network: HostNetwork) -> None:
    """Unlike docker0 its interface has another address on each host, and something at the other end of its cable."""
    pair = [network["node-a"], network["node-b"]]
    for number, host in enumerate(pair, start=1):
        host.check("ip", "link", "add", "storage", "type", "veth", "peer", "name", "elsewhere")
        host.check("ip", "address", "add", f"10.99.0.{number}/24", "dev", "storage")
        host.check("ip", "link", "set", "storage", "up")
        host.check("ip", "link", "set", "elsewhere", "up")
    program = "import numpy, ringtrain as rt; rt.init(); print(rt.allreduce(numpy.ones(1 << 20), op=rt.Sum).min())"
    try:
        done = launch(pair[0], python_with("mpich"), "-np", "2", "-H", "node-a:1,node-b:1", "python", "-c", program)
    finally:
        for host in pair:
            host.check("ip", "link", "delete", "storage")
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["[0] 2.0", "[1] 2.0"], done.stderr


@EACH_STARTER
def test_all_links_of_a_host_carry_tensors(mpi: str) -> None:
    """Two useful networks: each interface has sent a fair part of the bytes that the ring takes through a host.

    They have a rate: of two links without one, the first may take all that there is to send.
    """
    interfaces = ("eth0", "eth0-2")
    megabytes, rounds = 8, 4
    program = f"""
import numpy as np, ringtrain as rt
rt.init()
for _ in range({rounds}):
    total = rt.allreduce(np.ones({megabytes << 18}, np.float32), op=rt.Sum)
print(total.min(), total.max())
"""
    with HostNetwork({"node-a": "eth0", "node-b": "eth0"}, rate="1gbit", links=2) as network:
        done = launch(
            network["node-a"],
            python_with(mpi),
            *transport_of(mpi),
            "-np",
            "2",
            "-H",
            "node-a:1,node-b:1",
            "python",
            "-c",
            program,
        )
        counters = network["node-a"].run("cat", *(f"/sys/class/net/{name}/statistics/tx_bytes" for name in interfaces))
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["[0] 2.0 2.0", "[1] 2.0 2.0"], done.stderr
    sent = [int(count) for count in counters.stdout.split()]
    assert min(sent) > rounds * megabytes * 1e6 / 5, f"{dict(zip(interfaces, sent, strict=True))} bytes sent"


@EACH_STARTER
def test_a_failure_on_another_host_is_the_last_word(mpi: str, network: HostNetwork) -> None:
    program = """
import sys
import numpy as np, ringtrain as rt
rt.init()
if rt.rank() == 2:
    raise ValueError("the cause")
rt.allreduce(np.ones(10, np.float32))
"""
    done = launch(
        network["node-a"],
        python_with(mpi),
        *transport_of(mpi),
        "-np",
        "3",
        "-H",
        "node-a:1,node-b:1,node-c:1",
        "python",
        "-c",
        program,
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "[2] ValueError: the cause" or lines[-1].startswith("ringtrainrun: rank 2 (host node-c)"), (
        done.stderr
    )
    assert any(re.match(r"ringtrainrun: rank 2 \(host node-c\) failed with exit code 1", line) for line in lines)
    await_empty(network)


@pytest.mark.parametrize(
    "mpi, number, code",
    [
        pytest.param("openmpi", signal.SIGINT, 130, marks=pytest.mark.openmpi),
        pytest.param("mpich", signal.SIGKILL, -9, marks=pytest.mark.mpich),
        pytest.param("tcp", signal.SIGKILL, -9, marks=pytest.mark.tcp),
        pytest.param("openmpi", signal.SIGKILL, -9, marks=[pytest.mark.openmpi, pytest.mark.long]),
        pytest.param("mpich", signal.SIGTERM, 143, marks=[pytest.mark.mpich, pytest.mark.long]),
        pytest.param("tcp", signal.SIGINT, 130, marks=[pytest.mark.tcp, pytest.mark.long]),
    ],
)
def test_the_launchers_end_leaves_no_process_on_any_host(
    mpi: str, number: int, code: int, network: HostNetwork
) -> None:
    launcher = network["node-a"].start(
        *ringtrainrun(mpi, 3, "-H", "node-a:1,node-b:1,node-c:1", "python", "-c", STUBBORN),
        stdout=subprocess.PIPE,
        text=True,
        env=environment(TOKEN="a-secret-of-the-user"),
    )
    assert sorted(launcher.stdout.readline() for _ in range(3)) == [f"[{rank}] ready\n" for rank in range(3)]
    running = {name: host.processes() for name, host in network.hosts.items()}
    assert all(running.values())
    shown = "\n".join(line for processes in running.values() for line in processes.values())
    assert "a-secret-of-the-user" not in shown, "a variable's value stands on a command line"
    network["node-a"].signal_to(launcher, number)
    assert launcher.wait(PATIENCE) == code
    launcher.stdout.close()
    await_empty(network)


@OPENMPI_OR_TCP
def test_a_lost_agent_ends_the_job_and_names_the_host(mpi: str, network: HostNetwork) -> None:
    launcher = network["node-a"].start(
        *ringtrainrun(mpi, 2, "-H", "node-a:1,node-b:1", "python", "-c", STUBBORN),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    agent = next(pid for pid, line in network["node-b"].processes().items() if "agent/__main__.py" in line)
    network["node-b"].run("kill", "-9", str(agent))
    _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1 and "host node-b: the connection was lost" in said, said
    await_empty(network)


@pytest.mark.long
@OPENMPI_OR_TCP
def test_a_host_that_leaves_the_network_ends_the_job_on_both_sides(mpi: str) -> None:
    with HostNetwork({"node-a": "eth0", "node-b": "ens5"}) as network:
        launcher = network["node-a"].start(
            *ringtrainrun(mpi, 2, "-H", "node-a:1,node-b:1", "python", "-c", STUBBORN),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        network.unplug("node-b")
        _, said = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 1 and "host node-b: the connection was lost" in said, said
        deadline = time.monotonic() + PATIENCE
        while left := network["node-b"].left():  # without a connection again: the engine's daemon too
            assert time.monotonic() < deadline, f"cut off and still there: {left}"
            time.sleep(0.5)


# ---- before it ----


def refused(network: HostNetwork, listed: str, *arguments: str, folder: str | Path = ROOT) -> str:
    """What the launcher says when it refuses to start on these hosts."""
    count = str(len(listed.split(",")))
    done = launch(
        network["node-a"],
        python_with("openmpi"),
        "-np",
        count,
        "-H",
        listed,
        *arguments,
        "echo",
        "started",
        folder=folder,
        env=environment(),
        timeout=PATIENCE,
    )
    assert done.returncode == 125 and "started" not in done.stdout, done.stdout + done.stderr
    return done.stderr


def test_every_host_that_cannot_be_reached_is_named_with_its_reason(network: HostNetwork) -> None:
    """All at once: one without route, one without a name, one that would ask for a password."""
    with (network.folder / "names").open("a") as names:
        names.write("10.77.0.99 absent\n")
    node_c = network["node-c"].folder / "authorized_keys"
    keys = node_c.read_text()
    node_c.write_text("")
    try:
        said = refused(network, "node-a:1,absent:1,no-such-name:1,node-c:1")
    finally:
        node_c.write_text(keys)
    for host, reason in (
        ("absent", "it does not answer"),
        ("no-such-name", "its name cannot be resolved"),
        ("node-c", "it accepts no key of this user"),
    ):
        line = next(line for line in said.splitlines() if f"host '{host}'" in line)
        assert reason in line and "To see it: ssh -x -T -o BatchMode=yes" in line and f"{host} true" in line
    assert "node-a" not in said and "node-b" not in said


# Trains until there are two ranks.
UNTIL_TWO = """
import ringtrain as rt, ringtrain.elastic
rt.init()
@rt.elastic.run
def train(state):
    print("world of", rt.size(), flush=True)
    while rt.size() < 2:
        state.commit()
train(rt.elastic.ObjectState(step=0))
"""


def test_an_elastic_job_starts_without_a_host_that_is_down(network: HostNetwork) -> None:
    """The first one, on which rank 0 would be; it is told, and gets its rank when it comes."""
    flags = [
        *transport_of("tcp"),
        "--elastic",
        "-np",
        "1:2",
        "--blacklist-cooldown-range",
        "0.1",
        "0.1",
        "-H",
        "late:1,node-a:1",
    ]
    line = [python_with("tcp"), "-m", "ringtrain.launch", *flags, "python", "-c", UNTIL_TWO]
    before = (network.folder / "names").read_text()
    launcher = network["node-a"].start(
        *line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    lines = []
    try:
        for text in launcher.stdout:
            lines.append(text)
            if "world of 1" in text:
                with (network.folder / "names").open("a") as names:
                    names.write(f"{network['node-b'].address} late\n")
        assert launcher.wait(PATIENCE) == 0, lines
    finally:
        (network.folder / "names").write_text(before)
    said = "".join(lines)
    assert "host 'late': it must run a command without a prompt, but its name cannot be resolved" in said
    assert "The job starts without this host, and tries it again later." in said
    assert "host 'late' has come, with 1 slots." in said and said.count("world of 2") == 2


def test_an_elastic_job_takes_a_spare_host_for_one_that_is_down(network: HostNetwork) -> None:
    flags = [*transport_of("tcp"), "--elastic", "-np", "1:2", "-H", "nobody:1,node-a:1,node-c:2"]
    done = launch(network["node-a"], python_with("tcp"), *flags, "python", "-c", UNTIL_TWO)
    assert done.returncode == 0 and "host 'node-c' has come, with 1 slots." in done.stderr, done.stderr
    assert done.stdout.count("world of 2") == 2 and done.stderr.count("host 'nobody'") == 1


def test_an_elastic_job_does_not_start_below_its_minimum(network: HostNetwork) -> None:
    done = launch(
        network["node-a"],
        python_with("tcp"),
        *transport_of("tcp"),
        "--elastic",
        "-np",
        "2:3",
        "-H",
        "node-a:1,nobody:2",
        "true",
    )
    assert done.returncode == 125 and "host 'nobody': " in done.stderr
    assert (
        "--elastic: the hosts that are there must have 2 slots at least, as -np MIN:MAX says, but have 1."
        in done.stderr
    )


def test_a_changed_host_key_is_refused_with_the_way_out(network: HostNetwork) -> None:
    assert launch(network["node-a"], python_with("openmpi"), "-np", "1", "-H", "node-b:1", "true").returncode == 0
    home = network["node-a"].folder / "ssh" / "known_hosts"
    known = home.read_text()  # its names may be hashed, so every key is changed
    other = subprocess.run(
        ["ssh-keygen", "-y", "-f", network.folder / "user_key"], capture_output=True, text=True, check=True
    )
    kind, key = other.stdout.split()[:2]
    home.write_text(re.sub(r"^(\S+) .*$", rf"\1 {kind} {key}", known, flags=re.MULTILINE))
    try:
        said = refused(network, "node-b:1")
    finally:
        home.write_text(known)
    assert "host 'node-b'" in said and "its host key" in said and "ssh-keygen -R node-b" in said


def test_hosts_that_are_not_like_this_one_are_refused(network: HostNetwork, tmp_path: Path) -> None:
    """At once: a missing directory on one host, another version of ringtrain on the other."""
    there = tmp_path / "work"
    there.mkdir()
    with (
        network["node-b"].hidden(tmp_path),
        network["node-c"].replaced(ringtrain.version.__file__, '__version__ = "9.9.9"\n'),
    ):
        said = refused(network, "node-b:1,node-c:1", folder=there)
    here = ringtrain.version.__version__
    assert f"host 'node-b': working directory '{there}': it must exist there, but does not" in said
    assert "host 'node-c': ringtrain must be the same as here, but is 9.9.9" in said and f" and {here} (" in said


def test_a_command_that_is_on_no_path_there_is_refused(network: HostNetwork, tmp_path: Path) -> None:
    """It was started, and the job ended with 127."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    flags = *transport_of("tcp"), "-np", "2", "-H", "node-a:1,node-b:1"
    for command in "pyhton", str(program):
        with network["node-b"].replaced(program, "no program"):
            done = launch(network["node-a"], python_with("tcp"), *flags, command)
        named = [line.split("'")[1] for line in done.stderr.splitlines() if f"command '{command}': it must be" in line]
        assert done.returncode == 125 and named == (["node-a", "node-b"] if command == "pyhton" else ["node-b"]), (
            done.stderr
        )


def test_a_host_without_the_launchers_python_is_refused(network: HostNetwork) -> None:
    with network["node-b"].hidden(sys.prefix):
        said = refused(network, "node-b:1")
    assert "host 'node-b': it must run a command without a prompt, but there is no Python at" in said


def test_one_machine_under_two_names_is_refused(network: HostNetwork) -> None:
    with (network.folder / "names").open("a") as names:
        names.write(f"{network['node-b'].address} alias\n")
    assert "hosts 'node-b,alias': each name must be a different machine" in refused(network, "node-b:1,alias:1")


def test_interfaces_that_lead_nowhere_are_refused(network: HostNetwork) -> None:
    said = refused(network, "node-a:1,node-b:1", "--network-interfaces", "docker0")
    assert "every other host must reach it" in said and "at 172.17.0.1 (docker0): " in said
    said = refused(network, "node-a:1,node-b:1", "--network-interfaces", "eth0")
    assert "host 'node-b': it must have a network interface" in said
    assert "but has ens5 (10.77.0.2/24), docker0 (172.17.0.1/16). Name one that all hosts have" in said


@pytest.mark.long
@pytest.mark.tcp
def test_a_path_that_loses_large_packets_is_told_before_the_start() -> None:
    """That of the tensors; ssh goes by another one. Where there is a choice, the job goes another way."""
    program = "import numpy as np, ringtrain as rt; rt.init(); print(rt.allreduce(np.ones(9**6), op=rt.Sum)[0])"
    job = ("--transport", "tcp", "-np", "3", "-H", "node-a:1,node-b:1,node-c:1")
    with HostNetwork({"node-a": "eth0", "node-b": "ens5", "node-c": "enp3s0"}, links=2) as network:
        with network.losing_large("node-b", link=2):
            named = launch(
                network["node-a"],
                sys.executable,
                *job,
                "--network-interfaces",
                "10.78.2.0/24",
                "python",
                "-c",
                program,
            )
            free = launch(network["node-a"], sys.executable, *job, "python", "-c", program)
    (said,) = named.stderr.splitlines()
    assert named.returncode == 125 and "host 'node-b': packets of 1500 bytes" in said, named
    assert "small packets pass, large ones do not: MTU" in said
    assert free.returncode == 0 and free.stdout.count("3.0") == 3, free
    assert "network 10.78.2.0/24 is left out, because of host 'node-b'" in free.stderr


def test_gpus_named_by_x_are_those_of_every_host(network: HostNetwork) -> None:
    """The variable of the launcher's own host does not travel, but that of -x does."""
    said = refused(network, "node-a:1,node-b:2", "-x", "CUDA_VISIBLE_DEVICES=0", "-np", "3")
    assert "host 'node-b': there must be a GPU for each of its 2 ranks, but CUDA_VISIBLE_DEVICES names 1" in said
    assert "node-a" not in said


@OPENMPI_OR_TCP
def test_ports_stay_within_the_range(mpi: str, network: HostNetwork) -> None:
    await_empty(network)  # of agents that listened for earlier jobs
    program = """
import subprocess, ringtrain as rt
rt.init()
rt.barrier()
print(subprocess.run(["ss", "-Hltn"], capture_output=True, text=True).stdout, flush=True)
rt.barrier()
"""
    done = launch(
        network["node-a"],
        python_with(mpi),
        *transport_of(mpi),
        "-np",
        "2",
        "-H",
        "node-a:1,node-b:1",
        "--port-range",
        "21000-21099",
        "python",
        "-c",
        program,
    )
    assert done.returncode == 0, done.stderr
    listening = {tuple(address.rsplit(":", 1)) for address in re.findall(r"LISTEN\s+\d+\s+\d+\s+(\S+)", done.stdout)}
    ports = {int(port) for address, port in listening if address != "127.0.0.1"} - {22}
    assert ports and all(21000 <= port <= 21099 for port in ports), listening
    if mpi == "tcp":  # on no other network, such as docker0's, either
        ours = {address for address, port in listening if port != "22"}
        assert ours == {"10.77.0.1", "10.77.0.2"}, listening


PACKAGES = ("_cffi_backend*", "click", "cloudpickle", "mpi4py", "numpy", "numpy.libs", "yaml", "_yaml")


def conda_like(prefix: Path, python: str) -> Path:
    """An environment that is only a prefix, as conda makes them: its own interpreter, MPI in its lib, nothing to activate."""
    asked = subprocess.run(
        [
            python,
            "-c",
            "import sys, sysconfig; print(sys.prefix, sys.base_prefix, *map(sysconfig.get_path, "
            "('stdlib', 'purelib')))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    virtual, base, library, packages = map(Path, asked.stdout.split())
    target = prefix / "lib" / library.name
    shutil.copytree(library, target, ignore=shutil.ignore_patterns("site-packages", "test", "__pycache__"))
    for each in (path for pattern in PACKAGES for path in packages.glob(pattern)):
        copy = shutil.copytree if each.is_dir() else shutil.copy
        copy(each, target / each.name)  # Debian's Python looks into no site-packages
    for folder in ("bin", "share", "etc", "lib"):
        shutil.copytree(
            virtual / folder,
            prefix / folder,
            symlinks=True,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("python*", "site-packages"),
        )
    interpreter = prefix / "bin" / "python"
    shutil.copy((base / "bin" / library.name).resolve(), interpreter)
    return interpreter


@pytest.mark.openmpi
def test_an_environment_that_is_only_a_prefix_serves_all_hosts(network: HostNetwork, tmp_path: Path) -> None:
    python = conda_like(tmp_path / "conda", python_with("openmpi"))
    program = (
        "import sys, numpy, ringtrain as rt; rt.init(); "
        "print(rt.allreduce(numpy.ones(1), op=rt.Sum), sys.prefix, sys.base_prefix)"
    )
    prefix = Path(python_with("openmpi")).parents[1]
    with network["node-a"].hidden(prefix), network["node-b"].hidden(prefix):  # else it might serve in its place
        done = launch(
            network["node-a"],
            str(python),
            "-np",
            "2",
            "-H",
            "node-a:1,node-b:1",
            "python",
            "-c",
            program,
            env=environment(PATH="/usr/bin:/bin"),
        )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] [2.] {tmp_path}/conda {tmp_path}/conda" for rank in range(2)]
    await_empty(network)


# ---- what does not start, and what loses its engine ----


def test_a_failed_preflight_leaves_neither_ssh_nor_a_process_there(network: HostNetwork) -> None:
    """One host is refused at once; on the other Python hangs, as on a file server that does not answer."""
    hanging = network.folder / "hanging"
    hanging.mkdir()
    (hanging / "sitecustomize.py").write_text("import os, time\nif os.uname().nodename == 'node-b': time.sleep(600)\n")
    python = python_with("openmpi")
    done = launch(
        network["node-a"],
        python,
        "-np",
        "2",
        "-H",
        "node-b:1,no-such-name:1",
        "--start-timeout",
        "5",
        "true",
        env=environment() | {"PYTHONPATH": f"{hanging}:{ROOT}"},
        timeout=PATIENCE,
    )
    assert done.returncode == 125 and "no-such-name" in done.stderr, done.stderr
    await_empty(network)


def test_the_reason_is_not_what_ssh_mentions_beside_it(network: HostNetwork) -> None:
    """It meets the host for the first time, says so, and then that there is no Python."""
    known = network["node-a"].folder / "ssh" / "known_hosts"
    before = known.read_text() if known.exists() else ""
    known.write_text("")
    try:
        with network["node-b"].hidden(sys.prefix):
            said = refused(network, "node-b:1")
    finally:
        known.write_text(before)
    assert "there is no Python at" in said and "Permanently added" not in said, said


@EACH_MPI
def test_a_host_whose_daemon_is_killed_is_named(mpi: str, network: HostNetwork) -> None:
    launcher = network["node-a"].start(
        *ringtrainrun(mpi, 3, "-H", "node-a:1,node-b:1,node-c:1", "python", "-c", WORK),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert [launcher.stdout.readline().endswith("at work\n") for _ in range(3)] == [True] * 3
    daemon = max(
        pid
        for pid, line in network["node-b"].processes().items()  # Open MPI's has a parent that only waits for it
        if line.split()[0].rpartition("/")[2] in ("prted", "hydra_pmi_proxy")
    )
    network["node-b"].run("kill", "-9", str(daemon))
    _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode != 0
    last = said.splitlines()[-1]
    assert last.startswith("ringtrainrun: host node-b: ") and "has ended there while its ranks still ran" in last, said
    await_empty(network)


@pytest.mark.tcp
def test_a_host_whose_agent_is_killed_amidst_steps_is_named(network: HostNetwork) -> None:
    """Ranks of the other hosts learn of it from the world, at about the time at which the launcher does."""
    launcher = network["node-a"].start(
        *ringtrainrun("tcp", 3, "-H", "node-a:1,node-b:1,node-c:1", "python", "-c", WORK),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert [launcher.stdout.readline().endswith("at work\n") for _ in range(3)] == [True] * 3
    agent = next(pid for pid, line in network["node-b"].processes().items() if "agent/__main__.py" in line)
    network["node-b"].run("kill", "-9", str(agent))
    _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1
    assert "node-b" in [line for line in said.splitlines() if line.startswith("ringtrainrun: ")][-1], said
    await_empty(network)


@pytest.mark.openmpi
def test_daemons_end_when_the_data_network_dies_and_that_of_ssh_does_not() -> None:
    """They do not hear of the end of the job, nor does the ssh that started them end before they do."""
    interfaces = {"node-a": "eth0", "node-b": "ens5"}
    with HostNetwork(interfaces, links=2) as network:
        launcher = network["node-a"].start(
            *ringtrainrun(
                "openmpi", 2, "-H", "node-a:1,node-b:1", "--network-interfaces", "10.78.2.0/24", "python", "-c", WORK
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(RINGTRAIN_DEAD_AFTER_SECONDS="3"),
        )
        assert [launcher.stdout.readline().endswith("at work\n") for _ in range(2)] == [True] * 2
        network["node-b"].check("ip", "link", "set", "ens5-2", "down")
        _, said = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode != 0, said
        await_empty(network)
