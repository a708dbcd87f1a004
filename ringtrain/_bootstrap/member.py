"""A rank of an elastic job: of which world it is a member, until when, and the next one; the core decides (`membership.h`).

A thread listens to the launcher, through the agent of this host, or to the authority that stands beside an engine's ranks
(`leading`). It has each world opened that has been formed there, and ends it when it is told so: what is pending there fails
in the program's thread, which takes the next world once it comes to `init`. So a program that computes for a long time
holds nobody up, and is not taken for dead.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ringtrain._binding._native import CData, as_text, ffi, from_hex, lib, require
from ringtrain._binding.log import logger
from ringtrain._binding.options import environment
from ringtrain._bootstrap.formed_world import NO_MEMORY, FormedWorld, next_action
from ringtrain._bootstrap.leading import LeaveNotice, Link, LinkLostError
from ringtrain._rendezvous.launcher import ElasticPlace, has_started_replicas
from ringtrain._runtime import exits
from ringtrain._runtime.context import Context
from ringtrain.errors import InternalError, RingtrainError, TimeoutError, UnsupportedError, WorldChangedError

SECONDS_TO_CONNECT = 6.0  # all members have said that they are there; the launcher waits a second longer
# For the cause of a world's end: the launcher knows it as soon as the kernel does, and has to say it.
SECONDS_FOR_THE_CAUSE = 1.0
MOST_FAILURES = 3  # to connect, one after the other, until this rank gives up
SECONDS_TO_LISTEN = 30.0  # until a port must be free, while other ranks let theirs go
SECONDS_BETWEEN_PORTS = 0.1
LEFT = "this rank has left on notice; the others go on from here."
_SLICE_SECONDS = 0.5  # how long a wait may keep Ctrl-C waiting


class Opener(Protocol):
    """Opens worlds; `start` does."""

    def listen_at(self, addresses: str) -> None:
        """Has `listen` use these addresses from now on."""

    def listen(self) -> tuple[CData, str]:
        """A listener, and its addresses as others must be told."""

    def open(self, listener: CData, rank: int, peers: Sequence[str], secret: bytearray, epoch: int) -> Context:
        """A world of these peers; returns when all of them have opened it."""


class Member:
    """This process in its elastic job. link: to who leads it.

    Attributes:
        wants_pause: the launcher wants this world left by all members together: a rank waits to join, or one leaves.
        worlds: how many have begun for this process.
        planned: ranks whose batches make up that of a step, however many there are (`--batch constant`); 0: each rank's batch
            stays the same.
        balances: whether the shares of such a batch follow how fast the ranks are (`--batch balanced`).
    """

    def __init__(self, place: ElasticPlace, program: str, opener: Opener, link: Link):
        self.wants_pause = False
        self.worlds = 0
        self.planned, self.balances = link.planned, link.balances
        self._place = place
        self._link = link
        self._opener = opener
        self._from_where = ", from what they committed last"
        self._changed = threading.Condition()
        self._listener: CData | None
        self._listener, address = opener.listen()
        self._native = ffi.gc(
            lib.rt_membership_open(
                as_text(place.uid), as_text(place.host), place.slot, as_text(address), as_text(program)
            ),
            lib.rt_membership_free,
        )
        self._form: FormedWorld | None = None  # that is to be connected
        self._opening: FormedWorld | None = None  # that a thread connects
        self._opened: Context | None = None  # of it
        self._next: Context | None = None  # a world that runs, and that the program has not taken yet
        self._present: Context | None = None  # the one that it has
        self._present_goes_on = False
        self._dropped: list[Context] = []  # worlds that nobody has taken, to be closed by the thread
        self._over = ""  # why there will be no world any more
        self._departs = False  # since it leaves on notice
        self._notice = LeaveNotice(self._ask_for_leave)
        self._has_finished = False
        self._failures = 0
        self._lacks_port = False

    def begin(self) -> None:
        """Tells the launcher that this process is there, and listens to it from now on. Raises UnsupportedError."""
        self._link.open()
        with self._changed:
            self._carry_out(lib.rt_membership_begin(self._native))
        threading.Thread(target=self._listen, name="ringtrain-elastic", daemon=True).start()
        # SIGTERM is what torchrun gives to all processes of a replica of which one has died.
        taken = {"SIGTERM"} if has_started_replicas(environment()) else set()
        self._notice.heed([name for name in self._link.notices if name not in taken])

    # ---- the program's thread ----

    def take(self) -> Context:
        """The next world; waits until it runs. The launcher ends a job that waits for too long.

        Raises:
            SystemExit: this rank has left on notice.
            UnsupportedError: the launcher is gone; or this rank cannot connect with the others.
        """
        with self._changed:
            self._note_unheard()
            self._present = None
            if self._next is None:  # nobody has ended the world that this rank has left
                self._carry_out(lib.rt_membership_world_ended(self._native))
            while self._next is None and not self._over:
                self._changed.wait(_SLICE_SECONDS)
            if self._next is None and self._departs:
                self._leave()
            if self._next is None:
                raise UnsupportedError(self._over)
            self._present, self._next = self._next, None
            self._present_goes_on = True
            self.worlds += 1
            return self._present

    def got_state(self) -> None:
        """This rank has what the others have: it may give it to who joins from now on."""
        with self._changed:
            require(lib.rt_membership_got_state(self._native))
            if self._present is not None:
                self._present.takes_over = False

    def begin_step(self) -> bool:
        """From here on nobody new may be in the next world, until `end_step`; False if the present one has ended before."""
        with self._changed:
            if self._present_goes_on:
                self._from_where = ""
                lib.rt_membership_admits(self._native, False)
            return self._present_goes_on

    def end_step(self) -> None:
        """This rank is between two steps, where somebody new may be in the next world."""
        with self._changed:
            lib.rt_membership_admits(self._native, True)

    def finish(self) -> None:
        """The program has come to its end: no further world has this rank."""
        with self._changed:
            self._over = self._over or "init: this rank has come to its end."
            self._carry_out(lib.rt_membership_finished(self._native))
            self._drop(self._next)
            self._next = None
            self._has_finished = not self._departs
        if self._has_finished:
            self._link.finish()

    def explain(self, context: Context, problem: RingtrainError) -> RingtrainError:
        """The error of a world that has ended: in the launcher's words, the same on all ranks, if it says why.

        An operation that has waited for ranks until it was given up ends the world, too: those are evicted.
        """
        waited = isinstance(problem, TimeoutError)
        if waited and not context.suspects(lib.RT_MISSING):
            return problem
        with self._changed:
            if context is self._present and self._present_goes_on:  # else its ranks have other numbers by now
                self._suspect(context, lib.RT_SILENT)
                if waited:
                    self._suspect(context, lib.RT_MISSING)
            self._changed.wait_for(lambda: self._is_explained(context), SECONDS_FOR_THE_CAUSE)
        return WorldChangedError(context.ended_because or str(problem))

    def refuse(self, ranks: Sequence[int]) -> None:
        """These ranks of the program's world have joined it with other values, and know so: the next one is without them."""
        with self._changed:
            if self._present is not None and self._present_goes_on:  # else they have other numbers by now
                self._carry_out(lib.rt_membership_suspects(self._native, lib.RT_REFUSED, list(ranks), len(ranks)))

    def world_has_ended(self) -> bool:
        """Whether the program's world has ended, after a moment in which the launcher may say so; false without a world."""
        with self._changed:
            context = self._present
            if context is None:
                return False
            return bool(self._changed.wait_for(lambda: self._is_explained(context), SECONDS_FOR_THE_CAUSE))

    def _is_explained(self, context: Context) -> bool:
        """Whether it is known why a world has ended, or that another one follows."""
        return bool(context.ended_because or self._over or self._next) or context is not self._present

    # ---- notices ----

    def _ask_for_leave(self, number: int) -> None:
        with self._changed:
            if not self._link.ask_for_leave(number):  # nobody is left to go on
                os.kill(os.getpid(), signal.SIGTERM)

    def _leave(self) -> None:
        """Ends the process as a program that has come to its end."""
        if threading.current_thread() is not threading.main_thread():
            self._end_process(self._link.leave_code, LEFT)
        print(f"ringtrain: {LEFT}", file=sys.stderr, flush=True)
        sys.exit(self._link.leave_code)

    # ---- the thread that listens ----

    def _listen(self) -> None:
        try:
            self._listen_to_the_end()
        except RingtrainError as problem:  # no port is left to listen on, or no memory
            self._give_up(str(problem))

    def _listen_to_the_end(self) -> None:
        while True:
            try:
                said = self._link.receive()
            except LinkLostError as lost:
                if lost.ends_rank and not (self._has_finished or self._departs):
                    self._end_process(1, str(lost))
                self._give_up(str(lost))
                return
            for told in said:
                self._hear(told)
            if self._form is not None and not self._link.has_more():  # else it may be stale by now
                self._connect(self._form)

    def _hear(self, told: dict[str, Any]) -> None:
        if "listens" in told:
            self._listen_at(told["listens"])
            return
        if "over" in told:  # and no agent ends this process
            if not (self._has_finished or self._departs):
                self._end_process(told["over"], told["because"])
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._listener is not None or self._over
            )  # an answer says where this rank listens
            self._note_unheard()
            frame = from_hex(told["frame"])
            self._carry_out(lib.rt_membership_arrived(self._native, frame, len(frame)), told["because"])
            dropped, self._dropped = self._dropped, []
        for context in dropped:
            context.close(0.0)

    def _listen_at(self, addresses: str) -> None:
        self._opener.listen_at(addresses)
        self._use(self._listener_of_next_world())

    def _listener_of_next_world(self) -> tuple[CData, str]:
        """Where no port of a range is free it is tried again: other ranks let theirs go once their world is connected."""
        until = time.monotonic() + SECONDS_TO_LISTEN
        while True:
            try:
                return self._opener.listen()
            except RingtrainError as problem:
                if time.monotonic() >= until:
                    raise
                if not self._lacks_port:
                    self._lacks_port = True
                    logger.warning(
                        "elastic: no port to listen on for the next world, which is tried again: %s", problem
                    )
                time.sleep(SECONDS_BETWEEN_PORTS)

    def _connect(self, form: FormedWorld) -> None:
        """Has a thread open the world that has been formed: this one must hear if the launcher gives it up meanwhile."""
        with self._changed:
            listener, self._listener = self._listener, None
            self._form, self._opening = None, form
        threading.Thread(target=self._open, args=(form, listener), name="ringtrain-connect", daemon=True).start()
        try:
            self._use(self._opener.listen())
        except RingtrainError:  # the world that is opened lets ports go, so nobody may wait for one before
            threading.Thread(target=self._use_later, name="ringtrain-port", daemon=True).start()

    def _use(self, found: tuple[CData, str]) -> None:
        """In the world after the one that is opened."""
        with self._changed:
            self._listener, address = found
            require(lib.rt_membership_listens_at(self._native, as_text(address)))
            self._changed.notify_all()

    def _use_later(self) -> None:
        try:
            self._use(self._listener_of_next_world())
        except RingtrainError as problem:
            self._give_up(str(problem))

    # ---- a thread for each world that is opened ----

    def _open(self, form: FormedWorld, listener: CData) -> None:
        """Whoever fails to come has it fail, and the launcher form another one."""
        try:
            context = self._opener.open(listener, form.rank, form.addresses, self._link.key_of(form.key), form.count)
            context.world, context.peers, context.takes_over = form.count, tuple(form.peers), form.takes_over
            context.await_state_from(form.first_joiner)
            problem = None
        except RingtrainError as error:
            context, problem = None, error
        with self._changed:
            if is_given_up := self._opening is not form:
                self._drop(context)
                dropped, self._dropped = self._dropped, []
            else:
                self._note_opened(form, context, problem)
        if is_given_up:
            for each in dropped:
                each.close(0.0)
        elif problem is not None and self._failures >= MOST_FAILURES:
            self._give_up(str(problem))

    # ---- all of them, with the lock ----

    def _note_opened(self, form: FormedWorld, context: Context | None, problem: RingtrainError | None) -> None:
        self._opening, self._opened = None, context
        if context is not None:
            self._failures = 0
        elif not form.has_joiners or form.takes_over:  # else it is formed again without them
            self._failures += 1
        if problem is not None:
            logger.warning("elastic: world %d could not be connected: %s", form.count, problem)
        self._carry_out(lib.rt_membership_connected(self._native, form.count, context is not None))

    def _carry_out(self, count: int, because: str = "") -> None:
        """So many actions that follow from an event; below 0 where there is no memory for them."""
        if count < 0:
            raise InternalError(NO_MEMORY)
        for action in [next_action(self._native) for _ in range(count)]:
            kind = action.kind
            if kind == lib.RT_DO_SEND:
                self._link.send({"uid": self._place.uid, "control": action.frame.hex()})
            elif kind == lib.RT_DO_CONNECT:
                self._note_cause(because)  # whom the launcher gave up is known only now
                self._form = action.form
            elif kind == lib.RT_DO_ABANDON:
                self._abandon(because)
            elif kind == lib.RT_DO_RUN:
                self._next, self._opened = self._opened, None
                self.wants_pause = False
            elif kind == lib.RT_DO_PAUSE:
                self.wants_pause = True
            elif kind == lib.RT_DO_DEPART:
                self._depart()
            elif kind == lib.RT_DO_FENCE:
                self._end_process(1, action.text)
        self._changed.notify_all()

    def _depart(self) -> None:
        if self._over:
            return
        if self.worlds == 0:
            self._end_process(
                self._link.leave_code if self._notice.was_given else 0,
                "the job has come to its end before this rank could join it, or it is to leave.",
            )
        self._departs, self._over = True, LEFT

    def _suspect(self, context: Context, why: int) -> None:
        ranks = context.suspects(why)
        self._carry_out(lib.rt_membership_suspects(self._native, why, ranks, len(ranks)))

    def _note_unheard(self) -> None:
        """Of the world that this rank is a member of, which the program may not have taken yet: for the next report."""
        context = self._next or (self._present if self._present_goes_on else None)
        if context is not None:
            self._suspect(context, lib.RT_UNHEARD)

    def _abandon(self, because: str) -> None:
        """Ends what there is of worlds: the program meets it in its next operation, or in the one that it waits in."""
        self._form = self._opening = None
        self._note_cause(because)
        if self._present is not None:
            why = self._present.ended_because or "the world has ended: its ranks are to form another one."
            self._present.abort(why)
            self._present_goes_on = False
        for context in (self._next, self._opened):
            self._drop(context)
        self._next = self._opened = None

    def _note_cause(self, because: str) -> None:
        if because and self._present is not None and not self._present.ended_because:
            self._present.ended_because = f"{because} The other ranks go on without it{self._from_where}."

    def _drop(self, context: Context | None) -> None:
        if context is not None:
            context.abort("the world has ended before this rank took part in it.")
            self._dropped.append(context)

    def _give_up(self, why: str) -> None:
        with self._changed:
            self._over = self._over or why
            self._changed.notify_all()

    def _end_process(self, code: int, why: str) -> None:
        exits.flush()
        print(f"ringtrain: {why}", file=sys.stderr, flush=True)
        os._exit(code)
