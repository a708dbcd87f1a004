"""Open MPI's mpirun: its names, its command line, the variables it gives to each rank. Used by `mpi_installation` and `job`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from ringtrain._rendezvous.launcher import OPENMPI_TCP_SETTINGS, SLURM_PLUGINS, UCX_SETTINGS
from ringtrain.launch.networks import is_ipv6
from ringtrain.launch.plan import Plan

NAME = "Open MPI"
PROGRAMS = ("mpirun.openmpi", "mpirun")
WORDS_OF_PROGRAMS = ("Open MPI", "OpenRTE", "PRRTE", "prte")  # some of them are in what `mpirun --version` says
SLURM_PLUGIN = SLURM_PLUGINS[NAME]
# Of its mpirun, which sets the process group of ssh a second time, sometimes too late. The first time was enough.
HARMLESS_WORDS = re.compile(rb"plm:ssh: Warning: setpgid\(.* failed in parent")
# Its mpirun names the node whose daemon it lost, and ends the others' daemons then: who of them is gone first is chance.
LOST_DAEMON = re.compile(rb"^\s*Remote daemon:.* on node (\S+)$")
# What its mpirun, or a daemon of its, ends with now and then on a busy machine, before it starts a rank.
STUMBLED = re.compile(rb"PMIx server's listener thread failed to start")
# With two networks or more: only messages above these limits are cut and sent over all of them, so that the single
# network's limits (see OPENMPI_TCP_SETTINGS) would leave all but one idle. Open MPI's own.
SEVERAL_NETWORKS_SETTINGS = dict.fromkeys(
    ("OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_rndv_eager_limit"), "65536"
)
# With which a rank ends when the connection of another one closes (MPI_ERR_UNKNOWN), at once and without a word of its
# own.
CODE_OF_A_LOST_PEER = 14
POSIX_SHELLS = {"", "sh", "ash", "bash", "dash", "ksh", "zsh"}
# Where a rank finds its rank, the number of ranks, and both within its host.
RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


def owns(library_version: str) -> bool:
    """Whether MPI_Get_library_version's text is of this engine."""
    return "Open MPI" in library_version


def folder_of(process: int) -> str:
    """The folder of an mpirun for its temporary files, of Open MPI 5. It is in TMPDIR."""
    return f"ompi.{process}"


def command_line(mpirun: str, plan: Plan) -> list[str]:
    """The engine's command, up to what each rank runs.

    Not bound to cores, because a rank has several threads; more ranks than cores are what the user asked for.
    """
    line = [
        mpirun,
        "-np",
        str(plan.ranks),
        "--host",
        ",".join(map(str, plan.hosts)),
        *(() if _maps(plan.engine_arguments) else ("--map-by", "slot:OVERSUBSCRIBE")),
        *(plan.binding_arguments or ("--bind-to", "none")),
    ]
    if plan.as_root:
        line.append("--allow-run-as-root")
    return [*line, *plan.engine_arguments]


def _maps(arguments: Sequence[str]) -> bool:
    """Whether the user says where ranks are put, which mpirun takes once."""
    return any(each.lstrip("-").partition("=")[0] == "map-by" for each in arguments)


def environment(plan: Plan, networks: Sequence[str] = ()) -> dict[str, str]:
    """Settings of the library and of its daemons for this plan; what the user has set wins.

    They concern TCP alone: where the library finds InfiniBand or UCX, it uses that as ever.
    """
    settings = OPENMPI_TCP_SETTINGS | UCX_SETTINGS
    if plan.oversubscribed:
        # A rank that waits inside MPI gives its core to the others; the engine cannot see this, it was given slots.
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if plan.has_remote_hosts:
        arguments = shlex.join(plan.ssh.options)
        settings |= {
            "PRTE_MCA_plm_ssh_args": arguments,
            "OMPI_MCA_plm_rsh_args": arguments,
            # All hosts are reached from here, as has just been tested, and not from each other.
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        }
    settings |= SEVERAL_NETWORKS_SETTINGS if len(networks) > 1 else {}
    if is_ipv6(networks):
        settings["OMPI_MCA_btl_tcp_disable_family"] = "4"  # for the interfaces, see `of_host`
    elif networks:
        settings["OMPI_MCA_btl_tcp_if_include"] = ",".join(networks)
        if any(host.is_here for host in plan.hosts):  # else mpirun itself may be on none of these networks
            # One is enough for the daemons, and with two networks by number PRRTE 3 crashes.
            settings |= dict.fromkeys(("PRTE_MCA_prte_if_include", "OMPI_MCA_oob_tcp_if_include"), networks[0])
    settings.update(ports(*plan.ports, is_ipv6(networks)) if plan.ports[0] else {})
    return settings


def for_login_shells(names: Iterable[str]) -> dict[str, str]:
    """Settings for hosts with these login shells: the daemons' command line is one for sh, unless mpirun asks, by one ssh more."""
    if POSIX_SHELLS.issuperset(names):
        return {}
    return dict.fromkeys(("PRTE_MCA_plm_ssh_assume_same_shell", "OMPI_MCA_plm_rsh_assume_same_shell"), "0")


def of_host(interfaces: Sequence[str], networks: Sequence[str]) -> dict[str, str]:
    """Settings for the ranks of one host: the names of its interfaces, as Open MPI knows no IPv6 network by number."""
    return {"OMPI_MCA_btl_tcp_if_include": ",".join(interfaces)} if is_ipv6(networks) else {}


def ports(first: int, last: int, by_ipv6: bool) -> dict[str, str]:
    """Lets ranks listen on a port within these, and each daemon on the last two: it takes all that it is given.

    A daemon listens for IPv4 first and for IPv6 after it, where it needs ports that are still free if it is to be
    reached so.
    """
    of_family = {"ipv4": f"{last - 3}-{last - 2}" if by_ipv6 else f"{last - 1}-{last}", "ipv6": f"{last - 1}-{last}"}
    settings = {
        f"{prefix}_MCA_oob_tcp_dynamic_{family}_ports": daemons
        for prefix in ("PRTE", "OMPI")
        for family, daemons in of_family.items()
    }
    for family in ("v4", "v6"):
        settings |= {
            f"OMPI_MCA_btl_tcp_port_min_{family}": str(first),
            f"OMPI_MCA_btl_tcp_port_range_{family}": str(last - first - 1),
        }
    return settings
