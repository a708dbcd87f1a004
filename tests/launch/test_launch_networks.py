"""Which networks carry the tensors of a job, decided from what hosts have reached of each other, and what MPI is told of them."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import needs
import pytest

from ringtrain.bench.namespaces import HostNetwork
from ringtrain.launch import mpich, openmpi, preflight
from ringtrain.launch.agent import host_networks
from ringtrain.launch.agent.events import call_ready
from ringtrain.launch.agent.host_networks import (
    LOSES_LARGE,
    Networks,
    free_port,
    greet,
    ipv4_addresses,
    ipv6_addresses,
    is_allowed,
    rdma_ports,
)
from ringtrain.launch.agent.network_test import NetworkTest
from ringtrain.launch.environment import of_host
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.hosts import Host
from ringtrain.launch.mpi_installation import Installation
from ringtrain.launch.networks import Chosen, HostAddress, callees, choose
from ringtrain.launch.plan import Plan
from ringtrain.launch.preflight import Beside

OPEN_MPI = Installation("Open MPI v5", "", openmpi, "")
MPICH = Installation("MPICH Version: 5", "", mpich, "")


def address(interface: str, text: str, prefix: int = 24) -> HostAddress:
    return HostAddress(interface, text, prefix, 20000)


def reach(addresses: dict[str, list[HostAddress]], *blocked: tuple[str, str], why: str = "refused") -> dict:
    """Every host reaches every address of the others, but for those blocked: (from, address); docker0 never is."""
    return {
        (one, other, each.address): "refused" if each.interface == "docker0" else why * ((one, each.address) in blocked)
        for one in addresses
        for other in addresses
        if one != other
        for each in addresses[other]
    }


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 100, 1000])
def test_few_hosts_are_called_and_no_part_of_them_is_left_out(count: int) -> None:
    """All by all where they are few; else each by some, on both sides of any cut between neighbours."""
    hosts = [f"node-{number}" for number in range(count)]
    called = callees(hosts)
    assert list(called) == hosts and all(host not in own and len(own) == len(set(own)) for host, own in called.items())
    if count <= 8:
        assert {host: set(own) for host, own in called.items()} == {host: set(hosts) - {host} for host in hosts}
        return
    assert max(map(len, called.values())) <= 1 + (count - 1).bit_length()
    callers = {host: [one for one in hosts if host in called[one]] for host in hosts}
    assert min(map(len, callers.values())) >= 3 and len(callers[hosts[0]]) == count - 1
    for first in range(0, count, 7):
        part = {hosts[(first + each) % count] for each in range(count // 2)}
        assert any(set(called[host]) - part for host in part) and any(
            part & set(called[host]) for host in set(hosts) - part
        )


def test_who_was_not_called_by_a_host_is_not_taken_for_lost() -> None:
    many = {f"node-{number}": [address("eth0", f"10.0.0.{number}"), DOCKER] for number in range(1, 21)}
    called = callees(list(many))
    tried = {way: why for way, why in reach(many, ("node-4", "10.0.0.5")).items() if way[1] in called[way[0]]}
    assert choose(
        many, {way: why * (why != "refused" or way[2] == DOCKER.address) for way, why in tried.items()}
    ).networks == ("10.0.0.0/24",)
    assert choose(many, tried).startswith("host 'node-5': every other host must reach it")


DOCKER = address("docker0", "172.17.0.1", 16)
PAIR = {"a": [address("eth0", "10.0.0.1"), DOCKER], "b": [DOCKER, address("ens5", "10.0.0.2")]}


def test_a_network_that_leads_nowhere_is_not_chosen() -> None:
    assert choose(PAIR, reach(PAIR)) == Chosen(
        ("10.0.0.0/24",), {"a": ("eth0",), "b": ("ens5",)}, {"a": ("10.0.0.1",), "b": ("10.0.0.2",)}
    )


def test_all_networks_that_are_shared_are_used() -> None:
    two = {host: [*own, address("fast", f"10.9.0.{index}")] for index, (host, own) in enumerate(PAIR.items(), start=1)}
    assert choose(two, reach(two)).networks == ("10.0.0.0/24", "10.9.0.0/24")
    assert choose(two, reach(two)).addresses == {"a": ("10.0.0.1", "10.9.0.1"), "b": ("10.0.0.2", "10.9.0.2")}
    assert choose(two, reach(two, ("b", "10.9.0.1"))).networks == ("10.0.0.0/24",), "one way only is no network"


def test_routed_networks_do_where_none_is_shared() -> None:
    routed = {"a": [address("eth0", "10.0.1.1")], "b": [address("eth0", "10.0.2.1")]}
    assert choose(routed, reach(routed)).networks == ("10.0.1.0/24", "10.0.2.0/24")


def test_who_cannot_reach_whom_is_said() -> None:
    said = choose(PAIR, reach(PAIR, ("a", "10.0.0.2")))
    assert "host 'b'" in said and "from a at 10.0.0.2 (ens5): refused" in said and "ssh a ping -c 1 10.0.0.2" in said
    alone = {"a": PAIR["a"], "b": []}
    said = choose(alone, reach(alone), {"b": ["ens5 (10.0.0.2/24)", "docker0 (172.17.0.1/16)"]})
    assert (
        said.startswith("host 'b': it must have")
        and "but has ens5 (10.0.0.2/24), docker0 (172.17.0.1/16). Name" in said
    )
    assert "but has no interface that is up" in choose(alone, reach(alone))


def test_the_callers_own_address_is_not_to_be_pinged() -> None:
    """Nor named, unless there is no other: what it answers says nothing about the network."""
    said = choose(PAIR, reach(PAIR, ("b", "10.0.0.1")))
    assert "docker0" not in said and said.endswith("To see it: ssh b ping -c 1 10.0.0.1")
    further = {**PAIR, "a": [address("far", "10.5.0.1"), *PAIR["a"]]}
    assert choose(further, reach(further, ("b", "10.0.0.1"), ("b", "10.5.0.1"))).endswith("ssh b ping -c 1 10.0.0.1")
    only = {"a": [DOCKER], "b": [DOCKER]}
    assert "from b at 172.17.0.1 (docker0): refused" in choose(only, reach(only))


def test_the_host_that_most_others_cannot_reach_is_named() -> None:
    """Not the first that cannot reach it."""
    three = {host: [address("eth0", f"10.0.0.{number}")] for number, host in enumerate("abc", start=1)}
    cut_off = [("a", "10.0.0.2"), ("c", "10.0.0.2"), ("b", "10.0.0.1"), ("b", "10.0.0.3")]
    assert choose(three, reach(three, *cut_off)).startswith("host 'b': every other host must reach it")


# ---- large packets ----

THREE = {
    host: [address("eth0", f"10.0.0.{number}"), replace(address("tun0", f"10.9.0.{number}"), mtu=9000)]
    for number, host in enumerate("abc", start=1)
}
AROUND_B = [("a", "10.9.0.2"), ("c", "10.9.0.2"), ("b", "10.9.0.1"), ("b", "10.9.0.3")]


def test_a_network_that_loses_large_packets_is_left_out_and_named() -> None:
    chosen = choose(THREE, reach(THREE, *AROUND_B, why=LOSES_LARGE))
    assert chosen.networks == ("10.0.0.0/24",)
    assert chosen.left_out == (
        "network 10.9.0.0/24 is left out, because of host 'b': small packets pass, large ones do not: MTU.",
    )
    assert choose(THREE, reach(THREE, *AROUND_B)).left_out == (), "a firewall is nothing new"


def test_without_another_network_the_host_and_its_mtu_are_told() -> None:
    alone = {host: own[1:] for host, own in THREE.items()}
    said = choose(alone, reach(alone, *AROUND_B, why=LOSES_LARGE))
    assert said.startswith("host 'b': packets of 9000 bytes") and "small packets pass, large ones do not: MTU" in said
    assert "(from a at 10.9.0.1 (tun0) to b)" in said
    assert said.endswith("To see it: ssh b ping -c 1 -M do -s 8972 10.9.0.1")
    between = choose(alone, reach(alone, *AROUND_B[::2], why=LOSES_LARGE))
    assert between.startswith("hosts 'a,b': packets of 9000 bytes"), "c is well"


@contextmanager
def saying(*what: bytes) -> Iterator[socket.socket]:
    """A connection from somebody who has said this, one packet after the other, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as caller:
        connection, _ = server.accept()
        with connection:
            for each in what:
                caller.sendall(each)
            yield connection


