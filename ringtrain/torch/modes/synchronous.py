"""Gradients of each step are reduced over the ranks before it.

``optimizer`` makes one ``SynchronousMode`` for each optimizer of ``mode=Synchronous()``, and one for exact steps of local
ones; ``exchange`` has the gradients' way.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from typing import Any, TypeVar

import torch

from ringtrain._runtime import ranges
from ringtrain._runtime.context import Context
from ringtrain._runtime.operations import PerItem, Sum
from ringtrain._training.feedback import Feedback
from ringtrain._training.needs import check_needs
from ringtrain._training.rounds import Stage
from ringtrain._training.session import NewWorld
from ringtrain.errors import InvalidArgumentError
from ringtrain.torch import parameters
from ringtrain.torch.coexistence import refuse_shared_parameters
from ringtrain.torch.exchange import Exchange
from ringtrain.torch.gradients import ReductionSettings
from ringtrain.torch.hooks import Hooks, Owner, dismiss, enlist, others
from ringtrain.torch.members import MakeGroup
from ringtrain.torch.modes.base import Arguments, AroundSteps, State, closure_of
from ringtrain.torch.modes.wrapping import Wrapping
from ringtrain.torch.shards import is_shard, replicated
from ringtrain.torch.tensors import buffer_of

_Loss = TypeVar("_Loss")  # a tensor, a number, or None


class SynchronousMode(AroundSteps):
    """The gradients of one optimizer.

    Args:
        settings: how gradients are combined, the same on all ranks.
        passes_per_step: backward passes that are summed here before their gradients travel.
        averages_passes: whether the sum is then divided by ``passes_per_step``.
        makes_buckets: whether gradients become views of buckets once the steps are alike.
        make_group: makes groups of another kind, which stay as they are; None for those of ``gradients``.
    """

    ends_first = False

    def __init__(
        self, settings: ReductionSettings, passes_per_step: int, averages_passes: bool, makes_buckets: bool,
        make_group: MakeGroup | None = None,
    ):  # fmt: skip
        self._exchange = Exchange(settings, passes_per_step, averages_passes, makes_buckets, make_group)
        self._hooks = Hooks()
        self._skipping = False  # while the user's skip_synchronize block runs
        self._has_stepped = False
        self._has_rows = False  # of sharded embeddings, whose gradients have come when backward() returns
        enlist(self)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, wrapping: Wrapping) -> "SynchronousMode":
        """Over all ranks of the process set."""
        settings = wrapping.settings(optimizer, wrapping.process_set)
        return SynchronousMode.over(optimizer, wrapping, settings, wrapping.mode.gradient_as_bucket_view)

    @staticmethod
    def over(
        optimizer: torch.optim.Optimizer, wrapping: Wrapping, settings: ReductionSettings, makes_buckets: bool = False
    ) -> "SynchronousMode":
        """With these settings, which say over which ranks."""
        passes = optimizer.backward_passes_per_step
        made = SynchronousMode(settings, passes, wrapping.averages_passes, makes_buckets)
        current = parameters.names_of(optimizer, {**optimizer._parameter_names})
        made._has_rows = any(map(is_shard, current))
        made.add_names({**(wrapping.known or {}), **current})
        made.add_groups(parameters.grouped(replicated(current), wrapping.groups))
        return made

    @property
    def context(self) -> Context:
        """The rank that this optimizer acts for, in the current epoch."""
        return self._exchange.context

    @property
    def prefix(self) -> str:
        """Of all names that this optimizer submits; unique among the optimizers of the process set."""
        return self._exchange.prefix

    @property
    def settings(self) -> ReductionSettings:
        """How gradients are combined."""
        return self._exchange.settings

    @property
    def averages(self) -> bool:
        """Whether gradients are means, which do not grow with the number of ranks."""
        return self._exchange.settings.op != Sum

    def set_passes_per_step(self, passes: int) -> None:
        """Changes ``passes_per_step``, between two steps."""
        self._exchange.passes.set_per_step(passes)

    def order(self) -> int:
        """Its place among the optimizers of its world."""
        return self._exchange.number

    def enter_world(self, change: NewWorld) -> None:
        """Goes on in the present world; where a step begins anew there, what passes have left is looked at first."""
        if change is NewWorld.ANEW:
            self._exchange.catch_up()
        else:
            self.settings.session.follow(change)

    @property
    def guarded(self) -> Exchange:
        """What a guard of an elastic job releases, and tables travel with."""
        return self._exchange

    # ---- parameters ----

    def add_names(self, names: Mapping[torch.Tensor, str]) -> None:
        """Names parameters, those of this optimizer or others that may be added later; the first name stays."""
        self._exchange.members.add_names(names)

    def add(self, names: Mapping[torch.Tensor, str]) -> None:
        """Takes over parameters that were added to the optimizer, each alone."""
        self._has_rows |= any(map(is_shard, names))
        self.add_names(names)
        self.add_groups(parameters.grouped(replicated(names), None))

    def add_groups(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Takes over further parameters, which have names, in groups and an order that are the same on all ranks."""
        self._exchange.catch_up()
        if self._exchange.in_flight():
            self._complete()
        taken = {parameter for group in groups for parameter in group}
        for other in others(self):
            other.release(taken, self)
        for index in self._exchange.add(groups):
            self._hooks.attach(self._exchange, self._exchange.members[index].parameter, index)

    def close(self) -> None:
        """Removes the hooks; what is pending is finished first."""
        self._exchange.catch_up()
        if self._exchange.in_flight():
            self._complete()
        self._hooks.remove()
        dismiss(self)
        super().close()

    def release(self, parameters: set[torch.Tensor], owner: Owner) -> None:
        """Leaves parameters to an optimizer that was made later: two would reduce one gradient twice."""
        if self._hooks.has_any(parameters):
            if self._exchange.in_flight():
                self._complete()
            self._hooks.release(parameters, owner.prefix)

    def _require_own(self) -> None:
        lost = self._hooks.lost
        if lost is not None:
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected to reduce '{self._exchange.members.name_of(lost.parameter)}' but '{lost.owner}' "
                "does, which was made later over the same parameter. Give each parameter to one distributed optimizer."
            )

    # ---- what is saved ----

    def _feedback(self) -> Feedback | None:
        """What compression has lost of these gradients; between two steps. None without such a compression."""
        if not self.settings.makes_up_for_losses:
            return None
        self._exchange.catch_up()
        return self._exchange.members.feedback()

    def state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[], State]) -> State:
        """The user's; under ``compression`` what that has lost on this rank."""
        return state_with_losses(of_user(), self._feedback() if self.context.usable else None)

    def load_state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[State], None], state: State) -> None:
        """The user's; a begun step starts anew, on this rank, which may be the only one that loads a state."""
        self._exchange.catch_up()
        if self._exchange.in_flight():
            self._exchange.rounds.close_step(Stage.DISCARDING)
        self._exchange.rounds.reset()
        of_user(state)
        feedback = self._feedback()
        if feedback is not None:
            feedback.take(state.get("compression"))

    # ---- what the optimizer asks for ----

    def _refuse_sharing(self, param_groups: Sequence[Mapping[str, Sequence[torch.Tensor]]]) -> None:
        """Before the first step: raises InvalidArgumentError if another library averages these parameters, too."""
        if not self._has_stepped:
            refuse_shared_parameters([parameter for group in param_groups for parameter in group["params"]])
            self._has_stepped = True

    def _complete(self) -> None:
        """Returns when every gradient that any rank has is reduced and all ranks have called this, or step.

        Raises:
            RingtrainError: ranks disagree about a gradient, or the world ended. Nothing is pending afterwards.
        """
        self._exchange.catch_up()
        self._require_own()
        if self._exchange.has_lost_results():
            self._exchange.rounds.reset()  # closed for a step that was skipped, and zeroed since
        with ranges.around("ringtrain.synchronize"):
            self._exchange.rounds.close_step(Stage.CLOSING)

    def synchronize(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """As the user has asked: reduces what ``backward()`` has not."""
        exchange = self._exchange
        exchange.catch_up()
        if (
            exchange.step.closed
            and exchange.step.asked
            and exchange.may_reduce_again
            and not exchange.has_lost_results()
        ):
            exchange.rounds.begin_step(reopened=True)  # another rank may have added to its gradients since
        self._complete()
        exchange.step.note_asked()

    def scales(self, by_itself: bool) -> bool:
        """A ``GradScaler`` looks at the gradients next, and this rank may have had no backward pass."""
        if not self._skipping:
            self._complete_unchanged()
        return by_itself

    def _complete_unchanged(self) -> None:
        """Where the user has not called it, and so may have taken this rank's gradients for those of all ranks."""
        self._exchange.catch_up()
        changed = self._exchange.changed_gradient()
        if changed is not None:
            raise InvalidArgumentError(
                f"step '{changed}': expected the gradient as backward() left it, since it is not reduced yet, "
                "but found it changed. In a step that is cut short, call synchronize() before you unscale or clip."
            )
        self._complete()

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, object]) -> Arguments | None:
        """Reduces what is not reduced yet; of a closure, what it leaves, and its loss."""
        self._refuse_sharing(optimizer.param_groups)
        closure = closure_of(args, kwargs)
        if closure is not None:
            reducing = self._of_all(closure)
            return (
                ((optimizer, reducing, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": reducing})
            )
        if not self._begin_step():
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): nothing is reduced "
                "again. Put the step within that block.",
                stacklevel=4,
            )
        return None

    def _begin_step(self) -> bool:
        """Reduces what is not reduced yet; returns False if the user had asked for that and forgot the skip block."""
        self._require_own()
        if self._skipping:
            self._require_reduced()
        else:
            self._complete_unchanged()
        forgotten = self._exchange.step.asked and not self._skipping
        self._exchange.rounds.settle_residuals(used=True)
        self._exchange.end_step()
        return not forgotten

    def _of_all(self, closure: Callable[[], _Loss]) -> Callable[[], _Loss]:
        """The user's closure with gradients and loss of all ranks, as one process with all batches has them."""
        passes = self._exchange.passes
        of_each = passes.items  # said before the step, so of each evaluation in it

        def reducing_closure() -> _Loss:
            if passes.items is None:
                passes.items = of_each
            loss = closure()
            self._after_evaluation()
            return _reduced_loss(loss, self.settings, f"{self.prefix}.loss", passes.reduced_items)

        return reducing_closure

    def _after_evaluation(self) -> None:
        """Within a ``step(closure)``, when the user's closure has run: it may have reduced the gradients itself."""
        if self._skipping:
            self._require_own()
            self._require_reduced()
        else:
            self._complete()
        self._exchange.rounds.settle_residuals(used=True)

    def after_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The optimizer has stepped."""
        self._exchange.rounds.note_step()
        if self._exchange.step.closed:  # by a closure
            self._exchange.end_step()

    def _require_reduced(self) -> None:
        if not self._exchange.step.closed:
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected reduced gradients inside skip_synchronize() but found some that are "
                "not. Call synchronize() before, or at the end of the closure."
            )

    def discard(self, zeros: bool = False) -> None:
        """Before gradients are set to zero: begins a new step.

        If the one before came to no end, all ranks give it up together here: one of them may have had no gradient in
        it and know nothing of what the others have sent.
        """
        self._exchange.catch_up()
        self._exchange.discard()

    def count(self, items: int, of_sums: bool) -> None:
        """Of how many items the losses until the next step are sums; of means what they weigh in the average."""
        if of_sums and self.settings.op != PerItem:
            super().count(items, of_sums)
        if not of_sums:
            how = self.settings
            cannot = {"sum": how.op == Sum, "per item": how.op == PerItem, "powersgd": how.powersgd is not None}
            check_needs(["count_samples"], {**cannot, "sharded embedding": self._has_rows}, "count_samples")
        self._exchange.count(items)

    def silence(self) -> AbstractContextManager[None]:
        """A block of passes that only add to the gradients of this rank."""
        return self._exchange.passes.silence()

    @contextmanager
    def skip(self) -> Iterator[None]:
        """The user's ``skip_synchronize`` block: a step takes the gradients as they are."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False


def _reduced_loss(loss: Any, settings: ReductionSettings, name: str, weight: int | None) -> Any:
    """The loss of all ranks; of sums over items their mean. Line searches compare losses, and ranks that compare different
    ones would part.
    """
    is_tensor = isinstance(loss, torch.Tensor)
    if not (loss.is_floating_point() if is_tensor else isinstance(loss, Real)):
        return loss  # None, or what no optimizer compares
    total = loss.detach().clone() if is_tensor else torch.tensor(float(loss), dtype=torch.float64)
    buffer, session = buffer_of(total), settings.session
    session.context.submit(
        "allreduce", name, [buffer], [buffer],
        reduction=settings.name, process_set=session.process_set_id, waits=True, weight=weight,
    ).wait()  # fmt: skip
    return total if is_tensor else total.item()


def state_with_losses(state: State, feedback: Feedback | None) -> State:
    """An optimizer's state, and what compression has lost on this rank. Each rank saves and loads its own."""
    kept = None if feedback is None else feedback.of_this_rank()
    return {**state, "compression": kept} if kept else state
