"""A run whose number of ranks may change: `--elastic`. The authority decides (`authority`); this carries it out.

The agents start the ranks. A rank that dies is told of to the authority at once, which has the others form another
world, and has one started in its slot after a pause. Until the first world has been formed, a failure ends the job as it
does in `job`: what fails then would fail again.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ringtrain._binding._native import from_hex, lib
from ringtrain._rendezvous.agent_protocol import RankNews, Serving
from ringtrain.launch.authority import Action, Authority, Rules, said_in
from ringtrain.launch.discovery import Supply
from ringtrain.launch.elastic_hosts import ElasticHosts
from ringtrain.launch.ends import ElasticEnds
from ringtrain.launch.environment import listening
from ringtrain.launch.first_world import FirstWorld
from ringtrain.launch.host_setup import SECONDS_OF_SILENCE
from ringtrain.launch.hosts import Host
from ringtrain.launch.job import SECONDS_TO_REPORT, Job
from ringtrain.launch.job_folder import JobFolder, Outline, describe_hosts
from ringtrain.launch.job_record import JobRecord
from ringtrain.launch.mpi import Installation
from ringtrain.launch.networks import Chosen
from ringtrain.launch.notices import Notices
from ringtrain.launch.output import EngineStream, Terminal
from ringtrain.launch.plan import Plan
from ringtrain.launch.ranks import LOST, Rank
from ringtrain.launch.reach import Agent, hang_up_on
from ringtrain.launch.resume import TakenUp
from ringtrain.launch.slots import Slots
from ringtrain.launch.trials import Trial, Trials

_ENDS = {"failing", "ended", "lost", "cleared"}  # news that a rank is no more, or soon will be
TOO_FEW = "A world must have"  # as the authority's reason begins, if there are too few ranks


class ElasticJob(Job):
    """An elastic plan being carried out.

    rules: of the plan. folder: of the job, which this launcher holds. taken_up: what there is of a job that goes on, whose
    launcher was lost; None for one that begins. absent: hosts of the plan that are not among the agents', and why.
    """

    engine: Slots
    ends: ElasticEnds

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
        self.rules, self.taken_up = rules, taken_up
        self._record = JobRecord(folder, terminal)
        socket = taken_up.outline.socket if taken_up else ""
        super().__init__(plan, installation, terminal, agents, environment, networks, socket)
        self.ends = ElasticEnds(plan, terminal, self.output, self.engine, self.ranks)
        self._key = taken_up.outline.key if taken_up else secrets.token_hex(32)
        self._grace = self.setup.grace = 0.0 if plan.by_srun else rules.launcher_grace
        self.setup.key = self._key if self._grace else ""

    def agents_that_start(self, line: Sequence[str], words: Mapping[int, EngineStream]) -> Slots:
        """The agents as the engine."""
        slots = Slots(self.plan, line, self.agents, words)
        slots.notices, slots.planned = self.rules.notices, self.rules.planned
        return slots

    def _start_listeners(self) -> None:
        if self.taken_up is None:
            super()._start_listeners()
        else:
            self.setup.of_rank_0 = self.taken_up.outline.of_rank_0
            for agent in self.agents:
                self._listen_to(agent)
        self._hosts = ElasticHosts()
        named = [*self.plan.hosts, *self.plan.spare]
        if self.taken_up is not None and self.plan.script is not None:
            named = [host for host, _ in self.taken_up.outline.hosts]
        self._supply = Supply(named, self.rules.first_pause, self.rules.longest_pause)
        self._trials = Trials(self.setup, self._supply, self._hosts, self._wake)
        self._notices = Notices(self.rules.notice_grace)
        self._failing = Notices(self.rules.notice_grace)  # of ranks that have said that they fail: they are to end
        self._has_begun = False  # a world has been formed
        self._first_world = FirstWorld(self.rules.minimum, self.rules.wait, time.monotonic())
        self._reason: tuple[bool, str] | None = None  # why the authority has ended the job: well, and text
        if self.taken_up is None:
            self._begin()
        else:
            self._go_on(self.taken_up)
        if self.plan.script is not None:
            self._trials.watch(self.plan.script)

    def _begin(self) -> None:
        for agent in self.agents:
            self._hosts.add(agent)
        hosts = [agent.host for agent in self.agents]
        now = time.monotonic()
        self.authority = Authority(hosts, self.rules, self._grace or SECONDS_OF_SILENCE, now)
        for host, why in self.absent.items():
            self._supply.failed(now, host.name)
            self.terminal.say(
                f"{why} The job starts without this host, and tries it again later.", "host-absent", host=host.name
            )
        self._note_hosts()
        if self._grace:
            self.terminal.say(
                f"job {self._record.job}: should this launcher be lost, type within {self._grace:g} s, on this host: "
                f"ringtrainrun --resume {self._record.job}",
                "job-named",
                job=self._record.job,
                seconds=self._grace,
            )
        for host in hosts:
            self._carry_out(self.authority.host_came(now, host.name))

    def _go_on(self, taken_up: TakenUp) -> None:
        hosts = [host for host, _ in taken_up.outline.hosts]
        firsts = {host.name: first for host, first in taken_up.outline.hosts}
        for agent in self.agents:
            self._hosts.add(agent, firsts[agent.host.name])
        now, record = time.monotonic(), self._record.world
        self._has_begun = bool(record) or any(found["record"] for found in taken_up.found.values())
        self.authority = Authority(hosts, self.rules, self._grace or SECONDS_OF_SILENCE, now, record)
        for host, why in taken_up.lost.items():
            self._supply.failed(now, host.name)
            self.terminal.say(
                f"{why} The job goes on without this host, and tries it again later.", "host-absent", host=host.name
            )
        ranks = sum(len(found["processes"]) for found in taken_up.found.values())
        on = describe_hosts(agent.host for agent in taken_up.found)
        text = f"job {self._record.job}: taken up, with {ranks} ranks on {on}."
        self.terminal.say(text, "job-resumed", job=self._record.job, ranks=ranks)
        for agent, found in taken_up.found.items():
            self._adopt(agent, found)
        for agent in list(taken_up.found):  # whose accounts are taken one by one
            self._carry_out(self.authority.host_came(now, agent.host.name))

    def _adopt(self, agent: Agent, found: Serving) -> None:
        """Takes what an agent has said of the time without a launcher."""
        self.engine.take_over(agent, found["processes"])
        for number, code in found["ended"]:
            self.terminal.say(
                f"The rank in slot {self._hosts.slot(agent, number)} of host '{agent.host.name}' has ended with exit "
                f"code {code} while there was no launcher.",
                "rank-ended",
                rank=number,
                host=agent.host.name,
                code=code,
            )
        if found["dropped"]:
            self.terminal.say(
                f"host '{agent.host.name}': {found['dropped']} bytes that its ranks wrote while there was no launcher are "
                "lost; only the last ones were kept.",
                "output-lost",
                host=agent.host.name,
                bytes=found["dropped"],
            )

    def _note_hosts(self) -> None:
        """Has the next launcher, should there be one, know which hosts there are."""
        outline = Outline(
            self.plan,
            dict(os.environ),
            os.getcwd(),
            self.setup.socket,
            self._key,
            dict(self.setup.of_rank_0),
            self.networks,
            self._hosts.outline(),
        )
        self._record.note(outline)

    def run(self) -> int:
        """As `Job.run`; removes what it has written, unless the job is left to the next launcher."""
        try:
            return super().run()
        finally:
            self._trials.stop()
            self._record.finish()

    def _left_to_next(self) -> str:
        self._record.is_left = self._has_begun and bool(self._grace) and not (self._is_over() or self.interrupted_by)
        if not self._record.is_left:
            return ""
        return (
            f"The ranks go on. To have the job led again, type within {self._grace:g} s, on this host: "
            f"ringtrainrun --resume {self._record.job}"
        )

    # ---- events ----

    def _deadline(self) -> float:
        if self._is_over():
            return super()._deadline()
        next_try = self._trials.next_try() if self._may_try() else float("inf")
        look_at = float("inf") if self._has_begun else self._first_world.look_at
        notices = min(self._notices.deadline, self._failing.deadline)
        return min(super()._deadline(), self.authority.next_timer, next_try, notices, look_at)

    def _step(self) -> None:
        super()._step()
        now = time.monotonic()
        if not self._is_over() and now >= self.authority.next_timer:
            self._carry_out(self.authority.tick(now))
        if not self._is_over():
            self._end_those_who_stay(now)
            self._end_those_who_have_failed(now)
        if not self._is_over() and not self._has_begun:
            self._first_world.look(now, *self.engine.running(), functools.partial(self.terminal.say, kind="waiting"))
        self._record.touch(now)
        self._take_news(now)

    def _take_all(self, agent: Agent) -> None:
        super()._take_all(agent)
        if agent.is_open and not self._is_over():
            self._carry_out(self.authority.host_heard(time.monotonic(), agent.host.name))

    def _take(self, facts: RankNews, data: bytes, agent: Agent) -> None:
        if self._trials.hear(facts, agent):
            return
        if "control" in facts:
            self.engine.note_call(facts["rank"])
            if not self._is_over() and self.engine.processes.get(facts["rank"]) == facts["uid"]:
                self._carry_out(self.authority.arrived(time.monotonic(), agent.host.name, from_hex(facts["control"])))
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
        if "cleared" in facts and agent.host.name in self._hosts.leaving:
            self._release(agent)
        if not self._has_begun and not self.engine.processes:  # a program that calls no init()
            self.engine.is_over = True

    def _take_notice(self, number: int, agent: Agent) -> None:
        """A rank is asked to leave, or all those of a host (-1)."""
        if self._is_over():
            return
        now, host = time.monotonic(), agent.host.name
        if number < 0:
            self._supply.leaves(host)
            self._have_leave(agent, "it is to be taken away.")
        elif uid := self.engine.processes.get(number):
            self._notices.give({number: uid}, now)
            self._carry_out(self.authority.process_leaves(now, host, self._hosts.slot(agent, number), uid))

    def _end_those_who_stay(self, now: float) -> None:
        """Ends ranks that have not left in time after a notice."""
        for number, uid in self._notices.take_overdue(now).items():
            rank = self.ranks.get(number)
            if self.engine.processes.get(number) == uid and rank is not None:
                grace = self.rules.notice_grace
                self.terminal.say(
                    f"{rank.describe_place()} has not left within {grace:g} s of its notice, and is ended.",
                    "rank-killed",
                    rank=number,
                    host=rank.host,
                )
                self._evict(self._hosts[rank.listed_as], uid)

    def _end_those_who_have_failed(self, now: float) -> None:
        """Kills ranks whose program has failed and that do not end, as those that are stopped: their slots wait for that."""
        for number in self._failing.take_overdue(now):
            rank, grace = self.ranks[number], self.rules.notice_grace
            self.terminal.say(
                f"{rank.describe_place()} has not ended within {grace:g} s of its failure, and is killed.",
                "rank-killed",
                rank=number,
                host=rank.host,
            )
            self._hosts[rank.listed_as].send({"do": "evict", "rank": number})
            rank.was_told_to = True

    def _note_end(self, agent: Agent, number: int, uid: str, code: int) -> None:
        """Tells the authority of the end of a process, which comes up to three times: its program's word that it fails, which
        the end of a Python may follow a second later, its own end, and that of all that it has left behind."""
        on_notice = self._notices.end(number)
        if self._is_over() or (not self._has_begun and code == 0 and not on_notice):
            return
        slot = self._hosts.slot(agent, number)
        ended = self.authority.process_ended(time.monotonic(), agent.host.name, slot, uid, code)
        self.engine.processes[number] = ""  # the slot is free once nothing is left of it
        self._carry_out(ended)
        is_told = bool(said_in(ended)) or self.engine.has_evicted(uid)
        if self._has_begun and not is_told and number in self.ranks and self.ranks[number].failure:
            failure = self.ranks[number].describe_failure()
            text = f"{failure} before it had joined the others. Another one is started there after a pause."
            text = f"{failure} when it had left on notice. Its slot stays empty." if on_notice else text
            self.terminal.say(text, "rank-failed", **self.ranks[number].facts())

    def _follow_end(self, rank: Rank) -> None:
        if not self._has_begun or self._is_over():
            super()._follow_end(rank)
        elif rank.outcome != 0:
            self.ends.failures.append(rank)

    def _lose(self, agent: Agent) -> None:
        if not self._has_begun or self._is_over():
            super()._lose(agent)
            return
        self._supply.failed(time.monotonic(), agent.host.name)
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
        self._trials.lose(agent)
        agent.let_go()
        self.agents.remove(agent)
        self.output.forget(agent)
        self._notices.hosts.pop(agent.host.name, None)
        self._carry_out(self.authority.host_lost(time.monotonic(), agent.host.name, cause))
        self._note_hosts()

    # ---- hosts ----

    def _take_news(self, now: float) -> None:
        for trial in self._trials.take(self.terminal, self._is_over):
            self._take_trial(trial, now)
        if not self._has_begun or self._is_over():
            return
        for name in self._supply.to_leave(self._hosts.present()):
            if name not in self._hosts.leaving:
                self._have_leave(self._hosts[name], "--host-discovery-script names it no longer.")
        host = self._trials.next_host(now) if self._may_try() else None
        if host is not None and self.networks is not None:
            self._trials.begin(host, self.networks)

    def _may_try(self) -> bool:
        """Whether another host may be checked now."""
        return self._has_begun and self._trials.is_free and self.networks is not None

    def _take_trial(self, trial: Trial, now: float) -> None:
        name, agent = trial.host.name, trial.agent
        if agent is None or trial.networks is None or self.networks is None:
            self._supply.failed(now, name)
            self.terminal.say(
                f"{trial.problem} The job goes on without this host, and tries it again later.",
                "host-absent",
                host=name,
            )
            self._pass_notices_on(now)
            return
        if self._is_over():
            hang_up_on([agent])
            return
        self._use(trial.networks)
        self._hosts.add(agent)
        self.agents.append(agent)
        self._listen_to(agent)
        slots = trial.host.slots
        self.terminal.say(f"host '{name}' has come, with {slots} slots.", "host-came", host=name, slots=slots)
        self.authority.host_added(trial.host)
        self._note_hosts()
        self._carry_out(self.authority.host_came(now, name))
        self._pass_notices_on(now)

    def _use(self, networks: Chosen) -> None:
        """Takes the networks that all hosts share, the new one among them; if they are fewer, all listen there alone."""
        known, self.networks = self.networks, networks
        if known is None or networks.networks == known.networks:
            return
        for agent in self._hosts.all():
            if agent.host.name in networks.addresses:
                listens = listening(networks.addresses[agent.host.name], self.plan.ports)
                self.engine.listen(agent, listens, self._hosts.numbers(agent))

    def _have_leave(self, agent: Agent, cause: str) -> None:
        """Has all ranks of a host leave between two steps, and then its agent."""
        now, name = time.monotonic(), agent.host.name
        self._hosts.leaving.add(name)
        self._notices.give(self.engine.on(self._hosts.numbers(agent)), now)
        self._notices.hosts[name] = cause
        self._pass_notices_on(now)

    def _pass_notices_on(self, now: float) -> None:
        """But not where all hosts would leave, and another one is tried, or is to be, which is to take the state over."""
        all_leave = not self._hosts.staying()
        comes = self._trials.is_trying or (self._may_try() and self._trials.next_host(now) is not None)
        if self._notices.hosts and all_leave and comes:
            return
        notices, self._notices.hosts = self._notices.hosts, {}
        for name, cause in notices.items():
            self._carry_out(self.authority.host_leaves(now, name, cause))
            self._release(self._hosts[name])

    def _let_go(self, agent: Agent) -> None:
        """Of a host that the others' ranks cannot reach: it is tried again as one that was lost, and its network with it."""
        self.terminal.say(
            f"host '{agent.host.name}': the networks of the job must reach it, but its ranks were not heard over them. It gets "
            "ranks again once a check of the network passes.",
            "host-unreachable",
            host=agent.host.name,
        )
        self._hosts.leaving.add(agent.host.name)
        self._release(agent)

    def _release(self, agent: Agent) -> None:
        """Lets the agent of a host go that leaves, once nobody is left there."""
        if self.engine.is_empty(self._hosts.numbers(agent)):
            agent.send({"do": "end"})

    # ---- what follows ----

    def _carry_out(self, actions: Sequence[Action]) -> None:
        because = said_in(actions)
        for action in actions:
            kind, host = action.kind, action.host
            if kind == lib.RT_DO_SAY:
                self.terminal.say(action.text, "world")
            elif kind == lib.RT_DO_WRITE:
                self._has_begun = True
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
                self._let_go(self._hosts[host])
            elif kind == lib.RT_DO_END:
                running, starting = map(len, self.engine.running())
                on_the_way = _who_was_on_the_way(action.text, running, starting, self.rules.wait)
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
            self._carry_out(self.authority.host_present(now, host, uids))
            return
        self._carry_out(self.authority.host_present(now, host, uids, from_hex(found["record"]), found["finished"]))
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
            self.terminal.say(
                f"slot {slot} of host '{agent.host.name}' starts again, {seconds:.1f} s after the end of its last rank.",
                "slot-started",
                host=agent.host.name,
                slot=slot,
                seconds=round(seconds, 3),
            )

    def _evict(self, agent: Agent, uid: str) -> None:
        number = self.engine.evict(agent, uid)
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
            self.output.say_losses()
            if left := self.ends.remains():
                self.terminal.say(left, "left-over")
            return 0
        self.terminal.say(text, "job-ended")
        return super()._conclude() or 1 if self.ends.blame() else 1


def _who_was_on_the_way(reason: str, running: int, starting: int, wait: float) -> str:
    """Behind the authority's reason, if it is that there are too few ranks: those that were still to come to init()."""
    if not reason.startswith(TOO_FEW) or not starting:
        return ""
    return (
        f" It has waited for {wait:g} s (--elastic-timeout) for ranks to call init(), and {starting} of the {running} that run had "
        "not come to it. If their imports take longer, give --elastic-timeout more seconds."
    )
