"""One run: starts the engine, listens to its ranks, ends them all when one fails, says who failed first.

Single-threaded, around one selector. Each rank of this host has a socket to the launcher (see `rank`), on which it
gets the pipes of its output and reports how it ended; ranks of other hosts speak through the engine's output.
"""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from ringtrain.launch.mpi import Installation, LaunchError
from ringtrain.launch.output import RankStream, Terminal
from ringtrain.launch.plan import Plan
from ringtrain.launch.rank import REPORT_MARK, SECONDS_TO_END

RANK_PROGRAM = Path(__file__).with_name("rank.py")
SECONDS_TO_REPORT = 2.0  # for the other ranks, after a failure, to say what they saw
SECONDS_TO_KILL = SECONDS_TO_END + 2.0  # from the request to end until everything is killed
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOST = -signal.SIGKILL  # outcome of a rank whose supervisor vanished without a report: the engine killed it


@dataclass
class Rank:
    """What is known of one rank."""

    number: int
    host: str = "?"
    group: int = 0  # process group of its command, if it runs on this host
    outcome: int | None = None  # exit code, -n for signal n
    was_told_to: bool = False  # the engine or the launcher ended it
    failed_at: float = float("inf")  # CLOCK_MONOTONIC
    stderr: RankStream | None = None

    def describe_outcome(self) -> str:
        """For people: which rank, where, and how it ended."""
        if self.outcome < 0:
            number = signal.Signals(-self.outcome)
            hint = " (the kernel does so when memory runs out)" if number == signal.SIGKILL else ""
            how = f"was killed by signal {int(number)}, {number.name}{hint}"
        else:
            how = f"failed with exit code {self.outcome}"
        return f"rank {self.number} (host {self.host}) {how}"


