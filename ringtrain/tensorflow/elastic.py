"""Elastic training for TensorFlow, by Horovod's names; ``ringtrain.elastic`` says what it is.

Graphs outlive worlds: a function that was traced in one runs in the next, where size and rank are others. What ringtrain
puts into a graph asks for them when it runs; what ``hvd.size()`` returned while a function was traced is a number in it
for good, so functions ask with ``hvd.size_op()``.

>>> import ringtrain.tensorflow as hvd
>>> hvd.init()
>>> @tf.function
... def step(images, labels):
...     with tf.GradientTape() as tape:
...         loss = loss_of(model(images), labels)
...     gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
...     optimizer.apply_gradients(zip(gradients, model.trainable_variables))
>>> @hvd.elastic.run
... def train(state):
...     while state.batch < 10_000:
...         step(*next(batches))
...         state.batch += 1
...         state.commit()
>>> train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0))
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf

from ringtrain._bootstrap import membership
from ringtrain._bootstrap.start import shutdown
from ringtrain._runtime.objects import allgather_object, broadcast_object
from ringtrain._runtime.operations import broadcast_async_
from ringtrain.elastic import BatchSampler, ObjectState, State, run_fn
from ringtrain.elastic.adapters import Variables, is_seed, outline_of, register, variables_of
from ringtrain.elastic.worlds import register_sign
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.tensorflow import presence
from ringtrain.tensorflow.library import current_slot, init
from ringtrain.tensorflow.names import in_session_graph
from ringtrain.tensorflow.types import Variable

if TYPE_CHECKING:
    from ringtrain.tensorflow.keras.elastic import TensorFlowKerasState

__all__ = ["BatchSampler", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

_OUR_NODES = "Ringtrain"  # in the text of an error that one of our operations has ended in
Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """``ringtrain.elastic.run`` for functions that use TensorFlow, whose errors it understands.

    Example:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     for state.epoch in range(state.epoch, 3):
        ...         state.commit()
        >>> train(hvd.elastic.TensorFlowState(model.variables, epoch=0))

    A world's end meets a graph, or an eager operation, as ``tf.errors.UnknownError``. Those of the script's own, such as
    an exception in a ``tf.py_function``, leave the function.

    Args:
        func: takes the state and further arguments.
    """

    @functools.wraps(func)
    def in_each_world(state: State, *args: object, **kwargs: object) -> Result:
        if membership.current() is not None:
            presence.share()
        return func(state, *args, **kwargs)

    return run_fn(in_each_world, _next_world, _ends_world)


def _next_world() -> None:
    shutdown()
    init()  # graphs find the new world


def _ends_world(problem: Exception) -> bool:
    """Whether an error of TensorFlow's is that of an operation between ranks whose world has ended, or follows from it.

    Of what ringtrain's operations fail with, only lost ranks and ended worlds are UnknownErrors. One that comes by way of a
    ``tf.numpy_function`` does not name our operation; then the launcher must have said that the world has ended.
    """
    if not isinstance(problem, tf.errors.OpError):
        return False
    member = membership.current()
    is_ours = isinstance(problem, tf.errors.UnknownError) and _OUR_NODES in str(problem)
    return is_ours or (member is not None and member.world_has_ended())


class TensorFlowState(ObjectState):
    """Variables, and plain objects, each an attribute.

    Example:
        >>> state = hvd.elastic.TensorFlowState(model.variables + optimizer.variables, epoch=0, batch=0)

    Args:
        variables: in an order that all ranks share; in a graph of TensorFlow 1 by default its global variables.
        session: of such a graph; by default the one that is entered.
        kwargs: plain objects by name, which are copied.

    Raises:
        InvalidArgumentError: no variables where there is no graph of TensorFlow 1, or no session where there is one.
    """

    variables: list[Any]

    def __init__(self, variables: Sequence[Variable] | None = None, session: Any = None, **kwargs: object):
        in_graph = session is not None or in_session_graph()
        if variables is None and not in_graph:
            raise InvalidArgumentError(
                "TensorFlowState: variables must be given outside of a graph of TensorFlow 1, but are not. Pass "
                "model.variables + optimizer.variables."
            )
        if in_graph and session is None:
            session = tf.compat.v1.get_default_session()
        if in_graph and session is None:
            raise InvalidArgumentError(
                "TensorFlowState: a session must be given, or entered, in a graph of TensorFlow 1, but there is none. "
                "Pass session=."
            )
        if variables is None:
            with session.graph.as_default():
                variables = tf.compat.v1.global_variables()
        self.session = session
        self.variables = list(variables)
        self._kept: list[np.ndarray] = []
        super().__init__(**kwargs)
        self.save()

    def save(self) -> None:
        """Keeps a copy of everything, in the host's memory."""
        self._kept = self._read()
        super().save()

    def restore(self) -> None:
        """Goes back to it, bit for bit."""
        self._write(self._kept)
        super().restore()

    def sync(self) -> None:
        """Takes everything from rank 0, and keeps a copy of it; text variables and seeds of random layers stay as they are."""
        values = self._read()
        pending = [
            broadcast_async_(value.reshape(-1).view("uint8"), 0, f"ringtrain.elastic.variables.{place}")
            for place, (variable, value) in enumerate(zip(self.variables, values, strict=True))
            if value.dtype != object and not is_seed(variable)
        ]
        for operation in pending:
            operation.wait()
        self._write(values)
        super().sync()
        self.save()

    def _read(self) -> list[np.ndarray]:
        read = (
            self.session.run(list(self.variables))
            if self.session is not None
            else [variable.numpy() for variable in self.variables]
        )
        return [np.array(value, order="C") for value in read]

    def _write(self, values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self.variables, values, strict=True):
            if self.session is not None:
                assign = variable.initializer
                self.session.run(assign, {assign.inputs[1]: value})
            else:
                variable.assign(value)


