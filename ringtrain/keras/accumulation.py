"""Accumulation: gradients of several passes are added here, and leave together at the last one.

No byte travels before. The sums are kept outside the optimizer's variables, so that a saved optimizer is what Keras
makes of it without ringtrain; an update that is begun when a model is saved starts anew after loading. Keras' own
``gradient_accumulation_steps`` is not used for this: it counts passes where schedules expect updates, and within a
LossScaleOptimizer one rank may skip a pass that the others count.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from ringtrain.keras.backends import backend
from ringtrain.keras.types import Flag, Gradient, Gradients, Tensor, Variable

Reduce = Callable[[list[Tensor | None]], list[Gradient | None]]


class Accumulation:
    """Sums of the gradients of ``passes`` calls.

    Args:
        passes: gradients of how many passes make one update.
        average: whether the sum is divided by ``passes``.
    """

    def __init__(self, passes: int, average: bool):
        self.passes = passes
        self.average = average
        self._count: Any = None  # a variable, once it is built
        self._sums: dict[int, keras.Variable] = {}
        self._come: set[int] = set()  # variables that had a gradient since the last update
        self._traced: set[int] = set()  # variables that have one in a graph, which may run at any time
        self._variables: list[Variable] = []  # keeps them, and so their ids, alive
        self._apart = False

    def build(self, variables: Sequence[Variable]) -> None:
        """Makes room for the gradients of these variables; must run outside of conditions in a graph."""
        if self.passes == 1:
            return
        if self._count is None:
            self._count = keras.Variable(0, dtype="int32", trainable=False, name="accumulated_passes")
            self._count.stays_on_rank = True
        for variable in variables:
            if id(variable) not in self._sums:
                dtype = keras.backend.standardize_dtype(variable.dtype)
                total = self._sums[id(variable)] = keras.Variable(
                    initializer="zeros", shape=tuple(variable.shape), dtype=dtype, trainable=False, autocast=False
                )
                total.stays_on_rank = True
                self._variables.append(variable)

    @property
    def counter(self) -> keras.Variable | None:
        """The variable that counts the passes of the update under way, by Horovod's name; None before the first pass."""
        return self._count

    @property
    def carried(self) -> list[keras.Variable]:
        """The count and the sums, where a step must be given them with the optimizer's variables to change them."""
        if self._count is None or self._apart or not backend.carries_variables:
            return []
        return [self._count, *self._sums.values()]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A block in which they are not among the optimizer's variables: Keras' own, and files."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def is_begun(self) -> bool:
        """Whether passes were added up that have not left yet."""
        return self._count is not None and int(self._count.numpy()) > 0

    def begin_function(self) -> None:
        """Before a graph is made anew: between two updates it is that graph's alone which variables have a gradient."""
        if not self.is_begun():
            self._traced.clear()

    def forget(self) -> None:
        """Drops a sum that is begun: another world's ranks have begun none."""
        if self._count is not None:
            for total in (self._count, *self._sums.values()):
                total.assign(zeros_of(total))
        self._come.clear()

    def collect(
        self, gradients: list[Tensor | None], variables: Sequence[Variable], reduce: Reduce
    ) -> tuple[Flag, list[Gradient | None]]:
        """Adds one pass. Returns whether it was the last, and then ``reduce`` of the sums, else the gradients as given.

        Args:
            gradients: dense ones or None, one for each variable.
            variables: those that ``build`` has seen.
            reduce: combines the sums over all ranks.
        """
        sums = [self._sums[id(variable)] for variable in variables]
        gradients = [self._of(*pair) for pair in zip(variables, gradients, strict=True)]
        full = keras.ops.equal(self._count, self.passes - 1)
        self._count.assign(keras.ops.where(full, 0, self._count + 1))
        present: list[int] = []  # in a graph, where both branches are traced, leave() says what stay() must return

        def leave() -> list[Gradient | None]:
            totals = [None if gradient is None else total + gradient
                      for total, gradient in zip(sums, gradients, strict=True)]  # fmt: skip
            if self.average:
                totals = [None if total is None else total / self.passes for total in totals]
            for total in sums:
                total.assign(zeros_of(total))
            if not backend.is_traced():
                self._come.clear()
            reduced = reduce(totals)
            present[:] = _places(reduced)
            return [reduced[place] for place in present]

        def stay() -> list[Gradient | None]:
            own = _places(gradients)
            for place in own:
                sums[place].assign_add(gradients[place])
            if not present:
                present[:] = own
            return [gradients[place] if place in own else zeros_of(sums[place]) for place in present]

        results: list[Gradient | None] = [None] * len(gradients)
        for place, result in zip(present, backend.cond(full, leave, stay), strict=True):
            results[place] = result
        return full, results

    def _of(self, variable: Variable, gradient: Tensor | None) -> Tensor | None:
        """A gradient in the dtype of its sum; zeros for a missing one of which there is a sum already, else None."""
        total, identity = self._sums[id(variable)], id(variable)
        if gradient is not None:
            (self._traced if backend.is_traced() else self._come).add(identity)
            return keras.ops.cast(gradient, total.dtype)
        return zeros_of(total) if identity in self._come or identity in self._traced else None


def zeros_of(variable: Variable) -> Tensor:
    """Zeros for a variable, of its shape and dtype; ``keras.ops.zeros_like`` takes none on JAX."""
    return keras.ops.zeros(tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype))


def _places(gradients: Gradients) -> list[int]:
    """Where there is a gradient."""
    return [place for place, gradient in enumerate(gradients) if gradient is not None]
