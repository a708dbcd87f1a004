"""What is passed of Keras, as far as it is used here: of Keras 3 on any backend, and of tf_keras.

Protocols and not classes: the two Keras share none, and those of a tensor or a variable are the backend's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

Compression: TypeAlias = Any  # on JAX a name, else a class of ``Compression``, or derived from one; a PowerSGD; or None
Logs = dict[str, Any]  # metrics by name, as ``fit`` hands them to callbacks
Params = Mapping[str, int | None]  # what ``fit`` was called with: epochs, steps, verbose


class Gradient(Protocol):
    """A tensor, or ``tf.IndexedSlices``."""

    @property
    def shape(self) -> Sequence[int | None]:
        """Of the whole gradient."""

    @property
    def dtype(self) -> object:
        """As the backend has it."""


Gradients = Sequence[Gradient | None]  # of some variables


class Tensor(Gradient, Protocol):
    """A tensor of the backend: ``tf.Tensor``, ``torch.Tensor`` or ``jax.Array``."""

    def __add__(self, other: "Tensor | float") -> "Tensor": ...

    def __mul__(self, other: "Tensor | float") -> "Tensor": ...

    def __rmul__(self, other: "Tensor | float") -> "Tensor": ...

    def __truediv__(self, other: "Tensor | float") -> "Tensor": ...

    def __gt__(self, other: "Tensor | float") -> "Tensor": ...


Flag = bool | Tensor  # one of an eager step, or of a graph


class Variable(Protocol):
    """A variable of a model or an optimizer."""

    @property
    def name(self) -> str:
        """Of the variable alone."""

    @property
    def shape(self) -> Sequence[int]:
        """Known, once it is built."""

    @property
    def dtype(self) -> object:
        """A text in Keras 3."""

    @property
    def trainable(self) -> bool:
        """Whether training changes it."""

    def __mul__(self, other: "Tensor | float") -> Tensor:
        """Its value, multiplied."""

    def numpy(self) -> np.ndarray:
        """Its value."""

    def assign(self, value: object) -> object:
        """Gives it another one."""


class Layer(Protocol):
    """A layer, or a model."""

    @property
    def trainable_variables(self) -> Sequence[Variable]:
        """In the order of the layers."""

    @property
    def non_trainable_variables(self) -> Sequence[Variable]:
        """Such as moving statistics."""


class Optimizer(Protocol):
    """An optimizer, or a ``LossScaleOptimizer`` around one."""

    variables: Any  # a list in Keras 3, and a method too in tf_keras
    learning_rate: Any  # a variable, a tensor, or a number

    @property
    def iterations(self) -> Variable:
        """Counts steps."""

    def build(self, variables: Sequence[Variable]) -> object:
        """Makes its variables."""

    def get_config(self) -> dict[str, object]:
        """What it was made with."""


class Model(Layer, Protocol):
    """A model that was compiled."""

    optimizer: Any  # of either Keras; one that is distributed has more methods
    stop_training: object  # True or False, or what is as good as True
    jit_compile: bool
    train_function: Callable | None

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def built(self) -> bool:
        """Whether it has variables."""

    @property
    def variables(self) -> Sequence[Variable]:
        """Trainable ones and others."""

    def make_train_function(self, force: bool = False) -> object:
        """Has ``fit`` make its step anew."""


class Callback(Protocol):
    """What ``fit`` tells how far it is."""

    def set_model(self, model: Model) -> None:
        """Before the first hook."""

    def set_params(self, params: Params | None) -> None:
        """Likewise."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """The first hook."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """The last one."""
