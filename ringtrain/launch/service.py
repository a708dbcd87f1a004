"""An authority that runs alone, beside processes that an engine of the user's starts and starts again: `ringtrain authority`.

It starts nothing. Processes call it (`ringtrain._rendezvous.server`), `seats` says who may be a rank, the authority numbers
their worlds, and this carries out what both decide. The kernel's word that a connection is closed tells of the end of its
process; a network that carries nothing tells of nothing, and is left to the bound of silence.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringtrain._binding._native import from_hex, lib
from ringtrain._rendezvous.server import ENDED, Connection, Server
from ringtrain.launch.authority import SILENCE, Action, Authority, Rules, said_in
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.record import Record, RecordFile
from ringtrain.launch.seats import Seat, Seats
from ringtrain.version import __version__

SECONDS_BETWEEN_BEATS = 1.0
SECONDS_FOR_LAST_WORDS = 2.0
PATIENCE = SILENCE + 2.0  # with which the authority gives up who is silent
PAUSES = 10.0, 60.0  # seconds that a slot stays empty in which processes end soon: the first time, and at most
GONE = "its connection has ended."
ENDED_WELL = "the job has come to its end before this process could join it."
TOLD_TO_LEAVE = "it is told to leave before it could join the job."


class Terms(NamedTuple):
    """What the user has asked for.

    Attributes:
        rules: of the job.
        maximum: of ranks.
        gather: seconds from the moment in which there are enough ranks to the first world, unless the most have come before.
        leave_code: exit code of a rank that leaves on notice.
    """

    rules: Rules
    maximum: int
    gather: float
    leave_code: int


class Service:
    """One job, from the first call to its end. record: of the job, if it goes on; say: takes lines for people."""

    def __init__(
        self, terms: Terms, server: Server, file: RecordFile, record: Record | None, say: Callable[[str], None]
    ):
        self._terms, self._server, self._file, self._say = terms, server, file, say
        self._began = self._next_beat = time.monotonic()
        self._goes_on = record is not None and bool(record.world)
        self._record = record or Record(secrets.token_hex(8))
        self._seats = Seats(terms.rules.minimum, terms.maximum, terms.gather, PATIENCE, self._goes_on, PAUSES)
        self._caller_of: dict[str, Connection] = {}
        self._told_to_wait: set[str] = set()
        self._authority: Authority | None = None  # of a job that goes on once the first of its ranks has called
        self._code: int | None = None
        self._signal = 0
        for uid, (host, slot) in self._record.seats.items():
            self._seats.keep(self._began, uid, host, slot)
        if not self._goes_on:
            self._authority = Authority([], terms.rules, terms.rules.launcher_grace, self._began)

    def run(self) -> int:
        """Leads the job to its end. Returns 0 if the training has come to its end, 1 if not, 128 + n after signal n."""
        try:
            self._file.write(self._record)  # ranks that wait for the first world are of this job, too
            while self._code is None:
                self._step()
        except LaunchError as error:
            self._end(1, str(error))
        if self._signal == signal.SIGTERM and self._file.keeps:
            self._say("ends, and leaves the job to the next authority with this --state.")
            return self._code or 0
        self._file.remove()
        last = time.monotonic() + SECONDS_FOR_LAST_WORDS
        while (
            self._server.are_there() and time.monotonic() < last
        ):  # a connection that is closed too early forgets them
            self._server.wait(0.1)
        return self._code or 0

    def interrupt(self, number: int) -> None:
        """A signal has come: SIGTERM leaves the job to another authority if there may be one, any other ends it."""
        self._signal = number

    # ---- events ----

    def _step(self) -> None:
        now = time.monotonic()
        authority_at = self._authority.next_timer if self._authority else float("inf")
        for caller, said in self._server.wait(min(self._next_beat, authority_at, self._seats.next_time()) - now):
            self._take(caller, said)
        now = time.monotonic()
        if self._signal:
            self._heed_signal()
        if now >= self._next_beat:
            self._next_beat = now + SECONDS_BETWEEN_BEATS
            for caller in self._caller_of.values():
                if not caller.unsent:
                    self._server.send(caller, {"beat": 1})
        if self._authority is not None and now >= self._authority.next_timer:
            self._carry_out(self._authority.tick(now))
        if self._authority is None and now >= self._began + self._terms.rules.launcher_grace + PATIENCE:
            self._end_without_ranks()
        if self._code is None:
            self._let_in(now)

    def _heed_signal(self) -> None:
        code = 128 + self._signal
        if self._signal == signal.SIGTERM and self._file.keeps:
            self._code = code
        else:
            self._end(code, f"The authority was ended by {signal.Signals(self._signal).name}, and the job with it.")

    def _take(self, caller: Connection, said: dict[str, Any] | str) -> None:
        if self._code is not None:
            return
        if self._caller_of.get(caller.name) is not caller:
            if not isinstance(said, str):
                self._greet(caller, said)
            return
        if isinstance(said, str):
            del self._caller_of[caller.name]
            if said == ENDED or not self._is_let_in(caller.name):
                self._note_gone(caller.name)
        else:
            self._hear(caller, said)

    def _greet(self, caller: Connection, hello: dict[str, Any]) -> None:
        """The first words of a process: it is new, or calls again."""
        caller.name = str(hello.get("uid", "")) or "?"
        if problem := self._objection(hello):
            self._server.send(caller, {"refused": problem})
            self._server.drop(caller)
            return
        now, uid = time.monotonic(), caller.name
        before = self._caller_of.get(uid)
        for said in self._server.read(before) if before is not None else ():
            self._take(before, said)  # type: ignore[arg-type]  # what it said first comes first
        seat = self._seat_for(now, hello)
        self._caller_of[uid] = caller
        rules = self._terms.rules
        welcome = {
            "job": self._record.job,
            "host": seat.host,
            "slot": seat.slot,
            "notices": rules.notices,
            "planned": rules.planned,
            "balances": rules.balances,
            "grace": rules.launcher_grace,
            "leave_code": self._terms.leave_code,
        }
        self._server.send(caller, welcome)
        if before is not None:
            self._server.drop(before)
        if seat.is_let_in:
            self._ask(now, seat)
        if hello["noticed"]:
            self._note_notice(caller, seat)
        if hello["finished"]:
            self._note_finished(caller, seat)

    def _objection(self, hello: dict[str, Any]) -> str:
        """Why this process cannot be a rank; "" if it can. What has the secret is well-formed if its release is ours."""
        if hello.get("version") != __version__:
            return (
                f"its ringtrain must be that of the authority, {__version__}, but is {hello.get('version')}. Install the same "
                "everywhere."
            )
        if hello["job"] not in ("", self._record.job):
            return (
                "the authority must lead the job that this rank is of, but knows nothing of it. It was started anew without what "
                "--state has kept, or leads another job."
            )
        seat = self._seats.of(hello["uid"])
        others = [each for each in self._seats.all() if (each.host, each.slot) == (hello["host"], hello["slot"])]
        if seat is None and others:
            return "the others go on without this rank, since its connection had ended."
        return ""

    def _seat_for(self, now: float, hello: dict[str, Any]) -> Seat:
        uid, hostname, machine = hello["uid"], hello["hostname"], str(hello["machine"])
        seat = self._seats.of(uid)
        if seat is None and hello["host"]:
            seat = self._seats.keep(now, uid, hello["host"], hello["slot"], is_let_in=False)
        if seat is None:
            seat = self._seats.come(now, uid, hostname, machine)
            self._say(f"A process has come, in slot {seat.slot} of host '{seat.host}'.")
            return seat
        self._say(f"The rank in slot {seat.slot} of host '{seat.host}' has called again.")
        self._seats.knows(seat.host, hostname, machine)
        seat.heard = now
        return seat

    def _hear(self, caller: Connection, said: dict[str, Any]) -> None:
        now, seat = time.monotonic(), self._seats.of(caller.name)
        if seat is None:
            return
        seat.heard = now
        if "noticed" in said:
            self._note_notice(caller, seat)
        elif "finished" in said:
            self._note_finished(caller, seat)
        elif seat.is_let_in and self._authority is not None:
            if "control" in said:
                self._carry_out(self._authority.arrived(now, seat.host, from_hex(said["control"])))
            else:
                self._carry_out(self._authority.host_heard(now, seat.host))

    def _note_notice(self, caller: Connection, seat: Seat) -> None:
        if seat.is_let_in and self._authority is not None:
            self._carry_out(self._authority.process_leaves(time.monotonic(), seat.host, seat.slot, seat.uid))
        else:
            self._server.send(caller, {"over": self._terms.leave_code, "because": TOLD_TO_LEAVE})

    def _note_finished(self, caller: Connection, seat: Seat) -> None:
        """From here on the job has come to its end, whatever becomes of this authority."""
        if not self._record.finished:
            self._record.finished = True
            self._file.write(self._record)
        self._server.send(caller, {"kept": 1})
        if seat.is_let_in and self._authority is not None:
            self._carry_out(self._authority.host_present(time.monotonic(), seat.host, (), finished=True))

    def _note_gone(self, uid: str) -> None:
        seat, now = self._seats.of(uid), time.monotonic()
        pause = self._seats.go(now, uid)
        self._told_to_wait.discard(uid)
        if seat is not None and pause:
            self._say(
                f"Processes in slot {seat.slot} of host '{seat.host}' end soon after they have come, again and again. The next one waits "
                f"for {pause:g} s."
            )
        if seat is not None and seat.is_let_in and self._authority is not None:
            self._carry_out(self._authority.process_gone(now, seat.host, seat.slot, uid, GONE))

    # ---- who may come in ----

    def _let_in(self, now: float) -> None:
        if self._record.finished:
            for seat in self._seats.waiting():
                self._tell(seat.uid, {"over": 0, "because": ENDED_WELL})
            return
        if self._authority is None:
            return
        for seat in self._seats.let_in(now):
            self._ask(now, seat)
        for seat in self._seats.waiting() if self._seats.are_full(now) else ():
            if seat.uid not in self._told_to_wait:
                self._told_to_wait.add(seat.uid)
                most = self._terms.maximum
                self._tell(
                    seat.uid,
                    {
                        "waits": f"the job has {most} ranks, and may have no more (-np). This process waits until one has gone."
                    },
                )

    def _ask(self, now: float, seat: Seat) -> None:
        """Has the authority know of a process, which then says who it is."""
        if self._authority is None:
            self._authority = Authority(
                [], self._terms.rules, self._terms.rules.launcher_grace, now, from_hex(self._record.world)
            )
        self._carry_out(self._authority.process_came(now, seat.host, seat.slot, seat.uid))

    def _is_let_in(self, uid: str) -> bool:
        seat = self._seats.of(uid)
        return seat is not None and seat.is_let_in

    # ---- what follows ----

    def _carry_out(self, actions: Sequence[Action]) -> None:
        because = said_in(actions)
        for action in actions:
            if self._code is not None:
                return
            kind = action.kind
            if kind == lib.RT_DO_SAY:
                self._say(action.text)
            elif kind == lib.RT_DO_WRITE:
                self._record.world, self._record.seats = action.frame.hex(), self._seats.taken()
                self._file.write(self._record)
            elif kind in (lib.RT_DO_SEND, lib.RT_DO_EVICT):
                self._tell(action.uid, {"frame": action.frame.hex(), "because": because})
                seat = self._seats.of(action.uid)
                if kind == lib.RT_DO_EVICT and seat is not None:
                    seat.is_out = True
            elif kind == lib.RT_DO_ASK:
                self._ask_all(action.host, action.frame)
            elif kind == lib.RT_DO_END:
                self._end(0 if action.well else 1, action.text)

    def _ask_all(self, host: str, frame: bytes) -> None:
        """The authority had lost sight of a host, and hears it again."""
        uids = [seat.uid for seat in self._seats.on(host) if seat.uid in self._caller_of]
        for uid in uids:
            self._tell(uid, {"frame": frame.hex(), "because": ""})
        if self._authority is not None:
            self._carry_out(self._authority.host_present(time.monotonic(), host, uids))

    def _tell(self, uid: str, said: dict[str, Any]) -> None:
        if uid in self._caller_of:
            self._server.send(self._caller_of[uid], said)

    # ---- end ----

    def _end_without_ranks(self) -> None:
        """No rank of a job that was to go on has called: they have ended themselves, as they were told at the start."""
        if self._record.finished:
            self._end(0, "All ranks have come to their end.")
        else:
            self._end(1, "All ranks that held the state of the training are gone.")

    def _end(self, code: int, text: str) -> None:
        self._code = code
        self._say(text)
        for caller in self._caller_of.values():
            seat = self._seats.of(caller.name)
            spare = code == 0 or seat is None or not seat.is_let_in
            self._server.send(caller, {"over": 0 if spare and code == 0 else 1, "because": text})
