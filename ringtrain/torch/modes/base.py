"""What a distributed optimizer asks of its way of training. This base does nothing: it is that of a rank that trains alone.

``optimizer`` calls each of these where the user's optimizer is asked for the like. A mode keeps no optimizer alive, and
gets it with each call.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringtrain._training.needs import check_needs
from ringtrain._training.session import NewWorld
from ringtrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ringtrain._training.feedback import Feedback
    from ringtrain.torch.modes.wrapping import Wrapping

State = dict[str, Any]
Arguments = tuple[tuple, dict[str, object]]  # of a step


class OptimizerMode:
    """One optimizer's way of training, in this process.

    Attributes:
        refuses_skip, refuses_join: why ``skip_synchronize`` and ``join`` cannot be, for users; empty where they can.
        unweighed: the key of ``needs.TRAITS`` for which it has no weights; empty where it has.
    """

    unweighed = ""
    refuses_skip = ""
    refuses_join = (
        "join: the optimizer must have mode=LocalSteps(...), but has another. Call ringtrain.torch.join() instead."
    )

    def __reduce__(self) -> tuple:
        """Copies and pickles of an optimizer are plain optimizers: hooks and a world do not travel."""
        return Alone, ()

    # ---- where it begins and ends ----

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, wrapping: "Wrapping") -> "OptimizerMode":
        """Makes the one of an optimizer; on all ranks together."""
        raise NotImplementedError

    @staticmethod
    def works_alone(described: Any) -> bool:
        """Whether it changes what a world of one computes, as the user has described it."""
        return False

    @staticmethod
    def traits(optimizer: torch.optim.Optimizer, user_class: type) -> dict[str, object]:
        """What it asks of an optimizer of that class, by keys of ``needs.TRAITS``."""
        return {}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts itself around the optimizer's steps."""

    def close(self) -> None:
        """Gives up what it has of the optimizer; what is pending is finished first."""

    def check_new_group(self) -> None:
        """Raises the error that says why parameters cannot be added."""

    def note_hook(self, optimizer: torch.optim.Optimizer) -> None:
        """The user has registered a hook before steps."""

    def add(self, names: Mapping[torch.Tensor, str]) -> None:
        """Takes over parameters that were added to the optimizer, with their names."""

    # ---- worlds ----

    def order(self) -> int | None:
        """The place among the optimizers of this rank in which they enter a new world; None for one that enters none."""
        return None

    def parts(self) -> "tuple[OptimizerMode, ...]":
        """The modes that enter a world with it: itself, or those that it has made."""
        return (self,)

    def enter_world(self, change: NewWorld) -> None:
        """Goes on in the present world: in any case where that is numbered anew, else if it is another one than before."""

    # ---- a step ----

    def set_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes whose gradients are summed here, between two steps."""

    def silence(self) -> AbstractContextManager[None]:
        """A block of passes that only add to the gradients of this rank."""
        return _nothing()

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Returns when all ranks have what they are going to step with, or, between steps, the same parameters."""

    def skip(self) -> AbstractContextManager[None]:
        """A block in which a step takes the gradients as they are, because ``synchronize`` was called before."""
        if self.refuses_skip:
            raise InvalidArgumentError(f"skip_synchronize: {self.refuses_skip}")
        return _nothing()

    def discard(self, zeros: bool) -> None:
        """Before gradients are set to None, or to zeros: a step begins anew."""

    def scales(self, by_itself: bool) -> bool:
        """Whether a ``GradScaler`` leaves the step to it; before the scaler looks at the gradients.

        Args:
            by_itself: whether the user's class unscales, as fused optimizers do.
        """
        return by_itself

    def flush(self, optimizer: torch.optim.Optimizer) -> None:
        """Applies what is on its way, between two steps."""

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """This rank has no more data."""
        if self.refuses_join:
            raise InvalidArgumentError(self.refuses_join)

    def count(self, items: int, of_sums: bool) -> None:
        """Of how many items the losses until the next step are sums, or means: then what the step weighs."""
        if not of_sums:
            check_needs(["count_samples"], {self.unweighed: True}, "count_samples")
            return
        raise InvalidArgumentError(
            "count: the optimizer must have op=PerItem, and this rank be in its process set, but one is not so. Wrap it by "
            "DistributedOptimizer(..., op=ringtrain.torch.PerItem), or leave count() out."
        )

    # ---- what is saved ----

    def state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[], State]) -> State:
        """The user's ``state_dict``, and what belongs to the mode."""
        return of_user()

    def load_state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[State], None], state: State) -> None:
        """The user's ``load_state_dict``, and the mode's."""
        of_user(state)

    def common_state(self, optimizer: torch.optim.Optimizer) -> State | None:
        """What a rank that takes over the optimizer's state needs beside; the same on all ranks. None if there is nothing."""
        return None

    def take_common_state(self, optimizer: torch.optim.Optimizer, state: State | None) -> None:
        """Goes on with what ``common_state`` has returned, on all ranks."""

    def gather_state(self, to: int | None) -> None:
        """Makes the optimizer's state whole on one rank, or on all with None; on all ranks together."""

    def sharded_state(self, optimizer: torch.optim.Optimizer) -> State | None:
        """This rank's share of the state, as ``torch.distributed.checkpoint`` takes it; None where each rank has all of it."""
        return None

    def load_sharded_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Goes on with it."""

    def share_with(self, root: int) -> None:
        """The state of one rank is about to be given to all: makes it whole there; on all ranks together."""

    def check_copy(self) -> None:
        """Raises the error that says why the optimizer cannot be copied now."""

    def forget_losses(self) -> None:
        """What compression has lost belongs to none of the gradients that follow."""

    def compression_state(self) -> State:
        """What compression has lost, the same on all ranks; collective."""
        return {}

    def load_compression_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Goes on with it."""


