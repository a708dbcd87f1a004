"""Hosts that come to an elastic job and leave it: which is tried, who has to go, and until when. Used by `elastic_job`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from ringtrain.launch.authority import Action, Authority
from ringtrain.launch.discovery import Supply
from ringtrain.launch.elastic_hosts import ElasticHosts
from ringtrain.launch.elastic_news import ElasticNews
from ringtrain.launch.environment import listening
from ringtrain.launch.hang_up import hang_up_on
from ringtrain.launch.host_setup import Allocation
from ringtrain.launch.networks import Chosen
from ringtrain.launch.plan import Plan
from ringtrain.launch.reach import Agent
from ringtrain.launch.slot_engine import SlotEngine
from ringtrain.launch.terminal import Terminal
from ringtrain.launch.trials import Trial, Trials


class LedJob(Protocol):
    """What this needs of the job."""

    plan: Plan
    allocation: Allocation
    terminal: Terminal
    engine: SlotEngine
    authority: Authority
    news: ElasticNews
    has_begun: bool

    def is_over(self) -> bool:
        """Whether no other world is to come."""
        ...

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Does what the authority has decided."""
        ...

    def take_in(self, agent: Agent) -> None:
        """Listens to the agent of another host."""
        ...

    def note_hosts(self) -> None:
        """Has the next launcher know which hosts there are."""
        ...

    def give_notice(self, agent: Agent, now: float) -> None:
        """Asks the ranks of a host to leave in time."""
        ...


class HostChanges:
    """Takes hosts in that have passed their trial, and lets those go that are to leave once nobody is left there.

    Attributes:
        trials: of hosts that may come.
    """

    def __init__(self, job: LedJob, hosts: ElasticHosts, supply: Supply, trials: Trials):
        self.trials = trials
        self._job, self._hosts, self._supply = job, hosts, supply
        self._notices: dict[str, str] = {}  # why hosts are to leave of which the authority is not told yet, by name

    def next_try(self) -> float:
        """When a host may be tried next; infinite if none may."""
        return self.trials.next_try() if self._may_try() else float("inf")

    def take_news(self, now: float) -> None:
        """Takes what has come of trials, and what the script says; begins the next trial."""
        job = self._job
        for trial in self.trials.take(job.terminal, job.is_over):
            self._take_trial(trial, now)
        if not job.has_begun or job.is_over():
            return
        for name in self._supply.to_leave(self._hosts.present()):
            if name not in self._hosts.leaving:
                self.have_leave(self._hosts[name], "--host-discovery-script names it no longer.")
        host = self.trials.next_host(now) if self._may_try() else None
        if host is not None and job.allocation.networks is not None:
            self.trials.begin(host, job.allocation.networks)

    def _may_try(self) -> bool:
        """Whether another host may be checked now."""
        return self._job.has_begun and self.trials.is_free and self._job.allocation.networks is not None

    def _take_trial(self, trial: Trial, now: float) -> None:
        job, name, agent = self._job, trial.host.name, trial.agent
        if agent is None or trial.networks is None or job.allocation.networks is None:
            self._supply.failed(now, name)
            job.news.say_absent(name, trial.problem)
            self._pass_notices_on(now)
            return
        if job.is_over():
            hang_up_on([agent])
            return
        self._use(trial.networks)
        self._hosts.add(agent)
        job.take_in(agent)
        job.news.say_came(name, trial.host.slots)
        job.authority.host_added(trial.host)
        job.note_hosts()
        job.carry_out(job.authority.host_came(now, name))
        self._pass_notices_on(now)

    def _use(self, networks: Chosen) -> None:
        """Takes the networks that all hosts share, the new one among them; if they are fewer, all listen there alone."""
        job = self._job
        known, job.allocation.networks = job.allocation.networks, networks
        if known is None or networks.networks == known.networks:
            return
        for agent in self._hosts.all():
            if agent.host.name in networks.addresses:
                listens = listening(networks.addresses[agent.host.name], job.plan.ports)
                job.engine.listen(agent, listens, self._hosts.numbers(agent))

    def is_taken_away(self, agent: Agent) -> None:
        """A host is to go, and does not come again unless it is named anew."""
        self._supply.leaves(agent.host.name)
        self.have_leave(agent, "it is to be taken away.")

    def have_leave(self, agent: Agent, cause: str) -> None:
        """Has all ranks of a host leave between two steps, and then its agent."""
        now, name = time.monotonic(), agent.host.name
        self._hosts.leaving.add(name)
        self._job.give_notice(agent, now)
        self._notices[name] = cause
        self._pass_notices_on(now)

    def _pass_notices_on(self, now: float) -> None:
        """But not where all hosts would leave, and another one is tried, or is to be, which is to take the state over."""
        all_leave = not self._hosts.staying()
        comes = self.trials.is_trying or (self._may_try() and self.trials.next_host(now) is not None)
        if self._notices and all_leave and comes:
            return
        notices, self._notices = self._notices, {}
        for name, cause in notices.items():
            self._job.carry_out(self._job.authority.host_leaves(now, name, cause))
            self.release(self._hosts[name])

    def lose(self, agent: Agent) -> None:
        """The connection to a host's agent has ended; it is tried again later."""
        name = agent.host.name
        self._supply.failed(time.monotonic(), name)
        self.trials.lose(agent)
        self._notices.pop(name, None)

    def let_go(self, agent: Agent) -> None:
        """Of a host that the others' ranks cannot reach: it is tried again as one that was lost, and its network with it."""
        self._job.news.say_unreachable(agent.host.name)
        self._hosts.leaving.add(agent.host.name)
        self.release(agent)

    def release(self, agent: Agent) -> None:
        """Lets the agent of a host go that leaves, once nobody is left there."""
        if agent.host.name in self._hosts.leaving and self._job.engine.is_empty(self._hosts.numbers(agent)):
            agent.send({"do": "end"})


class Notices:
    """Ranks that must have left at some time.

    grace: seconds that a rank has.
    """

    def __init__(self, grace: float):
        self._grace = grace
        self._ranks: dict[int, tuple[str, float]] = {}  # uid, and when it is ended, by the slot's number

    @property
    def deadline(self) -> float:
        """When the next rank is overdue; infinite if none has a notice."""
        return min((at for _, at in self._ranks.values()), default=float("inf"))

    def give(self, processes: Mapping[int, str], now: float) -> None:
        """Processes are asked to leave: their uids, by the slots' numbers. One that has been asked gets no more time."""
        for number, uid in processes.items():
            self._ranks.setdefault(number, (uid, now + self._grace))

    def end(self, number: int) -> bool:
        """The process in a slot has ended; returns whether it had a notice."""
        return self._ranks.pop(number, None) is not None

    def take_overdue(self, now: float) -> dict[int, str]:
        """Uids of those that have not left in time, by the slots' numbers; once."""
        overdue = {number: uid for number, (uid, at) in self._ranks.items() if now >= at}
        for number in overdue:
            del self._ranks[number]
        return overdue
