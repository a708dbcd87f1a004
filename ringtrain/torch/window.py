"""One optimizer's windows: from hooks through agreement on what is complete to reduced gradients.

A window is what happens between two steps. Gradients start to travel from autograd's hooks in the backward pass that
completes them, the ``passes_per_step``-th of the window, small ones in bursts, and have arrived when that pass ends.
So whoever reads them afterwards, a ``GradScaler`` or ``clip_grad_norm_``, sees those of all ranks. ``optimizer`` owns one
``GradientReduction`` for each distributed optimizer; ``gradients`` sends.

Rounds. Ranks may run different branches of a model, so a gradient may come on some ranks only. Its average then counts
zeros for the others, as the concatenated batch would; one that no rank has stays ``None``, so that weight decay and
momentum leave it alone. No rank can see alone what the others have, and an operation needs every member. So a round
begins with one small maximum over a code for each parameter, and then every rank sends what any rank has. The pass that
completes gradients ends with a round; ``step()`` and ``synchronize()`` hold rounds until every rank is there and nothing
is left. A rank that has everything need not await the maximum, which its last hook has submitted.
"""

import enum
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from ringtrain.context import Context, Operation
from ringtrain.errors import InvalidArgumentError, RingtrainError
from ringtrain.torch.agreement import DENSE, MISSING, SETTLED, SPARSE, Agreement
from ringtrain.torch.backward import BackwardPass, take_turns
from ringtrain.torch.gradients import Group, Member, Reduction
from ringtrain.torch.hooks import attach, dismiss, enlist, others
from ringtrain.torch.plan import Plan

# Small gradients leave together: the first finds caches that the pass has filled with data, the others warm ones.
_BURST_BYTES = 1 << 20


class Stage(enum.Enum):
    """Why a rank holds a round."""

    PASS_ENDED = "more passes may follow in this window"
    CLOSING = "this rank steps next"
    DISCARDING = "this rank gives up the window's gradients"


