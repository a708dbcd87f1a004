"""Open MPI's mpirun: its names, its command line, the variables it gives to each rank. Used by `mpi` and `job`."""

from __future__ import annotations

import re

from ringtrain.launch.plan import Plan

NAME = "Open MPI"
PROGRAMS = ("mpirun.openmpi", "mpirun")
# Where a rank finds its rank, the number of ranks, and both within its host.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                  "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")

# Above its own limits (64 KiB) the library asks the receiver before it sends, so that each direction of a ring waits
# for the other and the wire idles. Messages up to this size are sent at once.
TCP_BYTES = 2 * 1024 * 1024


def owns(library_version: str) -> bool:
    """Whether MPI_Get_library_version's text is of this engine."""
    return "Open MPI" in library_version


def command_line(mpirun: str, plan: Plan) -> list[str]:
    """The engine's command, up to what each rank runs.

    Not bound to cores, because a rank has several threads; more ranks than cores are what the user asked for.
    """
    line = [mpirun, "-np", str(plan.ranks), "--host", ",".join(map(str, plan.hosts)),
            "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    if plan.as_root:
        line.append("--allow-run-as-root")
    if plan.has_remote_hosts:
        line.append("--tag-output")
        # Names only: the values travel inside the engine, not on command lines that others can read.
        line += [part for name in plan.forwarded for part in ("-x", name)]
    return line


def environment(plan: Plan) -> dict[str, str]:
    """Settings of the library for this plan; what the user has set wins."""
    settings = {
        "OMPI_MCA_btl_tcp_eager_limit": str(TCP_BYTES),
        "OMPI_MCA_btl_tcp_rndv_eager_limit": str(TCP_BYTES),
        "OMPI_MCA_btl_tcp_max_send_size": str(TCP_BYTES),
    }
    if plan.oversubscribed:
        # A rank that waits inside MPI gives its core to the others; the engine cannot see this, it was given slots.
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return settings


def rank_tag(line: bytes) -> bytes | None:
    """A line that the engine brought from a rank, tagged as the launcher does; None for its own lines."""
    tagged = re.match(rb"\[[^\],]*,(\d+)\]<std(?:out|err)>: ?(.*)", line)
    return b"[%s] %s" % tagged.groups() if tagged else None
