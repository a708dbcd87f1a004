"""A run whose number of ranks may change: `--elastic`. The authority decides (`authority`); this carries it out.

The agents start the ranks. A rank that dies is told of to the authority at once, which has the others form another
world, and has one started in its slot after a pause. Until the first world has been formed, a failure ends the job as it
does in `job`: what fails then would fail again.
"""

from __future__ import annotations

import os
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ringtrain.agent_protocol import RankNews
from ringtrain.launch.agents import Agents
from ringtrain.launch.authority import Action, Authority
from ringtrain.launch.discovery import ScriptError, Supply
from ringtrain.launch.environment import listening
from ringtrain.launch.hosts import Host
from ringtrain.launch.job import SECONDS_OF_SILENCE, Job
from ringtrain.launch.mpi import LaunchError
from ringtrain.launch.networks import Chosen
from ringtrain.launch.output import EngineStream
from ringtrain.launch.preflight import check_hosts
from ringtrain.launch.rank import NOTICES
from ringtrain.launch.ranks import LOST, Rank
from ringtrain.launch.reach import Agent, HostError, hang_up_on


class Trial(NamedTuple):
    """What has come of a host that was tried: its agent, which serves, and the job's networks with it; or why it cannot be used."""

    host: Host
    agent: Agent | None
    networks: Chosen | None
    problem: str = ""


class Slots(Agents):
    """The agents as the engine of an elastic job: they start a rank in a slot whenever they are told to.

    Attributes:
        is_over: nobody is to be started any more.
        processes: uids of the supervised processes, by the slot's number in the job.
        notices: names of the signals by which one is asked to leave.
        listens: where the ranks of a host listen, by its name, if that has changed since its agent was told.
    """

    is_over = False

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._left = dict.fromkeys(self._agents, 0)
        self.processes: dict[int, str] = {}
        self.notices: tuple[str, ...] = ()
        self.listens: dict[str, str] = {}

    def start(self, _selector: object) -> None:
        """Starts nothing yet: the authority says what."""

    def start_in(self, agent: Agent, slot: int, first: int) -> None:
        """Starts a rank in a slot of a host, whose slots are numbered from `first`."""
        uid = self.processes[first + slot] = secrets.token_hex(16)
        self._left[agent] = self._left.get(agent, 0) + 1
        request = self._request(agent, first)
        request["only"] = [slot]
        request["variables"] = {"RINGTRAIN_ELASTIC": f"{uid} {agent.host.name}", NOTICES: ",".join(self.notices)}
        if agent.host.name in self.listens:
            request["variables"]["RINGTRAIN_ELASTIC_LISTEN"] = self.listens[agent.host.name]
        agent.send(request)

    def hear(self, facts: RankNews, agent: Agent) -> None:
        """Takes what an agent says of the supervisors that it has started."""
        super().hear(facts, agent)
        if "supervisor" in facts:
            self.processes.pop(facts["rank"], None)
            self._code = 0  # what a rank's end means is the authority's to say

    @property
    def code(self) -> int | None:
        """0 once nobody is to be started any more and all have ended."""
        return super().code if self.is_over else None


