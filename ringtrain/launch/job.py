"""One run: starts the engine, listens to the agents of all hosts, ends all ranks when one fails, says who failed first.

Single-threaded, around one selector, but for a thread that lets the agents know that the launcher lives, and those that
write (see `writing`). What ranks write and how they end comes from their hosts' agents (see `agent`); the engine's own
words are passed on. While nobody reads, agents get no leave to send more, so that the ranks wait as they would without
a launcher.
"""

from __future__ import annotations

import secrets
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ringtrain._rendezvous.agent_protocol import RankNews
from ringtrain.launch import signals
from ringtrain.launch.agent.events import call_ready
from ringtrain.launch.agent.listener import SECONDS_TO_KILL
from ringtrain.launch.agent.processes import kill_group
from ringtrain.launch.agents import Agents
from ringtrain.launch.ends import Ends
from ringtrain.launch.engine import Engine, Program
from ringtrain.launch.hang_up import hang_up_on
from ringtrain.launch.host_errors import HostError, LaunchError
from ringtrain.launch.host_setup import Allocation, HostSetup
from ringtrain.launch.job_output import JobOutput
from ringtrain.launch.known_ranks import LOST, Rank
from ringtrain.launch.meeting import MeetingEnd, Meetings
from ringtrain.launch.mpi_installation import command_line
from ringtrain.launch.openmpi import HARMLESS_WORDS, LOST_DAEMON, STUMBLED
from ringtrain.launch.output import EngineStream
from ringtrain.launch.plan import Plan
from ringtrain.launch.reach import Agent
from ringtrain.launch.stopped import StoppedRanks
from ringtrain.launch.terminal import Terminal
from ringtrain.launch.writing import Patience

