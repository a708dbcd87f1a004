"""ringtrain for TensorFlow, with the names that Horovod's scripts use.

>>> import ringtrain.tensorflow as hvd
>>> hvd.init()
>>> tape = hvd.DistributedGradientTape(tape)
>>> hvd.broadcast_variables(model.variables, root_rank=0)
"""

import typing as _typing

try:
    import tensorflow as _tensorflow  # a missing one is reported here, not deep below
except ImportError as _problem:
    raise ImportError("ringtrain.tensorflow needs TensorFlow. Run: pip install tensorflow") from _problem

from ringtrain import LocalSteps, OneStepLate, RingtrainError, Synchronous
from ringtrain._training.adapter.basics import loads_later as _loads_later
from ringtrain.common.util import check_extension
from ringtrain.tensorflow import autograd as _autograd  # registers the gradients
from ringtrain.tensorflow import elastic, mpi_ops
from ringtrain.tensorflow.compression import Compression
from ringtrain.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from ringtrain.tensorflow.gathering import gather_with_gradient
from ringtrain.tensorflow.mpi_ops import *  # noqa: F403 - the operations and basics, listed once
from ringtrain.tensorflow.on_host import late_gradients
from ringtrain.tensorflow.optimizer import DistributedOptimizer
from ringtrain.tensorflow.sync_batch_norm import SyncBatchNormalization
from ringtrain.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from ringtrain.tensorflow.util import _executing_eagerly  # programs for Horovod ask it of this module, too

if _typing.TYPE_CHECKING:
    from ringtrain import Outer

_LATER = {
    "Outer": "ringtrain._training.averaging.outer"
}  # by where it is: who averages no local steps does not load it

_get, __dir__ = _loads_later(globals(), _LATER)
if not _typing.TYPE_CHECKING:  # to a checker every name would be one of these
    __getattr__ = _get


__all__ = [
    *mpi_ops.__all__,  # type: ignore[attr-defined]  # made of what it imports
    "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer",
    "LocalSteps", "OneStepLate", "Outer", "PartialDistributedGradientTape", "RingtrainError", "SyncBatchNormalization",
    "Synchronous", "allgather_object",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables", "check_extension",
    "elastic", "gather_with_gradient", "late_gradients",
]  # fmt: skip
