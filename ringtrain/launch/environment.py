"""The environment of a job's ranks: the user's, what flags add, and what it leaves open. Used by `cli` and `job`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ringtrain.launch import mpich, openmpi
from ringtrain.launch.mpi import Installation
from ringtrain.launch.networks import Chosen
from ringtrain.launch.plan import Plan

SYSTEM_PREFIXES = ("/usr", "/usr/local")  # of every user, whose own PATH says what comes first


def job_environment(plan: Plan, installation: Installation, networks: Chosen | None = None,
                    shows_progress: bool = False) -> dict[str, str]:
    """The environment for the engine and all ranks: our choices, over them the user's, over these the flags."""
    environment = dict(installation.engine.environment(plan, networks.networks if networks else ()))
    if shows_progress:  # the ranks write into pipes and cannot ask the terminal for its size
        size = os.get_terminal_size(sys.stderr.fileno())
        environment.update(COLUMNS=str(size.columns - 5), LINES=str(size.lines))
    environment.update(os.environ)
    environment.update({**plan.settings, **plan.exported})
    if sys.prefix not in SYSTEM_PREFIXES:  # `python` means the environment that has ringtrain, activated or not
        environment["PATH"] = os.path.join(sys.prefix, "bin") + os.pathsep + environment.get("PATH", os.defpath)
    return environment


def of_host(host: str, networks: Chosen | None, installation: Installation, environment: Mapping[str, str]) -> dict[str, str]:
    """What differs from host to host: the interfaces' names, unless the user chose them."""
    if networks is None:
        return {}
    names = networks.interfaces[host]
    ours = {"NCCL_SOCKET_IFNAME": "=" + ",".join(names), "GLOO_SOCKET_IFNAME": names[0], "FI_TCP_IFACE": names[0],
            **openmpi.of_host(names, networks.networks)}
    if mpich.owns(installation.version):
        ours |= mpich.of_host(names, networks.rdma_ports.get(host, ()))
    if networks.is_ipv6:
        ours["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return {name: value for name, value in ours.items() if name not in environment}
