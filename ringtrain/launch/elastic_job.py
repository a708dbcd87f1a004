"""A run whose number of ranks may change: `--elastic`. The authority decides (`authority`); this carries it out.

The agents start the ranks. A rank that dies is told of to the authority at once, which has the others form another
world, and has one started in its slot after a pause. Until the first world has been formed, a failure ends the job as it
does in `job`: what fails then would fail again.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence

from ringtrain._binding._native import from_hex, lib
from ringtrain._rendezvous.agent_protocol import RankNews, Serving
from ringtrain.launch.authority import Action, Authority, Rules, said_in
from ringtrain.launch.discovery import Supply
from ringtrain.launch.elastic_hosts import ElasticHosts
from ringtrain.launch.elastic_news import ElasticNews, who_was_on_the_way
from ringtrain.launch.ends import ElasticEnds
from ringtrain.launch.first_world import FirstWorld
from ringtrain.launch.host_changes import HostChanges, Notices
from ringtrain.launch.host_setup import SECONDS_OF_SILENCE, Allocation
from ringtrain.launch.job import SECONDS_TO_REPORT, Job
from ringtrain.launch.job_folder import JobFolder, Outline, describe_hosts
from ringtrain.launch.job_record import JobRecord
from ringtrain.launch.known_ranks import LOST, Rank
from ringtrain.launch.output import EngineStream
from ringtrain.launch.plan import Plan
from ringtrain.launch.reach import Agent
from ringtrain.launch.resume import TakenUp
from ringtrain.launch.slot_engine import SlotEngine
from ringtrain.launch.terminal import Terminal
from ringtrain.launch.trials import Trials

_ENDS = {"failing", "ended", "lost", "cleared"}  # news that a rank is no more, or soon will be


class ElasticJob(Job):
    """An elastic plan being carried out.

    rules: of the plan. folder: of the job, which this launcher holds. taken_up: what there is of a job that goes on, whose
    launcher was lost; None for one that begins.
    """

    engine: SlotEngine
    ends: ElasticEnds

    def __init__(
        self,
        plan: Plan,
        allocation: Allocation,
        terminal: Terminal,
        rules: Rules,
        folder: JobFolder,
        taken_up: TakenUp | None = None,
    ):
        self.rules, self.taken_up = rules, taken_up
        self._record = JobRecord(folder, terminal)
        socket = taken_up.outline.socket if taken_up else ""
        super().__init__(plan, allocation, terminal, socket)
        self.ends = ElasticEnds(plan, terminal, self.output, self.engine, self.ranks)
        self._key = taken_up.outline.key if taken_up else secrets.token_hex(32)
        self._grace = self.setup.grace = 0.0 if plan.by_srun else rules.launcher_grace
        self.news = ElasticNews(terminal, self._record.job, self._grace)
        self.setup.key = self._key if self._grace else ""

    def agents_that_start(self, line: Sequence[str], words: Mapping[int, EngineStream]) -> SlotEngine:
        """The agents as the engine."""
        slots = SlotEngine(self.plan, line, self.agents, words)
        slots.notices, slots.planned, slots.balances = self.rules.notices, self.rules.planned, self.rules.balances
        return slots

    def _start_listeners(self) -> None:
        if self.taken_up is None:
            super()._start_listeners()
        else:
            for agent in self.agents:
                self._listen_to(agent)
        self._hosts = ElasticHosts()
        named = [*self.plan.hosts, *self.plan.spare]
        if self.taken_up is not None and self.plan.script is not None:
            named = [host for host, _ in self.taken_up.outline.hosts]
        self._supply = Supply(named, self.rules.first_pause, self.rules.longest_pause)
        trials = Trials(self.setup, self._supply, self._hosts, self._wake)
        self._changes = HostChanges(self, self._hosts, self._supply, trials)
        self._notices = Notices(self.rules.notice_grace)
        self._failing = Notices(self.rules.notice_grace)  # of ranks that have said that they fail: they are to end
        self.has_begun = False  # a world has been formed
        self._first_world = FirstWorld(self.rules.minimum, self.rules.wait, time.monotonic())
        self._reason: tuple[bool, str] | None = None  # why the authority has ended the job: well, and text
        if self.taken_up is None:
            self._begin()
        else:
            self._go_on(self.taken_up)
        if self.plan.script is not None:
            trials.watch(self.plan.script)

    def _begin(self) -> None:
        for agent in self.agents:
            self._hosts.add(agent)
        hosts = [agent.host for agent in self.agents]
        now = time.monotonic()
        self.authority = Authority(hosts, self.rules, self._grace or SECONDS_OF_SILENCE, now)
        for host, why in self.allocation.absent.items():
            self._supply.failed(now, host.name)
            self.news.say_absent_at_start(host.name, why)
        self.note_hosts()
        self.news.say_name()
        for host in hosts:
            self.carry_out(self.authority.host_came(now, host.name))

    def _go_on(self, taken_up: TakenUp) -> None:
        hosts = [host for host, _ in taken_up.outline.hosts]
        firsts = {host.name: first for host, first in taken_up.outline.hosts}
        for agent in self.agents:
            self._hosts.add(agent, firsts[agent.host.name])
        now, record = time.monotonic(), self._record.world
        self.has_begun = bool(record) or any(found["record"] for found in taken_up.found.values())
        self.authority = Authority(hosts, self.rules, self._grace or SECONDS_OF_SILENCE, now, record)
        for host, why in taken_up.lost.items():
            self._supply.failed(now, host.name)
            self.news.say_absent(host.name, why)
        ranks = sum(len(found["processes"]) for found in taken_up.found.values())
        on = describe_hosts(agent.host for agent in taken_up.found)
        self.news.say_taken_up(ranks, on)
        for agent, found in taken_up.found.items():
            self._adopt(agent, found)
        for agent in list(taken_up.found):  # whose accounts are taken one by one
            self.carry_out(self.authority.host_came(now, agent.host.name))

    def _adopt(self, agent: Agent, found: Serving) -> None:
        """Takes what an agent has said of the time without a launcher."""
        self.engine.take_over(agent, found["processes"])
        for number, code in found["ended"]:
            self.news.say_ended_meanwhile(number, self._hosts.slot(agent, number), agent.host.name, code)
        if found["dropped"]:
            self.news.say_output_lost(agent.host.name, found["dropped"])

    def note_hosts(self) -> None:
        """Has the next launcher, should there be one, know which hosts there are."""
        outline = Outline(
            plan=self.plan,
            environment=dict(os.environ),
            directory=os.getcwd(),
            socket=self.setup.socket,
            key=self._key,
            networks=self.allocation.networks,
            hosts=self._hosts.outline(),
        )
        self._record.note(outline)

    def run(self) -> int:
        """As `Job.run`; removes what it has written, unless the job is left to the next launcher."""
        try:
            return super().run()
        finally:
            self._changes.trials.stop()
            self._record.finish()

    def _left_to_next(self) -> str:
        self._record.is_left = self.has_begun and bool(self._grace) and not (self.is_over() or self.interrupted_by)
        return self.news.how_to_resume() if self._record.is_left else ""

    # ---- events ----

    def _deadline(self) -> float:
        if self.is_over():
            return super()._deadline()
        look_at = float("inf") if self.has_begun else self._first_world.look_at
        notices = min(self._notices.deadline, self._failing.deadline)
        return min(super()._deadline(), self.authority.next_timer, self._changes.next_try(), notices, look_at)

    def _step(self) -> None:
        super()._step()
        now = time.monotonic()
        if not self.is_over() and now >= self.authority.next_timer:
            self.carry_out(self.authority.tick(now))
        if not self.is_over():
            self._end_those_who_stay(now)
            self._end_those_who_have_failed(now)
        if not self.is_over() and not self.has_begun:
            self._first_world.look(now, *self.engine.running(), self.terminal.say_waiting)
        self._record.touch(now)
        self._changes.take_news(now)

    def _take_all(self, agent: Agent) -> None:
        super()._take_all(agent)
        if agent.is_open and not self.is_over():
            self.carry_out(self.authority.host_heard(time.monotonic(), agent.host.name))

    def _take(self, facts: RankNews, data: bytes, agent: Agent) -> None:
        if self._changes.trials.hear(facts, agent):
            return
        if "control" in facts:
            self.engine.note_call(facts["rank"])
            if not self.is_over() and self.engine.processes.get(facts["rank"]) == facts["uid"]:
                self.carry_out(self.authority.arrived(time.monotonic(), agent.host.name, from_hex(facts["control"])))
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
            if "failing" in facts:
                self._failing.give({number: uid}, time.monotonic())
        if "ended" in facts or "cleared" in facts:
            self._failing.end(number)
        if "cleared" in facts and self.engine.take_waiting(number):
            self._start(agent, self._hosts.slot(agent, number))
        if "cleared" in facts:
            self._changes.release(agent)
        if not self.has_begun and not self.engine.processes:  # a program that calls no init()
            self.engine.is_over = True

    def _take_notice(self, number: int, agent: Agent) -> None:
        """A rank is asked to leave, or all those of a host (-1)."""
        if self.is_over():
            return
        now, host = time.monotonic(), agent.host.name
        if number < 0:
            self._changes.is_taken_away(agent)
        elif uid := self.engine.processes.get(number):
            self._notices.give({number: uid}, now)
            self.carry_out(self.authority.process_leaves(now, host, self._hosts.slot(agent, number), uid))

    def _end_those_who_stay(self, now: float) -> None:
        """Ends ranks that have not left in time after a notice."""
        for number, uid in self._notices.take_overdue(now).items():
            rank = self.ranks.get(number)
            if self.engine.processes.get(number) == uid and rank is not None:
                self.news.say_stays(rank, self.rules.notice_grace)
                self._evict(self._hosts[rank.listed_as], uid)

    def _end_those_who_have_failed(self, now: float) -> None:
        """Kills ranks whose program has failed and that do not end, as those that are stopped: their slots wait for that."""
        for number in self._failing.take_overdue(now):
            rank = self.ranks[number]
            self.news.say_does_not_end(rank, self.rules.notice_grace)
            self._hosts[rank.listed_as].send({"do": "evict", "rank": number})
            rank.was_told_to = True

    def _note_end(self, agent: Agent, number: int, uid: str, code: int) -> None:
        """Tells the authority of the end of a process, which comes up to three times: its program's word that it fails, which
        the end of a Python may follow a second later, its own end, and that of all that it has left behind."""
        on_notice = self._notices.end(number)
        if self.is_over() or (not self.has_begun and code == 0 and not on_notice):
            return
        slot = self._hosts.slot(agent, number)
        ended = self.authority.process_ended(time.monotonic(), agent.host.name, slot, uid, code)
        self.engine.processes[number] = ""  # the slot is free once nothing is left of it
        self.carry_out(ended)
        is_told = bool(said_in(ended)) or self.engine.has_evicted(uid)
        if self.has_begun and not is_told and number in self.ranks and self.ranks[number].failure:
            self.news.say_lost(self.ranks[number], on_notice)

    def _follow_end(self, rank: Rank) -> None:
        if not self.has_begun or self.is_over():
            super()._follow_end(rank)
        elif rank.outcome != 0:
            self.ends.failures.append(rank)

    def _lose(self, agent: Agent) -> None:
        if not self.has_begun or self.is_over():
            super()._lose(agent)
            return
        for rank in self.ranks.values():
            if rank.is_connected and rank.listed_as == agent.host.name:
                rank.was_told_to = True
                self._note_outcome(rank, LOST, rank.clock.there(time.monotonic()))
        for number in self._hosts.numbers(agent):
            self.engine.processes.pop(number, None)
            self._failing.end(number)
        said = agent.last_words()
        cause = "the connection to its agent has ended."
        if said:
            cause = f"the connection to its agent has ended, which said: {said}"
        self._changes.lose(agent)
        agent.let_go()
        self.agents.remove(agent)
        self.output.forget(agent)
        self.carry_out(self.authority.host_lost(time.monotonic(), agent.host.name, cause))
        self.note_hosts()

    # ---- hosts ----

    def take_in(self, agent: Agent) -> None:
        """Listens to the agent of another host."""
        self.agents.append(agent)
        self._listen_to(agent)

    def give_notice(self, agent: Agent, now: float) -> None:
        """Asks the ranks of a host to leave in time."""
        self._notices.give(self.engine.on(self._hosts.numbers(agent)), now)

    # ---- what follows ----

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Does what the authority has decided."""
        because = said_in(actions)
        for action in actions:
            kind, host = action.kind, action.host
            if kind == lib.RT_DO_SAY:
                self.terminal.say(action.text, "world")
            elif kind == lib.RT_DO_WRITE:
                self.has_begun = True
                self._record.note_world(action.frame)
                self.ends.note_survived()
            elif kind in (lib.RT_DO_SEND, lib.RT_DO_EVICT):
                self.engine.lead(self._hosts[host], action.uid, action.frame, because)
                if kind == lib.RT_DO_EVICT:
                    self._evict(self._hosts[host], action.uid)
            elif kind == lib.RT_DO_ASK:
                self._answer_for(self._hosts[host], action.frame)
            elif kind == lib.RT_DO_BEAT:
                self._hosts[host].send({"do": "beat", "at": time.monotonic()})
            elif kind == lib.RT_DO_START:
                self._start(self._hosts[host], action.slot)
            elif kind == lib.RT_DO_LET_GO:
                self._changes.let_go(self._hosts[host])
            elif kind == lib.RT_DO_END:
                running, starting = map(len, self.engine.running())
                on_the_way = who_was_on_the_way(action.text, running, starting, self.rules.wait)
                self._reason = action.well, action.text + on_the_way
                self.engine.is_over = True
                self.end_at = time.monotonic() + (SECONDS_TO_REPORT if self.ends.some_still_speak() else 0.0)

    def _answer_for(self, agent: Agent, frame: bytes) -> None:
        """Has the ranks of a host say who they are, and tells the authority which there are: it may have lost sight of them."""
        now, host = time.monotonic(), agent.host.name
        uids = list(self.engine.on(self._hosts.numbers(agent)).values())
        for uid in uids:
            self.engine.lead(agent, uid, frame)
        found = self.taken_up.found.pop(agent, None) if self.taken_up else None
        if found is None:
            self.carry_out(self.authority.host_present(now, host, uids))
            return
        self.carry_out(self.authority.host_present(now, host, uids, from_hex(found["record"]), found["finished"]))
        for number in [number for number, _, noticed in found["processes"] if noticed]:
            self._take_notice(number, agent)
        if found["noticed"]:
            self._take_notice(-1, agent)

    def _start(self, agent: Agent, slot: int) -> None:
        """Starts a rank in a slot, unless there is one; then the end of that one is told to the authority, too."""
        numbers = self._hosts.numbers(agent)
        number = numbers.start + slot
        if self._is_ending() or not agent.is_open:
            return
        if self.engine.may_start(number):
            self._tell_start(agent, number, slot)
            self.engine.start_in(agent, slot, numbers.start)

    def _tell_start(self, agent: Agent, number: int, slot: int) -> None:
        former = self.ranks.get(number)
        if former is not None and former.outcome is not None:
            seconds = former.clock.there(time.monotonic()) - former.ended_at
            self.news.say_starts_again(agent.host.name, slot, seconds)

    def _evict(self, agent: Agent, uid: str) -> None:
        number = self.engine.evict(agent, uid)
        if number in self.ranks:
            self.ranks[number].was_told_to = True

    # ---- end ----

    def is_over(self) -> bool:
        """Whether no other world is to come."""
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
            self.output.say_losses()
            if left := self.ends.remains():
                self.terminal.say(left, "left-over")
            return 0
        self.terminal.say(text, "job-ended")
        return super()._conclude() or 1 if self.ends.blame() else 1
