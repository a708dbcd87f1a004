"""The operations and the world's basics, where scripts for Horovod may import them: ``horovod.tensorflow.mpi_ops``.

This is also the list of them: ``ringtrain.tensorflow`` exports the same names.
"""

from ringtrain import (
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
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
from ringtrain.tensorflow.world import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op

__all__ = [name for name in dir() if not name.startswith("_")]
