"""The agents as the engine of an elastic job: they start a rank in a slot whenever they are told to. Used by `elastic`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from ringtrain.agent_protocol import RankNews
from ringtrain.launch.agents import Agents
from ringtrain.launch.reach import Agent

NOTICES, PLANNED = "RINGTRAIN_ELASTIC_NOTICE", "RINGTRAIN_ELASTIC_PLANNED"  # see ringtrain.leading


class Slots(Agents):
    """The agents as the engine of an elastic job: they start a rank in a slot whenever they are told to.

    Attributes:
        is_over: nobody is to be started any more.
        processes: uids of the processes, by the slot's number in the job.
        notices: names of the signals by which one is asked to leave.
        planned: ranks whose batches make up that of a step; 0 if each rank's stays the same.
        listens: where the ranks of a host listen, by its name, if that has changed since its agent was told.
    """

    is_over = False

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._left = dict.fromkeys(self._agents, 0)
        self.processes: dict[int, str] = {}
        self.notices: tuple[str, ...] = ()
        self.planned = 0
        self.listens: dict[str, str] = {}

    def start(self, _selector: object) -> None:
        """Starts nothing yet: the authority says what."""

    def start_in(self, agent: Agent, slot: int, first: int) -> None:
        """Starts a rank in a slot of a host, whose slots are numbered from `first`."""
        uid = self.processes[first + slot] = secrets.token_hex(16)
        self._left[agent] = self._left.get(agent, 0) + 1
        request = self._request(agent, first)
        request["only"], request["uid"] = [slot], uid
        request["variables"] = {"RINGTRAIN_ELASTIC": f"{uid} {agent.host.name}", NOTICES: ",".join(self.notices)}
        if self.planned:
            request["variables"][PLANNED] = str(self.planned)
        if agent.host.name in self.listens:
            request["variables"]["RINGTRAIN_ELASTIC_LISTEN"] = self.listens[agent.host.name]
        agent.send(request)

    def take_over(self, agent: Agent, processes: Iterable[tuple[int, str, bool]]) -> None:
        """The ranks that an agent has started for another launcher: number, uid, and whether it is asked to leave."""
        for number, uid, _ in processes:
            self.processes[number] = uid
            self._left[agent] = self._left.get(agent, 0) + 1

    def on(self, first: int, slots: int) -> list[str]:
        """Uids of the processes in these slots whose rank runs."""
        return [uid for number in range(first, first + slots) if (uid := self.processes.get(number))]

    def hear(self, facts: RankNews, agent: Agent) -> None:
        """Takes what an agent says of the ranks that it has started."""
        super().hear(facts, agent)
        if "cleared" in facts:
            self.processes.pop(facts["rank"], None)
            self._code = 0  # what a rank's end means is the authority's to say

    @property
    def code(self) -> int | None:
        """0 once nobody is to be started any more and all have ended."""
        return super().code if self.is_over else None
