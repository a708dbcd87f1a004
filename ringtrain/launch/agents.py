"""The launcher's own agents as the engine: each starts the ranks of its host. For jobs without an MPI; see `engine`.

What this module has beside its class is what the modules of the MPIs' engines have, such as `openmpi`, as far as it is
asked for: no MPI belongs to it, and no program of its own starts anything.
"""

from __future__ import annotations

import selectors
from collections.abc import Mapping, Sequence

from ringtrain._rendezvous.agent_protocol import RankNews, Start
from ringtrain.launch.output import EngineStream
from ringtrain.launch.plan import OF_THE_ENGINE, Plan
from ringtrain.launch.reach import Agent

NAME = "ringtrainrun"


def environment(plan: Plan, networks: Sequence[str] = ()) -> dict[str, str]:
    """Settings for this plan; what the user has set wins."""
    return {}


class Agents:
    """The agents of all hosts, which start the ranks.

    line: the ranks' command line. words: where goes what agents say of it (2).
    """

    name = NAME
    ends_ranks = False
    good_end = "shutdown()"

    def __init__(self, plan: Plan, line: Sequence[str], agents: Sequence[Agent], words: Mapping[int, EngineStream]):
        self.line = line
        self._size = plan.ranks
        self._agents = agents
        self._words = words[2]
        self._left = {agent: agent.host.slots for agent in agents}  # ranks of which something is left
        self._code = 0  # the first that was none of success

    def start(self, _selector: selectors.BaseSelector) -> None:
        """Has each agent start the ranks of its host, which are numbered host by host."""
        first = 0
        for agent in self._agents:
            agent.send(self._request(agent, first))
            first += agent.host.slots

    def _request(self, agent: Agent, first: int) -> Start:
        """To start all ranks of a host, which are numbered from `first`."""
        return {
            "do": "start",
            "line": list(self.line),
            "first": first,
            "count": agent.host.slots,
            "size": self._size,
            "without": list(OF_THE_ENGINE),
        }

    def start_anew(self, selector: selectors.BaseSelector) -> None:
        """Is not asked for: no program stands between the agents and their ranks."""
        raise NotImplementedError

    def hear(self, facts: RankNews, agent: Agent) -> None:
        """Takes what an agent says of the ranks that it has started."""
        if "cleared" in facts:
            self._left[agent] = self._left.get(agent, 1) - 1
            self._code = self._code or facts["cleared"]
        if "words" in facts:
            self._words.feed(facts["words"].encode())

    @property
    def code(self) -> int | None:
        """0 or the first rank's that failed; None while something is left of one on a host that can be heard."""
        return None if any(left and agent.is_open for agent, left in self._left.items()) else self._code

    def kill(self) -> None:
        """Waits for nobody any longer: agents are told to kill their ranks."""
        self._left.clear()

    def finish(self) -> None:
        """Passes on what agents have said last."""
        self._words.close()
