"""A step that survives a change of the world: no rank uses results before every member holds all of them.

The core decides (``native/elastic/step.h``, which has the rules and why they hold); here what it decides is carried out, by
operations of the present world. A window is the operations between two updates of an optimizer, or a part of them that is
waited for at once; of several optimizers, those between two draws of samples. Its inputs are kept. When this rank holds
every result it says so in an allreduce of nine bytes; when that returns, all members hold them. On the way a world may be
lost. Then the survivors meet in the next one, tell each other how far they are, and release what they hold, or submit the
kept inputs once more.

Results that are used before the window ends, such as statistics over the batches of all ranks, are released in the same
way, each as a part of its own that has no samples (``use_within``).

What is framework-specific is a ``Training``'s.
"""

from collections.abc import Callable, Generator, Sequence

import numpy as np

from ringtrain._binding._native import CData, counted, ffi, lib, made, require
from ringtrain._binding.log import logger
from ringtrain._bootstrap.member import Member
from ringtrain._runtime import error_feedback
from ringtrain._runtime.context import Context, current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.operations import Max, allgather, allreduce
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import global_process_set, id_of
from ringtrain._training import step_guard
from ringtrain._training.step_guard import Part, Result, awaited
from ringtrain.elastic.likeness import refusal, unlike
from ringtrain.elastic.sample_shares import Shares
from ringtrain.elastic.sets import Sets
from ringtrain.elastic.standing import ReleaseStage, Standing, Training, set_of, standing_of
from ringtrain.elastic.vote import Vote
from ringtrain.elastic.worlds import can_go_on, ends_world, let_all_know, next_world
from ringtrain.errors import (
    InternalError,
    InvalidArgumentError,
    MismatchError,
    ProcessSetLostError,
    RingtrainError,
    WorldChangedError,
)

_ROW = "ringtrain.elastic.standing"
_PLACE = "ringtrain.elastic.place"
_PAUSE = "ringtrain.elastic.pause"
_OUTLINE = "ringtrain.elastic.outline"


