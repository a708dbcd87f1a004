"""Hosts that may come to an elastic job are tried: each is checked as those of the start were, by a thread. Used by `elastic_job`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ringtrain._rendezvous.agent_protocol import RankNews, Request
from ringtrain.launch.discovery import HostScript, ScriptError, Supply
from ringtrain.launch.elastic_hosts import ElasticHosts
from ringtrain.launch.hang_up import hang_up_on
from ringtrain.launch.host_errors import HostError, LaunchError
from ringtrain.launch.host_setup import HostSetup
from ringtrain.launch.hosts import Host
from ringtrain.launch.networks import Chosen
from ringtrain.launch.preflight import Beside, check_hosts
from ringtrain.launch.reach import Agent
from ringtrain.launch.terminal import Terminal


class Trial(NamedTuple):
    """What has come of a host that was tried: its agent, which serves, and the job's networks with it; or why it cannot be used."""

    host: Host
    agent: Agent | None
    networks: Chosen | None
    problem: str = ""


class Trials:
    """Tries one host at a time, and listens to the script that names hosts.

    supply: which hosts the job may use. hosts: that it has. wake: called by a thread when there is news.

    Attributes:
        is_trying: a host is being tried.
    """

    def __init__(self, setup: HostSetup, supply: Supply, hosts: ElasticHosts, wake: Callable[[], None]):
        self.is_trying = False
        self._setup = setup
        self._supply = supply
        self._hosts = hosts
        self._wake = wake
        self._news: queue.SimpleQueue[list[Host] | ScriptError | Trial] = queue.SimpleQueue()
        self._answers: dict[Agent, queue.SimpleQueue[Any]] = {}  # of agents that serve, to what a thread has asked them
        self._script_failed = False
        self._stop_watching: Callable[[], None] = lambda: None

    def watch(self, script: HostScript) -> None:
        """Runs a script that names hosts again and again."""
        self._stop_watching = script.watch(self._tell)

    def stop(self) -> None:
        """Runs the script no more."""
        self._stop_watching()

    def hear(self, facts: RankNews, agent: Agent) -> bool:
        """Takes facts of an agent that answer what a thread has asked it; returns whether these do."""
        if "addresses" not in facts and "reached" not in facts:
            return False
        if agent in self._answers:
            self._answers[agent].put(facts)
        return True

    def lose(self, agent: Agent) -> None:
        """An agent that serves has gone, and answers no more."""
        if agent in self._answers:
            self._answers[agent].put(None)

    def take(self, terminal: Terminal, is_over: Callable[[], bool]) -> Iterator[Trial]:
        """What has come of hosts that were tried; the supply learns which hosts the script names."""
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Trial):
                self.is_trying = False
                yield news
            elif isinstance(news, ScriptError):
                if not self._script_failed and not is_over():
                    terminal.say(
                        f"{news} The job goes on with the hosts that it has; this is said once.", "script-failed"
                    )
                self._script_failed = True
            else:
                self._script_failed = False
                self._supply.named(news)

    @property
    def is_free(self) -> bool:
        """Whether another host may be tried now. In an allocation of Slurm's there is none to come."""
        return not self.is_trying and not self._setup.plan.by_srun

    def next_host(self, now: float) -> Host | None:
        """The host that is to be tried, if there is one at this time."""
        return self._supply.to_try(now, self._hosts.present(), self._room())

    def next_try(self) -> float:
        """When `next_host` may say something that it does not say now."""
        return self._supply.next_try(self._hosts.present(), self._room())

    def _room(self) -> int:
        """How many more ranks the job may have."""
        return self._setup.plan.ranks - sum(agent.host.slots for agent in self._hosts.staying())

    def begin(self, host: Host, known: Chosen) -> None:
        """Tries a host, beside the agents of those that stay. known: the job's networks."""
        self.is_trying = True
        beside = Beside(self._hosts.staying(), self._ask)
        threading.Thread(target=self._try, args=(host, known, beside), name="ringtrainrun-try", daemon=True).start()

    def _tell(self, news: list[Host] | ScriptError | Trial) -> None:
        """Takes what a thread has found out."""
        self._news.put(news)
        self._wake()

    def _try(self, host: Host, known: Chosen, beside: Beside) -> None:
        """Checks a host as those of the start were, beside those that there are; by a thread."""
        plan = replace(self._setup.plan, hosts=[host], spare=(), interfaces=known.networks)
        agent = None
        try:
            agents, networks, _ = check_hosts(plan, self._setup.installation, self._setup.environment, beside=beside)
            agent = agents.pop()
            if networks is None or not set(networks.networks) <= set(known.networks):
                raise LaunchError(
                    f"host '{host.name}': it must share one of the job's networks with all other hosts, but of "
                    f"{', '.join(known.networks) or 'the loopback'} it shares none. Open one of them."
                )
            self._setup.have_serve(agent, networks, time.monotonic() + self._setup.plan.start_seconds)
            self._tell(Trial(host, agent, networks))
        except Exception as error:  # whatever it is: or no host would be tried any more
            hang_up_on([agent] if agent else [])
            is_known = isinstance(error, (LaunchError, HostError, OSError))
            text = str(error) if is_known else f"host '{host.name}': it could not be tried: {error!r}."
            self._tell(Trial(host, None, None, text))

    def _ask(self, agent: Agent, request: Request, deadline: float) -> Any:
        """An answer of an agent that serves; by a thread, of which there is one at a time. Raises HostError."""
        answers = self._answers[agent] = queue.SimpleQueue()
        agent.send(request)
        wanted = {"listen": "addresses", "connect": "reached"}[request["do"]]
        try:
            while (answer := answers.get(timeout=max(0.0, deadline - time.monotonic()))) and wanted not in answer:
                pass  # that of a test which was given up
        except queue.Empty:
            answer = None
        if answer is None:
            raise HostError(
                f"host '{agent.host.name}': its agent must answer within {self._setup.plan.start_seconds:g} s (--start-timeout) when "
                "networks are tested, but has not. It may be stopped, or its machine busy."
            )
        return answer