def test_who_sends_nothing_behind_the_nonce_loses_large_packets() -> None:
    nonce = bytes(range(16))
    with saying(nonce) as connection:
        assert host_networks.answer_of(connection, nonce, "no answer") == LOSES_LARGE
    with saying(nonce, bytes(1000)) as connection:
        assert host_networks.answer_of(connection, nonce, "no answer") == LOSES_LARGE
        assert host_networks.answer_of(connection, nonce, LOSES_LARGE) == ""
    with saying(nonce[::-1]) as connection:
        assert host_networks.answer_of(connection, nonce, "no answer") == "another host answered"


def test_a_caller_that_takes_nothing_keeps_nobody_waiting() -> None:
    """Not even where all that is sent stays in the kernel."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        caller.connect(server.getsockname())
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024)
            greet(connection, bytes(16))  # returns


LISTEN = """
import json, sys
from ringtrain.launch.agent.host_networks import Networks
own = Networks()
print(json.dumps(own.listen("ab" * 16, (0, 0), [])), flush=True)
own.answer_beside()
sys.stdin.read()
"""
CONNECT = """
import json, sys
from ringtrain.launch.agent import host_networks
host_networks.SECONDS_FOR_LARGE = 1.5
print(json.dumps(host_networks.connect_all(json.loads(sys.argv[1]))))
"""


def reached(network: HostNetwork, caller: str, called: str) -> dict[str, str]:
    """What the agent of one host finds at each address of another one, by interface."""
    path = {"env": {"PYTHONPATH": str(Path(__file__).parents[2])}, "text": True}
    listener = network[called].start(
        sys.executable, "-c", LISTEN, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **path
    )
    listening = json.loads(listener.stdout.readline())
    targets = json.dumps([(where, port, "ab" * 16) for _, where, _, port, _ in listening])
    done = network[caller].run(sys.executable, "-c", CONNECT, targets, **path)
    listener.communicate("")
    return dict(zip([interface for interface, *_ in listening], json.loads(done.stdout), strict=True))


@needs.hosts
def test_agents_see_that_a_path_loses_large_packets(three_hosts: HostNetwork) -> None:
    with three_hosts.losing_large("node-b"):
        assert reached(three_hosts, "node-a", "node-b")["ens5"] == LOSES_LARGE
        assert reached(three_hosts, "node-b", "node-a")["eth0"] == LOSES_LARGE
    assert reached(three_hosts, "node-a", "node-b")["ens5"] == ""


# ---- what is allowed, what MPI is told ----


@pytest.mark.parametrize(
    "names, found",
    [(["ens5"], True), (["10.0.0.0/16"], True), (["eth0", "10.1.0.0/16"], False), ([], True), (["fd00::/16"], False)],
)
def test_interfaces_are_named_by_name_or_network(names: list[str], found: bool) -> None:
    assert is_allowed("ens5", "10.0.0.2", names) is found


def test_nothing_listens_where_it_may_not() -> None:
    own, interfaces = Networks(), {name for name, _, _ in ipv4_addresses()}
    if not interfaces:
        pytest.skip("needs a network interface besides the loopback")
    allowed = min(interfaces)
    found = own.listen(nonce="00", ports=(0, 0), interfaces=[allowed])
    own.close()
    assert {interface for interface, *_ in found} == {allowed}
    assert own.listen(nonce="00", ports=(0, 0), interfaces=["no-such-interface"]) == []


def test_ucx_gets_the_interfaces_that_lead_somewhere_and_all_of_infiniband(tmp_path) -> None:
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/1", "mlx5_0/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    assert rdma_ports(tmp_path) == ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1"] and rdma_ports(tmp_path / "none") == []
    chosen = replace(choose(PAIR, reach(PAIR)), rdma_ports={"b": rdma_ports(tmp_path)})
    devices = [of_host(host, chosen, MPICH, {})["UCX_NET_DEVICES"] for host in PAIR]
    assert devices == ["eth0", "ens5,mlx5_0:1,mlx5_0:2,mlx5_1:1"]
    assert "UCX_NET_DEVICES" not in of_host("a", chosen, MPICH, {"UCX_NET_DEVICES": "all"}) | of_host(
        "a", chosen, OPEN_MPI, {}
    )


# ---- IPv6 ----

BOTH = {
    host: [*own, address(own[0].interface, f"fd00::{number}", 64)]
    for number, (host, own) in enumerate(
        {"a": [address("eth0", "10.0.0.1")], "b": [address("ens5", "10.0.0.2")]}.items(), start=1
    )
}


def test_ipv6_serves_where_ipv4_does_not() -> None:
    """Both lead over one cable here, so they are never used at once."""
    assert choose(BOTH, reach(BOTH)).networks == ("10.0.0.0/24",)
    alone = choose(BOTH, reach(BOTH, ("a", "10.0.0.2")))
    assert alone.is_ipv6
    assert alone == Chosen(("fd00::/64",), {"a": ("eth0",), "b": ("ens5",)}, {"a": ("fd00::1",), "b": ("fd00::2",)})


def test_two_networks_of_one_cable_count_once() -> None:
    aliases = {
        host: [*own, address(own[0].interface, f"10.5.0.{number}")] for number, (host, own) in enumerate(BOTH.items())
    }
    assert choose(aliases, reach(aliases)).networks == ("10.0.0.0/24",)


def test_hosts_of_one_kind_of_address_each_are_told_so() -> None:
    said = choose(BOTH, reach(BOTH, ("a", "10.0.0.2"), ("b", "fd00::1")))
    assert "hosts 'a,b': all must have an IPv4 address" in said and "(a: 10.0.0.1; b: fd00::2)" in said


def test_open_mpi_gets_interfaces_for_ipv6_and_networks_for_ipv4() -> None:
    plan = Plan(["true"], 2, [Host("a", 1), Host("b", 1)], ports=(20000, 20009))
    four, six = (choose(BOTH, reach(BOTH, *blocked)) for blocked in ([], [("a", "10.0.0.2")]))
    by_four, by_six = (openmpi.environment(plan, chosen.networks) for chosen in (four, six))
    assert by_four["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.0/24" and "OMPI_MCA_btl_tcp_if_include" not in by_six
    assert by_six["OMPI_MCA_btl_tcp_disable_family"] == "4" and "OMPI_MCA_btl_tcp_disable_family" not in by_four
    of_b = of_host("b", six, OPEN_MPI, {})
    assert (of_b["OMPI_MCA_btl_tcp_if_include"], of_b["NCCL_SOCKET_FAMILY"]) == ("ens5", "AF_INET6")
    assert of_host("b", four, OPEN_MPI, {}).keys() == {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "FI_TCP_IFACE"}
    assert (
        of_host("b", six, OPEN_MPI, {"OMPI_MCA_btl_tcp_if_include": "eth9"}).get("OMPI_MCA_btl_tcp_if_include") is None
    )
    daemons = [by_six[f"PRTE_MCA_oob_tcp_dynamic_ipv{version}_ports"] for version in (4, 6)]
    assert daemons == ["20006-20007", "20008-20009"], "the second listener of a daemon finds its ports taken"


def test_addresses_of_one_cable_or_of_the_host_alone_are_left_out(tmp_path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe80000000000000d09737fffe0f404c 02 40 20 80     eth0\n"
        "fd770000000000000000000000000002 02 40 00 80     eth0\n"
    )
    assert ipv6_addresses(table) == [("eth0", "fd77::2", 64)]
    assert ipv6_addresses(tmp_path / "none") == []


def test_a_port_for_a_program_is_none_that_the_system_gives_to_others():
    """Or a rank's own connections may take it before the program listens."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = {free_port("127.0.0.1", (0, 0)) for _ in range(20)}
    assert all(found) and not any(low <= port <= high for port in found)
    assert len(found) > 1  # or jobs that start together meet at it


