"""Slurm's srun, inside an allocation: its command line, and the hosts that Slurm has given. Used by `cli`.

`srun --mpi=... python train.py` works without any of this, as `init` finds rank and size by itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from ringtrain.launch import mpich, openmpi
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.hosts import Host, HostsError, parse_slurm
from ringtrain.launch.mpi_installation import Installation
from ringtrain.launch.plan import Plan

NAME = "Slurm's srun"
# The last one is what the launcher's agent adds on each host: Slurm gives no rank the number of ranks of its host.
RANK_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "RINGTRAIN_SLOTS")


def find_program(environment: Mapping[str, str]) -> str:
    """The path of srun within an allocation, "" without one."""
    return shutil.which("srun", path=environment.get("PATH")) or "" if "SLURM_JOB_ID" in environment else ""


def refuse_other_hosts(environment: Mapping[str, str]) -> None:
    """Raises HostsError in an allocation of several hosts whose srun is not here, as in most containers: nothing reaches them."""
    hosts = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES", "")
    if "SLURM_JOB_ID" in environment and hosts.isdecimal() and int(hosts) > 1:
        raise HostsError(
            f"SLURM_JOB_NODELIST '{environment.get('SLURM_JOB_NODELIST', '')}': srun must be on PATH to start ranks on the "
            f"{hosts} hosts of this allocation, but is not, as in most containers. Let srun start the ranks, each in a container: "
            "srun --mpi=none --kill-on-bad-exit=1 apptainer exec IMAGE python train.py. Or name the hosts with -H, for ssh, or "
            "this one alone: -H localhost:N."
        )


def find_hosts(environment: Mapping[str, str]) -> list[Host]:
    """The hosts of the allocation, with as many slots as it has tasks for them. Raises HostsError."""
    listed = environment.get("SLURM_JOB_NODELIST", "")
    try:
        shown = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True)
    except OSError as error:  # a container that has srun alone
        raise HostsError(
            f"SLURM_JOB_NODELIST '{listed}': scontrol must be there to list its hosts, but: {error.strerror}. "
            "Name the hosts with -H."
        ) from None
    if shown.returncode or not shown.stdout.split():
        raise HostsError(
            f"SLURM_JOB_NODELIST '{listed}': scontrol must be able to list its hosts, but says: "
            f"{shown.stderr.strip() or 'nothing'}. Name the hosts with -H."
        )
    names = shown.stdout.split()
    tasks = environment.get("SLURM_TASKS_PER_NODE") or f"1(x{len(names)})"
    return parse_slurm(names, tasks)


def plugin_arguments(srun: str, library: Installation, plan: Plan, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What makes srun introduce the ranks to each other in the way that the MPI library asks for: srun's default is often
    to leave it, and then each rank is a world of one. Nothing where the user has chosen.

    Raises LaunchError if this Slurm cannot.
    """
    if "SLURM_MPI_TYPE" in environment or any(argument.startswith("--mpi") for argument in plan.engine_arguments):
        return ()
    listed = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (f"--mpi={choose_plugin(library, listed.stdout + listed.stderr)}",)


def choose_plugin(library: Installation, listed: str) -> str:
    """The library's plug-in among those in the words of `srun --mpi=list`; pure. Raises LaunchError if it is not there."""
    wanted = library.engine.SLURM_PLUGIN
    if wanted in re.findall(r"\w+", listed):
        return wanted
    raise LaunchError(
        f"Slurm's srun: it must have the plug-in '{wanted}' to connect ranks of {library.engine.NAME}, but it "
        f"lists: {' '.join(listed.split()) or 'nothing'}. Let mpirun start the ranks, with --mpi, or install "
        "Slurm's plug-in."
    )


def folder_of(process: int) -> str:
    """The folder of a program for its temporary files: srun makes none."""
    return ""


def command_line(srun: str, plan: Plan) -> list[str]:
    """The engine's command, up to what each rank runs."""
    hosts = ",".join(host.name for host in plan.hosts)
    return [
        srun,
        f"--ntasks={plan.ranks}",
        f"--nodes={len(plan.hosts)}",
        f"--nodelist={hosts}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        "--overlap",
        *(plan.binding_arguments or ("--cpu-bind=none",)),
        *plan.engine_arguments,
    ]


def environment(plan: Plan, networks: Sequence[str] = ()) -> dict[str, str]:
    """Settings of whichever library it is: their names differ."""
    return openmpi.environment(plan, networks) | mpich.environment(plan, networks)
