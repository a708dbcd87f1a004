"""Rows of all ranks for a loss that every rank computes over them, as contrastive losses do: with the exact gradient."""

from collections.abc import Callable

import tensorflow as tf

from ringtrain._runtime.process_sets import ProcessSet, global_process_set, size_of
from ringtrain.tensorflow.nodes import as_it_is
from ringtrain.tensorflow.operations import allgather
from ringtrain.tensorflow.types import Takes


@as_it_is
def gather_with_gradient(
    tensor: Takes, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """``allgather`` whose gradient is the sum over the ranks; see ``ringtrain.torch.gather_with_gradient``.

    Example:
        >>> images, texts = hvd.gather_with_gradient(images), hvd.gather_with_gradient(texts)

    Args:
        tensor: rows of this rank, of any number and one shape; floating point.
        name: identity among the ranks.
        process_set: the ranks that take part.

    Returns:
        The rows of all ranks, in rank order.
    """
    size = size_of(process_set)

    @tf.custom_gradient
    def with_gradient(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(rows), lambda gradient: gradient * tf.cast(size, gradient.dtype)

    return allgather(with_gradient(tf.convert_to_tensor(tensor)), name=name, process_set=process_set)
