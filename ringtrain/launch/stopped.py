"""Ranks that are stopped, as SIGSTOP does, and alone keep a job from its end. Used by `job`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ringtrain.launch.known_ranks import Rank
from ringtrain.launch.reach import Agent
from ringtrain.launch.terminal import Terminal

SECONDS_TO_STAND_STILL = 10.0  # for ranks that are stopped, when all others have come to their end
SECONDS_BETWEEN_LOOKS = 2.0  # whether they are


class StoppedRanks:
    """Has ranks killed that are stopped, if they alone keep the job: nobody of the job will ever have them go on.

    Attributes:
        look_at: when agents are asked next which ranks are stopped; infinite while some rank may still end by itself.
        killed: numbers of ranks that were.
    """

    def __init__(self, terminal: Terminal):
        self.look_at = float("inf")
        self.killed: list[int] = []
        self._terminal = terminal
        self._since: dict[int, float] = {}  # by rank

    def note(self, rank: int, is_stopped: bool, now: float) -> None:
        """Takes what an agent has seen."""
        if is_stopped:
            self._since.setdefault(rank, now)
        else:
            self._since.pop(rank, None)

    def look(self, now: float, ranks: Collection[Rank], agents: Iterable[Agent], is_ending: bool) -> None:
        """Asks which ranks are stopped, and has those killed that have been for long."""
        left = [rank for rank in ranks if rank.is_connected]
        if not left or is_ending or not any(rank.outcome == 0 for rank in ranks):
            self.look_at = float("inf")
            return
        if self.look_at == float("inf"):
            self._since.clear()
        elif now < self.look_at:
            return
        agents = list(agents)
        since = [self._since.get(rank.number, now) for rank in left]
        if now - max(since) >= SECONDS_TO_STAND_STILL:
            for rank in left:
                self._kill(rank, agents)
        self.look_at = now + SECONDS_BETWEEN_LOOKS
        for agent in agents:
            agent.send({"do": "tell stopped"})

    def _kill(self, rank: Rank, agents: Sequence[Agent]) -> None:
        if rank.number in self.killed:
            return
        self.killed.append(rank.number)
        self._terminal.say(
            f"{rank.describe_place()} has been stopped for {SECONDS_TO_STAND_STILL:g} s, as SIGSTOP does, while all others have come to "
            "their end. It is killed.",
            "rank-killed",
            rank=rank.number,
            host=rank.host,
        )
        for agent in agents:
            if agent.host.name == rank.listed_as:
                agent.send({"do": "evict", "rank": rank.number})
