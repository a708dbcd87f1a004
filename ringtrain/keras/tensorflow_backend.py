"""Gradients of Keras on TensorFlow; see ``backends`` for who asks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import ringtrain.tensorflow as hvd
from ringtrain.tensorflow.gradients import GradientReduction


class _Eager:
    """The scope of what runs outside of any tf.function."""


_EAGER = _Eager()
unconverted = tf.autograph.experimental.do_not_convert  # Python's control flow in a method is meant as it stands


def dense(gradient: Any) -> tf.Tensor:
    """The gradient with all its rows."""
    return tf.convert_to_tensor(gradient)


def scaled(gradient: Any, factor: float) -> Any:
    """The gradient times a number."""
    return tf.math.scalar_mul(factor, gradient)


def scopes() -> list[Any]:
    """The graph being traced and those around it, from the inside; outside of any, one object that stands for that."""
    if tf.executing_eagerly():
        return [_EAGER]
    graph, found = tf.compat.v1.get_default_graph(), []
    while graph is not None and getattr(graph, "outer_graph", None) is not None:
        found.append(graph)
        graph = graph.outer_graph
    return found


def reduce(gradients: Sequence[Any], names: Sequence[str], variables: Sequence[Any], settings: Any) -> list[Any]:
    """The gradients, none of them None, combined over the ranks as ``reduction.Settings`` say."""
    combined = GradientReduction(
        "DistributedOptimizer",
        settings.op,
        settings.compression or hvd.Compression.none,
        settings.sparse_as_dense,
        settings.gradient_predivide_factor,
        settings.groups,
        settings.process_set,
    )
    return combined.reduce(gradients, names, variables)


def maximum(gradient: Any, name: str, settings: Any) -> tf.Tensor:
    """The largest of the ranks' values."""
    return hvd.allreduce(gradient, op=hvd.Max, name=name, process_set=settings.process_set)
