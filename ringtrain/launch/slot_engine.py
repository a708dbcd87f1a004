"""The agents as the engine of an elastic job: they start a rank in a slot whenever they are told to. Used by `elastic_job`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from ringtrain._rendezvous.agent_protocol import RankNews
from ringtrain.launch.agents import Agents
from ringtrain.launch.reach import Agent

# See ringtrain._bootstrap.leading.
NOTICES, PLANNED, BALANCED = "RINGTRAIN_ELASTIC_NOTICE", "RINGTRAIN_ELASTIC_PLANNED", "RINGTRAIN_ELASTIC_BALANCED"


class SlotEngine(Agents):
    """The agents as the engine of an elastic job: they start a rank in a slot whenever they are told to.

    Attributes:
        is_over: nobody is to be started any more.
        processes: uids of the processes, by the slot's number in the job.
        notices: names of the signals by which one is asked to leave.
        planned: ranks whose batches make up that of a step; 0 if each rank's stays the same.
        balances: whether the shares of such a batch follow how fast the ranks are.
    """

    is_over = False

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._left = dict.fromkeys(self._agents, 0)
        self.processes: dict[int, str] = {}
        self.notices: tuple[str, ...] = ()
        self.planned, self.balances = 0, False
        self._listens: dict[
            str, str
        ] = {}  # where a host's ranks listen, by name, if that has changed since its agent was told
        self._waiting: set[int] = set()  # slots that get a rank once their last one is gone
        self._called: set[str] = set()  # uids of processes that have called init()
        self._evicted: set[str] = set()  # uids of those that were ended at once

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
        if self.balances:
            request["variables"][BALANCED] = "1"
        if agent.host.name in self._listens:
            request["variables"]["RINGTRAIN_ELASTIC_LISTEN"] = self._listens[agent.host.name]
        agent.send(request)

    def take_over(self, agent: Agent, processes: Iterable[tuple[int, str, bool]]) -> None:
        """The ranks that an agent has started for another launcher: number, uid, and whether it is asked to leave."""
        for number, uid, _ in processes:
            self.processes[number] = uid
            self._left[agent] = self._left.get(agent, 0) + 1

    def on(self, numbers: Iterable[int]) -> dict[int, str]:
        """Uids of the processes in these slots whose rank runs, by number."""
        return {number: uid for number in numbers if (uid := self.processes.get(number))}

    def is_empty(self, numbers: Iterable[int]) -> bool:
        """Whether nothing is left of any rank in these slots."""
        return not any(number in self.processes for number in numbers)

    def may_start(self, number: int) -> bool:
        """Whether a slot is free. One whose rank has ended, and of which something is left, waits until it is gone."""
        process = self.processes.get(number)
        if process == "":
            self._waiting.add(number)
        return process is None

    def take_waiting(self, number: int) -> bool:
        """Whether a slot, which is free now, has waited for that; once."""
        is_waiting = number in self._waiting
        self._waiting.discard(number)
        return is_waiting

    def note_call(self, number: int) -> None:
        """The rank in a slot has called init()."""
        if uid := self.processes.get(number):
            self._called.add(uid)

    def running(self) -> tuple[list[int], list[int]]:
        """Numbers of ranks that run, and of those of them that have not called init()."""
        running = {number: uid for number, uid in sorted(self.processes.items()) if uid}
        return list(running), [number for number, uid in running.items() if uid not in self._called]

    def lead(self, agent: Agent, uid: str, frame: bytes, because: str = "") -> None:
        """Passes a word of the authority on to a process."""
        agent.send({"do": "lead", "uid": uid, "frame": frame.hex(), "because": because})

    def listen(self, agent: Agent, listens: str, numbers: Iterable[int]) -> None:
        """Tells those in the slots of a host, and whoever starts there later, where they listen from now on."""
        self._listens[agent.host.name] = listens
        for uid in self.on(numbers).values():
            agent.send({"do": "lead", "uid": uid, "frame": "", "because": "", "listens": listens})

    def evict(self, agent: Agent, uid: str) -> int | None:
        """Ends a process at once; returns the number of its slot, None if it has gone."""
        self._evicted.add(uid)
        for number, process in self.processes.items():
            if process == uid:
                agent.send({"do": "evict", "rank": number})
                return number
        return None

    def has_evicted(self, uid: str) -> bool:
        """Whether a process was ended at once."""
        return uid in self._evicted

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
