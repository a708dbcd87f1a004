"""ringtrain for Keras 3 on TensorFlow, PyTorch or JAX, with the names that Horovod's scripts use.

>>> import ringtrain.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), "mse")
>>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

import inspect as _inspect
import typing as _typing

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
    RingtrainError,
    Synchronous,
    allgather_object,
    barrier,
    broadcast_object,
    join,
)
from ringtrain._training.adapter.basics import *  # noqa: F403 - what all adapters export, listed once
from ringtrain._training.adapter.basics import loads_later as _loads_later
from ringtrain.keras import callbacks, elastic, layers
from ringtrain.keras.backends import backend as _backend
from ringtrain.keras.loading import load_model
from ringtrain.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ringtrain.keras.value_operations import *  # noqa: F403 - the operations, listed once
from ringtrain.keras.variables import broadcast_global_variables, broadcast_variables

init, Compression = _backend.hvd.init, _backend.Compression
if _keras.backend.backend() == "tensorflow":
    SyncBatchNormalization = _backend.hvd.SyncBatchNormalization

if _typing.TYPE_CHECKING:
    from ringtrain import Outer

_LATER = {
    "Outer": "ringtrain._training.averaging.outer"
}  # by where it is: who averages no local steps does not load it

_get, __dir__ = _loads_later(globals(), _LATER)
if not _typing.TYPE_CHECKING:  # to a checker every name would be one of these
    __getattr__ = _get


_SUBMODULES = ("callbacks", "elastic", "layers")
__all__ = [
    name
    for name in (*globals(), *_LATER)
    if not name.startswith("_") and (name in _SUBMODULES or not _inspect.ismodule(globals().get(name)))
]
