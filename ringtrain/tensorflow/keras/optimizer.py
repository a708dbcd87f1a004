"""``DistributedOptimizer`` for the optimizers of ``tf.keras``, in the argument order of ``horovod.tensorflow.keras``."""

from collections.abc import Sequence
from typing import TypeVar

from ringtrain._runtime.operations import Average
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._training.mode import Mode
from ringtrain.keras.optimizer import DistributedOptimizer as in_order_of_keras
from ringtrain.keras.optimizer import checked_groups
from ringtrain.keras.types import Compression, Variable

_AnOptimizer = TypeVar("_AnOptimizer")


def DistributedOptimizer(
    optimizer: _AnOptimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    mode: Mode | None = None,
) -> _AnOptimizer:
    """Makes an optimizer of ``tf.keras`` update with the gradients of all ranks, and returns it.

    Example:
        >>> model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size())), loss="mse")
        >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    The arguments mean what they do for ``ringtrain.keras.DistributedOptimizer``, in another order. An optimizer of the
    legacy Keras 2 has the same methods with ``LocalSteps``, ``OneStepLate`` and PowerSGD; a LossScaleOptimizer around it is refused.

    Raises:
        InvalidArgumentError: not an optimizer of ``tf.keras.optimizers``, or an argument that cannot be.
        UnsupportedError: when an optimizer of Keras 2 with one of these is applied: in a graph of TensorFlow 1, or within a
            LossScaleOptimizer.
    """
    groups = checked_groups(num_groups, groups)  # here, where the warning about the older name finds its caller
    num_groups = 0
    return in_order_of_keras(**locals())
