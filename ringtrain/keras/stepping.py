"""What a Keras optimizer steps with: the numbers of its configuration, and its learning rate, which changes."""

import weakref
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from ringtrain._training.drift import Settings, Words
from ringtrain._training.watch import with_rate
from ringtrain.keras.types import Optimizer, Tensor, Variable

CALLED = Words("broadcast_variables() or BroadcastGlobalVariablesCallback")
# The rate is read in each step; how an update is computed is a rank's own.
_NOT_COMPARED = {"learning_rate", "jit_compile", "is_legacy_optimizer"}


class Stepping:
    """What one optimizer steps with, whichever Keras it is of. It does not keep the optimizer alive.

    Args:
        optimizer: the user's, or a ``LossScaleOptimizer`` around it.
        passes: numbers that say what becomes of the gradients of several passes.
    """

    def __init__(self, optimizer: Optimizer, passes: Settings):
        stepping = getattr(optimizer, "inner_optimizer", None) or optimizer
        self._passes = passes
        self._refer: Callable[[], Any] = weakref.ref(stepping)
        try:
            configured = stepping.get_config()
        except Exception:  # of a class of the user's, in whatever way
            configured = {}
        self._configured = {
            name: number
            for name, value in configured.items()
            if name not in _NOT_COMPARED and (number := _number(value)) is not None
        }

    def settings(self) -> Settings:
        """All numbers but the learning rate, as they are now."""
        optimizer = self._refer()
        now = {name: _number(getattr(optimizer, name, None)) for name in self._configured}
        own = {name: self._configured[name] if number is None else number for name, number in now.items()}
        return {**own, **self._passes}

    def rate(self) -> Variable | Tensor | float | None:
        """The learning rate of this step: a number, a variable, or a tensor of the graph; None for an optimizer without one."""
        optimizer = self._refer()
        rate = getattr(optimizer, "learning_rate", None)
        return rate(optimizer.iterations) if callable(rate) else rate

    def all_settings(self, rates: Sequence[np.ndarray]) -> Settings:
        """All numbers, with the learning rate as the step has it: none, or one."""
        return with_rate(self.settings(), *rates)


def _number(value: object) -> bool | float | None:
    """A number of whatever type, as another rank may have it from a file: 1 is 1.0. None for all else."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return float(value) if isinstance(value, (Real, np.number)) else None
