"""One optimizer's exchange of gradients: from hooks through agreement on what is complete to reduced gradients.

Gradients start to travel from autograd's hooks in the backward pass that completes them, the last of the step's
``passes``, small ones in ``bursts``, and have arrived when that pass ends. So whoever reads them afterwards, a
``GradScaler`` or ``clip_grad_norm_``, sees those of all ranks.

The pass that completes gradients ends with a round (``step_rounds``); ``step()`` and ``synchronize()`` hold rounds until every
rank is there and nothing is left.

Reduced gradients may be added to before the step, by further passes than were announced or after ``synchronize()``: the
step opens again, and what lies in ``p.grad`` then, reduced part included, is averaged once more. All ranks have the same
reduced part, which an average leaves as it is.
"""

import os
import threading
from collections.abc import Iterable, Sequence

import torch

from ringtrain._binding import log, tables
from ringtrain._runtime import ranges
from ringtrain._runtime.context import Context
from ringtrain._runtime.operations import PerItem
from ringtrain._runtime.process_sets import hosts_of
from ringtrain._training import residuals
from ringtrain._training.adapter.numbering import Number
from ringtrain._training.optimizer_arguments import checked_items
from ringtrain._training.powersgd import Beginning, settle
from ringtrain._training.presence import DENSE, MISSING, SETTLED, SPARSE_64
from ringtrain._training.rounds import Stage
from ringtrain._training.session import NewWorld, Session
from ringtrain._training.step_guard import StepGuard
from ringtrain.errors import InvalidArgumentError, RingtrainError
from ringtrain.torch.backward import OneByOne, PassPart, take_turns, wait_for
from ringtrain.torch.bucketing import Bucketing, Growth, growth_of_groups
from ringtrain.torch.bursts import Bursts
from ringtrain.torch.gradients import Group, OptimizedParameter, ReductionSettings
from ringtrain.torch.members import MakeGroup, Members
from ringtrain.torch.passes import Passes
from ringtrain.torch.step_rounds import StepRounds
from ringtrain.torch.timetable import Timetable


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
        members: the parameters, and their names.
        passes: counts backward passes.
        rounds: what ranks agree on and reduce.
        step: what is settled in the current step.
    """

    def __init__(
        self, settings: ReductionSettings, passes_per_step: int, averages_passes: bool, makes_buckets: bool,
        make_group: MakeGroup | None = None,
    ):  # fmt: skip
        self.settings = settings
        self.passes = Passes(self.look, self._end_pass, passes_per_step, averages_passes)
        self._session = settings.session
        self._bursts = Bursts(settings, self.passes)
        self._bucketing = Bucketing(Growth.NONE if make_group else growth_of_groups(settings, makes_buckets))
        self._number = Number(self._session, "optimizer")
        powersgd = settings.powersgd
        self._beginning = None if powersgd is None else Beginning(settings.session, powersgd.start_after)
        self.members = Members(settings, self._bucketing, self._beginning, make_group or Group)
        self._lock = threading.Lock()  # hooks of several devices run in several threads
        self.rounds = StepRounds(
            settings, self.members, self.passes, self._bursts, self._bucketing, self._beginning, self._lock
        )
        self.step = self.rounds.step
        self._timetable = Timetable()
        self._one_by_one: OneByOne | None = None
        self._has_told_cost = False
        self._enter_world()
        self._session.on_new_world(self._go_on)

    @property
    def prefix(self) -> str:
        """Of all names that this optimizer submits; unique among the optimizers of the process set."""
        return self.members.prefix

    @property
    def number(self) -> int:
        """The place of this optimizer among those of its world."""
        return self._number.value

    @property
    def context(self) -> Context:
        """The rank that this optimizer acts for, in the current epoch."""
        return self._session.context

    # ---- worlds ----

    def catch_up(self) -> None:
        """Before anything is asked of the gradients: goes on in the present world, and looks at all that has come."""
        if self.rounds.under_way is not None:  # an exception of this rank alone, as Ctrl-C in a wait, has left it
            wait_for(self.rounds.under_way)  # the others are in it
        self._session.follow()
        self.passes.look_at_all()

    def _go_on(self, change: NewWorld) -> None:
        """In another world: starts anew, as a new optimizer does, or submits the step under way again."""
        former = self.prefix
        self._enter_world()
        if change is NewWorld.ANEW:
            self._begin_anew()
        elif change is NewWorld.GOES_ON:
            self._submit_again(former)

    def _enter_world(self) -> None:
        self.members.rename(self._number.prefix)
        self.rounds.enter_world()
        self._choose_overlap()

    def _begin_anew(self) -> None:
        self.rounds.drop_results()
        settle(self.members.memories(), used=False)
        self._bucketing.restart()
        self.rounds.reset()
        self.passes.items = None
        self.step.note_discarded()

    def _submit_again(self, former: str) -> None:
        if self.prefix != former and self.settings.keeps_residuals:
            residuals.forget(self._session, f"{self.prefix}.")  # another optimizer's, which is gone
        if self.rounds.under_way is None:  # else it sees itself to what hooks have submitted
            self.rounds.take_back()

    # ---- steps that survive a change of the world ----

    def keep_inputs_for(self, guard: StepGuard, one_by_one: OneByOne | None = None) -> None:
        """From now on results are held beside the gradients until the guard releases them, each in memory of its own.

        Args:
            guard: which releases one round after the other.
            one_by_one: of the optimizers that share it; None if there is one.
        """
        self.rounds.guard = guard
        self._one_by_one = one_by_one
        self._bursts.keeps_inputs = True
        if self.settings.op != PerItem:
            passes = self.passes
            self._bursts.weight = lambda: guard.weight() if passes.items is None else passes.items
        self._bucketing.keep_apart(growth_of_groups(self.settings, makes_buckets=False))

    def is_kept_for(self, guard: StepGuard) -> bool:
        """Whether that guard is the one which releases the rounds."""
        return self.rounds.guard is guard

    # ---- parameters ----

    def add(self, groups: Sequence[Sequence[torch.Tensor]]) -> range:
        """Takes over further parameters, in groups; returns their places."""
        places = self.members.add(groups)
        self.passes.add(len(places))
        self._choose_overlap()
        self.rounds.begin_step()
        return places

    def _choose_overlap(self) -> None:
        self._bursts.overlap = overlap_pays(self._session, (member.parameter for member in self.members))

    # ---- the way out: hooks ----

    @property
    def parts(self) -> dict[int, PassPart]:
        """For the hooks: those of the pass under way."""
        return self.passes.parts

    def begin_part(self) -> PassPart:
        """For the hooks: the first gradient has come in a part of a backward pass."""
        if self.rounds.under_way is not None:
            raise InvalidArgumentError(
                f"backward '{self.prefix}': expected zero_grad() or step() of this optimizer after a backward pass in whose end an "
                "exception was raised, but found another pass. The gradients of all ranks are on their way; call one of them first."
            )
        self.passes.look_at_all()  # in their order: what came in a pass that has failed, or around this one
        with self._lock:
            self._session.follow()
            self.rounds.note_joins()
            return self._enter_part()

    def _enter_part(self) -> PassPart:
        part = self.passes.enter()
        is_open = self.rounds.guard is None and self.step.is_open
        self._timetable.begin(self.parts, part, self.passes.number_in_step, is_open)
        return part

    def look(self, part: PassPart) -> None:
        """For the hooks: a backward pass has added to gradients. What is complete leaves, when there is enough of it."""
        with self._lock:
            some_left = False
            for index in part.unseen():
                some_left |= self._take_in(self.members[index], part.nested)
            self._timetable.note(part, some_left)

    def _take_in(self, member: OptimizedParameter, nested: bool) -> bool:
        """Notes that a pass has added to a gradient; returns whether some leave now."""
        index, step = member.index, self.step
        if step.codes[index] == SETTLED:
            self._begin_again(member)
        elif not self.may_reduce_again and not self.passes.has_come(index) and member.holds_result(additions=1):
            self._tell_what_is_reduced_twice(member)
        gradient = member.parameter.grad
        if gradient is None or not self.passes.count(index, gradient, nested):
            return False
        if step.codes[index] != MISSING:
            raise InvalidArgumentError(too_many(member, self.passes))
        has_all = step.complete(index, SPARSE_64 if gradient.is_sparse else DENSE)
        if self.rounds.awaits_how:
            return False
        some_left = self._bursts.gather(member, step.codes)
        if not has_all or not self._bursts.overlap or self.rounds.has_announced:
            return some_left
        self._bursts.leave()
        try:
            self.rounds.announce(Stage.PASS_ENDED)
        except RingtrainError:
            if self.rounds.guard is None:  # else the round at the end of this pass goes on with it
                raise
        return True

    def note_passenger(self) -> None:
        """A backward pass has brought something for a passenger, which has no hook. Where gradients come, these complete the step."""
        with self._lock:
            self._enter_part()
            if not any(member.parameter.requires_grad for member in self.members):
                self.passes.count_rows()

    def _end_pass(self) -> None:
        with ranges.around("ringtrain.end of backward"):
            if self._one_by_one is None:
                take_turns(self.rounds.begin(Stage.PASS_ENDED))
            else:
                self._one_by_one.call(self.number, lambda: self.rounds.hold(Stage.PASS_ENDED))

    def _begin_again(self, member: OptimizedParameter) -> None:
        """A gradient that was settled comes anew: the step is over, unless it was added to what was reduced.

        To that only where reducing it once more leaves it as it is.
        """
        asked = self.step.asked
        is_added = member.holds_result(additions=1)
        if is_added and not self.may_reduce_again:
            raise InvalidArgumentError(self._again(member) if asked else too_many(member, self.passes))
        if not is_added:
            self.rounds.take_back_unused()
        elif not asked:
            self._tell_what_passes_cost(member)
        self.rounds.open_again(reopened=asked or is_added)

    def _tell_what_is_reduced_twice(self, member: OptimizedParameter) -> None:
        if not self._has_told_cost:  # ``p.grad.data.zero_()`` leaves no trace: so it is no error
            self._has_told_cost = True
            log.logger.warning(
                f"backward '{member.name}': expected gradients to be set to zero after step() but found this one as the step left "
                f"it, and a pass has added to it. {self._what_counts_twice()} Call optimizer.zero_grad() before each step."
            )

    def _what_counts_twice(self) -> str:
        op = tables.REDUCTION_CONSTANTS[tables.REDUCTION_BY_ID[self.settings.op]]
        setting = "average_aggregated_gradients" if self.settings.averages else f"op={op}"
        setting = setting if self._beginning is None else "PowerSGD"
        return f"With {setting} the reduced part cannot be reduced again and stay what it is."

    def _tell_what_passes_cost(self, member: OptimizedParameter) -> None:
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

    def _again(self, member: OptimizedParameter) -> str:
        return (
            f"backward '{member.name}': expected step() or zero_grad() after synchronize() but found a backward pass, whose "
            f"gradient was added to the reduced one. {self._what_counts_twice()} Use op=Average without it, or call synchronize() "
            "once, after the last pass."
        )

    # ---- steps ----

    def count(self, items: int) -> None:
        """Adds to the items of this step, or of the next one if all gradients are reduced."""
        self._session.follow()
        self.passes.count_items(checked_items(items))

    def end_step(self) -> None:
        """The optimizer steps with what was reduced."""
        self.rounds.reset()
        self.step.note_end()

    def note_between_steps(self) -> None:
        """All ranks are between two steps here, those that have joined too, and none has sent anything in the next one."""
        self.step.note_end()
        self._bucketing.restart()  # who has joined has not seen the steps of the others

    def discard(self) -> None:
        """Gives the step up: without a word, unless it came to no end and others may have sent something in it."""
        self.rounds.note_joins()
        if not self.step.closed and (self.step.unended or self.in_flight()):
            self.rounds.close_step(Stage.DISCARDING)
        self.rounds.reset()
        self.step.note_discarded()

    def in_flight(self) -> bool:
        """Whether a hook has submitted something of which no round has taken the result, and may still take it."""
        return self.context.usable and (self.step.has_begun or self.rounds.has_announced)

    def has_lost_results(self) -> bool:
        """Whether gradients were reduced and then dropped, as ``zero_grad`` does."""
        step = self.step
        return step.closed and step.witness is not None and self.members[step.witness].has_lost_result()

    def changed_gradient(self) -> str | None:
        """The name of a parameter whose gradient is not reduced, and not what the last pass left; None if there is none."""
        if self.step.closed:
            return None
        for member, code in zip(self.members, self.step.codes, strict=True):
            if code != SETTLED and self.passes.left_changed(member.index, member.parameter.grad):
                return member.name
        return None


def too_many(member: OptimizedParameter, passes: Passes) -> str:
    """What is wrong where a pass has come after the last one of a step."""
    return (
        f"backward '{member.name}': expected {passes.per_step} backward passes in a step but found another "
        f"one, whose gradient was added to the reduced one. {passes.instead_of_another()}. op=Average alone would reduce it "
        "once more."
    )


def overlap_pays(session: Session, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether something would be idle otherwise: a link between hosts, a GPU's copy engines, a core that no rank computes on.

    Where ranks of one host compute on all of its cores, the threads that add up gradients take the cores from those that
    make them: the same work, and switches between threads on top, for which the others wait.
    """
    context = session.context
    if hosts_of(context, session.process_set_id) > 1 or any(parameter.is_cuda for parameter in parameters):
        return True
    return context.local_size * torch.get_num_threads() < len(os.sched_getaffinity(0))
