"""``GradScaler`` before steps that every rank takes, also one that found an infinity in gradients of its own.

An optimizer whose ``_step_supports_amp_scaling`` is true has its ``step()`` called in any case, with what the scaler
knows as ``grad_scale`` and ``found_inf``. Fused optimizers use these themselves; for all others it is done here.
"""

from collections.abc import Sequence

import torch


class HeededScaler:
    """What the scaler's word does to one step."""

    def __init__(self) -> None:
        self._withheld: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before_step(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], by_itself: bool
    ) -> bool:
        """Unscales gradients, or withholds them all where the scaler found an infinity; returns whether they are used.

        Args:
            optimizer: whose step begins.
            parameters: those that it trains.
            by_itself: whether its class uses the scaler's word.
        """
        if getattr(optimizer, "found_inf", None) is None:
            return True
        scale, infinite = optimizer.grad_scale, float(optimizer.found_inf) > 0
        if by_itself:
            return not infinite
        optimizer.grad_scale = optimizer.found_inf = None  # the scaler takes them away; the user's class wants none
        gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        if infinite:
            self._withheld = gradients
            for parameter, _ in gradients:
                parameter.grad = None
        elif scale is not None:
            for _, gradient in gradients:
                gradient.div_(float(scale))
        return not infinite

    def after_step(self) -> None:
        """Gives back what was withheld."""
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        self._withheld = []
