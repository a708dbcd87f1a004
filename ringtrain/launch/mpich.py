"""MPICH's mpiexec (Hydra), also that of Intel MPI: its names, its command line, the variables it gives to each rank."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ringtrain._rendezvous.launcher import SLURM_PLUGINS, UCX_SETTINGS
from ringtrain.launch.plan import Plan

NAME = "MPICH"
PROGRAMS = ("mpiexec.hydra", "mpiexec.mpich", "mpiexec")
WORDS_OF_PROGRAMS = ("HYDRA", "MPICH", "Intel(R) MPI", "MVAPICH")  # some of them are in what `mpiexec --version` says
SLURM_PLUGIN = SLURM_PLUGINS[NAME]
# Where a rank finds its rank, the number of ranks, and both within its host.
RANK_VARIABLES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
MOST_RAILS = 16  # of UCX
# What MPI_Abort writes on the stderr of the rank that called it, with the exit code.
ABORT = re.compile(rb"Abort\((\d+)\) on node .* application called MPI_Abort")


def folder_of(process: int) -> str:
    """The folder of a program for its temporary files: Hydra's programs make none."""
    return ""


def owns(library_version: str) -> bool:
    """Whether MPI_Get_library_version's text is of this engine."""
    return any(name in library_version for name in ("MPICH", "Intel(R) MPI", "MVAPICH", "CRAY MPICH"))


def command_line(mpiexec: str, plan: Plan) -> list[str]:
    """The engine's command, up to what each rank runs. Hydra binds no rank unless it is told to."""
    line = [mpiexec, "-np", str(plan.ranks)]
    if plan.has_remote_hosts:
        line += ["-launcher", "ssh", "-hosts", ",".join(map(str, plan.hosts))]
    return [*line, *plan.binding_arguments, *plan.engine_arguments]


def of_host(interfaces: Sequence[str], rdma_ports: Sequence[str]) -> dict[str, str]:
    """Settings for the ranks of one host: without them UCX takes interfaces that lead nowhere, and MPI_Init fails.

    What it does not find in this list it leaves alone, so all ports of InfiniBand are in it.
    """
    return {"UCX_NET_DEVICES": ",".join([*interfaces, *rdma_ports])}


def environment(plan: Plan, networks: Sequence[str] = ()) -> dict[str, str]:
    """Settings of the library and of its daemons for this plan; what the user has set wins."""
    # UCX warns of each message that a failed rank has not received, which only hides the cause.
    settings = dict(UCX_SETTINGS) if plan.verbose else {**UCX_SETTINGS, "UCX_LOG_LEVEL": "error"}
    if plan.has_remote_hosts:
        settings["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(plan.ssh.options)
    if len(networks) > 1:  # else what UCX does not send by a rendezvous, large messages over TCP among it, goes by one
        settings["UCX_MAX_EAGER_RAILS"] = str(min(len(networks), MOST_RAILS))
    first, last = plan.ports
    if first:
        settings |= {
            "MPIEXEC_PORT_RANGE": f"{first}:{last}",
            "MPIR_CVAR_CH3_PORT_RANGE": f"{first}:{last}",
            "UCX_TCP_PORT_RANGE": f"{first}-{last}",
            "FI_TCP_PORT_LOW_RANGE": str(first),
            "FI_TCP_PORT_HIGH_RANGE": str(last),
        }
    return settings
