"""The outer update: what becomes of the common copy once the average of all workers' changes is known. Pure."""

from dataclasses import dataclass
from numbers import Real

import numpy as np

from ringtrain.errors import InvalidArgumentError


@dataclass(frozen=True)
class Outer:
    """The outer optimizer of DiLoCo: Nesterov's step on the common copy X, with the average change D as its gradient.

    Example:
        >>> mode = rt.LocalSteps(every=8, outer=rt.Outer(0.7, 0.9))

    ::

        D = mean(X - x);  m <- momentum * m + D;  X <- X - rate * (D + momentum * m);  x <- X

    Douillard et al. (arXiv:2311.08105) take 0.7 and 0.9, the streaming variant (arXiv:2501.18512) 0.4 and 0.9. With
    rate 1 and momentum 0 it is plain averaging.

    Args:
        rate: learning rate, above 0.
        momentum: in [0, 1).

    Raises:
        InvalidArgumentError: another number, or none.
    """

    rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not (_is_number(self.rate) and 0 < self.rate < float("inf")):
            raise InvalidArgumentError(f"Outer: rate must be a number above 0, but is {self.rate!r}.")
        if not (_is_number(self.momentum) and 0 <= self.momentum < 1):
            raise InvalidArgumentError(f"Outer: momentum must be a number in [0, 1), but is {self.momentum!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class AveragingPlan:
    """How workers average, the same on all ranks.

    Attributes:
        outer: None for plain averaging.
        compression: of what parameters have changed; a row of ``tables.COMPRESSIONS``.
        within: what is one worker, for the terms.
    """

    outer: Outer | None = None
    compression: str = "none"
    within: str | None = None


def advance(common: np.ndarray, change: np.ndarray, outer: Outer | None, velocity: np.ndarray | None) -> None:
    """Updates the common copy, and the velocity, in place; equal inputs give equal bits on every rank.

    Args:
        common: X, flat.
        change: D, the average of X - x over the workers; used up.
        outer: None for plain averaging, X - D.
        velocity: m; None without momentum.
    """
    if outer is not None:
        if velocity is not None:
            np.multiply(velocity, velocity.dtype.type(outer.momentum), out=velocity)
            np.add(velocity, change, out=velocity)
            np.add(change, velocity * velocity.dtype.type(outer.momentum), out=change)
        np.multiply(change, change.dtype.type(outer.rate), out=change)
    np.subtract(common, change, out=common)


def checked_outer(outer: object) -> Outer | None:
    """The argument ``outer``; raises InvalidArgumentError for what is none. A pair is taken for rate and momentum."""
    if isinstance(outer, tuple) and len(outer) == 2:
        return Outer(*outer)
    if outer is None or isinstance(outer, Outer):
        return outer
    raise InvalidArgumentError(f"local steps: outer must be None or an Outer, but is {outer!r}.")
