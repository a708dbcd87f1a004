"""A launcher takes up an elastic job whose launcher was lost: it reaches the agents, which have kept the ranks.

The hosts are not checked anew, and nothing starts: on each host a fresh agent hands its connection over to the one that
serves the job (see `agent.succession`). A host that cannot be reached is a lost one, as it is later.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ringtrain._rendezvous.agent_protocol import Serving, TakeOver
from ringtrain.launch.hang_up import hang_up_on
from ringtrain.launch.host_errors import HostError, LaunchError
from ringtrain.launch.hosts import Host
from ringtrain.launch.job_folder import JobFolder, Outline
from ringtrain.launch.output import Limits
from ringtrain.launch.reach import Agent

OF_THIS_LOGIN = "SSH_"  # variables that mean something here, as the agent that has the keys


@dataclass
class TakenUp:
    """What there was of a job.

    Attributes:
        outline: of it, by its last launcher.
        found: what each agent has said that could be taken over.
        lost: why others could not, by their hosts.
    """

    outline: Outline
    found: dict[Agent, Serving] = field(default_factory=dict)
    lost: dict[Host, str] = field(default_factory=dict)


def enter(outline: Outline) -> None:
    """Takes the environment and the folder in which the job was started. Raises LaunchError."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(OF_THIS_LOGIN)}
    theirs = {name: value for name, value in outline.environment.items() if not name.startswith(OF_THIS_LOGIN)}
    os.environ.clear()
    os.environ.update({**theirs, **ours})
    try:
        os.chdir(outline.directory)
    except OSError as error:
        raise LaunchError(
            f"working directory '{outline.directory}': it must be there, as when the job was started, but: {error.strerror}."
        ) from None


def take_over(folder: JobFolder, outline: Outline) -> TakenUp:
    """Reaches all agents of a job at once. Raises LaunchError if there is none left."""
    plan = outline.plan
    window = Limits.of(plan.ranks, len(plan.hosts)).window
    request: TakeOver = {"do": "take over", "socket": outline.socket, "key": outline.key, "window": window}
    hosts = [host for host, _ in outline.hosts]
    agents = [Agent(host, plan.ssh) for host in hosts]
    deadline = time.monotonic() + plan.start_seconds

    gone: list[Agent] = []  # whose hosts were reached

    def ask(agent: Agent) -> Serving | str:
        try:
            told = agent.ask(deadline, request)
        except HostError as error:
            return str(error)
        if "refused" not in told:
            return told
        gone.append(agent)
        return f"host '{agent.host.name}': its agent must serve this job, but {told['refused']}."

    taken = TakenUp(outline)
    with ThreadPoolExecutor(len(agents)) as pool:
        for agent, told in zip(agents, pool.map(ask, agents), strict=True):
            if isinstance(told, str):
                taken.lost[agent.host] = told
            else:
                taken.found[agent] = told
    hang_up_on([agent for agent in agents if agent not in taken.found])
    if not taken.found:
        if len(gone) == len(agents):  # it has ended, and is offered no longer
            folder.remove()
        else:
            folder.close()
        raise LaunchError(
            f"--resume {folder.name}: some agent of the job must be left, but none is. It has ended; start it anew.\n"
            + "\n".join(taken.lost.values())
        )
    return taken