class Job:
    """A plan being carried out."""

    def __init__(self, plan: Plan, installation: Installation, terminal: Terminal):
        self.plan = plan
        self.installation = installation
        self.terminal = terminal
        self.ranks: dict[int, Rank] = {}
        self.connections: dict[socket.socket, Rank | None] = {}
        self.streams: dict[int, RankStream] = {}  # by descriptor
        self.selector = selectors.DefaultSelector()
        self.engine: subprocess.Popen | None = None
        self.interrupted_by = 0
        self.end_at = float("inf")
        self.kill_at = float("inf")

    def run(self) -> int:
        """Runs the plan to its end and returns the exit code. Raises LaunchError if no rank ever started."""
        with tempfile.TemporaryDirectory(prefix="ringtrainrun-") as folder:
            self._watch_signals()
            listener = self._listen(os.path.join(folder, "launcher"))
            self._start_engine(os.path.join(folder, "launcher"))
            while not self._has_ended():
                self._step()
            self._kill()
            listener.close()
        self._drain()
        return self._conclude()

    # ---- start ----

    def _watch_signals(self) -> None:
        wakeup, wakeup_write = socket.socketpair()
        for end in (wakeup, wakeup_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
        self.wakeup_write = wakeup_write
        for number in STOPPING:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the selector
        self.selector.register(wakeup, selectors.EVENT_READ, lambda: wakeup.recv(4096))

    def _listen(self, path: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1024)
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        return listener

    def _start_engine(self, path: str) -> None:
        environment = rank_environment(self.plan, self.installation, self.terminal.live)
        environment["RINGTRAIN_LAUNCHER"] = path
        line = command_line(self.plan, self.installation)
        # A session of its own: Ctrl-C reaches the launcher alone, which then ends the ranks in order.
        self.engine = subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, start_new_session=True)
        for stream, pipe in ((1, self.engine.stdout), (2, self.engine.stderr)):
            self._read_lines(pipe.fileno(), EngineStream(self, stream))

    # ---- events ----

    def _step(self) -> None:
        deadline = min(self.end_at, self.kill_at)
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for key, _ in self.selector.select(timeout):
            key.data()
        now = time.monotonic()
        if self.engine.poll() is not None and self.connections:
            self._end()  # the engine is gone: whoever is still there will not be ended by it
        if now >= self.end_at:
            self._end()
        if now >= self.kill_at:
            self._kill()

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.interrupted_by:
            self.kill_at = time.monotonic()
        self.interrupted_by = self.interrupted_by or number
        self.end_at = time.monotonic()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self.connections[connection] = None
        pending = bytearray()
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._hear(connection, pending))

    def _hear(self, connection: socket.socket, pending: bytearray) -> None:
        """Takes what a rank says about itself: one JSON object a line."""
        try:
            data = connection.recv(65536)
        except ConnectionError:
            data = b""
        pending += data
        while b"\n" in pending:
            line, _, rest = bytes(pending).partition(b"\n")
            pending[:] = rest
            self._take(json.loads(line), connection)
        if not data:
            self._hang_up(connection)

    def _take(self, facts: dict, connection: socket.socket | None) -> None:
        """Notes facts about a rank. One that a rank's own program sends may carry only `failed_at`."""
        rank = self.ranks.setdefault(facts["rank"], Rank(facts["rank"]))
        rank.host = facts.get("host", rank.host)
        rank.group = facts.get("group", rank.group)
        rank.failed_at = min(rank.failed_at, facts.get("failed_at", float("inf")))
        if "omp_num_threads" in facts and connection is not None:
            self._welcome(rank, connection, facts["omp_num_threads"])
        if "ended" in facts:
            rank.was_told_to = facts["was_told_to"]
            self._note_outcome(rank, facts["ended"], facts["at"] if connection is not None else time.monotonic())

    def _welcome(self, rank: Rank, connection: socket.socket, omp_num_threads: int | None) -> None:
        """Gives a starting rank the pipes for its output."""
        self.connections[connection] = rank
        write_ends = []
        for stream in (1, 2):
            read_end, write_end = os.pipe()
            lines = RankStream(self.terminal, stream, rank.number)
            self._read_lines(read_end, lines)
            write_ends.append(write_end)
        rank.stderr = lines
        socket.send_fds(connection, [b"."], write_ends)
        for descriptor in write_ends:
            os.close(descriptor)
        if rank.number == 0 and omp_num_threads is not None:
            self.terminal.say(f"OMP_NUM_THREADS={omp_num_threads} (cores / ranks of this host), "
                              "because it is not set.")

    def _hang_up(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        rank = self.connections.pop(connection)
        if rank is not None and rank.outcome is None:
            rank.was_told_to = True
            self._note_outcome(rank, LOST, time.monotonic())

    def _note_outcome(self, rank: Rank, outcome: int, at: float) -> None:
        rank.outcome = outcome
        if outcome != 0:
            rank.failed_at = min(rank.failed_at, at)
            self.end_at = min(self.end_at, time.monotonic() + SECONDS_TO_REPORT)

    def _read_lines(self, descriptor: int, lines: RankStream | EngineStream) -> None:
        os.set_blocking(descriptor, False)
        self.streams[descriptor] = lines
        self.selector.register(descriptor, selectors.EVENT_READ, lambda: self._read(descriptor))

    def _read(self, descriptor: int) -> bool:
        """Reads once; False at the end of the stream or if nothing is there."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        lines = self.streams[descriptor]
        if data:
            lines.feed(data)
            return True
        lines.close()
        self.selector.unregister(descriptor)
        del self.streams[descriptor]
        return False

    # ---- end ----

    def _has_ended(self) -> bool:
        return self.engine.poll() is not None and not self.connections

    def _end(self) -> None:
        """Asks every rank to end: its supervisor does so when the socket closes, and kills after SECONDS_TO_END."""
        if self.kill_at == float("inf"):
            self.kill_at = time.monotonic() + SECONDS_TO_KILL
            for connection in self.connections:
                connection.shutdown(socket.SHUT_WR)
            if self.plan.has_remote_hosts:
                self.engine.terminate()
        self.end_at = float("inf")

    def _kill(self) -> None:
        """Kills what is left of the job on this host; the engine's daemons on other hosts end without it."""
        for rank in self.ranks.values():
            if rank.group and rank.outcome in (None, LOST):  # its supervisor has not seen to it
                kill_group(rank.group)
        if self.engine.poll() is None:
            kill_group(self.engine.pid)
        self.kill_at = float("inf")

    def _drain(self) -> None:
        """Reads what is still in the pipes, without waiting for processes that keep them open."""
        self.engine.wait()
        for descriptor in list(self.streams):
            while self._read(descriptor):
                pass
        for lines in self.streams.values():
            lines.close()

    def _conclude(self) -> int:
        """Says how the job ended, the first cause last, and returns the exit code."""
        if self.interrupted_by:
            self.terminal.say(f"stopped by {signal.Signals(self.interrupted_by).name}; all ranks have ended.")
            return 128 + self.interrupted_by
        failed = [rank for rank in self.ranks.values() if rank.outcome and not rank.was_told_to]
        if failed:
            first = min(failed, key=lambda rank: (rank.failed_at, rank.number))
            self._explain(first)
            return first.outcome if first.outcome > 0 else 128 - first.outcome
        if not self.ranks:
            raise LaunchError(f"{self.installation.engine.NAME} could not start the ranks: "
                              f"{shlex.join(command_line(self.plan, self.installation))}\n"
                              f"ended with code {self.engine.returncode}. Its words stand above.")
        if all(rank.outcome == 0 for rank in self.ranks.values()) and len(self.ranks) == self.plan.ranks:
            return 0
        return self._explain_engine()

    def _explain_engine(self) -> int:
        """Says why the engine ended ranks that had not failed, and returns the exit code.

        Ranks of other hosts that returned 0 are not known here: then the engine's code is all there is.
        """
        name, code = self.installation.engine.NAME, self.engine.returncode
        ended = any(rank.outcome for rank in self.ranks.values())
        left = ", ".join(str(rank.number) for rank in self.ranks.values() if rank.outcome == 0)
        if ended and left:
            self.terminal.say(f"rank {left} left with exit code 0, but without ending MPI and while other ranks still "
                              f"ran; {name} then ended these.")
        elif ended or code:
            self.terminal.say(f"{name} ended the job with code {code}, as MPI_Abort and a lost host make it do.")
        return max(code, int(ended)) if code >= 0 else 128 - code

    def _explain(self, first: Rank) -> None:
        """Names the first failing rank, and repeats its last words if others have spoken since."""
        repeat = first.stderr is not None and first.stderr.kept and first.stderr.last_line != self.terminal.lines
        self.terminal.say(first.describe_outcome() + ("; it ended with:" if repeat else "."))
        for line in first.stderr.ending() if repeat else []:
            self.terminal.write_line(2, line)


class EngineStream:
    """The engine's own stdout (1) or stderr (2), which also carries the output of ranks on other hosts."""

    def __init__(self, job: Job, stream: int):
        self.job = job
        self.stream = stream
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes as they come; reports of ranks are taken out, the rest is passed on line by line."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._pass_on(line)

    def close(self) -> None:
        """Passes on a last line that had no end."""
        if self._partial:
            self._pass_on(self._partial)
        self._partial = b""

    def _pass_on(self, line: bytes) -> None:
        before, mark, report = line.partition(REPORT_MARK.encode())
        if mark:
            self.job._take(json.loads(report), None)
            return
        tagged = self.job.installation.engine.rank_tag(line)
        # Once a rank's failure is known, the engine's own account of it only hides the cause.
        known = any(rank.outcome for rank in self.job.ranks.values()) or self.job.interrupted_by
        if tagged is not None or not known or self.job.plan.verbose:
            self.job.terminal.write_line(self.stream, line if tagged is None else tagged)


def command_line(plan: Plan, installation: Installation) -> list[str]:
    """The engine's whole command line."""
    engine = installation.engine
    return [*engine.command_line(installation.program, plan), sys.executable, "-I", "-S", str(RANK_PROGRAM),
            ",".join(engine.RANK_VARIABLES), "--", *plan.command]


def rank_environment(plan: Plan, installation: Installation, live: bool = False) -> dict[str, str]:
    """The environment for the engine and its ranks: the user's, and what it leaves open."""
    environment = dict(installation.engine.environment(plan))
    if live:  # the ranks write into pipes and cannot ask the terminal for its size
        size = os.get_terminal_size(sys.stderr.fileno())
        environment.update(COLUMNS=str(size.columns - 5), LINES=str(size.lines))
    environment.update(os.environ)
    if sys.prefix != sys.base_prefix:  # `python` means the environment that has ringtrain, activated or not
        environment["PATH"] = os.path.join(sys.prefix, "bin") + os.pathsep + environment.get("PATH", os.defpath)
    return environment


def kill_group(group: int) -> None:
    """Kills a process group of this host, if there is something left of it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
