"""The backend "ringtrain" of ``torch.distributed``: scripts for DDP, FSDP2 and device meshes over ringtrain's core.

>>> import torch.distributed as dist
>>> dist.init_process_group("ringtrain")

torch 2.5 and later find it where ringtrain is installed; for torch 2.4 import this package first. docs/torch-distributed.md
is the guide.
"""

from typing import Any

import ringtrain_backend
from ringtrain.torch.distributed.creation import create
from ringtrain.torch.distributed.monitored_barrier import offer as _offer_monitored_barrier
from ringtrain.torch.distributed.process_group import RingtrainProcessGroup

__all__ = ["Guard", "RingtrainProcessGroup", "create"]


def __getattr__(name: str) -> Any:
    """Elastic jobs alone need it."""
    if name == "Guard":
        from ringtrain.torch.distributed.guard import Guard

        return Guard
    raise AttributeError(name)


_offer_monitored_barrier()
ringtrain_backend.register()
