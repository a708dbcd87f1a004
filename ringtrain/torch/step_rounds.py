"""The rounds of a step: from what passes have left in gradients, through agreement, to reduced gradients.

``exchange`` begins a round where a pass ends, and holds rounds until every rank is there and nothing is left. A rank that
has everything need not await the maximum that a round begins with, which its last hook has submitted.
"""

import threading
from collections.abc import Generator, Iterator

import torch

from ringtrain._runtime import error_feedback
from ringtrain._runtime.pending import Operation
from ringtrain._training import residuals
from ringtrain._training.powersgd import Beginning
from ringtrain._training.presence import DENSE, FROZEN, MISSING, SETTLED, SPARSE_64, after_round, is_there
from ringtrain._training.rounds import Rounds, Said, Stage
from ringtrain._training.step_guard import Part, Passenger, StepGuard
from ringtrain.errors import RingtrainError
from ringtrain.torch.backward import wait_for
from ringtrain.torch.bucketing import Bucketing
from ringtrain.torch.bursts import Bursts
from ringtrain.torch.gradients import Group, OptimizedParameter, ReductionSettings
from ringtrain.torch.members import Members
from ringtrain.torch.passes import Passes
from ringtrain.torch.step import Step


class StepRounds:
    """What ranks agree on and reduce in a step, round by round.

    Args:
        settings: how gradients are combined, the same on all ranks.
        members: the parameters.
        passes: counts backward passes.
        bursts: what is complete here and has not left.
        bucketing: the groups that gradients travel in.
        beginning: when PowerSGD begins; None without it.
        lock: held where hooks of several threads may change what is on its way.

    Attributes:
        step: what is settled.
        guard: releases one round after the other, in steps that survive; None without it.
        passengers: what travels in the rounds of steps that survive, beside the gradients.
        under_way: the round, until it has ended.
    """

    def __init__(
        self, settings: ReductionSettings, members: Members, passes: Passes, bursts: Bursts, bucketing: Bucketing,
        beginning: Beginning | None, lock: threading.Lock,
    ):  # fmt: skip
        self.step = Step()
        self.guard: StepGuard | None = None
        self.passengers: list[Passenger] = []
        self.under_way: Iterator[Operation] | None = None
        self._settings = settings
        self._session = settings.session
        self._members = members
        self._passes = passes
        self._bursts = bursts
        self._bucketing = bucketing
        self._beginning = beginning
        self._lock = lock
        self._rounds: Rounds
        self._joins = 0  # of the world, when they were counted last
        self._has_unused_results = False  # gradients were reduced, and no step has used them so far
        self._turns = -1  # of the core's residuals, when results were released last
        self._filled: list[OptimizedParameter] = []  # given zeros for the round under way

    # ---- worlds ----

    def enter_world(self) -> None:
        """Agrees in the present world from now on, under the members' prefix."""
        self._rounds = Rounds(
            self._session, f"{self._members.prefix}.used", self._settings.terms, self._settings.replica(),
            trained=self._members.trained,
        )  # fmt: skip
        self._joins = self._session.context.joins

    def drop_results(self) -> None:
        """Another world has begun, in which nobody knows of what was reduced and not used."""
        self._has_unused_results = False

    def note_joins(self) -> None:
        """After ``join`` all ranks are between two steps, those that had no batch at all too, whatever the others did."""
        joins = self._session.context.joins
        if self._joins != joins:
            self._joins = joins
            self.step.note_end()
            self._bucketing.restart()  # a rank that had joined has not seen the steps of the others

    # ---- rounds ----

    def begin(self, stage: Stage) -> Iterator[Operation]:
        """A round, which yields the operations that it waits for."""
        self.under_way = self._run(stage)
        return self.under_way

    def hold(self, stage: Stage) -> None:
        """A round from begin to end."""
        wait_for(self.begin(stage))

    def close_step(self, stage: Stage) -> None:
        """Holds rounds until every gradient is settled on all ranks."""
        while not self.step.closed:
            self.hold(stage)

    def _run(self, stage: Stage) -> Iterator[Operation]:
        try:
            if self.guard is None:
                agreed = yield from self._attempt(stage)
            else:
                agreed = yield from self.guard.run(
                    lambda: self._attempt(stage), lambda agreed: self._part_of(agreed, stage), self.take_back
                )
                self._release()
            self._settle(agreed, stage)
        except BaseException:
            self.reset()
            self._rounds.forget_steps()
            self.step.note_end()  # the others have seen the end of this step too
            raise
        finally:
            self.under_way = None

    def _attempt(self, stage: Stage) -> Generator[Operation, None, Said]:
        """Agrees and reduces; returns what was agreed on. With a guard nothing but ``_release`` changes a gradient."""
        with self._lock:
            self._bursts.leave(waits=True)
            own = self._rounds.announced or self.announce(stage, waits=True)
            knows_all = self.step.has_all and not self.awaits_how
            if not self.awaits_how:
                self._submit_where(own.codes, whole_groups_only=True)
        agreed = own if knows_all else (yield from self._rounds.answer())
        with self._lock:
            if self._beginning is not None:
                self._beginning.decide(agreed.is_exact)
            if self.step.is_open_elsewhere(agreed.codes):
                self.open_again(reopened=True)
            self._submit_where(agreed.codes, whole_groups_only=False)
        yield from self._take_results()
        if self.guard is not None:
            for passenger in self.passengers:
                passenger.reduce(
                    f"{self._members.prefix}.rows", self.guard.weight(), gives_up=stage is Stage.DISCARDING
                )
        return agreed

    def _part_of(self, agreed: Said, stage: Stage) -> Part:
        """What a round is of the window that the step is."""
        if stage is Stage.DISCARDING:
            return Part.NOTHING
        left = after_round(self.step.codes, agreed.codes, agreed.is_last(stage))
        return Part.SOME if MISSING in left else Part.STEP

    def _release(self) -> None:
        """All ranks hold the results: they take the place of this rank's own gradients."""
        with torch.no_grad():
            for group in self._bucketing.groups:
                if group.submitted:
                    group.release(self._settings.compressor)
        self._filled.clear()
        for passenger in self.passengers:
            passenger.release()
        self._turns = error_feedback.turns(self._session.context)

    def take_back(self) -> None:
        """What was submitted and held is nothing any more; the gradients are as this rank's passes have left them."""
        with self._lock:
            for group in self._bucketing.groups:
                group.forget()
            for member in self._filled:
                member.parameter.grad = None
            self._filled.clear()
            self._bursts.forget()
            for passenger in self.passengers:
                passenger.take_back()
            if self._settings.keeps_residuals:
                residuals.take_back(self._session, f"{self._members.prefix}.", self._turns)

    @property
    def awaits_how(self) -> bool:
        """Whether the others have yet to say if the gradients of this step are compressed: none leaves before."""
        return self._beginning is not None and self._beginning.is_open

    def announce(self, stage: Stage, waits: bool = False) -> Said:
        """Submits what this rank has, for the maximum over all; ``waits`` if this thread waits for it next."""
        codes: bytes | bytearray = self.step.codes
        if MISSING in codes:
            members = zip(self._members, codes, strict=True)
            codes = bytes(self._code_of(member, stage) if code == MISSING else code for member, code in members)
        self.note_joins()
        beginning = self._beginning
        if beginning is None:
            return self._rounds.announce(codes, stage, waits=waits)
        return self._rounds.announce(codes, stage, beginning.says, waits, beginning.is_exact)

    def _code_of(self, member: OptimizedParameter, stage: Stage) -> int:
        """The code of a parameter whose gradient no hook has completed."""
        gradient = member.parameter.grad
        frozen = 0 if member.parameter.requires_grad else FROZEN
        if gradient is None:
            return FROZEN | SETTLED if frozen else MISSING
        if stage is Stage.PASS_ENDED:
            complete = self._passes.has_all(member.index)
        else:
            complete = stage is Stage.CLOSING and self._is_new(member)
        if not complete:
            return frozen | MISSING
        return frozen | (SPARSE_64 if gradient.is_sparse else DENSE)

    def _is_new(self, member: OptimizedParameter) -> bool:
        """Whether what lies in a gradient is more than the result of the step before."""
        if self.step.reopened:
            return self._passes.has_come(member.index) or not member.is_result()
        return not member.holds_result()

    def _submit_where(self, codes: bytes, whole_groups_only: bool) -> None:
        """Submits the gradients that the codes call for, unless they have left already."""
        for group in self._bucketing.groups:
            if group.submitted:
                continue
            unsettled = group.unsettled(self.step.codes)
            members = [member for member in unsettled if is_there(codes[member.index])]
            if members and not (whole_groups_only and len(members) < len(group.members)):
                for member in members:
                    if self.guard is not None and member.parameter.grad is None:
                        self._filled.append(member)
                    member.fill(codes[member.index] == SPARSE_64)
                self._bursts.submit(group, members, waits=True)

    def _take_results(self) -> Iterator[Operation]:
        submitted = [group for group in self._bucketing.groups if group.submitted]
        for group in submitted:  # all that follows is on its way before any of it is awaited
            if group.goes_on:
                yield from self._arrival_of(group)
                self._bursts.go_on(group)
        for group in submitted:
            yield from self._arrival_of(group)
            try:
                with torch.no_grad():
                    self._take(group)
            except RingtrainError as problem:
                self._bursts.note_problem(problem)
        said = yield from self._rounds.answer()
        yield from self._rounds.require_equal()
        self._bursts.raise_problem()
        if self._beginning is not None:
            self._beginning.note_round(said.compresses_next)

    def _arrival_of(self, group: Group) -> Iterator[Operation]:
        for operation in group.waiting():
            while not self._is_over(operation):
                yield operation
                if not self._is_over(operation) and self._rounds.lists_differ():  # it may have come to no other rank
                    yield from self._rounds.answer()
                    yield from self._rounds.require_equal()

    def _is_over(self, operation: Operation) -> bool:
        """Whether its result may be taken; one that others are told of must be there, and not on a GPU's queue alone."""
        return operation.done() if self.guard is None else operation.finished()

    def _take(self, group: Group) -> None:
        if self.guard is None:
            group.take_results(self._settings.compressor)
        elif (problem := group.hold()) is not None:
            raise problem

    def _settle(self, agreed: Said, stage: Stage) -> None:
        self._has_unused_results = self._settings.keeps_residuals or self._beginning is not None
        self.step.settle(agreed.codes, agreed.is_last(stage))
        if self.step.closed and stage is not Stage.DISCARDING:
            self._passes.close_step()
        for group in self._bucketing.groups:
            group.note_settled(self.step.codes)
        self._rounds.succeed()
        self._bucketing.note(agreed.codes, self.step.closed)

    # ---- steps ----

    def begin_step(self, reopened: bool = False) -> None:
        """Opens what is settled again; what a hook has submitted meanwhile is the new step's."""
        for group in self._bucketing.groups:
            group.reopen()
        if self.step.closed:
            self._bucketing.renew(self._members.prefix)
        self._passes.begin_step(self.step.settled(), reopened)
        self.step.begin(len(self._members), reopened)

    def open_again(self, reopened: bool) -> None:
        """Opens what is settled; ``discard`` holds a round or none by what all ranks know, also after a pass that sends nothing.

        That the step was closed is known to all ranks, but not that a pass of this rank has reached what is settled.
        """
        ended = self.step.closed
        self.begin_step(reopened)
        if ended:
            self.step.note_end()

    def reset(self) -> None:
        """Starts anew after an error, which all ranks have seen, or without what this rank had begun."""
        for group in self._bucketing.groups:
            group.forget()
        self.take_back_unused()
        self._bursts.forget()
        for passenger in self.passengers:
            passenger.forget()
        self._rounds.forget()
        self._passes.forget()
        self.step.forget()
        self.begin_step()

    def take_back_unused(self) -> None:
        """The reduced gradients are given up, as after an overflow: so is what compression has lost of them."""
        self.settle_residuals(used=False)

    def settle_residuals(self, used: bool) -> None:
        """The reduced gradients were used by a step, so that what compression has lost of them stays lost; or they are given up."""
        if self._has_unused_results:
            self._has_unused_results = False
            self._members.feedback().settle(used)

    def note_step(self) -> None:
        """The optimizer has stepped."""
        self._rounds.note_step()

    @property
    def has_announced(self) -> bool:
        """Whether a round has begun, of which the end has not been awaited."""
        return self._rounds.announced is not None