class Alone(OptimizerMode):
    """Of a world of one, of a rank outside of the process set, and of copies.

    Args:
        of: the mode that would be another's: a script hears in a world of one, too, what cannot be.
    """

    def __init__(self, of: type[OptimizerMode] = OptimizerMode):
        self.refuses_skip, self.refuses_join = of.refuses_skip, of.refuses_join


class AroundSteps(OptimizerMode):
    """A mode that does something before and after each step.

    Attributes:
        begins_first: whether it comes before hooks that the optimizer has already; they see reduced gradients then.
        ends_first: whether it comes before such hooks at the step's end, too.
    """

    begins_first = True
    ends_first = True
    _handles: tuple[torch.utils.hooks.RemovableHandle, ...] = ()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """By hooks rather than an override of step(): a scheduler made before has put its own step() on the object."""
        before, after = optimizer.register_step_pre_hook(_before_step), optimizer.register_step_post_hook(_after_step)
        if self.begins_first:
            optimizer._optimizer_step_pre_hooks.move_to_end(before.id, last=False)
        if self.ends_first:
            optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
        self._handles = before, after

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, object]) -> Arguments | None:
        """Before every ``step()``; ``args`` starts with the optimizer itself, and a closure may follow.

        Returns:
            The arguments that the step gets instead; None leaves them.
        """
        raise NotImplementedError

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After every ``step()`` that did not fail."""
        raise NotImplementedError

    # ---- what compression has lost ----

    def _feedback(self) -> "Feedback | None":
        """What compression has lost of what this mode sends; None where nothing is kept."""
        return None

    def forget_losses(self) -> None:
        """What compression has lost belongs to none of the gradients that follow."""
        feedback = self._feedback()
        if feedback is not None:
            feedback.forget()

    def compression_state(self) -> State:
        """What compression has lost, the same on all ranks; collective."""
        feedback = self._feedback()
        return {} if feedback is None else feedback.of_all_ranks()

    def load_compression_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Goes on with it."""
        feedback = self._feedback()
        if feedback is not None:
            feedback.load(state)


def mode_of(optimizer: object) -> OptimizerMode | None:
    """The mode of a distributed optimizer; None for any other object."""
    found = getattr(optimizer, "_mode", None)
    return found if isinstance(found, OptimizerMode) else None


def closure_of(args: tuple, kwargs: Mapping[str, object]) -> Any:
    """The closure that a step was called with; None without one."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, object]) -> Arguments | None:
    mode = getattr(optimizer, "_mode", None)
    return mode.before_step(optimizer, args, kwargs) if isinstance(mode, AroundSteps) else None


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, object]) -> None:
    mode = getattr(optimizer, "_mode", None)
    if isinstance(mode, AroundSteps):
        mode.after_step(optimizer)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
