"""What starts the ranks of a plan, and in which environment: an MPI's engine, srun, or the launcher's agents. Used by `cli`.

Which it is follows from the transport, which `auto` chooses: by what is known here, and again once all hosts are known.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ringtrain.launch import agents, mpi_installation, srun
from ringtrain.launch.agent.facts import run_probe
from ringtrain.launch.agent.host_networks import rdma_ports
from ringtrain.launch.environment import given_environment, job_environment
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.hosts import HostsError
from ringtrain.launch.mpi_installation import Installation, NoLibraryError, command_line
from ringtrain.launch.networks import Chosen
from ringtrain.launch.plan import Plan

VARIABLE = "RINGTRAIN_TRANSPORT"
NAMES_A_LIBRARY = "MPI4PY_LIBMPI"  # read by mpi4py: whoever sets it wants that MPI


@dataclass(frozen=True)
class Facts:
    """What `auto` decides by.

    Attributes:
        hosts: how many there are.
        rdma: whether each of them that is known by now has a port of InfiniBand or a relative of it.
        has_mpi4py: whether mpi4py is installed here; what it finds is not known.
        asked: a flag or variable that is an MPI's, "" for none.
    """

    hosts: int
    rdma: bool
    has_mpi4py: bool
    asked: str = ""


def decide(wanted: str, facts: Facts) -> tuple[str, str]:
    """The transport, "mpi" or "tcp", and why if there was something to choose, else ""; pure. See decision 215."""
    if wanted != "auto":
        return wanted, ""
    if facts.asked:
        return "mpi", f"{facts.asked} asks for it"
    if not facts.has_mpi4py:
        return "tcp", ""
    if facts.hosts == 1:
        return "tcp", "there is one host"
    if facts.rdma:
        return "mpi", "all hosts have RDMA"
    return "tcp", "not all hosts have RDMA"


def line_of(transport: str, why: str) -> str:
    """What is said of a choice of `auto`; "" if there was none."""
    other = {"tcp": "mpi", "mpi": "tcp"}[transport]
    further = "; scripts that use mpi4py themselves need it" if transport == "tcp" else ""
    return f"transport {transport}, because {why}. --transport {other} takes the other one{further}." if why else ""


def facts_here(plan: Plan, given: Mapping[str, str]) -> Facts:
    """What is known before any host has been asked: RDMA of this machine."""
    of_an_mpi = {
        "--mpi-args": bool(plan.engine_arguments),
        "--binding-args": bool(plan.binding_arguments),
        "--mpi": plan.by_mpirun,
        NAMES_A_LIBRARY: bool(given.get(NAMES_A_LIBRARY)),
    }
    asked = next((name for name, is_given in of_an_mpi.items() if is_given), "")
    has_mpi4py = importlib.util.find_spec("mpi4py") is not None
    return Facts(len(plan.hosts), bool(rdma_ports()), has_mpi4py, asked)


@dataclass(frozen=True)
class Starter:
    """What starts the ranks of a plan.

    Attributes:
        plan: with the arguments that the engine needs beside the user's.
        installation: of the engine's MPI, or of none.
        given: the environment that the user and flags give to the ranks, and the transport if it is TCP.
        line: what is said of a choice of `auto`; "" if there was none.
        facts: that `auto` has decided by, None if it had not to.
    """

    plan: Plan
    installation: Installation
    given: Mapping[str, str]
    line: str = ""
    facts: Facts | None = None

    def confirmed(self, networks: Chosen | None) -> Starter:
        """What starts them once all hosts have told their ports: MPI by `auto` needs RDMA on all of them."""
        if self.facts is None or not self.installation.has_mpi or networks is None:
            return self
        transport, why = decide("auto", replace(self.facts, rdma=all(networks.rdma_ports.values())))
        if transport == "mpi":
            return self
        plan = replace(self.plan, engine_arguments=())  # they are ours: of a user's `auto` does not choose
        return _by_tcp(plan, self.given, self.installation.package, line_of(transport, why))

    def environment(self, networks: Chosen | None = None, shows_progress: bool = False) -> dict[str, str]:
        """That of the engine and all ranks; see `job_environment`."""
        return job_environment(self.given, self.plan, self.installation, networks, shows_progress)

    def account(self) -> list[str]:
        """What --verbose and --dry-run say."""
        exported, installation = self.plan.exported, self.installation
        added = [
            f"{name}={shlex.quote(value)}"
            for name, value in self.environment().items()
            if os.environ.get(name) != value and name not in exported
        ]
        added += [f"{name}=..." for name in exported]  # its value may be a secret
        line = command_line(self.plan, installation, "SOCKET") if installation.has_mpi else self.plan.command
        return [
            *filter(None, [self.line]),
            f"MPI library {installation.library} ({installation.version})"
            if installation.has_mpi
            else "no MPI: TCP connects the ranks, and the agent on each host starts them",
            f"added to the environment: {' '.join(added) or 'nothing'}",
            f"command line: {shlex.join(line)}",
        ]


def starter_of(plan: Plan) -> Starter:
    """What starts a plan's ranks, by the transport that the environment asks for, or that `auto` chooses.

    Raises LaunchError if there is no MPI but must be, or if its engine is missing; HostsError for arguments of an engine
    that there is not.
    """
    given = given_environment(plan)
    wanted = given.get(VARIABLE) or "auto"
    facts = facts_here(plan, given)
    transport, why = decide(wanted, facts)
    line = line_of(transport, why)
    if transport == "tcp":
        return _by_tcp(plan, given, package_here(), line)
    try:
        installation = mpi_installation.find_installation()
    except NoLibraryError as missing:
        if wanted == "mpi" or facts.asked or not missing.package:
            raise
        return _by_tcp(plan, given, missing.package, line_of("tcp", f"no MPI library was found ({missing.why})"))
    if plan.by_srun:
        program = srun.find_program(os.environ)
        further = srun.plugin_arguments(program, installation, plan, os.environ)
        plan = replace(plan, engine_arguments=(*further, *plan.engine_arguments))
        installation = replace(installation, engine=srun, program=program)
    return Starter(plan, installation, given, line, facts if wanted == "auto" else None)


def _by_tcp(plan: Plan, given: Mapping[str, str], package: str, line: str) -> Starter:
    refuse_arguments_of_an_engine(plan)
    return Starter(plan, without_mpi(package), {**given, VARIABLE: "tcp"}, line)


def package_here() -> str:
    """The release of ringtrain that loads here without an MPI. Raises LaunchError if none does."""
    found = run_probe(mpi_installation.PROBE_WITHOUT_MPI)
    if "problem" in found:
        raise LaunchError(f"environment '{sys.prefix}': ringtrain must load there, but it says: {found['problem']}")
    return found["package"]


def without_mpi(package: str) -> Installation:
    """The installation of a job that TCP connects."""
    return Installation("", "", agents, "", package)


def refuse_arguments_of_an_engine(plan: Plan) -> None:
    """Raises HostsError if an mpirun is asked for, or has arguments: such a job has none."""
    given = {"--mpi-args": plan.engine_arguments, "--binding-args": plan.binding_arguments}
    found = [f"{flag} '{' '.join(words)}'" for flag, words in given.items() if words]
    if plan.by_mpirun:
        found.append("--mpi (controller: mpi)")
    if found:
        raise HostsError(
            f"{found[0]}: it must be left out with transport tcp, because no mpirun starts the ranks. Leave it out, or "
            "choose --transport mpi, which a job with --elastic cannot have."
        )
