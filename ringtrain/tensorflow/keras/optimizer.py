"""``DistributedOptimizer`` for the optimizers of ``tf.keras``, in the argument order of ``horovod.tensorflow.keras``."""

from collections.abc import Sequence
from typing import Any

from ringtrain.keras.optimizer import checked_groups, distribute
from ringtrain.keras.reduction import Settings
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer of ``tf.keras`` update with the gradients of all ranks, and returns it.

    The arguments mean what they do for ``ringtrain.keras.DistributedOptimizer``, in another order.

    Raises:
        InvalidArgumentError: not an optimizer of ``tf.keras.optimizers``, or an argument that cannot be.
    """
    settings = Settings(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=checked_groups(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return distribute(optimizer, settings, name)