class _Variables(Variables):
    """How states know variables, and what has some: modules, models, optimizers."""

    def fits(self, value: object) -> bool:
        """Also a list of variables."""
        if isinstance(value, (list, tuple)):
            return len(value) > 0 and all(isinstance(each, tf.Variable) for each in value)
        return isinstance(value, tf.Variable) or hasattr(value, "variables")

    def outline(self, values: Sequence[object]) -> dict[str, str]:
        """Shapes and dtypes of the variables."""
        return outline_of(variables_of(values))

    def take_over(self, values: Sequence[object]) -> None:
        """Raises MismatchError if ranks have different ones. Seeds of Keras' random layers stay each rank's own."""
        chosen = [each for each in variables_of(values) if not is_seed(each)]
        arrays = [np.array(variable.numpy(), order="C") for variable in chosen]
        described = [(array.shape, str(array.dtype)) for array in arrays]
        theirs = broadcast_object(described, 0, "ringtrain.elastic.described")
        everyone = allgather_object(described == theirs, "ringtrain.elastic.alike")
        if not all(everyone):
            different = [rank for rank, alike in enumerate(everyone) if not alike]
            raise MismatchError(
                f"elastic.State: number, shapes and dtypes of the variables must be those of rank 0 everywhere, but are not "
                f"on the ranks {different}. Make the same model and optimizer on all ranks."
            )
        pending = [
            broadcast_async_(array.reshape(-1).view("uint8"), 0, f"ringtrain.elastic.variables.{place}")
            for place, array in enumerate(arrays)
        ]
        for operation, variable, array in zip(pending, chosen, arrays, strict=True):
            operation.wait()
            variable.assign(array)

    def enter_world(self, values: Sequence[object]) -> None:
        """Graphs find the new world."""
        current_slot()


register(_Variables())
register_sign(_ends_world)


def __getattr__(name: str) -> type:
    if name == "TensorFlowKerasState":
        return importlib.import_module(
            "ringtrain.tensorflow.keras.elastic"
        ).TensorFlowKerasState  # only now: Keras costs time
    raise AttributeError(f"module 'ringtrain.tensorflow.elastic' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
