"""One run: starts the engine, listens to the agents of all hosts, ends all ranks when one fails, says who failed first.

Single-threaded, around one selector, but for a thread that lets the agents know that the launcher lives, and those that
write (see `writing`). What ranks write and how they end comes from their hosts' agents (see `agent`); the engine's own
words are passed on. While nobody reads, agents get no leave to send more, so that the ranks wait as they would without
a launcher.
"""

from __future__ import annotations

import base64
import os
import secrets
import selectors
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ringtrain.agent_protocol import FreePort, RankNews, Serve
from ringtrain.launch import signals
from ringtrain.launch.agent.command import OF_HOROVODRUN
from ringtrain.launch.agent.events import call_ready
from ringtrain.launch.agent.listener import SECONDS_TO_KILL
from ringtrain.launch.agent.processes import kill_group
from ringtrain.launch.agents import Agents
from ringtrain.launch.engine import Engine, Program
from ringtrain.launch.environment import for_horovod, listening, of_host, of_rank_0
from ringtrain.launch.hosts import Host
from ringtrain.launch.meeting import LET_ALL_COME, Answer, Meetings
from ringtrain.launch.mpi import Installation, LaunchError
from ringtrain.launch.networks import Chosen
from ringtrain.launch.openmpi import HARMLESS_WORDS, LOST_DAEMON, STUMBLED
from ringtrain.launch.output import EngineStream, Limits, RankFiles, RankStream, Terminal
from ringtrain.launch.plan import Plan
from ringtrain.launch.ranks import (
    LOST,
    Rank,
    describe_remains,
    failed_alike,
    first_cause,
    host_without_engine,
    left_before,
)
from ringtrain.launch.reach import Agent, HostError, hang_up_on
from ringtrain.launch.writing import Loss, Patience

RANK_PROGRAM = Path(__file__).with_name("rank.py")
SECONDS_TO_REPORT = 2.0  # for the other ranks, after a failure, to say what they saw
SECONDS_BETWEEN_BEATS = 5.0
SECONDS_OF_ONE_SIGNAL = 0.3  # that comes twice: `timeout` sends it to the launcher, and to its group
SECONDS_TO_STAND_STILL = 10.0  # for ranks that are stopped, when all others have come to their end
SECONDS_BETWEEN_LOOKS = 2.0  # whether they are
SECONDS_OF_SILENCE = 30.0  # until the agent of another host takes the launcher for dead
# For whoever reads the last lines, after the job. One that ended well has no other use of the time.
PATIENCE: dict[str, Patience] = {"ended well": (600.0, 3600.0), "failed": (10.0, 60.0), "stopped": (2.0, 5.0)}


class LeftJobError(Exception):
    """Something has failed in this launcher, which is the cause, and the ranks go on; says how they are led again."""


