"""Gradients of Keras on TensorFlow; see ``backends`` for who asks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import ringtrain.tensorflow as hvd


class _Eager:
    """The scope of what runs outside of any tf.function."""


_EAGER = _Eager()
unconverted = tf.autograph.experimental.do_not_convert  # Python's control flow in a method is meant as it stands


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient holds some rows only."""
    return isinstance(gradient, tf.IndexedSlices)


def dense(gradient: Any) -> tf.Tensor:
    """The gradient with all its rows."""
    return tf.convert_to_tensor(gradient)


def scaled(gradient: Any, factor: float) -> Any:
    """The gradient times a number."""
    if is_sparse(gradient):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def in_graph() -> bool:
    """Whether operations are being traced into a graph."""
    return not tf.executing_eagerly()


def scopes() -> list[Any]:
    """The graph being traced and those around it, from the inside; outside of any, one object that stands for that."""
    if tf.executing_eagerly():
        return [_EAGER]
    graph, found = tf.compat.v1.get_default_graph(), []
    while graph is not None and getattr(graph, "outer_graph", None) is not None:
        found.append(graph)
        graph = graph.outer_graph
    return found


def perform(operations: Sequence[Any], settings: Any) -> list[list[Any]]:
    """The results of reductions (``reduction.Operation``), in their order."""
    return [_reduced(operation, settings) for operation in operations]


def _reduced(operation: Any, settings: Any) -> list[Any]:
    arguments = {"op": operation.op, "name": operation.name, "process_set": settings.process_set}
    if settings.compression is not None:
        arguments["compression"] = settings.compression
    if operation.scale != 1.0 and not is_sparse(operation.tensors[0]):
        arguments.update(prescale_factor=1.0 / operation.scale, postscale_factor=operation.scale)
    if len(operation.tensors) == 1:
        return [hvd.allreduce(operation.tensors[0], **arguments)]
    return hvd.grouped_allreduce(operation.tensors, **arguments)