SECONDS_TO_REPORT = 2.0  # for the other ranks, after a failure, to say what they saw
SECONDS_BETWEEN_BEATS = 5.0
SECONDS_OF_ONE_SIGNAL = 0.3  # that comes twice: `timeout` sends it to the launcher, and to its group
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
        allocation: Allocation,
        terminal: Terminal,
        taken_up: str = "",
    ):
        self.plan = plan
        self.allocation = allocation
        self.terminal = terminal
        self.agents, installation = allocation.agents, allocation.installation
        self.output = JobOutput(plan, terminal)
        socket = taken_up or f"ringtrainrun-{secrets.token_hex(16)}"
        self.setup = HostSetup(plan, allocation, socket, self.output.limits.window)
        self.ranks: dict[int, Rank] = {}
        self.has_stumbled = self.was_started_anew = False
        self.selector = selectors.DefaultSelector()
        self.meetings = Meetings(plan.ranks)
        words = {number: EngineStream(terminal, number, self.shows, self._hear_engine) for number in (1, 2)}
        self.engine: Engine = (
            Program(
                installation.engine.NAME,
                command_line(plan, installation, socket),
                allocation.environment,
                words,
                installation.engine.folder_of,
            )
            if installation.has_mpi
            else self.agents_that_start(plan.command, words)
        )
        self.ends = Ends(plan, terminal, self.output, self.engine, self.ranks)
        self.stopped = StoppedRanks(terminal)
        self.interrupted_by, self.interrupted_at = 0, 0.0
        self.end_at = float("inf")
        self.kill_at = float("inf")

    def agents_that_start(self, line: Sequence[str], words: Mapping[int, EngineStream]) -> Agents:
        """The agents as the engine, where there is no MPI."""
        return Agents(self.plan, line, self.agents, words)

    def run(self) -> int:
        """Runs the plan to its end and returns the exit code. Raises LaunchError if no rank ever started."""
        self.setup.ignore(signals.ignored())
        self.wakeup, self.wakeup_write = signals.watch(self._on_signal, keeps_running=self.plan.has_remote_hosts)
        self.selector.register(self.wakeup, selectors.EVENT_READ, lambda: self.wakeup.recv(4096))
        self.output.watch(self._wake)
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
        known = any(rank.outcome for rank in self.ranks.values()) or self.interrupted_by or self.ends.lost_hosts
        return self.plan.verbose or not (known or HARMLESS_WORDS.search(line))

    def _hear_engine(self, line: bytes) -> None:
        if match := LOST_DAEMON.match(line):
            self.ends.hosts_without_daemon.add(match[1].decode(errors="replace"))
        self.has_stumbled = self.has_stumbled or bool(STUMBLED.search(line))

    def _start_listeners(self) -> None:
        """Lets every agent wait for the ranks of its host."""
        deadline = time.monotonic() + self.plan.start_seconds
        self.setup.begin(self.allocation.networks, deadline)
        for agent in self.agents:
            try:
                self.setup.have_serve(agent, self.allocation.networks, deadline)
            except HostError as error:
                raise LaunchError(str(error)) from None
            self._listen_to(agent)

    def _listen_to(self, agent: Agent) -> None:
        self.output.listen_to(agent)
        self.selector.register(agent.stdout, selectors.EVENT_READ, lambda: self._hear(agent))
        self.selector.register(agent.stderr, selectors.EVENT_READ, agent.hear_words)

    # ---- events ----

    def _step(self) -> None:
        deadline = self._deadline()
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        call_ready(self.selector, timeout)
        self.output.give_credit(self._is_ending())
        self.output.warn_of_losses()
        now = time.monotonic()
        if not self.terminal.is_read and not self.interrupted_by:
            self._on_signal(signal.SIGPIPE, None)  # nobody reads on: as a single process, the job ends of it
        if self.engine.code is not None and self._some_are_connected():
            self._end()  # the engine is gone: whoever is still there will not be ended by it
        self._answer(self.meetings.expire(now))
        self.stopped.look(now, self.ranks.values(), self.agents, self._is_ending())
        if now >= self.end_at:
            self._end()
        if now >= self.kill_at:
            self._kill()

    def _deadline(self) -> float:
        """When there is something to do even if nothing happens."""
        return min(self.end_at, self.kill_at, self.meetings.deadline, self.stopped.look_at)

    def _wake(self) -> None:
        """Called by a thread that writes, when there is room again or something went wrong."""
        try:
            self.wakeup_write.send(b"\0")
        except OSError:  # enough of these wait there, or the job is over
            pass

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
                self.ends.strays[facts["remains"]] = f"{facts['name']} on {agent.host.name}"
            return
        new = Rank(facts["rank"], agent.host.name, has_mpi=self.allocation.installation.has_mpi, clock=agent.clock)
        rank = self.ranks.setdefault(facts["rank"], new)
        if "stream" in facts:
            self.output.feed(rank, facts["stream"], data, agent)
        if "left" in facts:
            self.output.keep(f"{facts['left']}.{rank.number}", data)
        if "starts" in facts:
            rank.is_connected = True
            rank.host = facts["host"]
            self.terminal.note("rank-started", rank=rank.number, host=rank.host)
            self.output.begin(rank)
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
        if "stopped" in facts:
            self.stopped.note(rank.number, facts["stopped"], time.monotonic())
        if "remains" in facts:
            rank.remains[facts["remains"]] = facts["name"]
        if "ended" in facts:
            rank.was_told_to = (
                rank.was_told_to or facts["was_told_to"]
            )  # an agent asks whom it kills at once for nothing
            rank.engine_lost_at = facts["engine_lost_at"]
            self._note_outcome(rank, facts["ended"], facts["at"])
        if "lost" in facts:
            rank.was_told_to = self.engine.ends_ranks or self._is_ending()
            self._note_outcome(rank, LOST, facts["at"])
        if facts.get("cleared") and rank.outcome is None:  # it has not come so far as to run the command
            rank.host = agent.host.name
            self._note_outcome(rank, facts["cleared"], rank.clock.there(time.monotonic()))

    def _answer(self, answers: Iterable[MeetingEnd]) -> None:
        """Tells ranks that have called init() how their meeting has ended: their hosts alone."""
        for answer in answers:
            for rank in answer.to if answer.ended else ():
                self.ranks[rank].waited_for = answer.ended
            hosts = {self.ranks[rank].listed_as for rank in answer.to}
            for agent in self.agents:
                if agent.host.name in hosts:
                    agent.send(answer.introduce)

    def _note_outcome(self, rank: Rank, outcome: int, at: float) -> None:
        """at: by the clock of its host."""
        rank.outcome, rank.ended_at = outcome, at
        rank.is_connected = False
        if outcome != 0:
            rank.failed_at = min(rank.failed_at, at, rank.left_at)
        self.terminal.note("rank-ended", **rank.facts())
        self._follow_end(rank)

    def _follow_end(self, rank: Rank) -> None:
        """What becomes of the job when a rank has ended."""
        if rank.outcome == 0:
            self._answer(self.meetings.end(rank.number))
        else:
            self.end_at = min(self.end_at, time.monotonic() + SECONDS_TO_REPORT)

    def _lose(self, agent: Agent) -> None:
        """An agent has gone, and with it what is known of its host's ranks."""
        if agent.fault:
            host, words = agent.host.name, agent.last_words()
            self.terminal.say(f"host '{host}': the agent there failed: {words}", "agent-failed", host=host)
        left = [rank for rank in self.ranks.values() if rank.is_connected and rank.listed_as == agent.host.name]
        if left or self.kill_at == float("inf"):
            self.ends.lost_hosts.append(agent.host.name)
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
        name = self.engine.name
        text = f"{name} ended before any rank ran, as it said; it is started once more."
        self.terminal.say(text, "engine-restarted", engine=name)
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
        self.output.finish(self.ranks.values(), self._patience)

    def _patience(self) -> Patience:
        if self.interrupted_by:
            return PATIENCE["stopped"]
        return PATIENCE["ended well" if all(rank.outcome == 0 for rank in self.ranks.values()) else "failed"]

    def _conclude(self) -> int:
        """Says how the job ended, the first cause last, and returns the exit code."""
        self.output.say_losses()
        if self.interrupted_by:
            by = signal.Signals(self.interrupted_by).name
            left = self.ends.remains()
            text = f"stopped by {by}; {left}" if left else f"stopped by {by}; all ranks have ended."
            self.terminal.say(text, "stopped", signal=by)
            return 128 + self.interrupted_by
        if self.stopped.killed:
            return 1
        return self.ends.conclude()