class Transaction:
    """One rank's side, from world to world.

    Args:
        member: this process in its elastic job.
        training: what goes on.
        several: whether more than one optimizer may step in a window, which ``close`` ends then.
        sets: the process sets that go on with it.

    Attributes:
        several: as given.
        vote: what this rank wishes for, and all ranks do.
    """

    def __init__(self, member: Member, training: Training, several: bool = False, sets: Sets | None = None):
        self._member = member
        self._sets = sets or Sets()
        self._training = training
        self.several = several
        self._steps = made(lib.rt_steps_open(several), lib.rt_steps_free)
        self._places = ffi.new("int32_t **")
        self.vote = Vote(member)
        self._context: Context | None = None  # of the last world that this rank has entered
        self._survives = False  # while `survive` calls a function
        self._shares = Shares(training, member.balances)
        self._joiners: Sequence[
            int
        ] = ()  # ranks of the present world that have joined others, until a part is released there

    @property
    def deals(self) -> bool:
        """Whether it is counted which samples are in a step."""
        return bool(self._training.drawn())

    # ---- the open window ----

    def begin(self) -> None:
        """Something of a window is drawn, or submitted."""
        lib.rt_steps_begin(self._steps)

    def weight(self) -> int | None:
        """What this rank's inputs of the open window count in an average of the present world; None if all count alike."""
        count = lib.rt_steps_contributors(self._steps, self._places)
        return self._training.weight(set_of(self._places[0], count))

    def run(
        self,
        attempt: Callable[[], Generator[Operation, None, Result]],
        part_of: Callable[[Result], Part],
        take_back: Callable[[], None],
    ) -> Generator[Operation, None, Result]:
        """Has results of the open window, and returns when they are released; yields the operations that it waits for.

        Args:
            attempt: submits the inputs in the present world, leaves them as they are, and holds the results elsewhere.
            part_of: what it is of the window, by what ``attempt`` returned.
            take_back: lets go of what was submitted and held, but for the inputs.

        Raises:
            RingtrainError: what another world would meet again.
        """
        if self._survives:
            raise InvalidArgumentError(
                "elastic.State: what survive() calls must use operations alone, but runs a backward pass, a step or a layer "
                "whose results are released by themselves. Do that outside of it."
            )
        self._shares.begin_exchange()
        lib.rt_steps_begin_part(self._steps)
        held: list[Result] = []
        released = lib.rt_steps_released(self._steps)
        while True:
            try:
                if not held:
                    held.append((yield from attempt()))
                    self._hold(part_of(held[0]))
                yield from self.vote.cast(self._training.drawn())
                self._release()
                self._shares.end_exchange()
                return held[0]
            except RingtrainError as problem:
                if not can_go_on(problem) and not self._refuses_joiners(problem):
                    lib.rt_steps_drop(self._steps)
                    raise
            self._go_on()
            if lib.rt_steps_released(self._steps) > released:
                self._shares.end_exchange()
                return held[0]
            held.clear()
            take_back()

    def _hold(self, part: Part) -> None:
        if self._context is None and part is not Part.NOTHING:
            raise InvalidArgumentError(
                "elastic.State: a step belongs within its loop, where ranks that join would be, but was made before. Begin "
                "`for epoch in state.epochs(count):`, guard.epochs(count), or fit with Elastic, first."
            )
        lib.rt_steps_hold(self._steps, part)

    def use_within(self, attempt: Callable[[], Generator[Operation, None, Result]]) -> Result:
        """Has results that are used before the open window ends; all ranks ask for the same ones, in one order.

        They are those of the members of one world, and the same on all. The rest of the window may be another one's.

        Args:
            attempt: submits inputs in the present world, and leaves them as they are.
        """
        return awaited(self.run(attempt, lambda _: Part.NOTHING, lambda: None))

    def survive(self, function: Callable[[], Result], part: Part) -> Result:
        """Has what a function returns that waits for its operations itself.

        That a process set is lost, no other world changes. So it is what the function has come to, as a result would be,
        and is raised when all ranks have come to theirs.

        Args:
            function: uses the present world, and has no other effect.
            part: what that is of the open window.

        Raises:
            ProcessSetLostError: the function has used a set that has lost a member.
        """

        def attempt() -> Generator[Operation, None, Result | ProcessSetLostError]:
            yield from ()
            self._survives = True
            try:
                return function()
            except ProcessSetLostError as lost:
                return lost
            except Exception as problem:
                if ends_world(problem):  # in the words of a framework
                    raise WorldChangedError(str(problem)) from problem
                raise
            finally:
                self._survives = False

        turns = -1 if self._context is None else error_feedback.turns(self._context)

        def take_back() -> None:  # what compression has lost of results that are given up
            if self._context is not None:
                error_feedback.take_back(self._context, id_of(global_process_set), "", turns)

        result = awaited(self.run(attempt, lambda _: part, take_back))
        if isinstance(result, ProcessSetLostError):
            raise result
        return result

    def close(self, is_empty: bool = False) -> bool:
        """Ends the open window if there is nothing else that does; returns whether there was one.

        So it is if several optimizers may step in a window, and one has, or if its only results are such as ``survive`` gives
        up. To be called on all ranks alike, where the next window would begin.

        Args:
            is_empty: whatever has begun one has drawn nothing for it, as the draw that finds an epoch's end; so it is ended, too.
        """
        if not is_empty and not lib.rt_steps_has_end_to_come(self._steps):
            return False
        awaited(self.run(_nothing, lambda _: Part.LAST, lambda: None))
        return True

    def finish(self) -> None:
        """Returns when all members have released every window; so none of them needs this rank for one any more."""
        awaited(self.run(_nothing, lambda _: Part.LAST, lambda: None))
        step_guard.leave(self)

    def _refuses_joiners(self, problem: RingtrainError) -> bool:
        """Whether ranks differ since some have joined, with which no step was done yet: these alone fail, and the others go on."""
        joiners = self._joiners
        if not isinstance(problem, MismatchError) or not joiners or current().rank in joiners:
            return False
        if current().rank == 0:
            logger.warning("elastic: not let in: rank %s: %s", ", ".join(map(str, joiners)), problem)
        self._member.refuse(joiners)
        return True

    def _release(self) -> None:
        if self._joiners:
            current().await_state_from(current().size)
        self._joiners = ()
        require(lib.rt_steps_release(self._steps))
        self._carry_out()

    # ---- between two steps ----

    def enter(self) -> None:
        """Goes on in the present world, at the start of the program: with the state that rank 0 has."""
        self._sets.begin()
        self._go_on(present=True)
        step_guard.enter(self)

    def pause(self) -> bool:
        """Between two steps: takes the next world, if all have agreed to; who waits to join is in it. Returns whether it did.

        Now and then ranks tell how fast they are here, where shares follow that.
        """
        if lib.rt_steps_stage(self._steps) != ReleaseStage.IDLE:
            return False
        has_paused = self.vote.pauses
        if has_paused:
            try:
                allreduce(np.zeros(1, np.uint8), op=Max, name=_PAUSE)  # nobody is waited for once the first has left
                self._member.end_step()
            except RingtrainError as problem:
                if not can_go_on(problem):
                    raise
            self._go_on()
        if not self._shares.is_due(released := lib.rt_steps_released(self._steps)):
            return has_paused
        try:
            self._shares.decide(released)
        except RingtrainError as problem:
            if not can_go_on(problem):
                raise
            self._go_on()
            return True
        return has_paused

    # ---- worlds ----

    def _go_on(self, present: bool = False) -> None:
        """Takes the next world, or one after that, until all members of one have settled how far they are."""
        while True:
            try:
                if not present:
                    next_world()
                self._enter_world()
                self._settle()
                if self._member.begin_step():
                    return
            except RingtrainError as problem:
                if not can_go_on(problem):
                    raise
            present = False

    def _enter_world(self) -> None:
        self._joiners = ()
        self.vote.enter_world()
        self._shares.enter_world()
        context = current()
        context.awaits_gpus = True
        if self._context is not None and self._context is not context:
            error_feedback.inherit(context, self._context)
        self._context = context
        require(lib.rt_steps_enter_world(self._steps, context.world, context.size, context.rank))
        self._training.enter_world()

    def _settle(self) -> None:
        """All tell how far they are, and do what follows; also what some of them alone have heard with the last part."""
        told = allgather(np.array([[*self._standing(), self.vote.all_stop]], np.int64), name=_ROW)
        rows, self.vote.all_stop = told[:, :-1], bool(told[:, -1].any())
        place = ffi.new("int32_t *")
        if not counted(lib.rt_steps_hear(self._steps, rows.reshape(-1).tolist(), len(rows), place)):
            standings = [standing_of(row) for row in rows.tolist()]
            raise InternalError(f"elastic: a window was released that not all ranks held: {standings}.")
        # Of those whose shares of an open window's samples are still there.
        places = []
        if place[0] >= 0:
            places = allgather(np.array([place[0]]), name=_PLACE).tolist()
            self._shares.meet(self._standing())
        require(lib.rt_steps_settle(self._steps, places, len(places)))
        self._carry_out()

    def _standing(self) -> Standing:
        own = ffi.new("int64_t[]", len(Standing._fields))
        lib.rt_steps_standing(self._steps, self._sets.are_known(), own)
        return standing_of(list(own))

    def _carry_out(self) -> None:
        """What the core has decided, in its order."""
        effect = ffi.new("rt_step_effect *")
        while lib.rt_steps_next(self._steps, effect):
            _DEEDS[effect.kind](self, effect)

    def _finish_window(self, effect: CData) -> None:
        places = set_of(effect.places, effect.count)
        self._shares.end_window()
        self._training.finish_window(places)

    def _deal(self, effect: CData) -> None:
        self._training.deal(effect.size, effect.place)
        self._shares.deal(effect.world)

    def _renew_sets(self, _effect: CData) -> None:
        self._sets.renew()

    def _take_state(self, _effect: CData) -> None:
        self._training.take_state()
        lib.rt_steps_took_state(self._steps)
        self._member.got_state()

    def _refuse_unlike(self, _effect: CData) -> None:
        """Before the state is given out: ranks that join with other values raise, and the others go on without them."""
        told = allgather_object(
            (self._standing().holds_state, {**self._training.outline(), **self._sets.outline()}), _OUTLINE
        )
        outlines = [outline for _, outline in told]
        different = unlike(outlines)
        begins = not any(holds for holds, _ in told)  # nobody has anything that could be lost yet
        self._joiners = () if begins else [rank for rank, (holds, _) in enumerate(told) if not holds]
        if not different:
            return
        if current().rank == 0 and not begins:
            for rank in different:
                logger.warning("elastic: not let in: %s", refusal(outlines, rank))
        let_all_know()
        if begins or current().rank in different:
            raise MismatchError(refusal(outlines, different[0] if begins else current().rank))
        self._member.refuse(different)
        raise WorldChangedError("elastic.State: ranks that have joined were refused.")


# By the place of an effect in `StepEffect`.
_DEEDS: tuple[Callable[[Transaction, CData], None], ...] = (
    Transaction._finish_window,
    Transaction._deal,
    Transaction._refuse_unlike,
    Transaction._renew_sets,
    Transaction._take_state,
)


def _nothing() -> Generator[Operation, None, None]:
    """A window without an operation."""
    yield from ()