class Job:
    """A plan being carried out, once its hosts have been checked.

    taken_up: the socket of the agents that run it already, if another launcher has started it; "" if it begins.
    """

    def __init__(
        self,
        plan: Plan,
        installation: Installation,
        terminal: Terminal,
        agents: list[Agent],
        environment: Mapping[str, str],
        networks: Chosen | None = None,
        taken_up: str = "",
    ):
        self.plan = plan
        self.installation = installation
        self.terminal = terminal
        self.agents = agents
        self.environment = environment
        self.networks = networks
        self.limits = Limits.of(plan.ranks, len(plan.hosts))
        self.files = RankFiles(plan.folder, plan.ranks) if plan.folder else None
        self.socket = taken_up or f"ringtrainrun-{secrets.token_hex(16)}"  # of each agent, on its host
        self.ranks: dict[int, Rank] = {}
        self.strays: dict[int, str] = {}  # processes that could not be ended and belong to no rank, with their names
        self.lost_hosts: list[str] = []
        self.hosts_without_daemon: set[str] = set()  # as the engine named them
        self.has_stumbled = self.was_started_anew = False
        self.selector = selectors.DefaultSelector()
        self.meetings = Meetings(plan.ranks)
        words = {number: EngineStream(terminal, number, self.shows, self._hear_engine) for number in (1, 2)}
        self.engine: Engine = (
            Program(
                installation.engine.NAME,
                command_line(plan, installation, self.socket),
                environment,
                words,
                installation.engine.folder_of,
            )
            if installation.has_mpi
            else self.agents_that_start(plan.command, words)
        )
        self.unread = dict.fromkeys(agents, 0)  # bytes of each agent that it has no leave to replace yet
        self.results_lost = Loss("results")
        self.interrupted_by, self.interrupted_at = 0, 0.0
        self.end_at = float("inf")
        self.kill_at = float("inf")
        self.look_at = float("inf")  # whether the ranks that are left are stopped
        self.stopped_since: dict[int, float] = {}  # by rank
        self.given_up: list[int] = []  # ranks that stood still

    def agents_that_start(self, line: Sequence[str], words: Mapping[int, EngineStream]) -> Agents:
        """The agents as the engine, where there is no MPI."""
        return Agents(self.plan, line, self.agents, words)

    def run(self) -> int:
        """Runs the plan to its end and returns the exit code. Raises LaunchError if no rank ever started."""
        self.ignored = signals.ignored()
        self.wakeup, self.wakeup_write = signals.watch(self._on_signal, keeps_running=self.plan.has_remote_hosts)
        self.selector.register(self.wakeup, selectors.EVENT_READ, lambda: self.wakeup.recv(4096))
        for writes in self._writing():
            writes.watch(self._wake)
        stop_beating = self._start_beating()
        try:
            self._start_listeners()
            self.engine.start(self.selector)
            while not self._has_ended() or self._starts_anew():
                self._step()
            self._kill()
            self._hang_up(stop_beating)
            self._drain()
            return self._conclude()
        except BaseException as error:
            if isinstance(error, Exception) and (what_now := self._left_to_next()):
                raise LeftJobError(what_now) from error
            self._kill()
            self._hang_up(stop_beating)
            hang_up_on(self.agents)
            raise

    def _left_to_next(self) -> str:
        """How the job is led again, if it goes on without this launcher, in which something has failed; "" if it ends."""
        return ""

    # ---- start ----

    def _start_beating(self) -> Callable[[], None]:
        """Tells the agents every few seconds that the launcher lives, even while it waits for a slow terminal."""
        stopped = threading.Event()

        def beat() -> None:
            while not stopped.wait(SECONDS_BETWEEN_BEATS):
                for agent in self.agents:
                    agent.send({"do": "beat", "at": time.monotonic()})

        threading.Thread(target=beat, name="ringtrainrun-beat", daemon=True).start()
        return stopped.set

    def shows(self, line: bytes) -> bool:
        """Whether a line of the engine's is passed on: once a rank's failure is known, it only hides the cause."""
        known = any(rank.outcome for rank in self.ranks.values()) or self.interrupted_by or self.lost_hosts
        return self.plan.verbose or not (known or HARMLESS_WORDS.search(line))

    def _hear_engine(self, line: bytes) -> None:
        if match := LOST_DAEMON.match(line):
            self.hosts_without_daemon.add(match[1].decode(errors="replace"))
        self.has_stumbled = self.has_stumbled or bool(STUMBLED.search(line))

    def _start_listeners(self) -> None:
        """Lets every agent wait for the ranks of its host."""
        deadline = time.monotonic() + self.plan.start_seconds
        given = self.plan.function_folder and Path(self.plan.function_folder, "function").read_bytes()
        self._function = base64.b64encode(given).decode() if given else ""
        self._of_rank_0 = self._find_master(deadline)
        for agent in self.agents:
            try:
                self._have_it_serve(agent, self.networks, deadline)
            except HostError as error:
                raise LaunchError(str(error)) from None
            self._listen_to(agent)

    def _listen_to(self, agent: Agent) -> None:
        self.selector.register(agent.stdout, selectors.EVENT_READ, lambda: self._hear(agent))
        self.selector.register(agent.stderr, selectors.EVENT_READ, agent.hear_words)

    def _have_it_serve(self, agent: Agent, networks: Chosen | None, deadline: float) -> None:
        """Has an agent wait for the ranks of its host. Raises HostError."""
        host = agent.host
        environment = self.plan.given_to(host, self.environment)
        environment |= of_host(host.name, networks, self.installation, self.environment)
        environment |= self._of_rank_0
        environment["RINGTRAIN_SLOTS"] = str(host.slots)
        if OF_HOROVODRUN in self.environment:
            environment |= for_horovod(host, [each.host for each in self.agents])
        if not self.installation.has_mpi:
            environment["RINGTRAIN_LISTEN"] = listening(addresses_of(host, networks), self.plan.ports)
        asked = time.monotonic()
        agent.clock.note(asked, told=agent.ask(deadline, {"do": "tell time"})["clock"], answered=time.monotonic())
        request: Serve = {
            "do": "serve",
            "socket": self.socket,
            "directory": os.getcwd(),
            "environment": environment,
            "function": self._function,
            "patience": None if host.is_here else self._grace() or SECONDS_OF_SILENCE,
            "grace": self._grace(),
            "key": self._key(),
            "window": self.limits.window,
            "ignored": self.ignored,
            "notices": list(self.plan.elastic.notices) if self.plan.elastic else [],
        }
        agent.ask(deadline, request)

    def _grace(self) -> float:
        """Seconds that the ranks go on without a launcher."""
        return 0.0

    def _key(self) -> str:
        """What a launcher must know that takes the job up."""
        return ""

    def _find_master(self, deadline: float) -> dict[str, str]:
        """Variables that tell torch.distributed where to meet: on the host of rank 0."""
        first = self.agents[0]
        address = addresses_of(first.host, self.networks)[0]
        try:
            found: FreePort = first.ask(deadline, {"do": "find port", "address": address, "ports": self.plan.ports})
        except HostError as error:
            raise LaunchError(str(error)) from None
        return of_rank_0(address, found["port"], self.environment)

    # ---- events ----

    def _step(self) -> None:
        deadline = self._deadline()
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        call_ready(self.selector, timeout)
        self._give_credit()
        self._warn_of_losses()
        now = time.monotonic()
        if not self.terminal.is_read and not self.interrupted_by:
            self._on_signal(signal.SIGPIPE, None)  # nobody reads on: as a single process, the job ends of it
        if self.engine.code is not None and self._some_are_connected():
            self._end()  # the engine is gone: whoever is still there will not be ended by it
        self._answer(self.meetings.expire(now))
        self._look_for_stopped(now)
        if now >= self.end_at:
            self._end()
        if now >= self.kill_at:
            self._kill()

    def _deadline(self) -> float:
        """When there is something to do even if nothing happens."""
        return min(self.end_at, self.kill_at, self.meetings.deadline, self.look_at)

    def _look_for_stopped(self, now: float) -> None:
        """Has ranks that are stopped killed, if they alone keep the job: nobody of the job will ever have them go on."""
        left = [rank for rank in self.ranks.values() if rank.is_connected]
        if not left or self._is_ending() or not any(rank.outcome == 0 for rank in self.ranks.values()):
            self.look_at = float("inf")
            return
        if self.look_at == float("inf"):
            self.stopped_since.clear()
        elif now < self.look_at:
            return
        since = [self.stopped_since.get(rank.number, now) for rank in left]
        if now - max(since) >= SECONDS_TO_STAND_STILL:
            for rank in left:
                self._give_up(rank)
        self.look_at = now + SECONDS_BETWEEN_LOOKS
        for agent in self.agents:
            agent.send({"do": "tell stopped"})

    def _give_up(self, rank: Rank) -> None:
        if rank.number in self.given_up:
            return
        self.given_up.append(rank.number)
        self.terminal.say(
            f"{rank.describe_place()} has been stopped for {SECONDS_TO_STAND_STILL:g} s, as SIGSTOP does, while all others have come to "
            "their end. It is killed."
        )
        for agent in self.agents:
            if agent.host.name == rank.listed_as:
                agent.send({"do": "evict", "rank": rank.number})

    def _wake(self) -> None:
        """Called by a thread that writes, when there is room again or something went wrong."""
        try:
            self.wakeup_write.send(b"\0")
        except OSError:  # enough of these wait there, or the job is over
            pass

    def _give_credit(self) -> None:
        """Lets agents send as much more as has been passed on. A job that ends waits for no reader, or its cause might not come."""
        if self._is_ending() or all(writes.has_room for writes in self._writing()):
            for agent, size in self.unread.items():
                if size > self.limits.window // 4:
                    self.unread[agent] = 0
                    agent.send({"do": "go on", "bytes": size})

    def _warn_of_losses(self) -> None:
        for loss in self._losses():
            if not loss.is_told:
                loss.is_told = True
                self.terminal.say(
                    f"{loss.place}: it must take what the ranks write, but: {loss.reason}. The job goes on; "
                    "how much is missing there is said at its end."
                )

    def _writing(self) -> list[Terminal | RankFiles]:
        return [self.terminal, self.files] if self.files else [self.terminal]

    def _losses(self) -> list[Loss]:
        return [loss for writes in self._writing() for loss in writes.losses if loss.lines]

    def _on_signal(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if number == self.interrupted_by == signal.SIGTERM and now - self.interrupted_at < SECONDS_OF_ONE_SIGNAL:
            return
        if self.interrupted_by:
            self.kill_at = now
        self.interrupted_by, self.interrupted_at = self.interrupted_by or number, now
        self.end_at = now

    def _hear(self, agent: Agent) -> None:
        self._take_all(agent)
        if not agent.is_open:
            self.selector.unregister(agent.stdout)
            self.selector.unregister(agent.stderr)
            self._lose(agent)

    def _take_all(self, agent: Agent) -> None:
        """Takes what an agent has sent by now: its time, and news of ranks."""
        for facts, data in agent.news():
            if "clock" in facts:
                agent.clock.note(facts["asked"], time.monotonic(), facts["clock"])
            else:
                self._take(facts, data, agent)

    def _take(self, facts: RankNews, data: bytes, agent: Agent) -> None:
        """Notes facts about a rank."""
        self.engine.hear(facts, agent)
        if facts["rank"] < 0:  # of no rank, or of none any more
            if "remains" in facts:
                self.strays[facts["remains"]] = f"{facts['name']} on {agent.host.name}"
            return
        new = Rank(facts["rank"], agent.host.name, has_mpi=self.installation.has_mpi, clock=agent.clock)
        rank = self.ranks.setdefault(facts["rank"], new)
        if "stream" in facts:
            self.unread[agent] += len(data)
            self._stream(rank, facts["stream"]).feed(data)
        if "left" in facts:
            self._keep(f"{facts['left']}.{rank.number}", data)
        if "starts" in facts:
            rank.is_connected = True
            rank.host = facts["host"]
            for stream in (1, 2) if self.plan.folder else ():  # its files, even if it writes nothing
                self._stream(rank, stream)
        if "failing" in facts:
            rank.announced, rank.follows, rank.because = facts["failing"], facts["follows"], facts.get("because", "")
            rank.failed_at = min(rank.failed_at, facts["at"])
        if "omp_num_threads" in facts and rank.number == 0:
            self.terminal.say(
                f"OMP_NUM_THREADS={facts['omp_num_threads']} (cores / ranks of this host), because it is not set."
            )
        if "meets" in facts:
            self._answer(self.meetings.arrive(rank.number, facts["meets"], time.monotonic()))
        if "withdraws" in facts:
            self.meetings.withdraw(rank.number, facts["withdraws"])
        if "leaving" in facts:
            rank.left_at = facts["at"]
        if facts.get("stopped"):
            self.stopped_since.setdefault(rank.number, time.monotonic())
        elif "stopped" in facts:
            self.stopped_since.pop(rank.number, None)
        if "remains" in facts:
            rank.remains[facts["remains"]] = facts["name"]
        if "ended" in facts:
            rank.was_told_to, rank.engine_lost_at = facts["was_told_to"], facts["engine_lost_at"]
            self._note_outcome(rank, facts["ended"], facts["at"])
        if "lost" in facts:
            rank.was_told_to = self.engine.ends_ranks or self._is_ending()
            self._note_outcome(rank, LOST, facts["at"])
        if facts.get("cleared") and rank.outcome is None:  # it has not come so far as to run the command
            rank.host = agent.host.name
            self._note_outcome(rank, facts["cleared"], rank.clock.there(time.monotonic()))

    def _answer(self, answers: Iterable[Answer]) -> None:
        """Tells ranks that have called init() how their meeting has ended: their hosts alone."""
        for answer in answers:
            for rank in answer.to if answer.ended else ():
                self.ranks[rank].waited_for = answer.ended
            hosts = {self.ranks[rank].listed_as for rank in answer.to}
            for agent in self.agents:
                if agent.host.name in hosts:
                    agent.send(answer.introduce)

    def _stream(self, rank: Rank, stream: int) -> RankStream:
        if stream not in rank.streams:
            target = self.files.file(rank.number, stream) if self.files else None
            rank.streams[stream] = RankStream(self.terminal, stream, rank.number, target, self.limits)
        return rank.streams[stream]

    def _keep(self, name: str, data: bytes) -> None:
        """Leaves a file for `ringtrain.run`."""
        try:
            leave_private(Path(self.plan.function_folder, name), data)
        except OSError as error:
            self.results_lost.add(data, error.strerror or str(error))

    def _note_outcome(self, rank: Rank, outcome: int, at: float) -> None:
        """at: by the clock of its host."""
        rank.outcome, rank.ended_at = outcome, at
        rank.is_connected = False
        if outcome == 0:
            self._answer(self.meetings.end(rank.number))
        else:
            rank.failed_at = min(rank.failed_at, at, rank.left_at)
            self.end_at = min(self.end_at, time.monotonic() + SECONDS_TO_REPORT)

    def _lose(self, agent: Agent) -> None:
        """An agent has gone, and with it what is known of its host's ranks."""
        if agent.fault:
            self.terminal.say(f"host '{agent.host.name}': the agent there failed: {agent.last_words()}")
        left = [rank for rank in self.ranks.values() if rank.is_connected and rank.listed_as == agent.host.name]
        if left or self.kill_at == float("inf"):
            self.lost_hosts.append(agent.host.name)
        for rank in left:
            rank.was_told_to = True
            self._note_outcome(rank, LOST, rank.clock.there(time.monotonic()))
        self.end_at = min(self.end_at, time.monotonic())

    # ---- end ----

    def _is_ending(self) -> bool:
        return self.end_at < float("inf") or self.kill_at < float("inf")

    def _some_are_connected(self) -> bool:
        return any(rank.is_connected for rank in self.ranks.values())

    def _has_ended(self) -> bool:
        return self.engine.code is not None and not self._some_are_connected()

    def _starts_anew(self) -> bool:
        """Starts an engine once more that has ended of itself, for a reason known to be its own, before any rank ran."""
        if self.was_started_anew or self.ranks or not self.engine.code or self._is_ending() or self.interrupted_by:
            return False
        self.engine.finish()  # whose last words may be the reason
        if not self.has_stumbled:
            return False
        self.was_started_anew = True
        self.terminal.say(f"{self.engine.name} ended before any rank ran, as it said; it is started once more.")
        self.engine.start_anew(self.selector)
        return True

    def _end(self) -> None:
        """Asks every rank to end; its agent, or its supervisor, kills it after 3 s."""
        if self.kill_at == float("inf"):
            self.kill_at = time.monotonic() + SECONDS_TO_KILL + 1.0
            for agent in self.agents:
                agent.send({"do": "end"})
        self.end_at = float("inf")

    def _kill(self) -> None:
        """Kills whatever is left of the job, on every host."""
        for agent in self.agents:
            agent.send({"do": "kill"})
        self.engine.kill()
        for rank in self.ranks.values():
            rank.is_connected = False
        self.kill_at = float("inf")

    def _hang_up(self, stop_beating: Callable[[], None]) -> None:
        stop_beating()
        for agent in self.agents:
            agent.close()

    def _drain(self) -> None:
        """Reads what is still under way from agents and engine, without waiting for processes that keep pipes open."""
        deadline = time.monotonic() + SECONDS_TO_KILL
        with selectors.DefaultSelector() as selector:  # all at a time: none waits for long with what it has to hand in
            for agent in filter(lambda agent: agent.is_open, self.agents):
                selector.register(agent.stdout, selectors.EVENT_READ, agent)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    self._take_all(key.data)
                    deadline = time.monotonic() + SECONDS_TO_KILL  # a result may be large, and its network slow
                    if not key.data.is_open:
                        selector.unregister(key.fileobj)
        for agent in self.agents:
            if agent.is_open or not agent.has_left(deadline):  # an ssh may stay for the sake of other sessions
                kill_group(agent.process.pid)
            agent.process.wait()
        self.engine.finish()
        for rank in self.ranks.values():
            for stream in rank.streams.values():
                stream.close()
        for writes in self._writing():
            writes.finish(self._patience)

    def _patience(self) -> Patience:
        if self.interrupted_by:
            return PATIENCE["stopped"]
        return PATIENCE["ended well" if all(rank.outcome == 0 for rank in self.ranks.values()) else "failed"]

    def _conclude(self) -> int:
        """Says how the job ended, the first cause last, and returns the exit code."""
        for loss in self._losses():
            self.terminal.say(f"{loss.place}: {loss}.")
        if self.interrupted_by:
            by = signal.Signals(self.interrupted_by).name
            left = describe_remains(self.ranks.values(), self.strays)
            self.terminal.say(f"stopped by {by}; {left}" if left else f"stopped by {by}; all ranks have ended.")
            return 128 + self.interrupted_by
        if self.given_up:
            return 1
        for rank in self.ranks.values():
            rank.hear_abort()
        first = first_cause(self.ranks.values())
        if left := describe_remains(self.ranks.values(), self.strays):
            self.terminal.say(left)
        if first is None or first.is_a_victim:
            host = host_without_engine(self.ranks.values(), self.hosts_without_daemon)
            if host:
                return self._explain_lost_engine(host)
        if first is not None:
            self._explain(first)
            if self.plan.function_folder:
                self._keep("first", str(first.number).encode())
            return first.failure if first.failure > 0 else 128 - first.failure
        if self.lost_hosts:
            self.terminal.say(
                f"host {', '.join(self.lost_hosts)}: the connection was lost, so the job has ended. "
                "The machine may be down, or the network between."
            )
            return 1
        if not self.ranks:
            raise LaunchError(
                f"{self.engine.name} could not start the ranks: {shlex.join(self.engine.line)}\n"
                f"ended with code {self.engine.code}. See its output above."
            )
        if self.results_lost.lines:
            self.terminal.say(
                f"folder '{self.plan.function_folder}': the ranks' results must have room there, but: "
                f"{self.results_lost.reason}. Make room, or name another place with TMPDIR."
            )
            return 1
        if all(rank.outcome == 0 for rank in self.ranks.values()) and len(self.ranks) == self.plan.ranks:
            return 0
        return self._explain_engine()

    def _explain_lost_engine(self, host: str) -> int:
        """Says that the program which the engine keeps beside the ranks of a host was killed, and returns the exit code."""
        name, code = self.engine.name, self.engine.code or 0
        itself = " itself" if code < 0 else ""
        self.terminal.say(
            f"host {host}: {name}{itself} has ended there while its ranks still ran, so the job has ended. "
            "Somebody has killed it, or the kernel, when memory ran out."
        )
        return 128 - code if code < 0 else code or 1

    def _explain_engine(self) -> int:
        """Says why the engine ended ranks that had not failed, and returns the exit code."""
        name, code = self.engine.name, self.engine.code or 0
        ended = any(rank.outcome for rank in self.ranks.values())
        left = _numbers(rank for rank in self.ranks.values() if rank.outcome == 0)
        if ended and left:
            self.terminal.say(
                f"rank {left} left with exit code 0, but without {self.engine.good_end} and while other ranks still "
                f"ran; {name} then ended these."
            )
            return 1
        if ended or code:
            self.terminal.say(f"{name} ended the job with code {code}, as MPI_Abort and a lost host make it do.")
        return max(code, int(ended)) if code >= 0 else 128 - code

    def _explain(self, first: Rank) -> None:
        """Names the first failing rank, and repeats its last words if others have spoken since."""
        alike = failed_alike(self.ranks.values(), first)
        words = first.streams.get(2)
        last: list[bytes] = []
        if words is not None and words.kept and (words.last_line != self.terminal.lines or self._losses()):
            last = words.ending()
        also = "".join(f", {rank.describe_place()} too" for rank in alike)
        self.terminal.say(first.describe_failure() + also + ("; it ended with:" if last else "."))
        for line in last:
            self.terminal.write_line(2, line)
        if first.waited_for:
            absent = ", ".join(self.ranks[number].describe_place() for number in first.waited_for)
            self.terminal.say(
                f"{absent} ended with exit code 0 before it called init(), where the other ranks waited for it; these then "
                f"failed. {LET_ALL_COME}"
            )
            return
        left = _numbers(left_before(self.ranks.values(), first))
        if left and first.was_ended_for_a_peer:  # whose own report may be late, and tells nothing of the order
            self.terminal.say(f"rank {left} left with exit code 0 before that, perhaps without {self.engine.good_end}.")
        elif left:
            self.terminal.say(
                f"rank {left} left with exit code 0, but without {self.engine.good_end} and while other ranks still "
                "ran; these then failed."
            )


def addresses_of(host: Host, networks: Chosen | None) -> tuple[str, ...]:
    """Where the ranks of other hosts reach a host, or its own where there are no others."""
    return networks.addresses[host.name] if networks else ("127.0.0.1",)


def _numbers(ranks: Iterable[Rank]) -> str:
    """For people."""
    return ", ".join(str(rank.number) for rank in ranks)


def command_line(plan: Plan, installation: Installation, socket_name: str) -> list[str]:
    """The engine's whole command line."""
    engine = installation.engine
    return [
        *engine.command_line(installation.program, plan),
        sys.executable,
        "-I",
        "-S",
        str(RANK_PROGRAM),
        socket_name,
        ",".join(engine.RANK_VARIABLES),
        "--",
        *plan.command,
    ]


def leave_private(path: Path, data: bytes) -> None:
    """Writes a file for this user alone."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
