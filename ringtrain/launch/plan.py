"""What is to be run, as decided by `cli`: plain data, read by the engines' files, `preflight` and `job`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ringtrain.launch.authority import Rules
from ringtrain.launch.discovery import HostScript
from ringtrain.launch.hosts import Host
from ringtrain.launch.shells import Ssh

# Of this machine, this login or this shell; and CUDA_VISIBLE_DEVICES means other devices elsewhere.
SITE = "RINGTRAIN_SITE"
NOT_FORWARDED = ("BASH_FUNC_", "CUDA_VISIBLE_DEVICES", "DBUS_", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD",
                 "PWD", "SHELL", "SHLVL", "SSH_", "TMPDIR", SITE, "USER", "WAYLAND_", "XDG_")  # fmt: skip
# The engine gives each rank its own; those of a job that the launcher itself is part of would stand in their way.
OF_THE_ENGINE = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "MPI_LOCAL",
                 "HYDI_", "SLURM_PROCID", "SLURM_LOCALID", "RINGTRAIN_RANK", "RINGTRAIN_SIZE", "RINGTRAIN_LOCAL_",
                 "RINGTRAIN_SLOTS", "RINGTRAIN_LISTEN", "RINGTRAIN_ELASTIC")  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A command on a number of ranks, and where and how they run.

    Attributes:
        settings: environment variables that flags stand for; they win over the user's own.
        exported: those of -x, which may be secrets; they win over all.
        interfaces: what --network-interfaces names: interfaces or networks; () to find them.
        ports: first and last port that may be listened on; (0, 0) for any.
        folder: of --output-filename; "" to show the ranks' output.
        function_folder: where `ringtrain.run` has put a function, and wants what the ranks leave; "" for a command.
        shares_gpus: whether a host may have more ranks than GPUs that they see.
        engine_arguments: of --mpi-args and --binding-args, for the engine's command line.
        elastic: the rules of a job whose number of ranks may change, `ranks` at most; None for a fixed one.
        spare: further hosts that were named, beyond the `hosts` that the ranks need; an elastic job takes them for lost ones.
        hosts_come_late: whether some may not be up yet, as where an operator has named them, or in a pod; they are tried again.
        script: what names the hosts that such a job may use, again and again; None if they are named once.
        by_srun: whether srun starts what runs on the hosts. by_mpirun: whether --mpi asks for mpirun there.
    """

    command: list[str]
    ranks: int
    hosts: list[Host]
    verbose: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    exported: Mapping[str, str] = field(default_factory=dict)
    ssh: Ssh = field(default_factory=Ssh)
    start_seconds: float = 30.0
    interfaces: tuple[str, ...] = ()
    ports: tuple[int, int] = (0, 0)
    folder: str = ""
    shows_time: bool = False
    log_json: bool = False
    function_folder: str = ""
    engine_arguments: tuple[str, ...] = ()
    binding_arguments: tuple[str, ...] = ()
    by_srun: bool = False
    by_mpirun: bool = False
    shares_gpus: bool = False
    hosts_come_late: bool = False
    elastic: Rules | None = None
    script: HostScript | None = None
    spare: tuple[Host, ...] = ()
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    as_root: bool = field(default_factory=lambda: os.geteuid() == 0)

    @property
    def has_remote_hosts(self) -> bool:
        """Whether a rank runs on another machine than the launcher."""
        return not all(host.is_here for host in self.hosts)

    @property
    def oversubscribed(self) -> bool:
        """Whether some host has more ranks than this machine has cores; others are taken to be like it."""
        return max(host.slots for host in self.hosts) > self.cores

    def given_to(self, host: Host, environment: Mapping[str, str]) -> dict[str, str]:
        """What the launcher gives to the ranks of a host: its environment, as far as it travels, and all of -x."""
        site = {SITE: host.site} if host.site else {}
        return {**forwarded(environment, host.is_here), **site, **self.exported}


def forwarded(environment: Mapping[str, str], is_here: bool) -> dict[str, str]:
    """The part of an environment that ranks get from the launcher: on its own host the engine passes on the rest."""
    left_out = OF_THE_ENGINE + (() if is_here else NOT_FORWARDED)
    return {name: value for name, value in environment.items() if not name.startswith(left_out)}
