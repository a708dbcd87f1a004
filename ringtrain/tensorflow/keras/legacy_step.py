"""What a distributed optimizer of tf_keras knows of the step under way. Used by `legacy`."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from ringtrain.keras.reduction import KerasReducer
from ringtrain.keras.types import Flag
from ringtrain.tensorflow.keras_backend import scopes
from ringtrain.tensorflow.types import Gradient

Pairs = list[tuple[Gradient, tf.Variable]]


class LegacyStep:
    """What a distributed optimizer knows of the step under way.

    Attributes:
        variables: those that it has been asked about, in the order of the first time.
        scale: that a LossScaleOptimizer has multiplied the gradients by that are being computed; None for others.
    """

    def __init__(self, reduction: KerasReducer) -> None:
        self.variables: list[tf.Variable] = []
        self.scale: tf.Tensor | None = None
        self._reduction = reduction
        self._function = reduction.functions  # for which those are known that were asked about
        self._asked: list[tf.Variable] = []
        self._full: weakref.WeakKeyDictionary[object, Flag] = weakref.WeakKeyDictionary()
        self._computed: weakref.WeakSet[object] = weakref.WeakSet()  # scopes

    def know(self, variables: Iterable[tf.Variable]) -> None:
        """Adds variables; those whose gradients are left out later, being None, are missed then."""
        if self._function != self._reduction.functions:  # which may train others
            self._function, self._asked = self._reduction.functions, []
        variables = list(variables)
        for known in (self.variables, self._asked):
            places = {id(variable) for variable in known}
            known.extend(variable for variable in variables if id(variable) not in places)

    def gradients_of(self, pairs: Pairs) -> tuple[list[Gradient], list[tf.Variable]]:
        """Gradients, None for those that a LossScaleOptimizer has left out, being None; and what they belong to."""
        self.know(variable for _, variable in pairs)
        given = {id(variable): gradient for gradient, variable in pairs}
        return [given.get(id(variable)) for variable in self._asked], list(self._asked)

    @contextmanager
    def scaled_by(self, scale: tf.Tensor) -> Iterator[None]:
        """A block in which gradients are computed of a loss that was multiplied by this."""
        self.scale = scale
        try:
            yield
        finally:
            self.scale = None

    def note(self, full: Flag) -> None:
        """Remembers whether the gradients that were reduced last complete an update, for the apply that uses them.

        Within a LossScaleOptimizer that is in a condition of its own, and sees what was noted around it.
        """
        self._full[scopes()[0]] = full

    def note_computed(self) -> None:
        """``compute_gradients`` has reduced gradients, which the next apply is given."""
        self._computed.add(scopes()[0])

    def take_computed(self) -> bool:
        """Whether it has since the last apply."""
        found = [scope for scope in scopes() if scope in self._computed]
        self._computed.difference_update(found)
        return bool(found)

    def take(self) -> Flag:
        """What was noted; True where nothing was, since then the gradients are the user's own."""
        return next((self._full.pop(scope) for scope in scopes() if scope in self._full), True)
