"""What the ranks of a job write and leave, as far as it can be passed on. Used by `job`.

While nobody reads, agents get no leave to send more, so that the ranks wait as they would without a launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ringtrain.launch.known_ranks import Rank
from ringtrain.launch.output import Limits, RankStream
from ringtrain.launch.plan import Plan
from ringtrain.launch.rank_files import RankFiles
from ringtrain.launch.reach import Agent
from ringtrain.launch.terminal import Terminal
from ringtrain.launch.writing import Loss, Patience


class JobOutput:
    """Where what ranks write goes, the credit of the agents that send it, and what could not be written.

    Attributes:
        limits: bytes that the launcher has room for.
        results_lost: results of `ringtrain.run` that could not be left.
    """

    def __init__(self, plan: Plan, terminal: Terminal):
        self.limits = Limits.of(plan.ranks, len(plan.hosts))
        self.results_lost = Loss("results")
        self._terminal = terminal
        self._files = RankFiles(plan.folder, plan.ranks) if plan.folder else None
        self._writing: list[Terminal | RankFiles] = [terminal, self._files] if self._files else [terminal]
        self._folder = plan.function_folder
        self._unread: dict[Agent, int] = {}  # bytes of each agent that it has no leave to replace yet

    @property
    def losses(self) -> list[Loss]:
        """What could not be written, to each place where something is missing."""
        return [loss for writes in self._writing for loss in writes.losses if loss.lines]

    def watch(self, wake: Callable[[], None]) -> None:
        """Has this called, by some thread, when there is room again or something went wrong."""
        for writes in self._writing:
            writes.watch(wake)

    def listen_to(self, agent: Agent) -> None:
        """An agent begins to send what its ranks write."""
        self._unread.setdefault(agent, 0)

    def forget(self, agent: Agent) -> None:
        """An agent has gone."""
        del self._unread[agent]

    def feed(self, rank: Rank, stream: int, data: bytes, agent: Agent) -> None:
        """Takes what a rank has written, as its agent has sent it."""
        self._unread[agent] += len(data)
        self.stream(rank, stream).feed(data)

    def stream(self, rank: Rank, stream: int) -> RankStream:
        """Stdout (1) or stderr (2) of a rank; with its file, if each has one."""
        if stream not in rank.streams:
            target = self._files.file(rank.number, stream) if self._files else None
            rank.streams[stream] = RankStream(self._terminal, stream, rank.number, target, self.limits)
        return rank.streams[stream]

    def begin(self, rank: Rank) -> None:
        """Makes the files of a rank that starts, even if it writes nothing."""
        for stream in (1, 2) if self._files else ():
            self.stream(rank, stream)

    def give_credit(self, is_ending: bool) -> None:
        """Lets agents send as much more as has been passed on. A job that ends waits for no reader, or its cause might not come."""
        if is_ending or all(writes.has_room for writes in self._writing):
            for agent, size in self._unread.items():
                if size > self.limits.window // 4:
                    self._unread[agent] = 0
                    agent.send({"do": "go on", "bytes": size})

    def warn_of_losses(self) -> None:
        """Says once of each place that something is missing there."""
        for loss in self.losses:
            if not loss.is_told:
                loss.is_told = True
                self._terminal.say(
                    f"{loss.place}: it must take what the ranks write, but: {loss.reason}. The job goes on; "
                    "how much is missing there is said at its end.",
                    "output-lost",
                    place=loss.place,
                )

    def say_losses(self) -> None:
        """Says at the end how much is missing."""
        for loss in self.losses:
            self._terminal.say(
                f"{loss.place}: {loss}.", "output-lost", place=loss.place, lines=loss.lines, bytes=loss.size
            )

    def keep(self, name: str, data: bytes) -> None:
        """Leaves a file for `ringtrain.run`."""
        try:
            leave_private(Path(self._folder, name), data)
        except OSError as error:
            self.results_lost.add(data, error.strerror or str(error))

    def finish(self, ranks: Iterable[Rank], patience: Callable[[], Patience]) -> None:
        """Writes last lines that had no end, and waits until all is written, for as long as the patience is."""
        for rank in ranks:
            for stream in rank.streams.values():
                stream.close()
        for writes in self._writing:
            writes.finish(patience)


def leave_private(path: Path, data: bytes) -> None:
    """Writes a file for this user alone."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
