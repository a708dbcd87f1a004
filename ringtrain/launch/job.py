"""One run: starts the engine, listens to the agents of all hosts, ends all ranks when one fails, says who failed first.

Single-threaded, around one selector, but for a thread that lets the agents know that the launcher lives. What ranks
write and how they end comes from their hosts' agents (see `agent`); the engine's own words are passed on.
"""

from __future__ import annotations

import base64
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ringtrain.launch.agent import SECONDS_TO_KILL, kill_group
from ringtrain.launch.environment import of_host
from ringtrain.launch.mpi import Installation, LaunchError
from ringtrain.launch.networks import Chosen
from ringtrain.launch.openmpi import HARMLESS_WORDS
from ringtrain.launch.output import RankFile, RankStream, Terminal
from ringtrain.launch.plan import Plan
from ringtrain.launch.preflight import RANK_PROGRAM
from ringtrain.launch.ranks import LOST, Rank, first_cause
from ringtrain.launch.reach import Agent, HostError

SECONDS_TO_REPORT = 2.0  # for the other ranks, after a failure, to say what they saw
SECONDS_BETWEEN_BEATS = 5.0
SECONDS_OF_SILENCE = 30.0  # until the agent of another host takes the launcher for dead
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """A plan being carried out, once its hosts have been checked."""

    def __init__(self, plan: Plan, installation: Installation, terminal: Terminal, agents: list[Agent],
                 environment: Mapping[str, str], networks: Chosen | None = None):
        self.plan = plan
        self.installation = installation
        self.terminal = terminal
        self.agents = agents
        self.environment = environment
        self.networks = networks
        self.socket = f"ringtrainrun-{secrets.token_hex(16)}"  # of each agent, on its host
        self.ranks: dict[int, Rank] = {}
        self.lost_hosts: list[str] = []
        self.selector = selectors.DefaultSelector()
        self.engine: subprocess.Popen | None = None
        self.engine_streams: dict[int, EngineStream] = {}  # by descriptor
        self.interrupted_by = 0
        self.end_at = float("inf")
        self.kill_at = float("inf")

    def run(self) -> int:
        """Runs the plan to its end and returns the exit code. Raises LaunchError if no rank ever started."""
        self._watch_signals()
        stop_beating = self._start_beating()
        try:
            self._open_ears()
            self._start_engine()
            while not self._has_ended():
                self._step()
            self._kill()
        finally:
            stop_beating()
            for agent in self.agents:
                agent.close()
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
        if self.plan.has_remote_hosts:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a launcher that sleeps is dead for the other hosts
        self.selector.register(wakeup, selectors.EVENT_READ, lambda: wakeup.recv(4096))

    def _start_beating(self) -> Callable[[], None]:
        """Tells the agents every few seconds that the launcher lives, even while it waits for a slow terminal."""
        stopped = threading.Event()

        def beat() -> None:
            while not stopped.wait(SECONDS_BETWEEN_BEATS):
                for agent in self.agents:
                    agent.send(do="beat", at=time.monotonic())

        threading.Thread(target=beat, name="ringtrainrun-beat", daemon=True).start()
        return stopped.set

    def _open_ears(self) -> None:
        """Lets every agent wait for the ranks of its host."""
        deadline = time.monotonic() + self.plan.start_seconds
        given = self.plan.function_folder and Path(self.plan.function_folder, "function").read_bytes()
        function = base64.b64encode(given).decode() if given else ""
        for agent in self.agents:
            host = agent.host
            environment = self.plan.given_to(host, self.environment)
            environment |= of_host(host.name, self.networks, self.installation, self.environment)
            environment["RINGTRAIN_SLOTS"] = str(host.slots)
            try:
                asked = time.monotonic()
                agent.clock.note(asked, told=agent.ask(deadline, do="tell time")["clock"], answered=time.monotonic())
                agent.ask(deadline, do="serve", socket=self.socket, directory=os.getcwd(), environment=environment,
                          function=function, patience=None if host.is_here else SECONDS_OF_SILENCE)
            except HostError as error:
                raise LaunchError(str(error)) from None
            self.selector.register(agent.process.stdout, selectors.EVENT_READ, lambda agent=agent: self._hear(agent))
            self.selector.register(agent.process.stderr, selectors.EVENT_READ, agent.hear_words)

    def _start_engine(self) -> None:
        line = command_line(self.plan, self.installation, self.socket)
        # A session of its own: Ctrl-C reaches the launcher alone, which then ends the ranks in order.
        self.engine = subprocess.Popen(line, env=dict(self.environment), stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        for number, pipe in ((1, self.engine.stdout), (2, self.engine.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self.engine_streams[pipe.fileno()] = EngineStream(self, number)
            self.selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._read_engine(pipe.fileno()))

    # ---- events ----

    def _step(self) -> None:
        deadline = min(self.end_at, self.kill_at)
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for key, _ in self.selector.select(timeout):
            key.data()
        now = time.monotonic()
        if not self.terminal.is_read and not self.interrupted_by:
            self._on_signal(signal.SIGPIPE, None)  # nobody reads on: as a single process, the job ends of it
        if self.engine.poll() is not None and self._some_are_connected():
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

    def _hear(self, agent: Agent) -> None:
        for facts, data in agent.news():
            self._take(facts, data, agent)
        if not agent.is_open:
            self.selector.unregister(agent.process.stdout)
            self.selector.unregister(agent.process.stderr)
            self._lose(agent)

    def _take(self, facts: dict, data: bytes, agent: Agent) -> None:
        """Notes facts about a rank, or an agent's time. What a rank's own program sends carries "failing" alone."""
        if "clock" in facts:
            agent.clock.note(facts["asked"], time.monotonic(), facts["clock"])
            return
        rank = self.ranks.setdefault(facts["rank"], Rank(facts["rank"], agent.host.name, clock=agent.clock))
        if "stream" in facts:
            self._stream(rank, facts["stream"]).feed(data)
        if "left" in facts:
            leave_private(Path(self.plan.function_folder, f"{facts['left']}.{rank.number}"), data)
        if "starts" in facts:
            rank.is_connected = True
            rank.host = facts["host"]
            for stream in (1, 2) if self.plan.folder else ():  # its files, so that none of an earlier job stays
                self._stream(rank, stream)
        if "failing" in facts:
            rank.announced, rank.follows = facts["failing"], facts["follows"]
            rank.failed_at = min(rank.failed_at, facts["at"])
        if "omp_num_threads" in facts and rank.number == 0:
            self.terminal.say(f"OMP_NUM_THREADS={facts['omp_num_threads']} (cores / ranks of this host), "
                              "because it is not set.")
        if "ended" in facts:
            rank.was_told_to = facts["was_told_to"]
            self._note_outcome(rank, facts["ended"], facts["at"])
        if "lost" in facts:
            rank.was_told_to = True
            self._note_outcome(rank, LOST, facts["at"])

    def _stream(self, rank: Rank, stream: int) -> RankStream:
        if stream not in rank.streams:
            target = RankFile(self.plan.folder, rank.number, self.plan.ranks, stream) if self.plan.folder else None
            rank.streams[stream] = RankStream(self.terminal, stream, rank.number, self.plan.shows_time, target)
        return rank.streams[stream]

    def _note_outcome(self, rank: Rank, outcome: int, at: float) -> None:
        """at: by the clock of its host."""
        rank.outcome = outcome
        rank.is_connected = False
        if outcome != 0:
            rank.failed_at = min(rank.failed_at, at)
            self.end_at = min(self.end_at, time.monotonic() + SECONDS_TO_REPORT)

    def _lose(self, agent: Agent) -> None:
        """An agent has gone, and with it what is known of its host's ranks."""
        left = [rank for rank in self.ranks.values() if rank.is_connected and rank.listed_as == agent.host.name]
        if left or self.kill_at == float("inf"):
            self.lost_hosts.append(agent.host.name)
        for rank in left:
            rank.was_told_to = True
            self._note_outcome(rank, LOST, rank.clock.there(time.monotonic()))
        self.end_at = min(self.end_at, time.monotonic())

    def _read_engine(self, descriptor: int) -> bool:
        """Reads once; False at the end of the stream or if nothing is there."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if data:
            self.engine_streams[descriptor].feed(data)
            return True
        self.engine_streams.pop(descriptor).close()
        self.selector.unregister(descriptor)
        return False

    # ---- end ----

    def _some_are_connected(self) -> bool:
        return any(rank.is_connected for rank in self.ranks.values())

    def _has_ended(self) -> bool:
        return self.engine.poll() is not None and not self._some_are_connected()

    def _end(self) -> None:
        """Asks every rank to end: its supervisor does so when the agent closes its socket, and kills after 3 s."""
        if self.kill_at == float("inf"):
            self.kill_at = time.monotonic() + SECONDS_TO_KILL + 1.0
            for agent in self.agents:
                agent.send(do="end")
        self.end_at = float("inf")

    def _kill(self) -> None:
        """Kills whatever is left of the job, on every host."""
        for agent in self.agents:
            agent.send(do="kill")
        if self.engine.poll() is None:
            kill_group(self.engine.pid)
        for rank in self.ranks.values():
            rank.is_connected = False
        self.kill_at = float("inf")

    def _drain(self) -> None:
        """Reads what is still under way from agents and engine, without waiting for processes that keep pipes open."""
        self.engine.wait()
        deadline = time.monotonic() + SECONDS_TO_KILL
        for agent in self.agents:
            while agent.is_open and time.monotonic() < deadline:
                for facts, data in agent.news():
                    self._take(facts, data, agent)
                if agent.is_open:
                    wait_readable(agent.process.stdout, deadline)
            if agent.is_open:
                kill_group(agent.process.pid)
            agent.process.wait()
        for descriptor in list(self.engine_streams):
            while self._read_engine(descriptor):
                pass
        for lines in self.engine_streams.values():
            lines.close()
        for rank in self.ranks.values():
            for lines in rank.streams.values():
                lines.close()

    def _conclude(self) -> int:
        """Says how the job ended, the first cause last, and returns the exit code."""
        if self.interrupted_by:
            self.terminal.say(f"stopped by {signal.Signals(self.interrupted_by).name}; all ranks have ended.")
            return 128 + self.interrupted_by
        for rank in self.ranks.values():
            rank.hear_abort()
        first = first_cause(self.ranks.values())
        if first is not None:
            self._explain(first)
            if self.plan.function_folder:
                leave_private(Path(self.plan.function_folder, "first"), str(first.number).encode())
            return first.failure if first.failure > 0 else 128 - first.failure
        if self.lost_hosts:
            self.terminal.say(f"host {', '.join(self.lost_hosts)}: the connection was lost, so the job has ended. "
                              "The machine may be down, or the network between.")
            return 1
        if not self.ranks:
            raise LaunchError(f"{self.installation.engine.NAME} could not start the ranks: "
                              f"{shlex.join(command_line(self.plan, self.installation, self.socket))}\n"
                              f"ended with code {self.engine.returncode}. Its words stand above.")
        if all(rank.outcome == 0 for rank in self.ranks.values()) and len(self.ranks) == self.plan.ranks:
            return 0
        return self._explain_engine()

    def _explain_engine(self) -> int:
        """Says why the engine ended ranks that had not failed, and returns the exit code."""
        name, code = self.installation.engine.NAME, self.engine.returncode
        ended = any(rank.outcome for rank in self.ranks.values())
        left = self._ranks_that_returned_0()
        if ended and left:
            self.terminal.say(f"rank {left} left with exit code 0, but without ending MPI and while other ranks still "
                              f"ran; {name} then ended these.")
            return 1
        if ended or code:
            self.terminal.say(f"{name} ended the job with code {code}, as MPI_Abort and a lost host make it do.")
        return max(code, int(ended)) if code >= 0 else 128 - code

    def _ranks_that_returned_0(self) -> str:
        """Their numbers, for people."""
        return ", ".join(str(rank.number) for rank in self.ranks.values() if rank.outcome == 0)

    def _explain(self, first: Rank) -> None:
        """Names the first failing rank, and repeats its last words if others have spoken since."""
        if first.was_ended_for_a_peer and (left := self._ranks_that_returned_0()):
            self.terminal.say(f"rank {left} left with exit code 0 before that, perhaps without ending MPI.")
        words = first.streams.get(2)
        repeat = words is not None and words.kept and words.last_line != self.terminal.lines
        self.terminal.say(first.describe_failure() + ("; it ended with:" if repeat else "."))
        for line in words.ending() if repeat else []:
            self.terminal.write_line(2, line)


class EngineStream:
    """The engine's own stdout (1) or stderr (2)."""

    def __init__(self, job: Job, stream: int):
        self.job = job
        self.stream = stream
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes as they come and passes them on line by line."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._pass_on(line)

    def close(self) -> None:
        """Passes on a last line that had no end."""
        if self._partial:
            self._pass_on(self._partial)
        self._partial = b""

    def _pass_on(self, line: bytes) -> None:
        # Once a rank's failure is known, the engine's own account of it only hides the cause.
        known = any(rank.outcome for rank in self.job.ranks.values()) or self.job.interrupted_by or self.job.lost_hosts
        if self.job.plan.verbose or not (known or HARMLESS_WORDS.search(line)):
            self.job.terminal.write_line(self.stream, line)


def command_line(plan: Plan, installation: Installation, socket_name: str) -> list[str]:
    """The engine's whole command line."""
    engine = installation.engine
    return [*engine.command_line(installation.program, plan), sys.executable, "-I", "-S", str(RANK_PROGRAM),
            socket_name, ",".join(engine.RANK_VARIABLES), "--", *plan.command]


def leave_private(path: Path, data: bytes) -> None:
    """Writes a file for this user alone."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def wait_readable(stream, deadline: float) -> None:
    """Waits until a stream has something to read, or the deadline."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        selector.select(max(0.0, deadline - time.monotonic()))
