"""A step that survives a change of the world: no rank uses the results of a window before every member holds all of them.

A window is the operations between two updates of an optimizer, or a part of them that is waited for at once; of several
optimizers, those between two draws of samples. Its inputs are kept. When this rank holds every result it is whole, and says
so in an allreduce of nine bytes; when that returns all members are whole, and the window is released. On the way a world may
be lost. Then the survivors meet in the next one, tell each other how far they are (``settlement``), and release the window,
or submit the kept inputs once more.

That the exchange may reach some of them only, and be held again in another world, changes nothing:

- Whoever has released a window did so because all members of a world were whole, or because an exchange has said that.
  So each survivor is whole, with the same results, and every later exchange says release.
- Whoever was told to redo it has dropped its results. It becomes whole again only with the inputs of all members of its
  world, each of which has been told the same. So no two ranks are ever whole by different worlds.
- Whoever has begun the next window keeps everybody from joining: ranks that join are told the state between two steps.

Results that are used before the window ends, such as statistics over the batches of all ranks, are released in the same
way, each as a window of its own that has no samples (``use_within``).

What is framework-specific is a ``Training``'s.
"""

import zlib
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import Enum
from typing import Protocol, TypeVar

import numpy as np

from ringtrain.buffers import as_buffer
from ringtrain.context import Context, current
from ringtrain.elastic.likeness import Outline, refusal, unlike
from ringtrain.elastic.sets import Sets
from ringtrain.elastic.settlement import Settlement, Stage, Standing, settle
from ringtrain.elastic.worlds import can_go_on, ends_world, next_world
from ringtrain.errors import InvalidArgumentError, MismatchError, ProcessSetLostError, RingtrainError, WorldChangedError
from ringtrain.log import logger
from ringtrain.membership import Member
from ringtrain.objects import allgather_object
from ringtrain.operations import Max, allgather, allreduce
from ringtrain.pending import Operation
from ringtrain.process_sets import global_process_set, id_of

Result = TypeVar("Result")
_ROW = "ringtrain.elastic.standing"
_PLACE = "ringtrain.elastic.place"
_WHOLE = "ringtrain.elastic.whole"
_PAUSE = "ringtrain.elastic.pause"
_OUTLINE = "ringtrain.elastic.outline"
_DRAWN = "ringtrain.elastic.drawn"
_REFUSED = "ringtrain.elastic.refused"


class Part(Enum):
    """What results are of the open window."""

    NOTHING = "they are given up"
    SOME = "more will come"
    STEP = "with them an optimizer's step is complete, and so is the window if there is one optimizer"
    LAST = "with them it is complete"


class Training(Protocol):
    """What a transaction goes on with in another world."""

    def enter_world(self) -> None:
        """The default context is another one. What was under way in the one before is nothing any more."""

    def outline(self) -> Outline:
        """What the state has, as far as ranks must have it alike before one takes over what another has."""

    def take_state(self) -> None:
        """Takes the state of rank 0, on all ranks together, between two steps."""

    def deal(self, size: int, place: int) -> None:
        """The samples of the next window are dealt to so many ranks, of which this is the one at that place."""

    def drawn(self) -> str:
        """What this rank has drawn for the open window, in words that must be the same on all ranks."""

    def finish_window(self, contributors: set[int] | None) -> None:
        """All results of a window are released: the samples that these places have drawn are in them; None: of all."""

    def weight(self, contributors: set[int] | None) -> int | None:
        """What this rank's inputs of the open window count in an average over these places, None: all; None if all count alike."""


