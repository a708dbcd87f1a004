"""The world as the graph finds it when it runs: for graphs that are traced in one world and run in another."""

import tensorflow as tf

from ringtrain._runtime.process_sets import ProcessSet, id_of, size_of
from ringtrain.tensorflow.library import current_slot, ops
from ringtrain.tensorflow.nodes import as_it_is


@as_it_is
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Number of ranks of a process set, an int32 scalar; negative if there is no such set or no world.

    Example:
        >>> rate = 0.1 * tf.cast(hvd.size_op(), tf.float32)

    Args:
        process_set_id: ``process_set_id`` of the set; 0 for all ranks.
        name: of the operation in the graph.
    """
    return _ask("size", process_set_id, name)


@as_it_is
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in a process set: 1 or 0 (int32 scalar); negative if there is no such set or no world.

    Example:
        >>> even = hvd.add_process_set(range(0, hvd.size(), 2))
        >>> is_even = hvd.process_set_included_op(even.process_set_id)

    Args:
        process_set_id: ``process_set_id`` of the set; 0 for all ranks.
        name: of the operation in the graph.
    """
    return _ask("included", process_set_id, name)


@as_it_is
def rank_op(name: str | None = None) -> tf.Tensor:
    """This rank, an int32 scalar.

    Example:
        >>> @tf.function
        ... def loss_of_first(loss):  # traced once, right in each world of an elastic job
        ...     return tf.where(hvd.rank_op() == 0, loss, 0.0)
        >>> own = loss_of_first(loss)

    Args:
        name: of the operation in the graph.
    """
    return _ask("rank", 0, name)


@as_it_is
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This rank among those of its host, an int32 scalar.

    Example:
        >>> place = hvd.local_rank_op()

    Args:
        name: of the operation in the graph.
    """
    return _ask("local_rank", 0, name)


@as_it_is
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Number of ranks of this host, an int32 scalar.

    Example:
        >>> ranks_of_this_host = hvd.local_size_op()

    Args:
        name: of the operation in the graph.
    """
    return _ask("local_size", 0, name)


def divided_by_size(gradient: tf.Tensor | tf.IndexedSlices, process_set: ProcessSet) -> tf.Tensor | tf.IndexedSlices:
    """A tensor or ``tf.IndexedSlices`` over the number of a set's ranks: in a graph that of the world that it runs in."""
    dtype = gradient.dtype
    if tf.executing_eagerly():
        return tf.math.scalar_mul(1.0 / size_of(process_set), gradient)
    return tf.math.scalar_mul(tf.cast(1.0 / tf.cast(size_op(id_of(process_set)), tf.float64), dtype), gradient)


def _ask(what: str, process_set_id: int, name: str | None) -> tf.Tensor:
    return ops.ringtrain_world(what=what, slot=current_slot(), process_set=process_set_id, name=name)
