"""A run whose number of ranks may change: `--elastic`. The authority decides (`authority`); this carries it out.

The agents start the ranks. A rank that dies is told of to the authority at once, which has the others form another
world, and has one started in its slot after a pause. Until the first world has been formed, a failure ends the job as it
does in `job`: what fails then would fail again.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from ringtrain.agent_protocol import RankNews, Serving
from ringtrain.launch.authority import Action, Authority, Rules
from ringtrain.launch.discovery import ScriptError, Supply
from ringtrain.launch.environment import listening
from ringtrain.launch.hosts import Host
from ringtrain.launch.job import SECONDS_OF_SILENCE, SECONDS_TO_REPORT, Job
from ringtrain.launch.job_folder import JobFolder, Outline, describe_hosts
from ringtrain.launch.mpi import Installation, LaunchError
from ringtrain.launch.networks import Chosen
from ringtrain.launch.output import EngineStream, Terminal
from ringtrain.launch.plan import Plan
from ringtrain.launch.preflight import check_hosts
from ringtrain.launch.ranks import LOST, Rank, blame_survived, describe_remains
from ringtrain.launch.reach import Agent, HostError, hang_up_on
from ringtrain.launch.resume import TakenUp
from ringtrain.launch.slots import Slots

_ENDS = {"failing", "ended", "lost", "cleared"}  # news that a rank is no more, or soon will be
SECONDS_BETWEEN_TOUCHES = 3600.0  # of the record, which a cleaner of /tmp would take for forgotten
TOO_FEW = "A world must have"  # as the authority's reason begins, if there are too few ranks


class Trial(NamedTuple):
    """What has come of a host that was tried: its agent, which serves, and the job's networks with it; or why it cannot be used."""

    host: Host
    agent: Agent | None
    networks: Chosen | None
    problem: str = ""


