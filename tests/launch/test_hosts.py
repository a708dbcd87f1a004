"""The hosts that other tests and `ringtrain bench wire` run on: apart from each other, and gone when they should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import needs
import pytest

from ringtrain.bench.namespaces import HostNetwork

pytestmark = needs.hosts


@pytest.fixture(scope="module")
def network():
    with HostNetwork({"node-a": "eth0", "node-b": "ens5"}, rate="80mbit") as made:
        yield made


def test_hosts_have_their_own_names_interfaces_memory_and_processes(network: HostNetwork) -> None:
    Path(f"/dev/shm/mark-{os.getpid()}").touch()
    try:
        assert [network[name].run("hostname").stdout for name in ("node-a", "node-b")] == ["node-a\n", "node-b\n"]
        assert "ens5" in network["node-b"].run("ip", "address").stdout
        assert "ens5" not in network["node-a"].run("ip", "address").stdout
        assert network["node-a"].run("ls", "/dev/shm").stdout == ""
        assert str(os.getpid()) not in network["node-a"].run("ps", "-e", "-o", "pid=").stdout.split()
    finally:
        Path(f"/dev/shm/mark-{os.getpid()}").unlink()


def test_hosts_reach_each_other_by_ssh(network: HostNetwork) -> None:
    done = network["node-a"].run("ssh", "-o", "StrictHostKeyChecking=accept-new", "node-b", "/bin/hostname")
    assert done.stdout == "node-b\n", done.stderr


def test_links_have_the_rate_that_was_asked_for(network: HostNetwork) -> None:
    """8 MB at 80 Mbit/s take 0.8 s; without a shaper some milliseconds."""
    script = "import socket, time\n"
    receive = (
        script
        + """
server = socket.create_server(("", 7000)); print(flush=True); peer, _ = server.accept(); taken = 0
while data := peer.recv(1 << 20): taken += len(data)
peer.sendall(b".")"""
    )
    send = (
        script
        + """
peer = socket.create_connection(("node-b", 7000)); start = time.monotonic(); peer.sendall(bytes(8_000_000))
peer.shutdown(socket.SHUT_WR); peer.recv(1); print(time.monotonic() - start)"""
    )
    receiver = network["node-b"].start(sys.executable, "-c", receive, stdout=subprocess.PIPE)
    receiver.stdout.readline()
    seconds = float(network["node-a"].run(sys.executable, "-c", send).stdout)
    receiver.communicate()
    assert seconds > 0.7


def test_hosts_go_with_a_maker_that_is_killed() -> None:
    program = (
        "from ringtrain.bench.namespaces import HostNetwork\nimport time\nn = HostNetwork({'lone': 'eth0'})\n"
        "print(n['lone'].pid, n.folder, flush=True)\ntime.sleep(60)"
    )
    maker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    init, folder = maker.stdout.readline().split()
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    subprocess.run(["rm", "-r", folder], check=True)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{init}").exists():
        assert time.monotonic() < deadline, "the host outlived its maker"
        time.sleep(0.05)
