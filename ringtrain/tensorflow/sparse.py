"""Gradients of which most rows are zero: the ranks' rows are gathered instead of adding whole tensors.

A gradient of an embedding comes as ``tf.IndexedSlices``. Moving 512 touched rows of 100,000 costs a sixtieth of the
dense tensor. Every rank gathers the same rows in rank order, so the result has the same bits everywhere.
"""

import tensorflow as tf

from ringtrain._runtime.context import current
from ringtrain._runtime.operations import Average, Sum
from ringtrain._runtime.process_sets import ProcessSet, id_of
from ringtrain.errors import UnsupportedError
from ringtrain.tensorflow import nodes
from ringtrain.tensorflow.compression import Compressor
from ringtrain.tensorflow.graph_world import size_op


def allreduce(
    slices: tf.IndexedSlices,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    compression: type[Compressor],
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    """The rows of all ranks, each index once and its rows summed; for ``Average`` divided by the number of ranks.

    Once ranks have joined, that is the number of those that still contribute, or of all with the option
    ``join_divisor=initial``, as for dense tensors: every rank gathers a count of one beside its rows.

    Raises:
        UnsupportedError: another reduction than Average and Sum, or factors.
    """
    if op not in (Average, Sum) or prescale != 1.0 or postscale != 1.0:
        raise UnsupportedError(
            f"allreduce '{name or 'unnamed'}': tf.IndexedSlices need op Average or Sum and no factors, but op is {op}, "
            f"prescale_factor {prescale} and postscale_factor {postscale}. Convert them with tf.convert_to_tensor."
        )
    sent, context = compression.compress(slices.values)
    one = tf.ones([1], tf.uint8)
    values, indices, ones = nodes.run("allgather", [[sent, slices.indices, one]], name, id_of(process_set))
    total = sum_duplicates(tf.IndexedSlices(compression.decompress(values, context), indices, slices.dense_shape))
    if op == Average:
        members = _all_members(process_set)
        total = _divided(total, tf.size(ones) if members is None else members)
    return total


def _all_members(process_set: ProcessSet) -> tf.Tensor | None:
    """What an average divides by where the world's options say all members; None for those that contribute."""
    return size_op(id_of(process_set)) if current().chosen.get("join_divisor") == "initial" else None


def _divided(slices: tf.IndexedSlices, divisor: tf.Tensor) -> tf.IndexedSlices:
    dtype = slices.values.dtype
    divide = tf.truncatediv if dtype.is_integer else tf.divide
    return tf.IndexedSlices(divide(slices.values, tf.cast(divisor, dtype)), slices.indices, slices.dense_shape)


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each index once; not every optimizer adds the rows of an index that comes twice."""
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)