class ElasticJob(Job):
    """An elastic plan being carried out.

    rules: of the plan. folder: of the job, which this launcher holds. taken_up: what there is of a job that goes on, whose
    launcher was lost; None for one that begins. absent: hosts of the plan that are not among the agents', and why.
    """

    engine: Slots

    def __init__(
        self,
        plan: Plan,
        installation: Installation,
        terminal: Terminal,
        agents: list[Agent],
        environment: Mapping[str, str],
        networks: Chosen | None,
        rules: Rules,
        folder: JobFolder,
        taken_up: TakenUp | None = None,
        absent: Mapping[Host, str] = MappingProxyType({}),
    ):
        self.absent = absent
        self.rules, self.folder, self.taken_up = rules, folder, taken_up
        self._lacks_record = self._is_left = False
        self._touch_at = time.monotonic() + SECONDS_BETWEEN_TOUCHES
        self.key = taken_up.outline.key if taken_up else secrets.token_hex(32)
        self._stop_watching: Callable[[], None] = lambda: None
        socket = taken_up.outline.socket if taken_up else ""
        super().__init__(plan, installation, terminal, agents, environment, networks, socket)

    def agents_that_start(self, line: Sequence[str], words: Mapping[int, EngineStream]) -> Slots:
        """The agents as the engine."""
        slots = Slots(self.plan, line, self.agents, words)
        slots.notices, slots.planned = self.rules.notices, self.rules.planned
        return slots

    def _start_listeners(self) -> None:
        if self.taken_up is None:
            super()._start_listeners()
        else:
            self._function, self._of_rank_0 = "", self.taken_up.outline.of_rank_0
            for agent in self.agents:
                self._listen_to(agent)
        self._news: queue.SimpleQueue[list[Host] | ScriptError | Trial] = queue.SimpleQueue()
        self._is_trying = False
        self._script_failed = False
        self._leaving: set[str] = set()  # hosts that have a notice
        self._notices: dict[str, str] = {}  # why, of those of whom the authority is not told yet
        self._first: dict[str, int] = {}  # number of a host's first slot in the job
        self._agent_of: dict[str, Agent] = {}
        self._has_begun = False  # a world has been formed
        self._reason: tuple[bool, str] | None = None  # why the authority has ended the job: well, and text
        self._waiting: set[int] = set()  # slots that get a rank once their last one is gone
        self._leave_by: dict[int, tuple[str, float]] = {}  # ranks that have a notice: uid, and when it is ended
        self._failures: list[Rank] = []  # of ranks whose slots may have got another one since
        self._called: set[str] = set()  # uids of processes that have called init()
        self._evicted: set[str] = set()  # uids of those that were evicted, as was said
        for agent in self.agents:
            self._agent_of[agent.host.name] = agent
        if self.taken_up is None:
            self._begin()
        else:
            self._go_on(self.taken_up)
        if self.plan.script is not None:
            self._stop_watching = self.plan.script.watch(self._tell)

    def _begin(self) -> None:
        first = 0
        for agent in self.agents:
            self._first[agent.host.name] = first
            first += agent.host.slots
        self._supply = Supply([*self.plan.hosts, *self.plan.spare], self.rules.first_pause, self.rules.longest_pause)
        hosts = [agent.host for agent in self.agents]
        now = time.monotonic()
        self.authority = Authority(hosts, self.rules, self._grace() or SECONDS_OF_SILENCE, now)
        for host, why in self.absent.items():
            self._supply.failed(now, host.name)
            self.terminal.say(f"{why} The job starts without this host, and tries it again later.")
        self._note_hosts()
        if self._grace():
            self.terminal.say(
                f"job {self.folder.name}: should this launcher be lost, type within {self._grace():g} s, on this host: "
                f"ringtrainrun --resume {self.folder.name}"
            )
        for host in hosts:
            self._carry_out(self.authority.host_came(now, host.name))

    def _go_on(self, taken_up: TakenUp) -> None:
        hosts = [host for host, _ in taken_up.outline.hosts]
        self._first = {host.name: first for host, first in taken_up.outline.hosts}
        named = [*self.plan.hosts, *self.plan.spare] if self.plan.script is None else hosts
        self._supply = Supply(named, self.rules.first_pause, self.rules.longest_pause)
        now, record = time.monotonic(), self.folder.world
        self._has_begun = bool(record) or any(found["record"] for found in taken_up.found.values())
        self.authority = Authority(hosts, self.rules, self._grace() or SECONDS_OF_SILENCE, now, record)
        for host, why in taken_up.lost.items():
            self._supply.failed(now, host.name)
            self.terminal.say(f"{why} The job goes on without this host, and tries it again later.")
        ranks = sum(len(found["processes"]) for found in taken_up.found.values())
        on = describe_hosts(agent.host for agent in taken_up.found)
        self.terminal.say(f"job {self.folder.name}: taken up, with {ranks} ranks on {on}.")
        for agent, found in taken_up.found.items():
            self._adopt(agent, found)
        for agent in list(taken_up.found):  # whose accounts are taken one by one
            self._carry_out(self.authority.host_came(now, agent.host.name))

    def _adopt(self, agent: Agent, found: Serving) -> None:
        """Takes what an agent has said of the time without a launcher."""
        self.engine.take_over(agent, found["processes"])
        for number, code in found["ended"]:
            self.terminal.say(
                f"The rank in slot {number - self._first[agent.host.name]} of host '{agent.host.name}' has ended with exit "
                f"code {code} while there was no launcher."
            )
        if found["dropped"]:
            self.terminal.say(
                f"host '{agent.host.name}': {found['dropped']} bytes that its ranks wrote while there was no launcher are "
                "lost; only the last ones were kept."
            )

    def _grace(self) -> float:
        return 0.0 if self.plan.by_srun else self.rules.launcher_grace

    def _key(self) -> str:
        return self.key if self._grace() else ""

    def _note_hosts(self) -> None:
        """Has the next launcher, should there be one, know which hosts there are."""
        hosts = [(agent.host, self._first[name]) for name, agent in self._agent_of.items() if agent.is_open]
        outline = Outline(
            self.plan, dict(os.environ), os.getcwd(), self.socket, self.key, dict(self._of_rank_0), self.networks, hosts
        )
        self._record(lambda: self.folder.write(outline))

    def _record(self, write: Callable[[], None]) -> None:
        """Keeps what the next launcher must know. Training does not need it, so it goes on where that cannot be written."""
        try:
            write()
            self._lacks_record = False
        except OSError as error:
            if not self._lacks_record:
                self.terminal.say(
                    f"record '{self.folder.path}': it must be written anew when hosts or ranks change, but: {error.strerror or error}. "
                    "The job goes on; should this launcher be lost meanwhile, no other one can take the job up."
                )
            self._lacks_record = True

    def run(self) -> int:
        """As `Job.run`; removes what it has written, unless the job is left to the next launcher."""
        try:
            return super().run()
        finally:
            self._stop_watching()
            if not self._is_left:
                self.folder.remove()

    def _left_to_next(self) -> str:
        self._is_left = self._has_begun and bool(self._grace()) and not (self._is_over() or self.interrupted_by)
        if not self._is_left:
            return ""
        return (
            f"The ranks go on. To have the job led again, type within {self._grace():g} s, on this host: "
            f"ringtrainrun --resume {self.folder.name}"
        )

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
        if now >= self._touch_at:
            self.folder.touch()
            self._touch_at = now + SECONDS_BETWEEN_TOUCHES
        self._take_news(now)

    def _take_all(self, agent: Agent) -> None:
        super()._take_all(agent)
        if agent.is_open and not self._is_over():
            self._carry_out(self.authority.host_heard(time.monotonic(), agent.host.name))

    def _take(self, facts: RankNews, data: bytes, agent: Agent) -> None:
        if "control" in facts:
            if uid := self.engine.processes.get(facts["rank"]):
                self._called.add(uid)
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
        if uid and rank is not None and not facts.keys().isdisjoint(_ENDS):
            told = facts.get("failing", facts.get("cleared", 0))
            self._note_end(agent, number, uid, told if rank.outcome is None else rank.outcome)
        if "cleared" in facts and number in self._waiting:
            self._waiting.remove(number)
            self._start(agent, number - self._first[agent.host.name])
        if "cleared" in facts and agent.host.name in self._leaving:
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
        for number in numbers:
            if uid := self.engine.processes.get(number):
                self._leave_by.setdefault(number, (uid, now + self.rules.notice_grace))

    def _end_those_who_stay(self, now: float) -> None:
        """Ends ranks that have not left in time after a notice."""
        for number in [number for number, (_, at) in self._leave_by.items() if now >= at]:
            uid, _ = self._leave_by.pop(number)
            rank = self.ranks.get(number)
            if self.engine.processes.get(number) == uid and rank is not None:
                grace = self.rules.notice_grace
                self.terminal.say(
                    f"{rank.describe_place()} has not left within {grace:g} s of its notice, and is ended."
                )
                self._evict(rank.listed_as, uid)

    def _note_end(self, agent: Agent, number: int, uid: str, code: int) -> None:
        """Tells the authority of the end of a process, which comes up to three times: its program's word that it fails, which
        the end of a Python may follow a second later, its own end, and that of all that it has left behind."""
        on_notice = self._leave_by.pop(number, None) is not None
        if self._is_over() or (not self._has_begun and code == 0 and not on_notice):
            return
        slot = number - self._first[agent.host.name]
        ended = list(self.authority.process_ended(time.monotonic(), agent.host.name, slot, uid, code))
        self.engine.processes[number] = ""  # the slot is free once nothing is left of it
        self._carry_out(ended)
        is_told = any(action.kind == "say" for action in ended)
        is_told |= uid in self._evicted
        if self._has_begun and not is_told and number in self.ranks and self.ranks[number].failure:
            self.terminal.say(
                f"{self.ranks[number].describe_failure()} before it had joined the others. Another one is started there after a "
                "pause."
            )

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
        said = agent.last_words()
        cause = "the connection to its agent has ended."
        if said:
            cause = f"the connection to its agent has ended, which said: {said}"
        agent.let_go()
        self.agents.remove(agent)
        del self.unread[agent]
        self._notices.pop(agent.host.name, None)
        self._carry_out(self.authority.host_lost(time.monotonic(), agent.host.name, cause))
        self._note_hosts()

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
            agents, networks, _ = check_hosts(plan, self.installation, self.environment)
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
        except Exception as error:  # whatever it is: or no host would be tried any more
            hang_up_on([agent] if agent else [])
            known = isinstance(error, (LaunchError, HostError, OSError))
            text = str(error) if known else f"host '{host.name}': it could not be tried: {error!r}."
            self._tell(Trial(host, None, None, text))

    def _take_trial(self, trial: Trial, now: float) -> None:
        name, agent = trial.host.name, trial.agent
        if agent is None or trial.networks is None or self.networks is None:
            self._supply.failed(now, name)
            self.terminal.say(f"{trial.problem} The job goes on without this host, and tries it again later.")
            self._pass_notices_on(now)
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
        self._note_hosts()
        self._carry_out(self.authority.host_came(now, name))
        self._pass_notices_on(now)

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
        self._notices[name] = cause
        self._pass_notices_on(now)

    def _pass_notices_on(self, now: float) -> None:
        """But not where all hosts would leave, and another one is tried, or is to be, which is to take the state over."""
        present = self._present()
        stays = any(name not in self._leaving for name in present)
        if self._notices and not stays and (self._is_trying or self._has_one_to_try(now)):
            return
        notices, self._notices = self._notices, {}
        for name, cause in notices.items():
            self._carry_out(self.authority.host_leaves(now, name, cause))
            self._release(self._agent_of[name])

    def _has_one_to_try(self, now: float) -> bool:
        return self._may_try() and self._supply.to_try(now, self._present(), self._room()) is not None

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
                self._record(partial(setattr, self.folder, "world", columns[0]))
                self._note_survived()
            elif kind in ("send", "evict"):
                host, uid, frame = columns
                self._agent_of[host].send({"do": "lead", "uid": uid, "frame": frame, "because": because})
                if kind == "evict":
                    self._evict(host, uid)
            elif kind == "ask":
                self._answer_for(self._agent_of[columns[0]], columns[1])
            elif kind == "beat":
                self._agent_of[columns[0]].send({"do": "beat", "at": time.monotonic()})
            elif kind == "start":
                self._start(self._agent_of[columns[0]], int(columns[1]))
            elif kind == "end":
                self._reason = columns[0] == "1", columns[1] + self._who_was_on_the_way(columns[1])
                self.engine.is_over = True
                self.end_at = time.monotonic() + (SECONDS_TO_REPORT if self._some_still_speak() else 0.0)

    def _note_survived(self) -> None:
        """Another world is formed: what has ended the ones before does not end the job."""
        for rank in (*self.ranks.values(), *self._failures):
            rank.is_survived = rank.is_survived or bool(rank.outcome)

    def _who_was_on_the_way(self, reason: str) -> str:
        """Behind the authority's reason, if it is that there are too few ranks: those that were still to come to init()."""
        running = [uid for uid in self.engine.processes.values() if uid]
        starting = len(set(running) - self._called)
        if not reason.startswith(TOO_FEW) or not starting:
            return ""
        return (
            f" It has waited for {self.rules.wait:g} s (--elastic-timeout) for ranks to call init(), and {starting} of the "
            f"{len(running)} that run had not come to it. If their imports take longer, give --elastic-timeout more seconds."
        )

    def _answer_for(self, agent: Agent, frame: str) -> None:
        """Has the ranks of a host say who they are, and tells the authority which there are: it may have lost sight of them."""
        now, host = time.monotonic(), agent.host.name
        uids = self.engine.on(self._first[host], agent.host.slots)
        for uid in uids:
            agent.send({"do": "lead", "uid": uid, "frame": frame, "because": ""})
        found = self.taken_up.found.pop(agent, None) if self.taken_up else None
        if found is None:
            self._carry_out(self.authority.host_present(now, host, uids))
            return
        self._carry_out(self.authority.host_present(now, host, uids, found["record"], found["finished"]))
        for number in [number for number, _, noticed in found["processes"] if noticed]:
            self._take_notice(number, agent)
        if found["noticed"]:
            self._take_notice(-1, agent)

    def _start(self, agent: Agent, slot: int) -> None:
        """Starts a rank in a slot, unless there is one; then the end of that one is told to the authority, too."""
        number = self._first[agent.host.name] + slot
        if self._is_ending() or not agent.is_open:
            return
        process = self.engine.processes.get(number)
        if process is None:
            self._tell_start(agent, number, slot)
            self.engine.start_in(agent, slot, self._first[agent.host.name])
        elif not process:  # its rank has ended, and something of it is left
            self._waiting.add(number)

    def _tell_start(self, agent: Agent, number: int, slot: int) -> None:
        former = self.ranks.get(number)
        if former is not None and former.outcome is not None:
            seconds = former.clock.there(time.monotonic()) - former.ended_at
            self.terminal.say(
                f"slot {slot} of host '{agent.host.name}' starts again, {seconds:.1f} s after the end of its last rank."
            )

    def _some_still_speak(self) -> bool:
        """A rank says that it fails before its traceback is written, and the authority may end the job between the two."""
        return any(rank.announced is not None and rank.is_connected for rank in self.ranks.values())

    def _evict(self, host: str, uid: str) -> None:
        self._evicted.add(uid)
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
            if left := describe_remains(self.ranks.values(), self.strays):
                self.terminal.say(left)
            return 0
        self.terminal.say(text)
        blame_survived([*self.ranks.values(), *self._failures])
        if not any(rank.failure for rank in self.ranks.values()):
            followed = [rank for rank in self._failures if rank.failure]  # by others in their slots
            if not followed:  # all have left because they were told to
                return 1
            self.ranks[followed[-1].number] = followed[-1]
        return super()._conclude() or 1