class ElasticJob(Job):
    """An elastic plan being carried out."""

    engine: Slots

    def agents_that_start(self, line: Sequence[str], words: Mapping[int, EngineStream]) -> Slots:
        """The agents as the engine."""
        slots = Slots(self.plan, line, self.agents, words)
        assert self.plan.elastic is not None
        slots.notices = self.plan.elastic.notices
        return slots

    def _start_listeners(self) -> None:
        super()._start_listeners()
        assert self.plan.elastic is not None
        self._supply = Supply(self.plan.hosts, self.plan.elastic.first_pause)
        self._news: queue.SimpleQueue[list[Host] | ScriptError | Trial] = queue.SimpleQueue()
        self._is_trying = False
        self._script_failed = False
        self._leaving: set[str] = set()  # hosts that have a notice
        self._first: dict[str, int] = {}  # number of a host's first slot in the job
        self._agent_of: dict[str, Agent] = {}
        for agent in self.agents:
            self._first[agent.host.name] = sum(other.host.slots for other in self._agent_of.values())
            self._agent_of[agent.host.name] = agent
        self._has_begun = False  # a world has been formed
        self._reason: tuple[bool, str] | None = None  # why the authority has ended the job: well, and text
        self._waiting: set[int] = set()  # slots that get a rank once their last one is gone
        self._leave_by: dict[int, tuple[str, float]] = {}  # ranks that have a notice: uid, and when it is ended
        self._failures: list[Rank] = []  # of ranks whose slots may have got another one since
        self._record = os.path.join(tempfile.mkdtemp(prefix="ringtrainrun-elastic-"), "world")
        now = time.monotonic()
        hosts = [agent.host for agent in self.agents]
        self.authority = Authority(hosts, self.plan.elastic, SECONDS_OF_SILENCE, now)
        for host in hosts:
            self._carry_out(self.authority.host_came(now, host.name))
        if self.plan.script is not None:
            self._stop_watching = self.plan.script.watch(self._tell)

    def run(self) -> int:
        """As `Job.run`; removes what it has written."""
        self._stop_watching = lambda: None
        try:
            return super().run()
        finally:
            self._stop_watching()
            if hasattr(self, "_record"):
                remove_quietly(self._record)

    # ---- events ----

    def _deadline(self) -> float:
        if self._is_over():
            return super()._deadline()
        leave_by = (at for _, at in self._leave_by.values())
        next_try = self._supply.next_try(self._present(), self._room()) if self._may_try() else float("inf")
        return min(super()._deadline(), self.authority.next_timer, next_try, *leave_by)

    def _step(self) -> None:
        super()._step()
        now = time.monotonic()
        if not self._is_over() and now >= self.authority.next_timer:
            self._carry_out(self.authority.tick(now))
        if not self._is_over():
            self._end_those_who_stay(now)
        self._take_news(now)

    def _take_all(self, agent: Agent) -> None:
        super()._take_all(agent)
        if agent.is_open and not self._is_over():
            self._carry_out(self.authority.host_heard(time.monotonic(), agent.host.name))

    def _take(self, facts: RankNews, data: bytes, agent: Agent) -> None:
        if "control" in facts:
            if not self._is_over() and self.engine.processes.get(facts["rank"]) == facts["uid"]:
                self._carry_out(self.authority.arrived(time.monotonic(), agent.host.name, facts["control"]))
            return
        if "noticed" in facts:
            self._take_notice(facts["rank"], agent)
            return
        number = facts["rank"]
        uid = self.engine.processes.get(number, "")
        former = self.ranks.get(number)
        if "starts" in facts and former is not None and former.outcome is not None:  # another one in its slot
            self.ranks[number] = Rank(number, agent.host.name, has_mpi=False, clock=agent.clock, streams=former.streams)
        super()._take(facts, data, agent)
        rank = self.ranks.get(number)
        if uid and rank is not None and ("ended" in facts or "lost" in facts or "supervisor" in facts):
            self._note_end(agent, number, uid, facts["supervisor"] if rank.outcome is None else rank.outcome)
        if "supervisor" in facts and number in self._waiting:
            self._waiting.remove(number)
            self._start(agent, number - self._first[agent.host.name])
        if "supervisor" in facts and agent.host.name in self._leaving:
            self._release(agent)
        if not self._has_begun and not self.engine.processes:  # a program that calls no init()
            self.engine.is_over = True

    def _take_notice(self, number: int, agent: Agent) -> None:
        """A rank is asked to leave, or all those of a host (-1)."""
        if self._is_over():
            return
        now, host = time.monotonic(), agent.host.name
        first = self._first[host]
        if number < 0:
            self._supply.leaves(host)
            self._have_leave(agent, "it is to be taken away.")
        elif uid := self.engine.processes.get(number):
            self._limit_stay((number,), now)
            self._carry_out(self.authority.process_leaves(now, host, number - first, uid))

    def _limit_stay(self, numbers: Iterable[int], now: float) -> None:
        assert self.plan.elastic is not None
        for number in numbers:
            if uid := self.engine.processes.get(number):
                self._leave_by.setdefault(number, (uid, now + self.plan.elastic.notice_grace))

    def _end_those_who_stay(self, now: float) -> None:
        """Ends ranks that have not left in time after a notice."""
        for number in [number for number, (_, at) in self._leave_by.items() if now >= at]:
            uid, _ = self._leave_by.pop(number)
            rank = self.ranks.get(number)
            if self.engine.processes.get(number) == uid and rank is not None:
                grace = self.plan.elastic.notice_grace if self.plan.elastic else 0.0
                self.terminal.say(
                    f"{rank.describe_place()} has not left within {grace:g} s of its notice, and is ended."
                )
                self._evict(rank.listed_as, uid)

    def _note_end(self, agent: Agent, number: int, uid: str, code: int) -> None:
        """Tells the authority of the end of a process, which comes twice: of the rank, and of its supervisor."""
        on_notice = self._leave_by.pop(number, None) is not None
        if self._is_over() or (not self._has_begun and code == 0 and not on_notice):
            return
        slot = number - self._first[agent.host.name]
        ended = self.authority.process_ended(time.monotonic(), agent.host.name, slot, uid, code)
        self.engine.processes[number] = ""  # the slot is free once its supervisor is gone, too
        self._carry_out(ended)

    def _note_outcome(self, rank: Rank, outcome: int, at: float) -> None:
        if not self._has_begun or self._is_over():
            super()._note_outcome(rank, outcome, at)
            return
        rank.outcome, rank.ended_at, rank.is_connected = outcome, at, False
        if outcome != 0:
            rank.failed_at = min(rank.failed_at, at, rank.left_at)
            self._failures.append(rank)

    def _lose(self, agent: Agent) -> None:
        if not self._has_begun or self._is_over():
            super()._lose(agent)
            return
        self._supply.failed(time.monotonic(), agent.host.name)
        for rank in self.ranks.values():
            if rank.is_connected and rank.listed_as == agent.host.name:
                rank.was_told_to = True
                self._note_outcome(rank, LOST, rank.clock.there(time.monotonic()))
        first = self._first[agent.host.name]
        for number in range(first, first + agent.host.slots):
            self.engine.processes.pop(number, None)
        self._carry_out(
            self.authority.host_lost(time.monotonic(), agent.host.name, "the connection to its agent has ended.")
        )

    # ---- hosts ----

    def _tell(self, news: list[Host] | ScriptError | Trial) -> None:
        """Takes what a thread has found out."""
        self._news.put(news)
        self._wake()

    def _take_news(self, now: float) -> None:
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Trial):
                self._is_trying = False
                self._take_trial(news, now)
            elif isinstance(news, ScriptError):
                if not self._script_failed and not self._is_over():
                    self.terminal.say(f"{news} The job goes on with the hosts that it has; this is said once.")
                self._script_failed = True
            else:
                self._script_failed = False
                self._supply.named(news)
        if not self._has_begun or self._is_over():
            return
        present = self._present()
        for name in self._supply.to_leave(present):
            if name not in self._leaving:
                self._have_leave(self._agent_of[name], "--host-discovery-script names it no longer.")
        host = self._supply.to_try(now, present, self._room()) if self._may_try() else None
        if host is not None:
            self._is_trying = True
            others = [each for name, each in present.items() if name not in self._leaving]
            threading.Thread(target=self._try, args=(host, others), name="ringtrainrun-try", daemon=True).start()

    def _may_try(self) -> bool:
        """Whether another host may be checked now. In an allocation of Slurm's there is none to come."""
        return self._has_begun and not self._is_trying and not self.plan.by_srun and self.networks is not None

    def _present(self) -> dict[str, Host]:
        """The hosts whose agents can be heard."""
        return {name: agent.host for name, agent in self._agent_of.items() if agent.is_open}

    def _room(self) -> int:
        """How many more ranks the job may have."""
        used = sum(host.slots for name, host in self._present().items() if name not in self._leaving)
        return self.plan.ranks - used

    def _try(self, host: Host, others: list[Host]) -> None:
        """Checks a host as those of the start were, beside those that there are; by a thread."""
        interfaces = self.networks.networks if self.networks else self.plan.interfaces
        plan = replace(self.plan, hosts=[*others, host], interfaces=interfaces)
        agent = None
        try:
            agents, networks = check_hosts(plan, self.installation, self.environment)
            agent = agents.pop()
            hang_up_on(agents)
            ours = self.networks.networks if self.networks else ()
            if networks is None or not set(networks.networks) <= set(ours):
                raise LaunchError(
                    f"host '{host.name}': it must share one of the job's networks with all other hosts, but of "
                    f"{', '.join(ours) or 'the loopback'} it shares none. Open one of them."
                )
            self._have_it_serve(agent, networks, time.monotonic() + self.plan.start_seconds)
            self._tell(Trial(host, agent, networks))
        except (LaunchError, HostError, OSError) as error:
            hang_up_on([agent] if agent else [])
            self._tell(Trial(host, None, None, str(error)))

    def _take_trial(self, trial: Trial, now: float) -> None:
        name, agent = trial.host.name, trial.agent
        if agent is None or trial.networks is None or self.networks is None:
            self._supply.failed(now, name)
            self.terminal.say(f"{trial.problem} The job goes on without this host, and tries it again later.")
            return
        if self._is_over():
            hang_up_on([agent])
            return
        self._use(trial.networks)
        before = self._agent_of.get(name)
        if before is None or before.host.slots < trial.host.slots:
            ends = [self._first[each] + other.host.slots for each, other in self._agent_of.items()]
            self._first[name] = max(ends, default=0)
        self._leaving.discard(name)
        self._agent_of[name] = agent
        self.agents.append(agent)
        self.unread[agent] = 0
        self._listen_to(agent)
        self.terminal.say(f"host '{name}' has come, with {trial.host.slots} slots.")
        self.authority.host_added(trial.host)
        self._carry_out(self.authority.host_came(now, name))

    def _use(self, networks: Chosen) -> None:
        """Takes the networks that all hosts share, the new one among them; if they are fewer, all listen there alone."""
        known, self.networks = self.networks, networks
        if known is None or networks.networks == known.networks:
            return
        for name, agent in self._agent_of.items():
            if name not in networks.addresses:
                continue
            listens = listening(networks.addresses[name], self.plan.ports)
            self.engine.listens[name] = listens
            first = self._first[name]
            for number in range(first, first + agent.host.slots):
                if uid := self.engine.processes.get(number):
                    agent.send({"do": "lead", "uid": uid, "frame": "", "because": "", "listens": listens})

    def _have_leave(self, agent: Agent, cause: str) -> None:
        """Has all ranks of a host leave between two steps, and then its agent."""
        now, name = time.monotonic(), agent.host.name
        self._leaving.add(name)
        first = self._first[name]
        self._limit_stay(range(first, first + agent.host.slots), now)
        self._carry_out(self.authority.host_leaves(now, name, cause))
        self._release(agent)

    def _release(self, agent: Agent) -> None:
        """Lets the agent of a host go that leaves, once nobody is left there."""
        first = self._first[agent.host.name]
        if not any(number in self.engine.processes for number in range(first, first + agent.host.slots)):
            agent.send({"do": "end"})

    # ---- what follows ----

    def _carry_out(self, actions: Iterable[Action]) -> None:
        actions = list(actions)
        because = " ".join(action.columns[0] for action in actions if action.kind == "say")
        for kind, columns in actions:
            if kind == "say":
                self.terminal.say(columns[0])
            elif kind == "write":
                self._has_begun = True
                write_private(self._record, bytes.fromhex(columns[0]))
            elif kind in ("send", "evict"):
                host, uid, frame = columns
                self._agent_of[host].send({"do": "lead", "uid": uid, "frame": frame, "because": because})
                if kind == "evict":
                    self._evict(host, uid)
            elif kind == "beat":
                self._agent_of[columns[0]].send({"do": "beat", "at": time.monotonic()})
            elif kind == "start":
                self._start(self._agent_of[columns[0]], int(columns[1]))
            elif kind == "end":
                self._reason = columns[0] == "1", columns[1]
                self.engine.is_over = True
                self.end_at = time.monotonic()

    def _start(self, agent: Agent, slot: int) -> None:
        number = self._first[agent.host.name] + slot
        if self._is_ending() or not agent.is_open:
            return
        if number in self.engine.processes:
            self._waiting.add(number)
        else:
            self.engine.start_in(agent, slot, self._first[agent.host.name])

    def _evict(self, host: str, uid: str) -> None:
        for number, process in self.engine.processes.items():
            if process == uid:
                self._agent_of[host].send({"do": "evict", "rank": number})
                if number in self.ranks:
                    self.ranks[number].was_told_to = True

    # ---- end ----

    def _is_over(self) -> bool:
        return self._reason is not None or self._is_ending()

    def _end(self) -> None:
        self.engine.is_over = True
        super()._end()

    def _conclude(self) -> int:
        """The authority's reason; then the first cause, as for any job."""
        if self.interrupted_by or self._reason is None:
            return super()._conclude()
        well, text = self._reason
        if well:
            for loss in self._losses():
                self.terminal.say(f"{loss.place}: {loss}.")
            return 0
        self.terminal.say(text)
        if not any(rank.failure for rank in self.ranks.values()):
            for rank in self._failures[-1:]:  # it has been followed by another one
                self.ranks[rank.number] = rank
        return super()._conclude() or 1


def write_private(path: str, record: bytes) -> None:
    """Puts a file for this user alone in its place at once, on the disk."""
    new = f"{path}.new"
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(record)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def remove_quietly(path: str) -> None:
    """Removes a file and its folder, as far as they are there."""
    for remove, what in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
        try:
            remove(what)
        except OSError:
            pass
