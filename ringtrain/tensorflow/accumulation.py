"""Accumulation for an optimizer of TensorFlow 1: gradients of several passes are added, and leave at the last.

Sums and counter are local variables of the graph, as in Horovod: ``tf.compat.v1.local_variables_initializer`` sets
them, which a ``MonitoredTrainingSession`` runs by itself, and checkpoints do not have them.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from ringtrain.errors import InvalidArgumentError
from ringtrain.tensorflow.types import Gradient

_v1 = tf.compat.v1


class Accumulation:
    """Sums of the gradients of ``passes`` runs of a graph.

    Args:
        passes: gradients of how many passes make one update.
        average: whether the sum is divided by ``passes``.
    """

    def __init__(self, passes: int, average: bool):
        self._passes = passes
        self._average = average
        self._count: tf.Variable | None = None  # passes since the last update

    def collect(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        reduce: Callable[[list[Gradient]], list[Gradient]],
    ) -> list[Gradient]:
        """Adds one pass; at the last one the sums, reduced, and before this pass's gradients as they are.

        Args:
            gradients: dense, or None.
            variables: what they belong to.
            reduce: combines the sums over all ranks.

        Raises:
            InvalidArgumentError: ``tf.IndexedSlices``, which cannot be added up in a variable.
        """
        present = [place for place, gradient in enumerate(gradients) if gradient is not None]
        for place in present:
            if isinstance(gradients[place], tf.IndexedSlices):
                raise InvalidArgumentError(
                    f"DistributedOptimizer: backward_passes_per_step above 1 needs sparse_as_dense=True for '"
                    f"{variables[place].name}', whose gradients are tf.IndexedSlices. Pass it."
                )
        own = [gradient for gradient in gradients if gradient is not None]
        count_variable = self._count = _local_zeros([], tf.int32)
        sums = [_local_zeros(gradient.shape, gradient.dtype) for gradient in own]
        totals = [total.assign_add(gradient, read_value=True) for total, gradient in zip(sums, own, strict=True)]
        with tf.control_dependencies(totals):
            count = count_variable.assign_add(1, read_value=True)

        def leave() -> list[tf.Tensor]:
            read = [tf.identity(total) for total in totals]
            with tf.control_dependencies(read):
                cleared = [total.assign(tf.zeros_like(total)) for total in sums] + [count_variable.assign(0)]
            reduced = reduce(_in_places(read, present, len(gradients)))
            with tf.control_dependencies(cleared):
                share = 1.0 / self._passes if self._average else 1.0
                return [tf.math.scalar_mul(share, reduced[place]) for place in present]

        results = tf.cond(tf.equal(count, self._passes), leave, lambda: [tf.identity(gradient) for gradient in own])
        return _in_places(results, present, len(gradients))

    def apply(
        self,
        pairs: Sequence[tuple[Gradient, tf.Variable]],
        update: Callable[[], tf.Operation],
        global_step: tf.Variable | None,
    ) -> tf.Operation:
        """Updates at the last pass of several; at any other only moves ``global_step``, as in Horovod."""

        def stay() -> tf.Operation:
            return tf.no_op() if global_step is None else tf.group(global_step.assign_add(1))

        with tf.control_dependencies([gradient for gradient, _ in pairs if gradient is not None]):
            return tf.group(tf.cond(tf.equal(self._count, 0), lambda: _done(update), lambda: _done(stay)))


def _done(act: Callable[[], tf.Operation]) -> tf.Tensor:
    with tf.control_dependencies([act()]):
        return tf.constant(True)


def _in_places(gradients: Sequence[tf.Tensor], places: Sequence[int], count: int) -> list[Gradient]:
    results: list[Gradient] = [None] * count
    for place, gradient in zip(places, gradients, strict=True):
        results[place] = gradient
    return results


def _local_zeros(shape: tf.TensorShape, dtype: tf.DType) -> tf.Variable:
    return _v1.Variable(
        tf.zeros(shape, dtype), trainable=False, collections=[_v1.GraphKeys.LOCAL_VARIABLES], use_resource=True
    )
