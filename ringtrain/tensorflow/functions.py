"""The start of a training run: every rank gets the variables, or any objects, of one of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ringtrain._runtime import objects
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain.elastic.adapters import is_seed
from ringtrain.errors import InvalidArgumentError
from ringtrain.tensorflow.names import claim_in_function, in_session_graph
from ringtrain.tensorflow.nodes import as_it_is
from ringtrain.tensorflow.operations import broadcast_
from ringtrain.tensorflow.types import Variable

_GROUP_BYTES = 64 << 20  # one operation's worth of values, which exist beside the variables until they are assigned


@as_it_is
def broadcast_variables(
    variables: Iterable[Variable], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False,
    seeds: bool = False,
) -> tf.Operation | None:  # fmt: skip
    """Puts the root's values into the variables of all ranks.

    Example:
        >>> hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)

    Args:
        variables: ``tf.Variable`` or Keras variables, in an order that all ranks share; text variables are left alone.
        root_rank: global rank of the root.
        process_set: the ranks that take part.
        inplace: accepted for Horovod's sake; the variables are always the same objects afterwards.
        seeds: whether the states of Keras' ``SeedGenerator`` are sent, too. By default each rank keeps its own, or all ranks
            would drop the same units of their batches.

    Returns:
        None; in a graph for sessions of TensorFlow 1 the operation that does it, for a session to run.

    Raises:
        InvalidArgumentError: something else than variables.
        tf.errors.FailedPreconditionError: ranks disagree about the number, a shape or a dtype.
    """
    stem = claim_in_function("broadcast_variables")
    values: list[tf.Tensor] = []
    chosen = [each for each in variables if seeds or not hasattr(each, "name") or not is_seed(each)]
    for number, group in enumerate(_groups(_numeric(chosen))):
        values += broadcast_(group, root_rank, f"{stem}.{number}", process_set)
    return tf.group(*values) if in_session_graph() else None


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """In a graph of TensorFlow 1: gives all global variables the root's values.

    Example:
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     weights = tf.compat.v1.get_variable("weights", shape=[3])
        ...     give = hvd.broadcast_global_variables(0)
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     session.run(give)

    Args:
        root_rank: global rank of the root.

    Returns:
        The operation to run.

    Raises:
        RuntimeError: in eager mode, which has no global variables.
    """
    _require_graph("broadcast_global_variables", "hvd.broadcast_variables(<model/optimizer variables>, root_rank)")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all ranks the root's global variables when a session of TensorFlow 1 is made.

    Example:
        >>> with tf.Graph().as_default():
        ...     weights = tf.compat.v1.get_variable("weights", shape=[3])
        ...     hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        ...     with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
        ...         values = session.run(weights)

    Args:
        root_rank: global rank of the root.
        device: device on which the operations are placed.
    """

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self._root_rank = root_rank
        self._device = device
        self._operation: tf.Operation | None = None

    def begin(self) -> None:
        """Adds the operation to the graph, once."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._operation.graph is not graph:
            with tf.device(self._device or None):
                self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        """Runs it."""
        session.run(self._operation)


def broadcast_object(
    obj: object,
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank; see ``ringtrain.broadcast_object``. No ``session`` is needed.

    Example:
        >>> config = hvd.broadcast_object({"lr": 0.1} if hvd.rank() == 0 else None)
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[object], Any]:
    """A function of one object that is ``broadcast_object`` with these arguments.

    Example:
        >>> give = hvd.broadcast_object_fn(root_rank=0)
        >>> config = give({"lr": 0.1})

    Args:
        root_rank, session, name, process_set: as for ``broadcast_object``.

    Returns:
        The function; it returns the root's object.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: object, session: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in rank order; see ``ringtrain.allgather_object``. No ``session`` is needed.

    Example:
        >>> counts = hvd.allgather_object({"samples": len(x)}, name="counts")
    """
    return objects.allgather_object(obj, name, process_set)


def _require_graph(name: str, instead: str) -> None:
    if tf.executing_eagerly():
        raise RuntimeError(f"{name}: expected a graph of TensorFlow 1 but found eager mode. Use {instead}.")


def _numeric(variables: Iterable[Variable]) -> list[tf.Variable]:
    """TensorFlow's variables below Keras' ones, each once."""
    below = {}
    for variable in variables:
        inner = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
        if not isinstance(inner, tf.Variable):
            raise InvalidArgumentError(
                f"broadcast_variables: expected variables but found a {type(variable).__name__}. "
                "Send other objects with broadcast_object."
            )
        if inner.dtype.base_dtype != tf.string:
            below[id(inner)] = inner
    return list(below.values())


def _groups(variables: Sequence[tf.Variable]) -> list[list[tf.Variable]]:
    """Runs of variables that are one operation each; the same on all ranks that have the same variables."""
    groups: list[list[tf.Variable]] = []
    size_bytes = _GROUP_BYTES
    for variable in variables:
        if size_bytes >= _GROUP_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(variable)
        size_bytes += variable.dtype.base_dtype.size * (variable.shape.num_elements() or 0)
    return groups
