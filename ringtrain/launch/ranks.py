"""What the launcher knows of each rank, and which of them is to blame when a job fails. `job` notes it and asks."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from ringtrain.launch.clocks import HostClock
from ringtrain.launch.mpich import ABORT
from ringtrain.launch.openmpi import CODE_OF_A_LOST_PEER
from ringtrain.launch.output import RankStream

LOST = -signal.SIGKILL  # outcome of a rank whose supervisor vanished without a report: the engine killed it


@dataclass
class Rank:
    """What is known of one rank."""

    number: int
    listed_as: str  # its host's name in the plan
    host: str = "?"  # the name that the host gives itself
    is_connected: bool = False
    outcome: int | None = None  # exit code, -n for signal n
    announced: int | None = None  # exit code that its own program announced when it failed
    follows: bool = False  # it said that another rank's failure is the reason of its own
    was_told_to: bool = False  # the engine or the launcher ended it
    clock: HostClock = field(default_factory=HostClock)  # of its host
    failed_at: float = float("inf")  # by that clock
    streams: dict[int, RankStream] = field(default_factory=dict)

    @property
    def failure(self) -> int:
        """The exit code, -n for signal n, with which it failed by itself; 0 if it did not."""
        return (self.announced or 0) if self.was_told_to else (self.outcome or 0)

    @property
    def was_ended_for_a_peer(self) -> bool:
        """Whether its MPI seems to have ended it because another rank was gone, whose own end may be reported later."""
        return self.announced is None and self.outcome == CODE_OF_A_LOST_PEER

    @property
    def is_a_victim(self) -> bool:
        """Whether another rank is the reason of its failure."""
        return self.follows or self.was_ended_for_a_peer

    def describe_failure(self) -> str:
        """For people: which rank, where, and how it ended."""
        if self.failure < 0:
            number = signal.Signals(-self.failure)
            hint = " (the kernel does so when memory runs out)" if number == signal.SIGKILL else ""
            how = f"was killed by signal {int(number)}, {number.name}{hint}"
        else:
            hint = " (as Open MPI ends a rank when another one is gone)" if self.was_ended_for_a_peer else ""
            how = f"failed with exit code {self.failure}{hint}"
        return f"rank {self.number} (host {self.host}) {how}"

    def hear_abort(self) -> None:
        """Under MPICH a rank that called MPI_Abort is ended like the others before it can leave; but it has said so."""
        if self.was_told_to and 2 in self.streams:
            for match in filter(None, map(ABORT.match, self.streams[2].kept)):
                self.announced = int(match[1]) % 256 or 1


def first_cause(ranks: Iterable[Rank]) -> Rank | None:
    """The rank that is to blame: the first of those that failed by themselves, and not because of a peer; pure."""
    failed = [rank for rank in ranks if rank.failure]
    return min(failed, key=lambda rank: (rank.is_a_victim, rank.clock.here(rank.failed_at), rank.number), default=None)
