"""``torch.profiler`` sees what ringtrain does: ranges, and which rank a trace is of.

Ranges lie around hooks, what is submitted (``ringtrain.allreduce: name``) and what is waited for (``ringtrain.wait: name``), and
go to NVTX too where ``torch.autograd.profiler.emit_nvtx`` is on. Readers of traces of several ranks, such as Holistic Trace
Analysis, need ``distributedInfo``, which torch writes for ``torch.distributed`` alone.
"""

import json
from contextlib import AbstractContextManager

import torch

from ringtrain._runtime import context as contexts
from ringtrain._runtime import ranges


def install() -> None:
    """From now on ranges are made while a profiler of torch is on."""
    ranges.use(torch.autograd._profiler_enabled, _range)


def _range(name: str) -> AbstractContextManager[torch.autograd.profiler.record_function]:
    if contexts.is_initialized() and not _torch_tells():
        torch.autograd._add_metadata_json("distributedInfo", _distributed_info())
    return torch.profiler.record_function(name)


def _torch_tells() -> bool:
    """Whether the profiler has found a process group, of which it writes more than we know."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _distributed_info() -> str:
    context = contexts.current()
    return json.dumps({"backend": "ringtrain", "rank": context.rank, "world_size": context.size})
