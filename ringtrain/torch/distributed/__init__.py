"""The backend "ringtrain" of ``torch.distributed``: scripts for DDP, FSDP2 and device meshes over ringtrain's core.

>>> import torch.distributed as dist
>>> dist.init_process_group("ringtrain")

torch 2.5 and later find it where ringtrain is installed; for torch 2.4 import this package first. docs/torch-distributed.md
is the guide.
"""

import importlib
from typing import Any

import ringtrain_backend
from ringtrain.torch.distributed.creation import create
from ringtrain.torch.distributed.monitored_barrier import offer as _offer_monitored_barrier
from ringtrain.torch.distributed.process_group import RingtrainProcessGroup

__all__ = ["Guard", "ReplicaSampler", "RingtrainProcessGroup", "ShardedGuard", "create"]
_OF_ELASTIC_JOBS = {"Guard": "guard", "ReplicaSampler": "replica_sampler", "ShardedGuard": "sharded_guard"}


def __getattr__(name: str) -> Any:
    """Elastic jobs alone need these."""
    if name in _OF_ELASTIC_JOBS:
        return getattr(importlib.import_module(f"{__name__}.{_OF_ELASTIC_JOBS[name]}"), name)
    raise AttributeError(name)


_offer_monitored_barrier()
ringtrain_backend.register()
