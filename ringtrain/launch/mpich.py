"""MPICH's mpiexec (Hydra), also that of Intel MPI: its names, its command line, the variables it gives to each rank."""

from __future__ import annotations

import re

from ringtrain.launch.plan import Plan

NAME = "MPICH"
PROGRAMS = ("mpiexec.hydra", "mpiexec.mpich", "mpiexec")
# Where a rank finds its rank, the number of ranks, and both within its host.
RANK_VARIABLES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def owns(library_version: str) -> bool:
    """Whether MPI_Get_library_version's text is of this engine."""
    return any(name in library_version for name in ("MPICH", "Intel(R) MPI", "MVAPICH", "CRAY MPICH"))


def command_line(mpiexec: str, plan: Plan) -> list[str]:
    """The engine's command, up to what each rank runs. Hydra binds no rank and forwards the whole environment."""
    line = [mpiexec, "-np", str(plan.ranks)]
    if plan.has_remote_hosts:
        line += ["-l", "-hosts", ",".join(map(str, plan.hosts))]
    return line


def environment(plan: Plan) -> dict[str, str]:
    """Settings of the library for this plan; what the user has set wins."""
    return {}


def rank_tag(line: bytes) -> bytes | None:
    """A line that the engine brought from a rank, tagged as the launcher does; None for its own lines."""
    return line if re.match(rb"\[\d+\] ", line) else None
