"""What a Keras optimizer steps with: the numbers of its configuration, and its learning rate, which changes."""

import weakref
from collections.abc import Callable
from typing import Any

from ringtrain.gradients.drift import Settings, Words

CALLED = Words("broadcast_variables() or BroadcastGlobalVariablesCallback")
_NUMBERS = (bool, int, float)
_NOT_COMPARED = {"learning_rate"}  # which is read in each step


class Stepping:
    """What one optimizer steps with, whichever Keras it is of. It does not keep the optimizer alive.

    Args:
        optimizer: the user's, or a ``LossScaleOptimizer`` around it.
    """

    def __init__(self, optimizer: Any):
        stepping = getattr(optimizer, "inner_optimizer", None) or optimizer
        self._refer: Callable[[], Any] = weakref.ref(stepping)
        try:
            configured = stepping.get_config()
        except Exception:  # of a class of the user's, in whatever way
            configured = {}
        self._configured = {
            name: value for name, value in configured.items() if type(value) in _NUMBERS and name not in _NOT_COMPARED
        }

    def settings(self) -> Settings:
        """All numbers but the learning rate, as they are now."""
        optimizer = self._refer()
        now = {name: getattr(optimizer, name, value) for name, value in self._configured.items()}
        read = {name: value if type(value) in _NUMBERS else self._configured[name] for name, value in now.items()}
        return {name: float(value) if type(value) is int else value for name, value in read.items()}

    def rate(self) -> Any:
        """The learning rate of this step: a number, a variable, or a tensor of the graph; None for an optimizer without one."""
        optimizer = self._refer()
        rate = getattr(optimizer, "learning_rate", None)
        return rate(optimizer.iterations) if callable(rate) else rate
