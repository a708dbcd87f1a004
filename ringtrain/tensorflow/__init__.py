"""ringtrain for TensorFlow, with the names that Horovod's scripts use.

>>> import ringtrain.tensorflow as hvd
>>> hvd.init()
>>> tape = hvd.DistributedGradientTape(tape)
>>> hvd.broadcast_variables(model.variables, root_rank=0)
"""

try:
    import tensorflow as _tensorflow  # noqa: F401 - a missing one is reported here, not deep below
except ImportError as _problem:
    raise ImportError("ringtrain.tensorflow needs TensorFlow. Run: pip install tensorflow") from _problem

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
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ringtrain.tensorflow import autograd as _autograd  # noqa: F401 - registers the gradients
from ringtrain.tensorflow.compression import Compression
from ringtrain.tensorflow.functions import broadcast_variables
from ringtrain.tensorflow.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from ringtrain.tensorflow.start import init

__all__ = [name for name in dir() if not name.startswith("_")]
