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
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    RingtrainError,
    Sum,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ringtrain.keras import callbacks, elastic
from ringtrain.keras.backends import backend as _backend
from ringtrain.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ringtrain.keras.saving import load_model
from ringtrain.keras.values import allgather, allreduce, broadcast, reducescatter
from ringtrain.keras.variables import broadcast_global_variables, broadcast_variables
from ringtrain.probes import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)

init, Compression = _backend.hvd.init, _backend.hvd.Compression

_SUBMODULES = ("callbacks", "elastic")
__all__ = [
    name
    for name in dir()
    if not name.startswith("_") and (name in _SUBMODULES or not _inspect.ismodule(globals()[name]))
]
