"""What is passed of TensorFlow, and of Keras, which is not imported for it."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


class KerasVariable(Protocol):
    """A variable of Keras 3, whose value is one of TensorFlow's."""

    @property
    def name(self) -> str:
        """Its own, without that of its layer."""

    @property
    def path(self) -> str:
        """With that."""

    @property
    def shape(self) -> Sequence[int]:
        """Known, once it is built."""

    @property
    def dtype(self) -> str:
        """Its name."""

    @property
    def value(self) -> tf.Variable:
        """TensorFlow's."""

    def numpy(self) -> np.ndarray:
        """A copy."""

    def assign(self, value: object) -> object:
        """Gives it another value."""


class KerasLayer(Protocol):
    """A layer, or a model."""

    @property
    def trainable_weights(self) -> "Sequence[Variable]":
        """In the order of the layers."""


Variable: TypeAlias = tf.Variable | KerasVariable
Source: TypeAlias = Variable | tf.Tensor  # what a tape computes gradients to
Structure: TypeAlias = Any  # a tensor or a variable, or lists, tuples and dicts of such
Pairs: TypeAlias = list[tuple[Gradient, Variable]]  # as optimizers take them
Takes: TypeAlias = tf.types.experimental.TensorLike | tf.Variable | tf.IndexedSlices  # what operations make tensors of
