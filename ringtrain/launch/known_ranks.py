"""What the launcher knows of each rank, and which of them is to blame when a job fails. `job` notes it and asks."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ringtrain.launch.mpich import ABORT
from ringtrain.launch.openmpi import CODE_OF_A_LOST_PEER
from ringtrain.launch.output import RankStream

SECONDS_TOGETHER = 0.5  # between deaths that have one reason
KEPT_ANSWERS = 12  # of a minute: drifting clocks part by less than a packet takes
# In what victims say of the rank that they lost, as Connections has it: one that waits in vain closes its connections,
# and the kernel resets what was still under way on them. Whatever else they say comes before both.
CONSEQUENCES = ("connection reset by", "connection closed by")
LOST = -signal.SIGKILL  # outcome of a rank whose supervisor vanished without a report: the engine killed it


class HostClock:
    """The clock of one host, as the launcher knows it. Until its first answer it is taken for the launcher's own.

    What happens on a host is stamped there, with `time.monotonic()`, whose zero differs from host to host. The launcher
    asks every agent for its time when the job starts and with every beat (see `job`). A question and its answer bound the
    other clock's distance; the quickest of the last ones bounds it best, to half the time that both took. Times of one host
    are compared as they are, since all of them are moved alike.
    """

    def __init__(self) -> None:
        self._answers: deque[tuple[float, float]] = deque(maxlen=KEPT_ANSWERS)  # (time taken, distance), in seconds

    def note(self, asked: float, answered: float, told: float) -> None:
        """Takes an answer: the host's clock said `told` between two times of the launcher's clock."""
        self._answers.append((answered - asked, (asked + answered) / 2 - told))

    def here(self, time_there: float) -> float:
        """The time on the launcher's clock for one on the host's."""
        return time_there + self._distance()

    def there(self, time_here: float) -> float:
        """The time on the host's clock for one on the launcher's."""
        return time_here - self._distance()

    def _distance(self) -> float:
        return min(self._answers)[1] if self._answers else 0.0


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
    because: str = ""  # the error in which it learnt of that
    has_mpi: bool = True  # whether MPI connects it, which may end it
    was_told_to: bool = False  # the engine or the launcher ended it
    is_survived: bool = False  # an elastic job has gone on in another world since it failed
    engine_lost_at: float | None = (
        None  # when the engine's program beside it was gone, unasked, while it ran; by the host's clock
    )
    left_at: float = float(
        "inf"
    )  # when its program began to end with a code that only the process's end tells; by the host's clock
    waited_for: tuple[int, ...] = ()  # ranks that ended well while it waited for them in init()
    remains: dict[int, str] = field(default_factory=dict)  # processes that could not be killed: names by id
    clock: HostClock = field(default_factory=HostClock)  # of its host
    failed_at: float = float("inf")  # by that clock
    ended_at: float = float("inf")  # when its process ended, by that clock
    streams: dict[int, RankStream] = field(default_factory=dict)

    @property
    def failure(self) -> int:
        """The exit code, -n for signal n, with which it failed by itself; 0 if it did not, or if the job has survived that."""
        announced = self.announced or 0
        if self.is_survived:
            return 0
        if (
            self.was_told_to or self.engine_lost_at is not None
        ):  # the death of the engine may crash its ranks' MPI, or end it
            return announced
        return self.outcome or (0 if self.follows else announced)

    @property
    def was_ended_for_a_peer(self) -> bool:
        """Whether its MPI seems to have ended it because another rank was gone, whose own end may be reported later."""
        return self.has_mpi and self.announced is None and self.outcome == CODE_OF_A_LOST_PEER

    @property
    def is_a_victim(self) -> bool:
        """Whether another rank is the reason of its failure."""
        return self.follows or self.was_ended_for_a_peer

    def facts(self) -> dict[str, str | int]:
        """For programs: which rank, where, and how it ended."""
        code = self.failure or self.outcome
        ended = {} if code is None else {"code": code}
        because = {"because": self.because} if self.follows and self.because else {}
        return {"rank": self.number, "host": self.host, **ended, **because}

    def describe_failure(self) -> str:
        """For people: which rank, where, and how it ended."""
        if self.failure < 0:
            number = -self.failure
            hint = " (the kernel does so when memory runs out)" if number == signal.SIGKILL else ""
            name = signal.Signals(number).name if number in set(signal.Signals) else "a real-time signal"
            how = f"was killed by signal {number}, {name}{hint}"
        else:
            hint = " (as Open MPI ends a rank when another one is gone)" if self.was_ended_for_a_peer else ""
            reason = f", because of another rank: {self.because.rstrip('.')}" if self.follows and self.because else ""
            how = f"failed with exit code {self.failure}{hint}{reason}"
        return f"{self.describe_place()} {how}"

    def describe_place(self) -> str:
        """For people: which rank, and where."""
        return f"rank {self.number} (host {self.host})"

    def hear_abort(self) -> None:
        """Under MPICH a rank that called MPI_Abort is ended like the others before it can leave; but it has said so."""
        if self.was_told_to and 2 in self.streams:
            for match in filter(None, map(ABORT.match, self.streams[2].kept)):
                self.announced = int(match[1]) % 256 or 1


def first_cause(ranks: Iterable[Rank]) -> Rank | None:
    """The rank that is to blame: the first of those that failed by themselves, and not because of a peer; pure.

    If all failed because of a peer, who says that one was silent comes before whose connection was reset, and this one
    before whose connection was closed.
    """

    def order(rank: Rank) -> tuple[bool, int, float, int]:
        kinds = [number for number, words in enumerate(CONSEQUENCES, start=1) if words in rank.because]
        kind = max(kinds, default=0) if rank.follows else 0
        return rank.is_a_victim, kind, rank.clock.here(rank.failed_at), rank.number

    return min((rank for rank in ranks if rank.failure), key=order, default=None)


def blame_survived(ranks: Iterable[Rank]) -> None:
    """Counts the last failure that a job has survived, where those behind it came of it: scripts that survive nothing; pure."""
    ranks = list(ranks)
    failed, survived = [rank for rank in ranks if rank.failure], [rank for rank in ranks if rank.is_survived]
    if failed and survived and all(rank.is_a_victim for rank in failed):
        max(survived, key=lambda rank: rank.clock.here(rank.failed_at)).is_survived = False


def left_before(ranks: Iterable[Rank], victim: Rank) -> list[Rank]:
    """Ranks that are the reason of a victim's failure: ended with code 0 before it, and not as one leaves; pure.

    Whoever leaves well waits for the others, or says that it leaves because its world has failed. Without MPI the others
    see its connections close while it ends, and fail before its end can be reported.
    """
    if not victim.is_a_victim:
        return []
    late = 0.0 if victim.has_mpi else SECONDS_TOGETHER
    return [
        rank
        for rank in ranks
        if rank.outcome == 0
        and rank.announced is None
        and rank.left_at == float("inf")
        and (victim.was_ended_for_a_peer or rank.clock.here(rank.ended_at) - late < victim.clock.here(victim.failed_at))
    ]


def failed_alike(ranks: Iterable[Rank], first: Rank) -> list[Rank]:
    """Further ranks that the same signal has killed at about the same time, as when memory runs out; pure."""
    if first.failure >= 0:
        return []
    at = first.clock.here(first.failed_at)
    return [
        rank
        for rank in ranks
        if rank is not first
        and rank.failure == first.failure
        and not rank.is_a_victim
        and abs(rank.clock.here(rank.failed_at) - at) < SECONDS_TOGETHER
    ]


def host_without_engine(ranks: Iterable[Rank], named: Collection[str] = ()) -> str:
    """The host on which the engine was gone first, if that was before any rank ended for another reason; else "". Pure.

    named: hosts that the engine itself has named as lost. The loss ends it on the other hosts within milliseconds, and a
    busy host notices its own late, or not before it is told to end: so the engine's word is better than our clocks.
    """
    ranks = list(ranks)
    lost = [(rank.clock.here(rank.engine_lost_at), rank.host) for rank in ranks if rank.engine_lost_at is not None]
    others = [
        rank.clock.here(rank.failed_at)
        for rank in ranks
        if rank.outcome and rank.engine_lost_at is None and not rank.is_a_victim
    ]
    if not lost or min(lost)[0] > min(others, default=float("inf")):
        return ""
    return next((rank.host for rank in ranks if {rank.host, rank.listed_as} & set(named)), min(lost)[1])


def describe_remains(ranks: Iterable[Rank], strays: Mapping[int, str]) -> str:
    """For people: which processes are still there, although they were killed; "" if none is. Pure. strays: those of no rank."""
    left = [
        f"process {process} ({name}) of {rank.describe_place()}"
        for rank in ranks
        for process, name in rank.remains.items()
    ]
    left += [f"process {process} ({name})" for process, name in strays.items()]
    if not left:
        return ""
    return (
        f"not ended: {', '.join(left)}. The kernel ends a process only when it does not wait for a disk or a file server; "
        "look at what that host has mounted."
    )
