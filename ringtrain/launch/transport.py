"""Which transport connects the ranks of a job, and so what starts them: an MPI's engine, or the launcher's agents."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ringtrain.launch import agents, mpi_installation
from ringtrain.launch.agent.facts import run_probe
from ringtrain.launch.agent.host_networks import rdma_ports
from ringtrain.launch.hosts import HostsError
from ringtrain.launch.mpi_installation import Installation, LaunchError, NoLibraryError
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
class Choice:
    """The installation for a transport, and what is said of it.

    Attributes:
        facts: that `auto` has decided by, None if it had not to.
    """

    installation: Installation
    line: str
    facts: Facts | None = None

    def confirmed(self, networks: Chosen | None) -> Choice:
        """The choice once all hosts have told their ports: MPI by `auto` needs RDMA on all of them."""
        if self.facts is None or not self.installation.has_mpi or networks is None:
            return self
        transport, why = decide("auto", replace(self.facts, rdma=all(networks.rdma_ports.values())))
        if transport == "mpi":
            return self
        return Choice(without_mpi(self.installation.package), line_of(transport, why))


def choose(plan: Plan, given: Mapping[str, str]) -> Choice:
    """The installation for the transport that an environment asks for, and a line where `auto` had to choose.

    Raises LaunchError if there is no MPI but must be, or if its engine is missing.
    """
    wanted = given.get(VARIABLE) or "auto"
    facts = facts_here(plan, given)
    transport, why = decide(wanted, facts)
    if transport == "mpi":
        try:
            return Choice(
                mpi_installation.find_installation(), line_of(transport, why), facts if wanted == "auto" else None
            )
        except NoLibraryError as missing:
            if wanted == "mpi" or facts.asked or not missing.package:
                raise
            return Choice(without_mpi(missing.package), line_of("tcp", f"no MPI library was found ({missing.why})"))
    found = run_probe(mpi_installation.PROBE_WITHOUT_MPI)
    if "problem" in found:
        raise LaunchError(f"environment '{sys.prefix}': ringtrain must load there, but it says: {found['problem']}")
    return Choice(without_mpi(found["package"]), line_of(transport, why))


def without_mpi(package: str) -> Installation:
    """The installation of a job that TCP connects."""
    return Installation("", "", agents, "", package)


def refuse_arguments_of_an_engine(plan: Plan) -> None:
    """Raises HostsError if there are arguments for an mpirun, which such a job has not."""
    given = {"--mpi-args": plan.engine_arguments, "--binding-args": plan.binding_arguments}
    for flag, words in given.items():
        if words:
            raise HostsError(
                f"{flag} '{' '.join(words)}': it must be left out with transport tcp, because no mpirun starts the ranks. "
                "Leave it out, or choose --transport mpi."
            )
