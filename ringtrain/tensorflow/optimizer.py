"""``DistributedOptimizer`` for whatever optimizer a TensorFlow script has: those of Keras, and TensorFlow 1's.

Keras' optimizers are the business of ``ringtrain.tensorflow.keras``. One of ``tf.compat.v1.train`` stays the user's
object: its class is exchanged for one whose ``compute_gradients`` reduces.
"""

from typing import Any

import tensorflow as tf

from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.tensorflow.compression import Compression, Compressor
from ringtrain.tensorflow.gradients import GradientReduction, Groups, unique_names


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """What an optimizer of TensorFlow 1 becomes; ``_reduction`` is set by ``DistributedOptimizer``."""

    _reduction: GradientReduction

    def compute_gradients(self, *arguments: Any, **further: Any) -> list[tuple[Any, Any]]:
        """As in TensorFlow; the gradients are reduced over the ranks."""
        pairs = super().compute_gradients(*arguments, **further)
        variables = [variable for _, variable in pairs]
        names = unique_names("DistributedOptimizer", variables)
        reduced = self._reduction.reduce([gradient for gradient, _ in pairs], names, variables)
        return list(zip(reduced, variables, strict=True))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer average its gradients over the ranks, and returns it.

    Args:
        optimizer: one of Keras, for which ``ringtrain.tensorflow.keras.DistributedOptimizer`` says more, or of
            ``tf.compat.v1.train``.
        name: accepted for Horovod's sake; the optimizer keeps its own.
        use_locking: accepted for Horovod's sake.
        device_dense: accepted for Horovod's sake; TensorFlow places the operations.
        device_sparse: accepted for Horovod's sake.
        compression: how gradients travel.
        sparse_as_dense: make ``tf.IndexedSlices`` dense first.
        backward_passes_per_step: gradients to add up before they are reduced; Keras' optimizers only.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: part of the average's divisor that is applied before the sum.
        average_aggregated_gradients: divide by ``backward_passes_per_step`` too; Keras' optimizers only.
        num_groups: deprecated; ``groups`` as a number.
        groups: number of groups, or lists of variables whose gradients are one operation each.
        process_set: the ranks that take part.
        scale_local_gradients: divide the gradients of local variables by the number of ranks; Keras' optimizers only.

    Raises:
        InvalidArgumentError: something else than an optimizer, or a wrong argument.
        UnsupportedError: an accumulation over passes for an optimizer of TensorFlow 1.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _keras_optimizer(
            optimizer, name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
            sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups, groups=groups,
            process_set=process_set, scale_local_gradients=scale_local_gradients,
        )  # fmt: skip
    if backward_passes_per_step != 1:
        raise UnsupportedError(
            f"DistributedOptimizer: backward_passes_per_step must be 1 for an optimizer of tf.compat.v1, but is "
            f"{backward_passes_per_step!r}. Use an optimizer of Keras."
        )
    reduction = GradientReduction(
        "DistributedOptimizer", op, compression, sparse_as_dense, gradient_predivide_factor,
        groups or num_groups or None, process_set,
    )  # fmt: skip
    if isinstance(optimizer, _DistributedOptimizer):
        raise InvalidArgumentError("DistributedOptimizer: expected a plain optimizer but found a distributed one.")
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_DistributedOptimizer, kind), {"__module__": kind.__module__})
    optimizer._reduction = reduction
    return optimizer


def _keras_optimizer(optimizer: Any, name: str | None, **arguments: Any) -> Any:
    from ringtrain.tensorflow import keras  # only now: Keras costs time, and a tape needs none of it

    return keras.DistributedOptimizer(optimizer, name, **arguments)