class Transaction:
    """One rank's side, from world to world.

    Args:
        member: this process in its elastic job.
        training: what goes on.
        several: whether more than one optimizer may step in a window, which ``close`` ends then.
        sets: the process sets that go on with it.

    Attributes:
        several: as given.
    """

    def __init__(self, member: Member, training: Training, several: bool = False, sets: Sets | None = None):
        self._member = member
        self._sets = sets or Sets()
        self._training = training
        self.several = several
        self._holds_state = False
        self._released = 0
        self._stage = Stage.IDLE
        self._pauses = False  # all have agreed to leave this world between two steps
        self._worlds: dict[int, tuple[int, int]] = {}  # by number: size, and this rank's place in it
        self._dealt_in = 0  # the world among whose members the open window was dealt, or the next one will be
        self._contributors: set[int] | None = (
            None  # places in that dealing whose inputs the present world has; None: all
        )
        self._applied: set[int] | None = None  # of the first part of the open window that was released
        self._has_parts = False  # whether there was one
        self._has_step = False  # whether an optimizer's step was among them
        self._is_apart = False  # whether nothing of it but what is given up was drawn or released
        self._part = Part.NOTHING  # that is held
        self._context: Context | None = None  # of the last world that this rank has entered
        self._survives = False  # while `survive` calls a function

    # ---- the open window ----

    def begin(self) -> None:
        """Something of a window is drawn, or submitted."""
        if self._stage is Stage.IDLE:
            self._stage = Stage.BEGUN

    def weight(self) -> int | None:
        """What this rank's inputs of the open window count in an average of the present world; None if all count alike."""
        return self._training.weight(self._contributors)

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
        self._is_apart |= self._stage is Stage.IDLE
        self.begin()
        held: list[Result] = []
        released = self._released
        while True:
            try:
                if not held:
                    held.append((yield from attempt()))
                    self._part = part_of(held[0])
                    self._stage = Stage.WHOLE
                yield from self._agree()
                self._release()
                return held[0]
            except RingtrainError as problem:
                if not can_go_on(problem):
                    self._stage = Stage.BEGUN
                    raise
            self._go_on()
            if self._released > released:
                return held[0]
            held.clear()
            take_back()

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

        turns = -1 if self._context is None else self._context.residual_turns

        def take_back() -> None:  # what compression has lost of results that are given up
            if self._context is not None:
                self._context.take_back_residuals(id_of(global_process_set), "", turns)

        result = awaited(self.run(attempt, lambda _: part, take_back))
        if isinstance(result, ProcessSetLostError):
            raise result
        return result

    def close(self) -> bool:
        """Ends the open window if there is nothing else that does; returns whether there was one.

        So it is if several optimizers may step in a window, and one has, or if its only results are such as ``survive`` gives
        up. To be called on all ranks alike, where the next window would begin.
        """
        if not (self._has_step or self._is_apart):
            return False
        awaited(self.run(_nothing, lambda _: Part.LAST, lambda: None))
        return True

    def finish(self) -> None:
        """Returns when all members have released every window; so none of them needs this rank for one any more."""
        awaited(self.run(_nothing, lambda _: Part.LAST, lambda: None))
        _under_way.remove(self)

    def _agree(self) -> Generator[Operation, None, None]:
        """Returns when all members are whole, which also tells whether one of them was asked to pause.

        Raises:
            MismatchError: on all of them, if they have drawn differently: a wrong average now, and later a standstill.
        """
        drawn = np.frombuffer(zlib.crc32(self._training.drawn().encode()).to_bytes(4, "little"), np.uint8)
        said = np.concatenate([np.array([self._member.wants_pause], np.uint8), drawn, 255 - drawn])
        buffers = [as_buffer(said)]
        operation = current().submit("allreduce", _WHOLE, buffers, buffers, reduction="max", waits=True)
        while not operation.finished():
            yield operation
        operation.wait()
        self._pauses = bool(said[0])
        if (said[1:5] != 255 - said[5:]).any():
            raise MismatchError(self._unlike_draws())

    def _unlike_draws(self) -> str:
        everyone = allgather_object(self._training.drawn(), _DRAWN)
        other = next(rank for rank, drawn in enumerate(everyone) if drawn != everyone[0])
        return (
            f"elastic.State: all ranks must draw the same for a step, but rank 0 has drawn {everyone[0]}, and rank {other} "
            f"{everyone[other]}. Use one batch_size, and as many batches a step, on all ranks."
        )

    def _release(self) -> None:
        if not self._has_parts and self._part is not Part.NOTHING:
            self._applied, self._has_parts = self._contributors, True
        self._released += 1
        self._stage = Stage.BEGUN
        self._has_step |= self._part is Part.STEP
        self._is_apart &= self._part is Part.NOTHING
        if self._part is Part.LAST or (self._has_step and not self.several):
            self._stage = Stage.IDLE
            self._training.finish_window(self._applied)
            self._applied, self._contributors, self._has_parts, self._has_step = None, None, False, False
            self._is_apart = False
            self._deal_in(current().world)

    # ---- between two steps ----

    def enter(self) -> None:
        """Goes on in the present world, at the start of the program: with the state that rank 0 has."""
        self._sets.begin()
        self._go_on(present=True)
        _under_way.append(self)

    def pause(self) -> bool:
        """Takes the next world between two steps, if all have agreed to; who waits to join is in it. Returns whether it did."""
        if not self._pauses or self._stage is not Stage.IDLE:
            return False
        try:
            allreduce(np.zeros(1, np.uint8), op=Max, name=_PAUSE)  # nobody is waited for once the first has left
            self._member.end_step()
        except RingtrainError as problem:
            if not can_go_on(problem):
                raise
        self._go_on()
        return True

    # ---- worlds ----

    def _go_on(self, present: bool = False) -> None:
        """Takes the next world, or one after that, until all members of one have settled how far they are."""
        while True:
            try:
                if not present:
                    next_world()
                self._enter_world()
                self._apply(self._settle())
                if self._member.begin_step():
                    return
            except RingtrainError as problem:
                if not can_go_on(problem):
                    raise
            present = False

    def _enter_world(self) -> None:
        self._pauses = False
        context = current()
        context.awaits_gpus = True
        if self._context is not None and self._context is not context:
            context.inherit_residuals(self._context)
        self._context = context
        self._worlds[context.world] = context.size, context.rank
        self._training.enter_world()

    def _settle(self) -> tuple[Settlement, set[int] | None]:
        """What follows for all; and, if a window is to go on, whose shares of its samples are still there."""
        own = Standing(self._holds_state, self._released, self._stage, self._dealt_in, self._sets.are_known())
        rows = allgather(np.array([own], np.int64), name=_ROW)
        settlement = settle(
            [
                Standing(bool(held), step, Stage(stage), world, bool(has_sets))
                for held, step, stage, world, has_sets in rows.tolist()
            ]
        )
        if settlement.dealt_in is None:
            return settlement, None
        places = allgather(np.array([self._worlds[settlement.dealt_in][1]]), name=_PLACE)
        return settlement, set(places.tolist())

    def _apply(self, settled: tuple[Settlement, set[int] | None]) -> None:
        settlement, contributors = settled
        if self._holds_state and settlement.released > self._released:
            self._release()
        elif self._stage is Stage.WHOLE:
            self._stage = Stage.BEGUN
        if settlement.dealt_in is not None:
            self._contributors = contributors
        if self._stage is Stage.IDLE:
            self._contributors = contributors
            self._deal_in(current().world if settlement.dealt_in is None else settlement.dealt_in)
        if settlement.gives_state:
            self._refuse_unlike()
        if settlement.renews_sets:
            self._sets.renew()
        if settlement.gives_state:
            self._training.take_state()
            self._released, self._holds_state = settlement.released, True
            self._member.got_state()

    def _refuse_unlike(self) -> None:
        """Before the state is given out: ranks that join with other values raise, and the others go on without them."""
        told = allgather_object((self._holds_state, {**self._training.outline(), **self._sets.outline()}), _OUTLINE)
        outlines = [outline for _, outline in told]
        different = unlike(outlines)
        if not different:
            return
        begins = not any(holds for holds, _ in told)  # nobody has anything that could be lost yet
        if current().rank == 0 and not begins:
            for rank in different:
                logger.warning("elastic: not let in: %s", refusal(outlines, rank))
        allreduce(np.zeros(1, np.uint8), op=Max, name=_REFUSED)  # until then nobody ends, so that all know
        if begins or current().rank in different:
            raise MismatchError(refusal(outlines, different[0] if begins else current().rank))
        allreduce(np.zeros(1, np.uint8), op=Max, name=_REFUSED)  # ends with this world, when those who raise have ended

    def _deal_in(self, world: int) -> None:
        """The next window is dealt among the members of a world that this rank has been in."""
        self._dealt_in = world
        self._training.deal(*self._worlds[world])


def under_way() -> Transaction | None:
    """The one that this process is in, from ``enter`` to ``finish``; None if there is none."""
    return _under_way[-1] if _under_way else None


_under_way: list[Transaction] = []


def awaited(steps: Generator[Operation, None, Result]) -> Result:
    """Waits for each operation that a window names, until it has its result."""
    while True:
        try:
            operation = next(steps)
        except StopIteration as end:
            return end.value
        with suppress(RingtrainError):  # the window looks at it itself
            operation.wait()


def _nothing() -> Generator[Operation, None, None]:
    """A window without an operation."""
    yield from ()
