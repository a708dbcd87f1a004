"""One optimizer's exchange of gradients: from hooks through agreement on what is complete to reduced gradients.

Gradients start to travel from autograd's hooks in the backward pass that completes them, the last of the step's
``passes``, small ones in ``bursts``, and have arrived when that pass ends. So whoever reads them afterwards, a
``GradScaler`` or ``clip_grad_norm_``, sees those of all ranks.

The pass that completes gradients ends with a round (``ringtrain.gradients.rounds``); ``step()`` and ``synchronize()``
hold rounds until every rank is there and nothing is left. A rank that has everything need not await the maximum that a
round begins with, which its last hook has submitted.

Reduced gradients may be added to before the step, by further passes than were announced or after ``synchronize()``: the
step opens again, and what lies in ``p.grad`` then, reduced part included, is averaged once more. All ranks have the same
reduced part, which an average leaves as it is.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import torch

from ringtrain import log, ranges
from ringtrain.context import Context
from ringtrain.errors import InvalidArgumentError, RingtrainError
from ringtrain.gradients import residuals
from ringtrain.gradients.guard import Part, Passenger, StepGuard
from ringtrain.gradients.presence import DENSE, MISSING, SETTLED, SPARSE_64, after_round, is_there
from ringtrain.gradients.rounds import Rounds, Said, Stage
from ringtrain.numbering import next_number
from ringtrain.pending import Operation
from ringtrain.torch.backward import OneByOne, PassPart, take_turns, wait_for
from ringtrain.torch.bucketing import Bucketing, Growth, growth_of_groups
from ringtrain.torch.bursts import Bursts
from ringtrain.torch.gradients import Group, Member, ReductionSettings
from ringtrain.torch.overlap import overlap_pays
from ringtrain.torch.passes import Passes
from ringtrain.torch.powersgd import Beginning, Memory, settle, shape_of
from ringtrain.torch.step import Step
from ringtrain.torch.timetable import Timetable

MakeGroup = Callable[[str, list[Member]], Group]


class Exchange:
    """Parameters of one optimizer, and where their gradients are in the current step.

    Args:
        settings: how gradients are combined, the same on all ranks.
        passes_per_step: backward passes that are summed here before their gradients travel.
        averages_passes: whether the sum is then divided by ``passes_per_step``.
        makes_buckets: whether gradients become views of buckets once the steps are alike.
        make_group: makes groups of another kind, which stay as they are; None for those of ``gradients``.

    Attributes:
        settings: as given.
        prefix: of all names that this optimizer submits; unique among the optimizers of the process set.
        passes: counts backward passes.
        step: what is settled.
        passengers: what travels in the rounds of steps that survive, beside the gradients.
    """

    def __init__(
        self, settings: ReductionSettings, passes_per_step: int, averages_passes: bool, makes_buckets: bool,
        make_group: MakeGroup | None = None,
    ):  # fmt: skip
        self.settings = settings
        self.passes = Passes(self.look, self._end_pass, passes_per_step, averages_passes)
        self.step = Step()
        self._timetable = Timetable()
        self._session = settings.session
        self._bursts = Bursts(settings, self.passes)
        self._make_group = make_group or Group
        self._bucketing = Bucketing(Growth.NONE if make_group else growth_of_groups(settings, makes_buckets))
        self._names: dict[torch.Tensor, str] = {}  # prefix not included
        self._has_unused_results = False  # gradients were reduced, and no step has used them so far
        self._guard: StepGuard | None = None
        self._one_by_one: OneByOne | None = None
        self.passengers: list[Passenger] = []
        self._has_told_cost = False
        self._turns = -1  # of the core's residuals, when results were released last
        self._filled: list[Member] = []  # given zeros for the round under way
        self._members: list[Member] = []
        powersgd = settings.powersgd
        self._beginning = None if powersgd is None else Beginning(settings.session, powersgd.start_after)
        self._lock = threading.Lock()  # hooks of several devices run in several threads
        self._under_way: Iterator[Operation] | None = None  # the round, until it has ended
        self._enter_world()

    @property
    def number(self) -> int:
        """The place of this optimizer among those of its world."""
        return int(self.prefix.rpartition(".")[2])

    @property
    def context(self) -> Context:
        """The rank that this optimizer acts for, in the current epoch."""
        return self._session.context

    # ---- worlds ----

    def catch_up(self) -> None:
        """Before anything is asked of the gradients: goes on in the present world, and looks at all that has come."""
        if (
            self._under_way is not None
        ):  # an exception of this rank alone, as Ctrl-C in a wait, has left it: the others are in it
            wait_for(self._under_way)
        self.follow_world()
        self.passes.look_at_all()

    def follow_world(self) -> None:
        """If another world has taken the place of the one before, starts anew in it, as a new optimizer does."""
        if self._session.has_moved():
            self._has_unused_results = False
            settle(self.memories(), used=False)
            self._enter_world()
            self._bucketing.restart()
            self.reset()
            self.step.note_discarded()

    def _enter_world(self) -> None:
        # Optimizers are numbered, so that two that hold parameters of equal names never share a name.
        number = next_number(self._session.context, self._session.process_set_id, "optimizer")
        self.prefix = f"optimizer.{number}"
        self._rounds = Rounds(self._session, f"{self.prefix}.used", self.settings.terms, self.settings.replica())
        if self._beginning is not None:
            self._beginning.enter_world()
        self._joins = self._session.context.joins
        self._choose_overlap()
        for member in self._members:
            member.name = self.name_of(member.parameter)
        for number, group in enumerate(self._bucketing.given):
            group.name = self._group_name(number, [member.parameter for member in group.members])

    def _note_joins(self) -> None:
        """After ``join`` all ranks are between two steps, those that had no batch at all too, whatever the others did."""
        joins = self._session.context.joins
        if self._joins != joins:
            self._joins = joins
            self.step.note_end()
            self._bucketing.restart()  # a rank that had joined has not seen the steps of the others

    # ---- steps that survive a change of the world ----

    def keep_inputs_for(self, guard: StepGuard, one_by_one: OneByOne | None) -> None:
        """From now on results are held beside the gradients until the guard releases them; there are no buckets.

        Args:
            guard: which releases one round after the other.
            one_by_one: of the optimizers that share it; None if there is one.
        """
        self._guard = guard
        self._one_by_one = one_by_one
        self._bursts.keeps_inputs, self._bursts.weight = True, guard.weight
        self._bucketing.end()

    def is_kept_for(self, guard: StepGuard) -> bool:
        """Whether that guard is the one which releases the rounds."""
        return self._guard is guard

    def go_on_in_world(self) -> None:
        """Another world has taken the place of the one before; the step under way goes on, and is submitted anew."""
        former = self.prefix
        if self._session.has_moved():
            self._enter_world()
            if self.prefix != former and self.settings.keeps_residuals:
                residuals.forget(self._session, f"{self.prefix}.")  # another optimizer's, which is gone
            if self._under_way is None:  # else it sees itself to what hooks have submitted
                self._take_back()

    def renumber(self) -> None:
        """Goes on under the next number, in the present world, in which nothing was sent so far."""
        self._session.has_moved()
        self._enter_world()

    # ---- parameters ----

    def add_names(self, names: Mapping[torch.Tensor, str]) -> None:
        """Names parameters, those of this optimizer or others that may be added later; the first name stays."""
        for parameter, name in names.items():
            self._names.setdefault(parameter, name)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The identity of a parameter among the ranks."""
        return f"{self.prefix}.{self._names[parameter]}"

    def add(self, groups: Sequence[Sequence[torch.Tensor]]) -> range:
        """Takes over further parameters, in groups; returns their places."""
        first, first_group = len(self._members), len(self._bucketing.given)
        self._bucketing.add(
            [self._group_of(parameters, number) for number, parameters in enumerate(groups, first_group)]
        )
        self.passes.add(len(self._members) - first)
        self._choose_overlap()
        self.begin_step()
        return range(first, len(self._members))

    def _choose_overlap(self) -> None:
        self._bursts.overlap = overlap_pays(self._session, (member.parameter for member in self._members))

    def parameter(self, index: int) -> torch.Tensor:
        """The parameter at a place."""
        return self._members[index].parameter

    def _group_of(self, parameters: Sequence[torch.Tensor], number: int) -> Group:
        first = len(self._members)
        self._members += [
            Member(parameter, self.name_of(parameter), index, memory=self._memory_of(parameter))
            for index, parameter in enumerate(parameters, first)
        ]
        return self._make_group(self._group_name(number, parameters), self._members[first:])

    def _group_name(self, number: int, parameters: Sequence[torch.Tensor]) -> str:
        return self.name_of(parameters[0]) if len(parameters) == 1 else f"{self.prefix}.group.{number}"

    def memories(self) -> list[Memory]:
        """What PowerSGD keeps of gradients, in the order of the parameters."""
        return [member.memory for member in self._members if member.memory is not None]

    @property
    def beginning(self) -> Beginning | None:
        """When PowerSGD begins; None without it."""
        return self._beginning

    def _memory_of(self, parameter: torch.Tensor) -> Memory | None:
        powersgd, beginning = self.settings.powersgd, self._beginning
        if powersgd is None or beginning is None:
            return None
        shape = shape_of(powersgd, parameter)
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return None if shape is None else Memory(shape, self._names[parameter], dtype, beginning)

    # ---- the way out: hooks ----

    @property
    def parts(self) -> dict[int, PassPart]:
        """For the hooks: those of the pass under way."""
        return self.passes.parts

    def begin_part(self) -> PassPart:
        """For the hooks: the first gradient has come in a part of a backward pass."""
        if self._under_way is not None:
            raise InvalidArgumentError(
                f"backward '{self.prefix}': expected zero_grad() or step() of this optimizer after a backward pass in whose end an "
                "exception was raised, but found another pass. The gradients of all ranks are on their way; call one of them first."
            )
        self.passes.look_at_all()  # in their order: what came in a pass that has failed, or around this one
        with self._lock:
            if not self._session.context.usable:
                self.follow_world()
            self._note_joins()
            return self._enter_part()

    def _enter_part(self) -> PassPart:
        part = self.passes.enter()
        is_open = self._guard is None and self.step.is_open
        self._timetable.begin(self.parts, part, self.passes.number_in_step, is_open)
        return part

    def look(self, part: PassPart) -> None:
        """For the hooks: a backward pass has added to gradients. What is complete leaves, when there is enough of it."""
        with self._lock:
            some_left = False
            for index in part.unseen():
                some_left |= self._take_in(self._members[index], part.nested)
            self._timetable.note(part, some_left)

    def _take_in(self, member: Member, nested: bool) -> bool:
        """Notes that a pass has added to a gradient; returns whether some leave now."""
        index, step = member.index, self.step
        if step.codes[index] == SETTLED:
            self._begin_again(member)
        gradient = member.parameter.grad
        if gradient is None or not self.passes.count(index, gradient, nested):
            return False
        if step.codes[index] != MISSING:
            raise InvalidArgumentError(self._too_many(member))
        has_all = step.complete(index, SPARSE_64 if gradient.is_sparse else DENSE)
        if self._awaits_how:
            return False
        some_left = self._bursts.gather(member, step.codes)
        if not has_all or not self._bursts.overlap or self._rounds.announced is not None:
            return some_left
        self._bursts.leave()
        try:
            self._announce(Stage.PASS_ENDED)
        except RingtrainError:
            if self._guard is None:  # else the round at the end of this pass goes on with it
                raise
        return True

    def note_passenger(self) -> None:
        """A backward pass has brought something for a passenger, which has no hook. Where gradients come, these complete the step."""
        with self._lock:
            self._enter_part()
            if not any(member.parameter.requires_grad for member in self._members):
                self.passes.count_rows()

    def _end_pass(self) -> None:
        with ranges.around("ringtrain.end of backward"):
            if self._one_by_one is None:
                take_turns(self._begin_round(Stage.PASS_ENDED))
            else:
                self._one_by_one.call(self.number, lambda: self._hold_round(Stage.PASS_ENDED))

    def _begin_again(self, member: Member) -> None:
        """A gradient that was settled comes anew: the step is over, unless it was added to what was reduced.

        To that only where reducing it once more leaves it as it is.
        """
        asked = self.step.asked
        is_added = member.holds_result(additions=1)
        if is_added and not self.may_reduce_again:
            raise InvalidArgumentError(self._again(member) if asked else self._too_many(member))
        if not is_added:
            self._take_back_unused()
        elif not asked:
            self._tell_what_passes_cost(member)
        self._open_again(reopened=asked or is_added)

    def _open_again(self, reopened: bool) -> None:
        """Opens what is settled; ``discard`` holds a round or none by what all ranks know, also after a pass that sends nothing.

        That the step was closed is known to all ranks, but not that a pass of this rank has reached what is settled.
        """
        ended = self.step.closed
        self.begin_step(reopened)
        if ended:
            self.step.note_end()

    def _tell_what_passes_cost(self, member: Member) -> None:
        if not self._has_told_cost:
            self._has_told_cost = True
            log.logger.warning(
                f"backward '{member.name}': a pass has added to gradients that were reduced already, and all that it reaches "
                "travels again, as often in each step. The result is right. To send them once, set backward_passes_per_step, "
                f"or run all passes but the last one within no_sync(){self.passes.at_an_epochs_end()}"
            )

    @property
    def may_reduce_again(self) -> bool:
        """Whether gradients that are reduced, and so equal on all ranks, stay what they are when they are reduced again."""
        return self.settings.averages and self.passes.divisor == 1 and self._beginning is None

    def _too_many(self, member: Member) -> str:
        return (
            f"backward '{member.name}': expected {self.passes.per_step} backward passes in a step but found another "
            f"one, whose gradient was added to the reduced one. {self.passes.instead_of_another()}. op=Average alone would reduce it "
            "once more."
        )

    def _again(self, member: Member) -> str:
        setting = "average_aggregated_gradients" if self.settings.averages else "op=Sum"
        setting = setting if self._beginning is None else "PowerSGD"
        return (
            f"backward '{member.name}': expected step() or zero_grad() after synchronize() but found a backward pass, whose "
            f"gradient was added to the reduced one. With {setting} the reduced part cannot be reduced again and stay what "
            "it is. Use op=Average without it, or call synchronize() once, after the last pass."
        )

    # ---- rounds ----

    def _begin_round(self, stage: Stage) -> Iterator[Operation]:
        """A round, which yields the operations that it waits for."""
        self._under_way = self._round(stage)
        return self._under_way

    def _round(self, stage: Stage) -> Iterator[Operation]:
        try:
            if self._guard is None:
                agreed = yield from self._attempt(stage)
            else:
                agreed = yield from self._guard.run(
                    lambda: self._attempt(stage), lambda agreed: self._part_of(agreed, stage), self._take_back
                )
                self._release()
            self._settle(agreed, stage)
        except BaseException:
            self.reset()
            self._rounds.forget_steps()
            self.step.note_end()  # the others have seen the end of this step too
            raise
        finally:
            self._under_way = None

    def _hold_round(self, stage: Stage) -> None:
        wait_for(self._begin_round(stage))

    def _attempt(self, stage: Stage) -> Generator[Operation, None, Said]:
        """Agrees and reduces; returns what was agreed on. With a guard nothing but ``_release`` changes a gradient."""
        with self._lock:
            self._bursts.leave(waits=True)
            own = self._rounds.announced or self._announce(stage, waits=True)
            knows_all = self.step.has_all and not self._awaits_how
            if not self._awaits_how:
                self._submit_where(own.codes, whole_groups_only=True)
        agreed = own if knows_all else (yield from self._rounds.answer())
        with self._lock:
            if self._beginning is not None:
                self._beginning.decide(agreed.is_exact)
            if self.step.is_open_elsewhere(agreed.codes):
                self._open_again(reopened=True)
            self._submit_where(agreed.codes, whole_groups_only=False)
        yield from self._take_results()
        if self._guard is not None:
            for passenger in self.passengers:
                passenger.reduce(f"{self.prefix}.rows", self._guard.weight(), gives_up=stage is Stage.DISCARDING)
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
                    group.release(self.settings.compressor)
        self._filled.clear()
        for passenger in self.passengers:
            passenger.release()
        self._turns = self._session.context.residual_turns

    def _take_back(self) -> None:
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
            if self.settings.keeps_residuals:
                residuals.take_back(self._session, f"{self.prefix}.", self._turns)

    @property
    def _awaits_how(self) -> bool:
        """Whether the others have yet to say if the gradients of this step are compressed: none leaves before."""
        return self._beginning is not None and self._beginning.is_open

    def _announce(self, stage: Stage, waits: bool = False) -> Said:
        codes: bytes | bytearray = self.step.codes
        if MISSING in codes:
            members = zip(self._members, codes, strict=True)
            codes = bytes(self._code_of(member, stage) if code == MISSING else code for member, code in members)
        self._note_joins()
        beginning = self._beginning
        if beginning is None:
            return self._rounds.announce(codes, stage, waits=waits)
        return self._rounds.announce(codes, stage, beginning.says, waits, beginning.is_exact)

    def _code_of(self, member: Member, stage: Stage) -> int:
        """The code of a parameter whose gradient no hook has completed."""
        gradient = member.parameter.grad
        if gradient is None:
            return MISSING if member.parameter.requires_grad else SETTLED
        if stage is Stage.PASS_ENDED:
            complete = self.passes.has_all(member.index)
        else:
            complete = stage is Stage.CLOSING and self._is_new(member)
        if not complete:
            return MISSING
        return SPARSE_64 if gradient.is_sparse else DENSE

    def _is_new(self, member: Member) -> bool:
        """Whether what lies in a gradient is more than the result of the step before."""
        if self.step.reopened:
            return self.passes.has_come(member.index) or not member.is_result()
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
                    if self._guard is not None and member.parameter.grad is None:
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

    def _is_over(self, operation: Operation) -> bool:
        """Whether its result may be taken; one that others are told of must be there, and not on a GPU's queue alone."""
        return operation.done() if self._guard is None else operation.finished()

    def _take(self, group: Group) -> None:
        if self._guard is None:
            group.take_results(self.settings.compressor)
        elif (problem := group.hold()) is not None:
            raise problem

    def _settle(self, agreed: Said, stage: Stage) -> None:
        self._has_unused_results = self.settings.keeps_residuals or self._beginning is not None
        self.step.settle(agreed.codes, agreed.is_last(stage))
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
            self._bucketing.renew(self.prefix)
        self.passes.begin_step(self.step.settled())
        self.step.begin(len(self._members), reopened)

    def reset(self) -> None:
        """Starts anew after an error, which all ranks have seen, or without what this rank had begun."""
        for group in self._bucketing.groups:
            group.forget()
        self._take_back_unused()
        self._bursts.forget()
        for passenger in self.passengers:
            passenger.forget()
        self._rounds.forget()
        self.passes.forget()
        self.step.forget()
        self.begin_step()

    def close_step(self, stage: Stage) -> None:
        """Holds rounds until every gradient is settled on all ranks."""
        while not self.step.closed:
            self._hold_round(stage)

    def discard(self) -> None:
        """Gives the step up: without a word, unless it came to no end and others may have sent something in it."""
        self._note_joins()
        if not self.step.closed and (self.step.unended or self.in_flight()):
            self.close_step(Stage.DISCARDING)
        self.reset()
        self.step.note_discarded()

    def note_use(self) -> None:
        """A step uses the reduced gradients: what compression has lost of them stays lost until the next ones."""
        self._settle_residuals(used=True)

    def _take_back_unused(self) -> None:
        """The reduced gradients are given up, as after an overflow: so is what compression has lost of them."""
        self._settle_residuals(used=False)

    def _settle_residuals(self, used: bool) -> None:
        if self._has_unused_results:
            self._has_unused_results = False
            if self.settings.keeps_residuals:
                residuals.settle(self._session, f"{self.prefix}.", used)
            settle(self.memories(), used)
            if used and self._beginning is not None:
                self._beginning.note_use()

    def note_step(self) -> None:
        """The optimizer has stepped."""
        self._rounds.note_step()

    def in_flight(self) -> bool:
        """Whether a hook has submitted something of which no round has taken the result, and may still take it."""
        return self.context.usable and (self.step.has_begun or self._rounds.announced is not None)

    def has_lost_results(self) -> bool:
        """Whether gradients were reduced and then dropped, as ``zero_grad`` does."""
        step = self.step
        return step.closed and step.witness is not None and self._members[step.witness].has_lost_result()

    def changed_gradient(self) -> str | None:
        """The name of a parameter whose gradient is not reduced, and not what the last pass left; None if there is none."""
        if self.step.closed:
            return None
        for member, code in zip(self._members, self.step.codes, strict=True):
            if code != SETTLED and self.passes.left_changed(member.index, member.parameter.grad):
                return member.name
        return None
