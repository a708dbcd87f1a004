"""Each rank updates its share of the parameters; ``ahead`` has its way."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringtrain._training.needs import check_needs
from ringtrain.errors import UnsupportedError
from ringtrain.torch.ahead import Ahead
from ringtrain.torch.compilation import eager
from ringtrain.torch.gradients import ReductionSettings
from ringtrain.torch.modes.base import AroundSteps, State, closure_of

_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


class ShardedStepMode(AroundSteps):
    """The steps of one optimizer.

    Args:
        user_class: the optimizer's class as the user made it.
        settings: how gradients are combined, the same on all ranks.
        names: its parameters with their names, in the order in which a forward pass is expected to need them.
        passes_per_step: backward passes that are summed here before their gradients travel.
        averages_passes: whether the sum is then divided by that.
    """

    begins_first = False  # hooks of the user come before the update

    def __init__(
        self, optimizer: Any, user_class: type, settings: ReductionSettings, names: Mapping[torch.Tensor, str],
        passes_per_step: int, averages_passes: bool,
    ):  # fmt: skip
        self._ahead = Ahead(optimizer, user_class, settings, names, passes_per_step, averages_passes)

    def close(self) -> None:
        """Gives back whole state, on all ranks together, and removes the hooks."""
        self._ahead.close()
        super().close()

    def check_new_group(self) -> None:
        """Raises UnsupportedError: shares are dealt out when the optimizer is wrapped."""
        raise UnsupportedError(
            "add_param_group: expected all parameters when the optimizer was wrapped with ShardedStep, which dealt them "
            "out, but found new ones. Add them before, or wrap the optimizer again in another mode."
        )

    def note_hook(self, optimizer: Any) -> None:
        """The user's hooks come before the update."""
        if self._handles:  # else it is registering its own
            optimizer._optimizer_step_pre_hooks.move_to_end(self._handles[0].id)

    def set_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes in a step."""
        self._ahead.passes.set_per_step(passes)

    def silence(self) -> Any:
        """A block of passes that only add to the gradients of this rank."""
        return self._ahead.passes.silence()

    @eager
    def before_step(self, optimizer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """All of the user's step: it finds no gradients then."""
        check_needs(["ShardedStep"], {"closure": closure_of(args, kwargs) is not None}, "step")
        self._ahead.before_step(optimizer)

    @eager
    def after_step(self, optimizer: Any) -> None:
        """The optimizer has stepped."""
        self._ahead.after_step()

    def synchronize(self, optimizer: Any) -> None:
        """Waits until the parameters have the values of the last step; on this rank alone, at any time."""
        self._ahead.settle()

    def discard(self, zeros: bool) -> None:
        """A step starts anew, and if the one before came to no end, on all ranks together."""
        self._ahead.discard(zeros)

    def scales(self, by_itself: bool) -> bool:
        """False has ``GradScaler`` unscale the gradients itself, also where the user's class could."""
        return False

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """``clip_grad_norm_`` over the shares of all ranks."""
        return self._ahead.clip(max_norm, norm_type, error_if_nonfinite)

    def groups_to_unscale(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """For a ``GradScaler``: the param groups with this rank's pieces."""
        return self._ahead.groups_to_unscale(groups)

    # ---- what is saved ----

    def state_dict(self, optimizer: Any, of_user: Callable[[], State]) -> State:
        """The user's, with the whole state; raises InvalidArgumentError where this rank has its share alone."""
        with self._ahead.state.shown_whole("state_dict"):
            return of_user()

    def load_state_dict(self, optimizer: Any, of_user: Callable[[State], None], state: State) -> None:
        """The user's, of whole state; each rank keeps its share from the first step on."""
        self._ahead.state.forget()
        of_user(state)

    def gather_state(self, to: int | None) -> None:
        """Puts the shares together on one rank, or on all with None."""
        self._ahead.state.consolidate(to)

    def share_with(self, root: int) -> None:
        """The root's state becomes whole, and others forget what they have."""
        self._ahead.state.gather_at(root)

    def check_copy(self) -> None:
        """Raises UnsupportedError where this rank has its share alone."""
        if not self._ahead.state.is_whole:
            raise UnsupportedError(
                "copy of an optimizer: expected its whole state but found this rank's share of it (ShardedStep). Call "
                "consolidate_state_dict() on all ranks, and copy state_dict()."
            )


def what_it_has(optimizer: Any, user_class: type) -> dict[str, bool]:
    """Traits of ``needs`` of an optimizer whose parameters are to be shared out."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "not elementwise": user_class not in _ELEMENTWISE,
        "differentiable": any(group.get("differentiable") for group in optimizer.param_groups),
        "device": not all(
            each.is_cpu and each.is_floating_point() and each.layout is torch.strided for each in trained
        ),
    }
