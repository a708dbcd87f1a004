"""The start of a training run: every rank gets the variables of one of them."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.tensorflow.operations import broadcast_

_GROUP_BYTES = 64 << 20  # one operation's worth of values, which exist beside the variables until they are assigned


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Puts the root's values into the variables of all ranks.

    Args:
        variables: ``tf.Variable`` or Keras variables, in an order that all ranks share; text variables are left alone.
        root_rank: global rank of the root.
        process_set: the ranks that take part.
        inplace: accepted for Horovod's sake; the variables are always the same objects afterwards.

    Raises:
        tf.errors.InvalidArgumentError: ranks disagree about a number of variables, a shape or a dtype.

    Example:
        >>> hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)
    """
    group: list[tf.Variable] = []
    number = size_bytes = 0
    for variable in _numeric(variables):
        group.append(variable)
        size_bytes += variable.dtype.size * variable.shape.num_elements()
        if size_bytes >= _GROUP_BYTES:
            broadcast_(group, root_rank, f"broadcast_variables.{number}", process_set)
            group, number, size_bytes = [], number + 1, 0
    broadcast_(group, root_rank, f"broadcast_variables.{number}", process_set)


def _numeric(variables: Iterable[Any]) -> list[tf.Variable]:
    """TensorFlow's variables below Keras' ones, each once."""
    below = [variable if isinstance(variable, tf.Variable) else variable.value for variable in variables]
    return list({id(variable): variable for variable in below if variable.dtype != tf.string}.values())
