"""How a job has ended, and which rank, host or engine is to be named as the first cause. `job` notes it and asks."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from ringtrain.launch.engine import Engine
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.job_output import JobOutput
from ringtrain.launch.known_ranks import (
    Rank,
    blame_survived,
    describe_remains,
    failed_alike,
    first_cause,
    host_without_engine,
    left_before,
)
from ringtrain.launch.meeting import LET_ALL_COME
from ringtrain.launch.plan import Plan
from ringtrain.launch.terminal import Terminal


class Ends:
    """What has ended in a job beside its ranks, and what is said of all of it at the end.

    Attributes:
        strays: processes that could not be ended and belong to no rank, with their names.
        lost_hosts: whose agents have gone.
        hosts_without_daemon: as the engine has named them.
    """

    def __init__(self, plan: Plan, terminal: Terminal, output: JobOutput, engine: Engine, ranks: dict[int, Rank]):
        self.strays: dict[int, str] = {}
        self.lost_hosts: list[str] = []
        self.hosts_without_daemon: set[str] = set()
        self._plan = plan
        self._terminal = terminal
        self._output = output
        self._engine = engine
        self._ranks = ranks

    def remains(self) -> str:
        """For people: which processes are still there, although they were killed; "" if none is."""
        return describe_remains(self._ranks.values(), self.strays)

    def conclude(self) -> int:
        """Says how the job ended, the first cause last, and returns the exit code. Raises LaunchError if no rank ever started."""
        for rank in self._ranks.values():
            rank.hear_abort()
        first = first_cause(self._ranks.values())
        if left := self.remains():
            self._terminal.say(left, "left-over")
        # The engine ends on all hosts when it loses one, and may notice that before the launcher does.
        if self.lost_hosts and (first is None or first.was_ended_for_a_peer):
            return self._explain_lost_hosts()
        if (first is None or first.is_a_victim) and not self.lost_hosts:
            host = host_without_engine(self._ranks.values(), self.hosts_without_daemon)
            if host:
                return self._explain_lost_engine(host)
        if first is not None:
            self._explain(first)
            if self._plan.function_folder:
                self._output.keep("first", str(first.number).encode())
            return first.failure if first.failure > 0 else 128 - first.failure
        if not self._ranks:
            raise LaunchError(
                f"{self._engine.name} could not start the ranks: {shlex.join(self._engine.line)}\n"
                f"ended with code {self._engine.code}. See its output above."
            )
        if self._output.results_lost.lines:
            self._terminal.say(
                f"folder '{self._plan.function_folder}': the ranks' results must have room there, but: "
                f"{self._output.results_lost.reason}. Make room, or name another place with TMPDIR.",
                "output-lost",
                place=self._plan.function_folder,
            )
            return 1
        if all(rank.outcome == 0 for rank in self._ranks.values()) and len(self._ranks) == self._plan.ranks:
            return 0
        return self._explain_engine()

    def _explain_lost_hosts(self) -> int:
        """Says which hosts could not be heard any more, and returns the exit code."""
        self._terminal.say(
            f"host {', '.join(self.lost_hosts)}: the connection was lost, so the job has ended. "
            "The machine may be down, or the network between.",
            "host-lost",
            hosts=self.lost_hosts,
        )
        return 1

    def _explain_lost_engine(self, host: str) -> int:
        """Says that the program which the engine keeps beside the ranks of a host was killed, and returns the exit code."""
        name, code = self._engine.name, self._engine.code or 0
        itself = " itself" if code < 0 else ""
        self._terminal.say(
            f"host {host}: {name}{itself} has ended there while its ranks still ran, so the job has ended. "
            "Somebody has killed it, or the kernel, when memory ran out.",
            "engine-ended",
            engine=name,
            code=code,
            host=host,
        )
        return 128 - code if code < 0 else code or 1

    def _explain_engine(self) -> int:
        """Says why the engine ended ranks that had not failed, and returns the exit code."""
        name, code = self._engine.name, self._engine.code or 0
        ended = any(rank.outcome for rank in self._ranks.values())
        left = [rank.number for rank in self._ranks.values() if rank.outcome == 0]
        if ended and left:
            self._terminal.say(
                f"rank {_listed(left)} left with exit code 0, but without {self._engine.good_end} and while other ranks "
                f"still ran; {name} then ended these.",
                "rank-left",
                ranks=left,
            )
            return 1
        if ended or code:
            self._terminal.say(
                f"{name} ended the job with code {code}, as MPI_Abort and a lost host make it do.",
                "engine-ended",
                engine=name,
                code=code,
            )
        return max(code, int(ended)) if code >= 0 else 128 - code

    def _explain(self, first: Rank) -> None:
        """Names the first failing rank, and repeats its last words if others have spoken since."""
        alike = failed_alike(self._ranks.values(), first)
        words = first.streams.get(2)
        last: list[bytes] = []
        if words is not None and words.kept and (words.last_line != self._terminal.lines or self._output.losses):
            last = words.ending()
        also = "".join(f", {rank.describe_place()} too" for rank in alike)
        self._terminal.say(
            first.describe_failure() + also + ("; it ended with:" if last else "."),
            "rank-failed",
            **first.facts(),
            last_words=[line.decode(errors="surrogateescape") for line in last],
        )
        if first.waited_for:
            absent = ", ".join(self._ranks[number].describe_place() for number in first.waited_for)
            self._terminal.say(
                f"{absent} ended with exit code 0 before it called init(), where the other ranks waited for it; these then "
                f"failed. {LET_ALL_COME}",
                "rank-left",
                ranks=list(first.waited_for),
            )
            return
        left = [rank.number for rank in left_before(self._ranks.values(), first)]
        if left and first.was_ended_for_a_peer:  # whose own report may be late, and tells nothing of the order
            self._terminal.say(
                f"rank {_listed(left)} left with exit code 0 before that, perhaps without {self._engine.good_end}.",
                "rank-left",
                ranks=left,
            )
        elif left:
            self._terminal.say(
                f"rank {_listed(left)} left with exit code 0, but without {self._engine.good_end} and while other ranks "
                "still ran; these then failed.",
                "rank-left",
                ranks=left,
            )


class ElasticEnds(Ends):
    """The same of a job that goes on without ranks that have failed.

    Attributes:
        failures: ranks whose slots may have got another one since.
    """

    def __init__(self, plan: Plan, terminal: Terminal, output: JobOutput, engine: Engine, ranks: dict[int, Rank]):
        super().__init__(plan, terminal, output, engine, ranks)
        self.failures: list[Rank] = []

    def note_survived(self) -> None:
        """Another world is formed: what has ended the ones before does not end the job."""
        for rank in (*self._ranks.values(), *self.failures):
            rank.is_survived = rank.is_survived or bool(rank.outcome)

    def some_still_speak(self) -> bool:
        """A rank says that it fails before its traceback is written, and the authority may end the job between the two."""
        return any(rank.announced is not None and rank.is_connected for rank in self._ranks.values())

    def blame(self) -> bool:
        """Finds the failure that has ended the job; False if all ranks have left because they were told to."""
        blame_survived([*self._ranks.values(), *self.failures])
        if not any(rank.failure for rank in self._ranks.values()):
            followed = [rank for rank in self.failures if rank.failure]  # by others in their slots
            if not followed:
                return False
            self._ranks[followed[-1].number] = followed[-1]
        return True


def _listed(ranks: Iterable[int]) -> str:
    """For people."""
    return ", ".join(map(str, ranks))
