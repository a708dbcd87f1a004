"""The accumulation window: gradients of several passes are added here, and leave together at the last one.

No byte travels before. The sums are kept outside the optimizer's variables, so that a saved optimizer is what Keras
makes of it without ringtrain; a window that is begun when a model is saved starts anew after loading. Keras' own
``gradient_accumulation_steps`` is not used for this: it counts passes where schedules expect updates, and within a
LossScaleOptimizer one rank may skip a pass that the others count.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

Reduce = Callable[[list[Any]], list[Any]]


class AccumulationWindow:
    """Sums of the gradients of ``passes`` calls.

    Args:
        passes: gradients of how many passes make one update.
        average: whether the sum is divided by ``passes``.
    """

    def __init__(self, passes: int, average: bool):
        self.passes = passes
        self.average = average
        self._count: keras.Variable | None = None
        self._sums: dict[int, keras.Variable] = {}
        self._variables: list[Any] = []  # keeps them, and so their ids, alive

    def build(self, variables: Sequence[Any]) -> None:
        """Makes room for the gradients of these variables; must run outside of conditions in a graph."""
        if self.passes == 1:
            return
        if self._count is None:
            self._count = keras.Variable(0, dtype="int64", trainable=False, name="accumulated_passes")
        for variable in variables:
            if id(variable) not in self._sums:
                dtype = keras.backend.standardize_dtype(variable.dtype)
                self._sums[id(variable)] = keras.Variable(
                    initializer="zeros", shape=tuple(variable.shape), dtype=dtype, trainable=False, autocast=False
                )
                self._variables.append(variable)

    def collect(self, gradients: list[Any], variables: Sequence[Any], reduce: Reduce) -> tuple[Any, list[Any]]:
        """Adds one pass. Returns whether it was the last, and then ``reduce`` of the sums, else the gradients as given.

        Args:
            gradients: dense, one for each variable.
            variables: those that ``build`` has seen.
            reduce: combines the sums over all ranks.
        """
        sums = [self._sums[id(variable)] for variable in variables]
        gradients = [keras.ops.cast(gradient, total.dtype) for gradient, total in zip(gradients, sums, strict=True)]
        full = keras.ops.equal(self._count, self.passes - 1)
        self._count.assign(keras.ops.where(full, 0, self._count + 1))

        def leave() -> list[Any]:
            totals = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
            if self.average:
                totals = [total / self.passes for total in totals]
            for total in sums:
                total.assign(keras.ops.zeros_like(total))
            return reduce(totals)

        def stay() -> list[Any]:
            for total, gradient in zip(sums, gradients, strict=True):
                total.assign_add(gradient)
            return gradients

        return full, keras.ops.cond(full, leave, stay)