def test_a_port_for_a_program_is_free_at_every_address():
    """torch.distributed listens at all of them."""
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", (port, port)) == 0
        assert free_port("127.0.0.1", (port - 1, port)) in (0, port - 1)


# ---- beside a job ----


class Served:
    """What an agent that serves does in the test, with a selector of its own."""

    def __init__(self) -> None:
        self.told: list[dict] = []
        self.selector = selectors.DefaultSelector()
        self.test = NetworkTest(SimpleNamespace(tell=self.told.append), self.selector)  # type: ignore[arg-type]
        how = {"nonce": "ab" * 16, "ports": (0, 0), "interfaces": []}
        self.test.listen({"do": "listen", "listener": how})  # type: ignore[typeddict-item]

    def step(self) -> None:
        call_ready(self.selector, 0.01)
        if time.monotonic() >= self.test.look_at:
            self.test.look()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback as the network of two hosts."""
    monkeypatch.setattr(host_networks, "ipv4_addresses", lambda: [("eth0", "127.0.0.1", 8)])
    monkeypatch.setattr(host_networks, "ipv6_addresses", list)


def test_agents_that_serve_call_each_other(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By events, without a thread; who does not answer costs no more than its time, and nothing stays open."""
    before = len(os.listdir("/proc/self/fd"))
    pair = Served(), Served()
    ports = [each.told[0]["addresses"][0][3] for each in pair]
    assert pair[0].told[0]["machine"] == pair[1].told[0]["machine"] and pair[0].told[0]["name"] == socket.gethostname()
    monkeypatch.setattr(host_networks, "SECONDS_TO_CONNECT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = closed.getsockname()[1]
        closed.close()
        wanted = [(ports[1], "ab"), (ports[1], "cd"), (silent.getsockname()[1], "ab"), (nowhere, "ab")]
        targets = [("127.0.0.1", port, nonce * 16) for port, nonce in wanted]
        pair[0].test.connect({"do": "connect", "targets": targets})
        deadline = time.monotonic() + 60
        while len(pair[0].told) < 2 and time.monotonic() < deadline:
            for each in pair:
                each.step()
    assert pair[0].told[1] == {"reached": ["", "another host answered", "no answer", "Connection refused"]}
    assert pair[0].test.look_at == float("inf")
    pair[0].test.connect({"do": "connect", "targets": []})
    assert pair[0].told[2] == {"reached": []}
    for each in pair:
        each.test.close()
        each.selector.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_those_who_have_been_tested_are_called_by_who_comes_alone() -> None:
    assert callees(list("abc"), {"b"}) == {"a": ["b"], "b": ["c", "a"], "c": ["b"]}
    hosts = [f"node-{number}" for number in range(100)]
    called = callees(hosts, hosts[-1:])
    assert called[hosts[-1]][:3] == ["node-0", "node-1", "node-3"]
    assert [host for host in hosts if called[host] == hosts[-1:]] == [
        hosts[99 - (1 << each)] for each in range(6, -1, -1)
    ]


@pytest.mark.parametrize("machine", ["of c", "of a"])
def test_a_host_that_comes_is_tested_beside_the_agents_that_serve(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They call it and are called, without agents of their own for that; a machine of the job under another name is refused."""
    asked: list[tuple] = []

    class FakeAgent(SimpleNamespace):
        def ask(self, _deadline: float, request: dict) -> dict:
            return answer(self, request)

        def send(self, request: dict) -> None:
            asked.append((self.host.name, request["do"]))

        def close(self) -> None:
            pass

        def has_left(self, _deadline: float) -> bool:
            return True

        def has_shell(self) -> bool:
            return False

    def answer(agent: FakeAgent, request: dict) -> dict:
        name = agent.host.name
        if request["do"] == "connect":
            asked.append((name, "connect", [address for address, *_ in request["targets"]]))
            return {"reached": [""] * len(request["targets"])}
        own = machine if name == "c" else f"of {name}"
        listening = [("eth0", f"10.0.0.{ord(name) - ord('a') + 1}", 24, 20000, 1500)]
        return {"addresses": listening, "left_out": [], "rdma_ports": [], "name": name, "machine": [own]}

    serving = [FakeAgent(host=Host(name, 1)) for name in "ab"]
    beside = Beside(serving, lambda agent, request, _: answer(agent, request))  # type: ignore[arg-type]
    monkeypatch.setattr(preflight, "Agent", lambda host, _: FakeAgent(host=host, awaited_for=""))
    monkeypatch.setattr(preflight, "_describe", lambda agent, *_: {"machine": [machine], "gpus": 0})
    plan = Plan(["true"], 1, [Host("c", 1)], interfaces=("10.0.0.0/24",))

    def check() -> preflight.Checked:
        return preflight.check_hosts(plan, Installation("", "", None, "", ""), {}, beside=beside)  # type: ignore[arg-type]

    if machine == "of a":
        with pytest.raises(LaunchError, match="hosts 'a,c': each name must be a different machine, but both are c"):
            check()
    else:
        agents, chosen, _ = check()
        assert [agent.host.name for agent in agents] == ["c"] and chosen is not None
        assert chosen.networks == ("10.0.0.0/24",) and set(chosen.addresses) == set("abc")
        connected = {each[0]: each[2] for each in asked if each[1] == "connect"}
        assert connected == {"a": ["10.0.0.3"], "b": ["10.0.0.3"], "c": ["10.0.0.1", "10.0.0.2"]}
    assert [each for each in asked if each[1] == "listen no more"] == [("a", "listen no more"), ("b", "listen no more")]
