"""What the agent of a host is told before ranks start there. Used by `job`, and by `trials` for a host that comes later."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ringtrain._rendezvous.agent_protocol import FreePort, Serve
from ringtrain.launch.agent.rank_command import OF_HOROVODRUN
from ringtrain.launch.environment import for_horovod, listening, of_host, of_rank_0
from ringtrain.launch.host_errors import HostError, LaunchError
from ringtrain.launch.hosts import Host
from ringtrain.launch.mpi_installation import Installation
from ringtrain.launch.networks import Chosen
from ringtrain.launch.plan import Plan
from ringtrain.launch.reach import Agent

SECONDS_OF_SILENCE = 30.0  # until the agent of another host takes the launcher for dead


@dataclass
class Allocation:
    """What a job runs on, as the checks of its hosts have found it.

    Attributes:
        installation: the MPI of all hosts, or none.
        agents: of the hosts that are used, at any time.
        environment: of the engine and of all ranks.
        networks: which all hosts share; None for one host.
        absent: hosts of the plan that are not among the agents', and why.
    """

    installation: Installation
    agents: list[Agent]
    environment: Mapping[str, str]
    networks: Chosen | None = None
    absent: Mapping[Host, str] = field(default_factory=dict)


class HostSetup:
    """What is the same for all hosts of a job, from which each agent's request to serve is made.

    window: bytes of output that an agent may send ahead.

    Attributes:
        plan, installation, environment: of the job.
        socket: name of each agent's, on its host.
        of_rank_0: variables that tell torch.distributed where to meet; none in an elastic job, where rank 0 may die.
        grace: seconds that the ranks go on without a launcher.
        key: what a launcher must know that takes the job up; "" if none may.
    """

    def __init__(
        self,
        plan: Plan,
        allocation: Allocation,
        socket: str,
        window: int,
    ):
        self.socket = socket
        self.of_rank_0: dict[str, str] = {}
        self.grace = 0.0
        self.key = ""
        self.plan = plan
        self.installation = allocation.installation
        self.environment = allocation.environment
        self._agents = allocation.agents
        self._window = window
        self._ignored: list[int] = []  # signals that the launcher ignores, and so the ranks
        self._function = ""  # that `ringtrain.run` wants called

    def begin(self, networks: Chosen | None, deadline: float) -> None:
        """Reads the function that the ranks are to call, and finds where torch meets. Raises LaunchError."""
        given = self.plan.function_folder and Path(self.plan.function_folder, "function").read_bytes()
        self._function = base64.b64encode(given).decode() if given else ""
        if not self.plan.elastic:
            self._find_torchs_store(networks, deadline)

    def _find_torchs_store(self, networks: Chosen | None, deadline: float) -> None:
        """On the host of rank 0."""
        first = self._agents[0]
        address = addresses_of(first.host, networks)[0]
        try:
            found: FreePort = first.ask(deadline, {"do": "find port", "address": address, "ports": self.plan.ports})
        except HostError as error:
            raise LaunchError(str(error)) from None
        self.of_rank_0 = of_rank_0(address, found["port"], self.environment)

    def ignore(self, signals: list[int]) -> None:
        """Notes which signals the launcher ignores."""
        self._ignored = signals

    def have_serve(self, agent: Agent, networks: Chosen | None, deadline: float) -> None:
        """Has an agent wait for the ranks of its host. Raises HostError."""
        host = agent.host
        environment = self.plan.given_to(host, self.environment)
        environment |= of_host(host.name, networks, self.installation, self.environment)
        environment |= self.of_rank_0
        environment["RINGTRAIN_SLOTS"] = str(host.slots)
        if OF_HOROVODRUN in self.environment:
            environment |= for_horovod(host, [each.host for each in self._agents])
        if not self.installation.has_mpi:
            environment["RINGTRAIN_LISTEN"] = listening(addresses_of(host, networks), self.plan.ports)
        asked = time.monotonic()
        agent.clock.note(asked, told=agent.ask(deadline, {"do": "tell time"})["clock"], answered=time.monotonic())
        request: Serve = {
            "do": "serve",
            "socket": self.socket,
            "directory": os.getcwd(),
            "environment": environment,
            "function": self._function,
            "patience": None if host.is_here else self.grace or SECONDS_OF_SILENCE,
            "grace": self.grace,
            "key": self.key,
            "window": self._window,
            "ignored": self._ignored,
            "notices": list(self.plan.elastic.notices) if self.plan.elastic else [],
        }
        agent.ask(deadline, request)


def addresses_of(host: Host, networks: Chosen | None) -> tuple[str, ...]:
    """Where the ranks of other hosts reach a host, or its own where there are no others."""
    return networks.addresses[host.name] if networks else ("127.0.0.1",)
