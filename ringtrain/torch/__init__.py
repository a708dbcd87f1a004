"""ringtrain for PyTorch, with the names that Horovod's scripts use.

>>> import ringtrain.torch as hvd
>>> hvd.init()
>>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
>>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""

try:
    import torch as _torch  # a missing one is reported here, not deep below
except ImportError as _problem:
    raise ImportError("ringtrain.torch needs PyTorch. Run: pip install torch") from _problem

import typing as _typing

from ringtrain import (
    Handle,
    LocalSteps,
    OneStepLate,
    RingtrainError,
    ShardedStep,
    Synchronous,
    allgather_object,
    broadcast_object,
    shard,
)
from ringtrain._bootstrap.membership import needs_to_join as _needs_to_join
from ringtrain._training.adapter.basics import loads_later as _loads_later
from ringtrain.common.util import check_extension
from ringtrain.torch import mpi_ops
from ringtrain.torch import profiling as _profiling
from ringtrain.torch.buffers import broadcast_buffers
from ringtrain.torch.clipping import clip_grad_norm_
from ringtrain.torch.compression import Compression
from ringtrain.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringtrain.torch.mpi_ops import *  # noqa: F403 - the operations and basics, listed once
from ringtrain.torch.optimizer import DistributedOptimizer
from ringtrain.torch.sampler import DistributedSampler
from ringtrain.torch.sync_batch_norm import SyncBatchNorm

if _typing.TYPE_CHECKING:
    from ringtrain import Outer
    from ringtrain.torch import elastic
    from ringtrain.torch.embedding import ShardedEmbedding, ShardedEmbeddingBag, ShardedEmbeddingCollection
    from ringtrain.torch.gathering import gather_with_gradient
    from ringtrain.torch.resuming import resume_together
    from ringtrain.torch.row_optimizers import RowWiseAdagrad
    from ringtrain.torch.table_checkpoints import dense_state_dict, load_tables, plain_weight, save_tables
    from ringtrain.torch.uneven import until_all_are_done

_profiling.install()
_needs_to_join(
    "ringtrain.torch.modes.synchronous", "ringtrain.torch.elastic", "torch._dynamo"
)  # torch's optimizers need it

# The vector functions of PyTorch's MKL settle in their first call which processor they are for, with a race: threads that
# call one at that moment may get results of four digits. Ranks may be threads (ringtrain.testing.World).
_torch.zeros(1, dtype=_torch.float32, device="cpu").tanh()

_LATER = {  # by where it is: who has no elastic job, no tables and no local steps needs none of it
    "Outer": "ringtrain._training.averaging.outer",
    "elastic": "ringtrain.torch.elastic",
    **dict.fromkeys(
        ("ShardedEmbedding", "ShardedEmbeddingBag", "ShardedEmbeddingCollection"), "ringtrain.torch.embedding"
    ),
    "RowWiseAdagrad": "ringtrain.torch.row_optimizers",
    "gather_with_gradient": "ringtrain.torch.gathering",
    "resume_together": "ringtrain.torch.resuming",
    "until_all_are_done": "ringtrain.torch.uneven",
    **dict.fromkeys(
        ("dense_state_dict", "load_tables", "plain_weight", "save_tables"), "ringtrain.torch.table_checkpoints"
    ),
}

_get, __dir__ = _loads_later(globals(), _LATER)
if not _typing.TYPE_CHECKING:  # to a checker every name would be one of these
    __getattr__ = _get


__all__ = [
    *mpi_ops.__all__,  # type: ignore[attr-defined]  # made of what it imports
    "Compression", "DistributedOptimizer", "DistributedSampler", "Handle", "LocalSteps", "OneStepLate", "Outer",
    "RingtrainError", "RowWiseAdagrad",
    "ShardedEmbedding", "ShardedEmbeddingBag", "ShardedEmbeddingCollection", "ShardedStep", "SyncBatchNorm", "Synchronous",
    "allgather_object",
    "broadcast_buffers", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "check_extension",
    "clip_grad_norm_", "dense_state_dict", "elastic", "gather_with_gradient", "load_tables", "plain_weight",
    "resume_together", "save_tables", "shard", "until_all_are_done",
]  # fmt: skip
