"""ringtrain for Keras 3 on TensorFlow or PyTorch, with the names that Horovod's scripts use.

>>> import ringtrain.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), "mse")
>>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

import inspect as _inspect

try:
    import keras as _keras
except ImportError as _problem:
    raise ImportError(
        f"ringtrain.keras needs Keras 3, but: {_problem}. Run: pip install keras tensorflow"
    ) from _problem

if _keras.__version__.split(".")[0] != "3":
    raise ImportError(f"ringtrain.keras needs Keras 3, but found {_keras.__version__}. Run: pip install 'keras>=3'")

from ringtrain import (
    LocalSteps,
    OneStepLate,
    Outer,
    RingtrainError,
    Synchronous,
    allgather_object,
    barrier,
    broadcast_object,
    join,
)
from ringtrain.basics import *  # noqa: F403 - what all adapters export, listed once
from ringtrain.keras import callbacks, elastic, layers
from ringtrain.keras.backends import backend as _backend
from ringtrain.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ringtrain.keras.saving import load_model
from ringtrain.keras.values import *  # noqa: F403 - the operations, listed once
from ringtrain.keras.variables import broadcast_global_variables, broadcast_variables

init, Compression = _backend.hvd.init, _backend.hvd.Compression
if _keras.backend.backend() == "tensorflow":
    SyncBatchNormalization = _backend.hvd.SyncBatchNormalization

_SUBMODULES = ("callbacks", "elastic", "layers")
__all__ = [
    name
    for name in dir()
    if not name.startswith("_") and (name in _SUBMODULES or not _inspect.ismodule(globals()[name]))
]
