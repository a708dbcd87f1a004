"""The hosts of an elastic job: whose agent serves, which slots of the job are theirs, and who leaves. Used by `elastic_job`."""

from __future__ import annotations

from ringtrain.launch.hosts import Host
from ringtrain.launch.reach import Agent


class ElasticHosts:
    """The hosts that a job has, or had.

    A slot has a number in the job, which its rank's output is tagged with; a host that comes again keeps those of its slots.

    Attributes:
        leaving: names of hosts that get no more ranks.
    """

    def __init__(self) -> None:
        self.leaving: set[str] = set()
        self._agents: dict[str, Agent] = {}
        self._first: dict[str, int] = {}  # number of a host's first slot

    def __getitem__(self, name: str) -> Agent:
        return self._agents[name]

    def add(self, agent: Agent, first: int | None = None) -> None:
        """A host has come. first: number of its first slot, if another launcher has given it one."""
        name, slots = agent.host.name, agent.host.slots
        before = self._agents.get(name)
        if first is not None:
            self._first[name] = first
        elif before is None or before.host.slots < slots:
            self._first[name] = max((numbers.stop for numbers in map(self.numbers, self._agents.values())), default=0)
        self.leaving.discard(name)
        self._agents[name] = agent

    def numbers(self, agent: Agent) -> range:
        """Of the slots of a host."""
        first = self._first[agent.host.name]
        return range(first, first + agent.host.slots)

    def slot(self, agent: Agent, number: int) -> int:
        """Which slot of its host has a number in the job."""
        return number - self._first[agent.host.name]

    def all(self) -> list[Agent]:
        """The agents of all hosts, of each the last one."""
        return list(self._agents.values())

    def present(self) -> dict[str, Host]:
        """The hosts whose agents can be heard."""
        return {name: agent.host for name, agent in self._agents.items() if agent.is_open}

    def outline(self) -> list[tuple[Host, int]]:
        """Those, and the number of their first slot."""
        return [(host, self._first[name]) for name, host in self.present().items()]

    def staying(self) -> list[Agent]:
        """The agents that can be heard, but for those of hosts that leave."""
        return [agent for name, agent in self._agents.items() if agent.is_open and name not in self.leaving]
