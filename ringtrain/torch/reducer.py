"""What a distributed optimizer asks of its gradients: to be reduced before a step, given up, or left alone.

``optimizer`` owns one ``Reducer`` for each distributed optimizer; ``exchange`` has the gradients' way.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ringtrain import ranges
from ringtrain.context import Context
from ringtrain.elastic.transaction import Transaction
from ringtrain.embedding.row_gradients import RowGradients
from ringtrain.errors import InvalidArgumentError
from ringtrain.gradients.rounds import Stage
from ringtrain.torch.backward import OneByOne
from ringtrain.torch.coexistence import refuse_shared_parameters
from ringtrain.torch.exchange import Exchange
from ringtrain.torch.feedback import Feedback
from ringtrain.torch.gradients import ReductionSettings
from ringtrain.torch.hooks import Hooks, dismiss, enlist, others


class Reducer:
    """The gradients of one optimizer.

    Args:
        settings: how gradients are combined, the same on all ranks.
        passes_per_step: backward passes that are summed here before their gradients travel.
        averages_passes: whether the sum is then divided by ``passes_per_step``.
        makes_buckets: whether gradients become views of buckets once the steps are alike.
    """

    def __init__(self, settings: ReductionSettings, passes_per_step: int, averages_passes: bool, makes_buckets: bool):
        self._exchange = Exchange(settings, passes_per_step, averages_passes, makes_buckets)
        self._hooks = Hooks()
        self._skipping = False  # while the user's skip_synchronize block runs
        self._has_stepped = False
        enlist(self)

    def __reduce__(self) -> tuple:
        """Copies and pickles of an optimizer are plain optimizers: hooks and a world do not travel."""
        return type(None), ()

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
        """Whether gradients are averaged, and not added up."""
        return self._exchange.settings.averages

    @property
    def passes_per_step(self) -> int:
        """Backward passes that are summed before their gradients travel."""
        return self._exchange.passes.per_step

    def set_passes_per_step(self, passes: int) -> None:
        """Changes ``passes_per_step``, between two steps."""
        self._exchange.passes.set_per_step(passes)

    @property
    def number(self) -> int:
        """Its place among the optimizers of its world."""
        return self._exchange.number

    def enter_world(self) -> None:
        """Goes on in the present world, if it is not the last one that this optimizer was used in."""
        self._exchange.catch_up()

    def keep_inputs_for(self, transaction: Transaction, one_by_one: OneByOne | None = None) -> None:
        """Has the transaction release each step, so that it survives a change of the world; between two steps."""
        self._exchange.keep_inputs_for(transaction, one_by_one)

    def is_kept_for(self, transaction: Transaction) -> bool:
        """Whether that transaction is the one which releases each step."""
        return self._exchange.is_kept_for(transaction)

    @property
    def rows(self) -> RowGradients:
        """In an elastic job, the gradients of rows that travel with these."""
        return self._exchange.rows

    def go_on_in_world(self) -> None:
        """Goes on in the present world with the step under way, whose gradients are kept."""
        self._exchange.go_on_in_world()

    def renumber(self) -> None:
        """Goes on under the next number, in the present world, in which nothing was sent so far."""
        self._exchange.renumber()

    def note_between_steps(self) -> None:
        """All ranks are between two steps here, those that have joined too, and none has sent anything in the next one."""
        self._exchange.step.note_end()

    # ---- parameters ----

    def add_names(self, names: Mapping[torch.Tensor, str]) -> None:
        """Names parameters, those of this optimizer or others that may be added later; the first name stays."""
        self._exchange.add_names(names)

    def add(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Takes over further parameters, which have names, in groups and an order that are the same on all ranks."""
        self._exchange.catch_up()
        if self._exchange.in_flight():
            self.synchronize()
        parameters = {parameter for group in groups for parameter in group}
        for other in others(self):
            other.release(parameters, self)
        for index in self._exchange.add(groups):
            self._hooks.attach(self._exchange, self._exchange.parameter(index), index)

    def close(self) -> None:
        """Removes the hooks; what is pending is finished first."""
        self._exchange.catch_up()
        if self._exchange.in_flight():
            self.synchronize()
        self._hooks.remove()
        dismiss(self)

    def release(self, parameters: set[torch.Tensor], owner: "Reducer") -> None:
        """Leaves parameters to an optimizer that was made later: two would reduce one gradient twice."""
        if self._hooks.has_any(parameters):
            if self._exchange.in_flight():
                self.synchronize()
            self._hooks.release(parameters, owner.prefix)

    def _require_own(self) -> None:
        lost = self._hooks.lost
        if lost is not None:
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected to reduce '{self._exchange.name_of(lost.parameter)}' but '{lost.owner}' "
                "does, which was made later over the same parameter. Give each parameter to one distributed optimizer."
            )

    def feedback(self) -> Feedback | None:
        """What compression has lost of these gradients; between two steps. None without such a compression."""
        if not self.settings.makes_up_for_losses:
            return None
        self._exchange.catch_up()
        return Feedback(self.settings, self.prefix, self._exchange.memories(), self._exchange.beginning)

    # ---- what the optimizer asks for ----

    def refuse_sharing(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Before the first step: raises InvalidArgumentError if another library averages these parameters, too."""
        if not self._has_stepped:
            refuse_shared_parameters([parameter for group in param_groups for parameter in group["params"]])
            self._has_stepped = True

    def synchronize(self) -> None:
        """Returns when every gradient that any rank has is reduced and all ranks have called this, or step.

        Raises:
            RingtrainError: ranks disagree about a gradient, or the world ended. Nothing is pending afterwards.
        """
        self._exchange.catch_up()
        self._require_own()
        if self._exchange.has_lost_results():
            self._exchange.reset()  # closed for a step that was skipped, and zeroed since
        with ranges.around("ringtrain.synchronize"):
            self._exchange.close_step(Stage.CLOSING)

    def synchronize_as_asked(self) -> None:
        """``synchronize`` that the user has called."""
        exchange = self._exchange
        exchange.catch_up()
        if (
            exchange.step.closed
            and exchange.step.asked
            and exchange.may_reduce_again
            and not exchange.has_lost_results()
        ):
            exchange.begin_step(reopened=True)  # another rank may have added to its gradients since
        self.synchronize()
        exchange.step.note_asked()

    def before_unscaling(self) -> None:
        """A ``GradScaler`` looks at the gradients next, and this rank may have had no backward pass."""
        if not self._skipping:
            self._synchronize_unchanged()

    def _synchronize_unchanged(self) -> None:
        """``synchronize`` where the user has not called it, and so may have taken this rank's gradients for those of all ranks."""
        self._exchange.catch_up()
        changed = self._exchange.changed_gradient()
        if changed is not None:
            raise InvalidArgumentError(
                f"step '{changed}': expected the gradient as backward() left it, since it is not reduced yet, "
                "but found it changed. In a step that is cut short, call synchronize() before you unscale or clip."
            )
        self.synchronize()

    def before_step(self) -> bool:
        """Reduces what is not reduced yet; returns False if the user had asked for that and forgot the skip block."""
        self._require_own()
        if self._skipping:
            self._require_reduced()
        else:
            self._synchronize_unchanged()
        forgotten = self._exchange.step.asked and not self._skipping
        self._exchange.note_use()
        self._end_step()
        return not forgotten

    def after_evaluation(self) -> None:
        """Within a ``step(closure)``, when the user's closure has run: it may have reduced the gradients itself."""
        if self._skipping:
            self._require_own()
            self._require_reduced()
        else:
            self.synchronize()
        self._exchange.note_use()

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self._exchange.note_step()
        if self._exchange.step.closed:  # by a closure
            self._end_step()

    def _require_reduced(self) -> None:
        if not self._exchange.step.closed:
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected reduced gradients inside skip_synchronize() but found some that are "
                "not. Call synchronize() before, or at the end of the closure."
            )

    def _end_step(self) -> None:
        self._exchange.reset()
        self._exchange.step.note_end()

    def discard(self) -> None:
        """Before gradients are set to zero: begins a new step.

        If the one before came to no end, all ranks give it up together here: one of them may have had no gradient in
        it and know nothing of what the others have sent.
        """
        self._exchange.catch_up()
        self._exchange.discard()

    def restart(self) -> None:
        """Begins a new step on this rank, which may be the only one that loads a state."""
        self._exchange.catch_up()
        if self._exchange.in_flight():
            self._exchange.close_step(Stage.DISCARDING)
        self._exchange.reset()

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
