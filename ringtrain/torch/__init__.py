"""ringtrain for PyTorch, with the names that Horovod's scripts use.

>>> import ringtrain.torch as hvd
>>> hvd.init()
>>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
>>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""

try:
    import torch as _torch  # noqa: F401 - a missing one is reported here, not deep below
except ImportError as _problem:
    raise ImportError("ringtrain.torch needs PyTorch. Run: pip install torch") from _problem

from ringtrain import (
    Average,
    Handle,
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
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    poll,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronize,
)
from ringtrain.torch.compression import Compression
from ringtrain.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringtrain.torch.operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from ringtrain.torch.optimizer import DistributedOptimizer
from ringtrain.torch.sampler import DistributedSampler

__all__ = [name for name in dir() if not name.startswith("_")]
