"""Ignite's ``idist`` over ringtrain: ``idist.Parallel(backend="ringtrain")``.

>>> import ringtrain.ignite  # idist knows the backend from here on
>>> with idist.Parallel(backend="ringtrain") as parallel:
...     parallel.run(training)

Ignite has a closed list of backends, and wraps models for these alone: others train each rank by itself, in silence. So
its native model gets one more, and ``idist.auto_model`` asks here first. docs/other-trainers.md is the guide.
"""

import torch
from ignite import distributed as idist
from ignite.distributed import auto
from ignite.distributed.comp_models.native import _NativeDistModel
from torch.nn.parallel import DistributedDataParallel

import ringtrain_backend

__all__ = ["auto_model"]
NAME = ringtrain_backend.NAME
_of_ignite = auto.auto_model


def auto_model(model: torch.nn.Module, sync_bn: bool = False, **named: object) -> torch.nn.Module:
    """``idist.auto_model``, which wraps a model in ``DistributedDataParallel`` on the backend "ringtrain", too.

    Args:
        model: is moved to the rank's device.
        sync_bn: whether batch normalisation is to take in the batches of all ranks.
        named: arguments for ``DistributedDataParallel``.
    """
    if idist.backend() != NAME or idist.get_world_size() == 1:
        return _of_ignite(model, sync_bn, **named)
    device = idist.device()
    model = model.to(device)
    if sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **named)


ringtrain_backend.register()
if NAME not in _NativeDistModel.available_backends:
    _NativeDistModel.available_backends += (NAME,)
    auto.auto_model = idist.auto_model = auto_model