class GradientReduction:
    """Hooks, rounds and the current window of one optimizer.

    Args:
        how: the settings, the same on all ranks.
        prefix: of all names that this optimizer submits; unique among the optimizers of the process set.
        passes_per_step: backward passes that are summed here before their gradients travel.
        averages_passes: whether the sum is then divided by ``passes_per_step``.
        makes_buckets: whether gradients become views of buckets once the steps are alike.

    Attributes:
        skipping: True while the user's ``skip_synchronize`` block runs.
        quiet: True while the user's ``no_sync`` block runs.
        asked: True once the user has called ``synchronize()`` in this window.
        closed: True once every gradient of the window is settled on all ranks.
        stepped: True once ``step()`` was called.
    """

    def __init__(self, how: Reduction, prefix: str, passes_per_step: int, averages_passes: bool, makes_buckets: bool):
        self.how = how
        self.prefix = prefix
        self.passes_per_step = passes_per_step
        self.skipping = self.quiet = self.asked = self.closed = self.stepped = False
        self._averages_passes = averages_passes
        self._names: dict[torch.Tensor, str] = {}  # prefix included
        self._plan = Plan(prefix, makes_buckets)
        self._members: list[Member] = []
        self._hooks: dict[torch.Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._lost_to: tuple[str, str] | None = None  # name of a parameter and the later optimizer that reduces it
        self._pass = BackwardPass(self._end_pass)
        # of the window
        self._first_pass = 1
        self._codes = bytearray()  # what this rank has: MISSING until a hook completes it
        self._gathered: list[tuple[Group, list[Member]]] = []  # complete here, and not submitted yet
        self._gathered_bytes = 0
        self._ready_count = 0
        self._unsettled_count = 0
        self._unended = True  # whether no step has come since zero_grad(), or at all
        self._witness: Member | None = None  # one whose gradient was reduced
        self._problems: list[RingtrainError] = []  # what this rank had to refuse
        self._agreement = Agreement(how.context, how.process_set, f"{prefix}.used")
        self._lock = threading.Lock()  # hooks of several devices run in several threads
        self._round_lock = threading.Lock()
        enlist(self)

    def __reduce__(self) -> tuple:
        """Copies and pickles of an optimizer are plain optimizers: hooks and a world do not travel."""
        return type(None), ()

    @property
    def context(self) -> Context:
        """The rank that this optimizer acts for."""
        return self.how.context

    # ---- parameters ----

    def add_names(self, names: Mapping[torch.Tensor, str]) -> None:
        """Names parameters, those of this optimizer or others that may be added later; the first name stays."""
        for parameter, name in names.items():
            self._names.setdefault(parameter, f"{self.prefix}.{name}")

    def add(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Takes over further parameters, which have names, in groups and an order that are the same on all ranks."""
        if self._in_flight():
            self.synchronize()
        for other in others(self):
            other._release({parameter for parameters in groups for parameter in parameters}, self)
        self._plan.add([self._group_of(parameters, number) for number, parameters in enumerate(groups, self._plan.given_count)])
        self._begin_window()

    def _group_of(self, parameters: Sequence[torch.Tensor], number: int) -> Group:
        group = Group(self._names[parameters[0]] if len(parameters) == 1 else f"{self.prefix}.group.{number}", [])
        for parameter in parameters:
            member = Member(parameter, self._names[parameter], len(self._members), group)
            group.members.append(member)
            self._members.append(member)
            self._attach(member)
        return group

    def close(self) -> None:
        """Removes the hooks; what is pending is finished first."""
        if self._in_flight():
            self.synchronize()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        dismiss(self)

    def _attach(self, member: Member) -> None:
        hook = attach(self, member.parameter, member.index)
        if hook is not None:
            self._hooks[member.parameter] = hook

    def _release(self, parameters: set[torch.Tensor], owner: "GradientReduction") -> None:
        """Leaves parameters to an optimizer that was made later: two would reduce one gradient twice."""
        lost = [parameter for parameter in self._hooks if parameter in parameters]
        if lost and self._in_flight():
            self.synchronize()
        for parameter in lost:
            self._hooks.pop(parameter).remove()
        if lost and self._lost_to is None:
            self._lost_to = self._names[lost[0]], owner.prefix

    def _require_own(self) -> None:
        if self._lost_to is not None:
            name, owner = self._lost_to
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected to reduce '{name}' but '{owner}' does, which was made later over the "
                "same parameter. Give each parameter to one distributed optimizer."
            )

    # ---- the way out: hooks ----

    def on_gradient(self, index: int) -> None:
        """For the hooks: a backward pass has added to the gradient of a parameter."""
        member = self._members[index]
        with self._lock:
            nested = self._pass.enter()
            if member.settled:
                self._begin_again(member)
            if not nested or member.backward != self._pass.number:
                member.passes += 1
                member.backward = self._pass.number
            gradient = member.parameter.grad
            member.version = gradient._version
            completes = not self.quiet and member.passes >= self.passes_per_step
            self._pass.completes |= completes
            if nested or not completes:
                return  # nested: another part of this pass may add to it; the round at its end sends it
            if self._codes[member.index] != MISSING:
                raise InvalidArgumentError(self._too_many(member))
            self._codes[member.index] = SPARSE if gradient.is_sparse else DENSE
            self._gather(member)
            self._ready_count += 1
            if self._ready_count == self._unsettled_count and self._agreement.announced is None:
                self._submit_gathered()
                self._announce(Stage.PASS_ENDED)

    def _end_pass(self) -> None:
        if not self._pass.runs:
            return  # several parts of the pass have asked to be told
        completes = self._pass.completes
        self._pass.forget()
        if completes:
            take_turns(self._round(Stage.PASS_ENDED))

    def _begin_again(self, member: Member) -> None:
        """A gradient that was settled comes anew: the window is over, unless it was added to what was reduced."""
        if member.holds_result(additions=1):
            raise InvalidArgumentError(self._too_many(member))
        self._begin_window()
        self._unended = False

    def _too_many(self, member: Member) -> str:
        return (
            f"backward '{member.name}': expected {self.passes_per_step} backward passes in a step but found another "
            "one. Call step() or zero_grad(), raise backward_passes_per_step, or use no_sync()."
        )

    def _gather(self, member: Member) -> None:
        """Notes a gradient that is complete here; submits when there is enough for a burst. A big one leaves at once."""
        group = member.group
        group.ready_count += 1
        self._gathered_bytes += member.parameter.nbytes
        if group.complete:
            self._gathered.append((group, group.unsettled()))
            if self._gathered_bytes >= _BURST_BYTES:
                self._submit_gathered()

    def _submit_gathered(self) -> None:
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        for group, members in gathered:
            self._submit(group, members)

    def _submit(self, group: Group, members: Sequence[Member]) -> None:
        """Submits, and goes on after a refusal: the other ranks wait for the rest."""
        postscale = self.how.postscale / (self.passes_per_step if self._averages_passes else 1)
        try:
            group.submit(members, self.how, postscale)
        except RingtrainError as problem:
            self._problems.append(problem)

    # ---- rounds ----

    def _round(self, stage: Stage) -> Iterator[Operation]:
        """Holds one round; yields the operations that it waits for."""
        with self._round_lock:
            try:
                with self._lock:
                    self._submit_gathered()
                    if self._agreement.announced is None:
                        self._announce(stage)
                    has_all = self._ready_count == self._unsettled_count
                    self._submit_where(self._agreement.announced, whole_groups_only=True)
                agreed = self._agreement.announced if has_all else (yield from self._agreement.answer())
                with self._lock:
                    self._submit_where(agreed, whole_groups_only=False)
                yield from self._take_results()
                self._settle(agreed, stage)
            except BaseException:
                self._reset()
                self._unended = False  # the others have seen the end of this window too
                raise

    def _announce(self, stage: Stage) -> None:
        codes = self._codes
        if MISSING in codes:
            members = zip(self._members, codes, strict=True)
            codes = bytes(self._code_of(member, stage) if code == MISSING else code for member, code in members)
        self._agreement.announce(codes, more_may_follow=stage is Stage.PASS_ENDED)

    def _code_of(self, member: Member, stage: Stage) -> int:
        """The code of a parameter whose gradient no hook has completed."""
        gradient = member.parameter.grad
        if gradient is None:
            return MISSING if member.parameter.requires_grad else SETTLED
        if stage is Stage.PASS_ENDED:
            # A gradient with fewer passes is complete too, unless the micro-batches have several passes each: then the
            # pass for this one may be still to come.
            one_a_batch = self._pass.number - self._first_pass < self.passes_per_step
            complete = member.passes > 0 and (one_a_batch or member.passes >= self.passes_per_step)
        else:
            complete = stage is Stage.CLOSING and not member.holds_result()
        if not complete:
            return MISSING
        return SPARSE if gradient.is_sparse else DENSE

    def _submit_where(self, codes: bytes, whole_groups_only: bool) -> None:
        """Submits the gradients that the codes call for, unless they have left already."""
        for group in self._plan.groups:
            if group.submitted:
                continue
            unsettled = group.unsettled()
            members = [member for member in unsettled if codes[member.index] >= DENSE]
            if members and not (whole_groups_only and len(members) < len(unsettled)):
                for member in members:
                    member.fill(codes[member.index] == SPARSE)
                self._submit(group, members)

    def _take_results(self) -> Iterator[Operation]:
        for group in self._plan.groups:
            if group.submitted:
                for operation in group.waiting():
                    while not operation.settled():
                        yield operation
                try:
                    with torch.no_grad():
                        group.take_results(self.how.compressor)
                except RingtrainError as problem:
                    self._problems.append(problem)
        yield from self._agreement.answer()
        if self._problems:
            raise self._problems[0]

    def _settle(self, codes: bytes, stage: Stage) -> None:
        last = stage is not Stage.PASS_ENDED and not codes[-1]
        for group in self._plan.groups:
            for member in group.unsettled():
                code = codes[member.index]
                if code >= DENSE:
                    self._witness = member
                elif code == MISSING and not last:
                    continue
                member.settled = True
                self._codes[member.index] = SETTLED
            group.settled_count = sum(member.settled for member in group.members)
        self._unsettled_count = self._codes.count(MISSING)
        self._ready_count = 0
        self._agreement.forget()
        self.closed = self._unsettled_count == 0
        self._plan.note(codes[:-1], self.closed)

    # ---- windows ----

    def _begin_window(self) -> None:
        """Opens what is settled again; what a hook has submitted meanwhile is the new window's."""
        for group in self._plan.groups:
            group.begin()
        if self.closed:
            self._plan.renew()
        open_codes = bytes(MISSING if code == SETTLED else code for code in self._codes)
        self._codes = bytearray(open_codes.ljust(len(self._members), bytes([MISSING])))
        self._unsettled_count = len(self._members)
        self._first_pass = self._pass.number + (not self._pass.runs)
        self._witness = None
        self.asked = self.closed = False

    def _reset(self) -> None:
        """Starts anew after an error, which all ranks have seen, or without what this rank had begun."""
        for group in self._plan.groups:
            group.forget()
            for member in group.members:
                member.passes, member.settled = 0, False
            group.settled_count = 0
        self._codes = bytearray()
        self._gathered.clear()
        self._gathered_bytes = self._ready_count = 0
        self._problems = []
        self._agreement.forget()
        self._pass.forget()
        self._begin_window()

    def _in_flight(self) -> bool:
        """Whether a hook has submitted something of which no round has taken the result."""
        return self._ready_count > 0 or self._agreement.announced is not None

    def _close(self, stage: Stage) -> None:
        while not self.closed:
            for operation in self._round(stage):
                with suppress(RingtrainError):  # the round looks at it itself
                    operation.wait()

    # ---- what the optimizer asks for ----

    def synchronize(self) -> None:
        """Returns when every gradient that any rank has is reduced and all ranks have called this, or step.

        Raises:
            RingtrainError: ranks disagree about a gradient, or the world ended. Nothing is pending afterwards.
        """
        self._require_own()
        if self.closed and self._witness is not None and self._witness.has_lost_result():
            self._reset()  # closed for a step that was skipped, and zeroed since
        self._close(Stage.CLOSING)

    def synchronize_unchanged(self) -> None:
        """``synchronize`` where the user has not called it, and so may have taken this rank's gradients for everybody's."""
        for member in self._members:
            if not self.closed and member.is_changed():
                raise InvalidArgumentError(
                    f"step '{member.name}': expected the gradient as backward() left it, since it is not reduced yet, "
                    "but found it changed. In a window that is cut short, call synchronize() before you unscale or clip."
                )
        self.synchronize()

    def before_step(self) -> bool:
        """Reduces what is not reduced yet; returns False if the user had asked for that and forgot the skip block."""
        self._require_own()
        if not self.skipping:
            self.synchronize_unchanged()
        elif not self.closed:
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected reduced gradients inside skip_synchronize() but found some that are "
                "not. Call synchronize() before."
            )
        forgotten = self.asked and not self.skipping
        self._reset()
        self._unended = False
        return not forgotten

    def discard(self) -> None:
        """Before gradients are set to zero: begins a new window.

        If the one before came to no end, all ranks give it up together here: one of them may have had no gradient in
        it and know nothing of what the others have sent.
        """
        if not self.closed and (self._unended or self._in_flight()):
            self._close(Stage.DISCARDING)
        self._reset()
        self._unended = True

    def restart(self) -> None:
        """Begins a new window on this rank, which may be the only one that loads a state."""
        if self._in_flight():
            self._close(Stage.DISCARDING)
        self._reset()

    @contextmanager
    def silence(self) -> Iterator[None]:
        """A block of passes that only add to the gradients of this rank."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before
