"""The environment of a job's ranks: the user's, what flags add, and what it leaves open. Used by `cli` and `job`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ringtrain._rendezvous.meeting import endpoint
from ringtrain.launch import mpich, openmpi
from ringtrain.launch.hosts import Host
from ringtrain.launch.mpi_installation import Installation
from ringtrain.launch.networks import Chosen
from ringtrain.launch.plan import OF_THE_ENGINE, Plan

LEAST_COLUMNS = 20
SYSTEM_PREFIXES = ("/usr", "/usr/local")  # of every user, whose own PATH says what comes first


def given_environment(plan: Plan) -> dict[str, str]:
    """What the user has set in the launcher's environment, and over it what flags set."""
    # A shell that another engine has started, or a stray variable, would have the ranks look for that engine's world.
    users = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_ENGINE)}
    return {**users, **plan.settings, **plan.exported}


def job_environment(
    given: Mapping[str, str],
    plan: Plan,
    installation: Installation,
    networks: Chosen | None = None,
    shows_progress: bool = False,
) -> dict[str, str]:
    """The environment for the engine and all ranks: our choices, over them what was given.

    Args:
        given: by `given_environment`.
        networks: those between the hosts, once they are known.
        shows_progress: whether ranks draw for a terminal.
    """
    environment = dict(installation.engine.environment(plan, networks.networks if networks else ()))
    if shows_progress:  # the ranks write into pipes and cannot ask the terminal for its size
        size = os.get_terminal_size(sys.stderr.fileno())
        if size.columns > LEAST_COLUMNS:  # some terminals have no size
            environment.update(COLUMNS=str(size.columns - len("[0] ") - 1), LINES=str(size.lines))
    environment.update(given)
    if sys.prefix not in SYSTEM_PREFIXES:  # `python` means the environment that has ringtrain, activated or not
        ours, path = os.path.join(sys.prefix, "bin"), environment.get("PATH", os.defpath)
        if path.split(os.pathsep)[0] != ours:
            environment["PATH"] = ours + os.pathsep + path
    return environment


def of_rank_0(address: str, port: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Where torch.distributed meets, in scripts that were written for torchrun; unless the user has said so. port: 0 for none."""
    ours = {"MASTER_ADDR": address, "MASTER_PORT": str(port)} if port else {}
    return {name: value for name, value in ours.items() if name not in environment}


def for_horovod(host: Host, hosts: Sequence[Host]) -> dict[str, str]:
    """Where a host is among those of the job, for programs that read Horovod's variables; each rank adds its own place."""
    return {
        "HOROVOD_HOSTNAME": host.name,
        "HOROVOD_CROSS_RANK": str(hosts.index(host) if host in hosts else len(hosts)),
        "HOROVOD_CROSS_SIZE": str(max(len(hosts), 1)),
    }


def listening(addresses: Sequence[str], ports: tuple[int, int]) -> str:
    """Where a rank listens if TCP connects the ranks: "10.0.0.1:0,10.1.0.1:20000-20999"; port 0 is any."""
    range_of_ports = f"{ports[0]}-{ports[1]}" if ports[0] else "0"
    return ",".join(endpoint(each, range_of_ports) for each in addresses)


def of_host(
    host: str, networks: Chosen | None, installation: Installation, environment: Mapping[str, str]
) -> dict[str, str]:
    """What differs from host to host: the interfaces' names, unless the user chose them."""
    if networks is None:
        return {}
    names = networks.interfaces[host]
    ours = {
        "NCCL_SOCKET_IFNAME": "=" + ",".join(names),
        "GLOO_SOCKET_IFNAME": names[0],
    }
    if installation.has_mpi:
        ours |= {"FI_TCP_IFACE": names[0], **openmpi.of_host(names, networks.networks)}
    if mpich.owns(installation.version):
        ours |= mpich.of_host(names, networks.rdma_ports.get(host, ()))
    if networks.is_ipv6:
        ours["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return {name: value for name, value in ours.items() if name not in environment}
