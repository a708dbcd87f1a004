"""The operations and the world's basics, where scripts for Horovod may import them: ``horovod.torch.mpi_ops``.

This is also the list of them: ``ringtrain.torch`` exports the same names.
"""

import typing as _typing
from collections.abc import Callable as _Callable

import torch as _torch

from ringtrain import barrier, init, join
from ringtrain._training.adapter.basics import *  # noqa: F403 - what all adapters export, listed once
from ringtrain.common.util import gpu_available
from ringtrain.torch.handles import poll, synchronize
from ringtrain.torch.operations import *  # noqa: F403 - listed once, there
from ringtrain.torch.reductions import *  # noqa: F403 - listed once, there

_Result: _typing.TypeAlias = (
    _torch.Tensor | tuple[_torch.Tensor, _torch.Tensor]
)  # a pair, with the splits of an alltoall


class _Function:
    """What programs take for Horovod's autograd functions: ``apply`` is an operation, with its arguments in their order."""

    def __init__(self, operation: _Callable[..., _Result], arguments: str):
        self._operation, self._arguments = operation, arguments.split()

    def apply(self, *given: object) -> _Result:
        """The result of the operation, which gradients flow through."""
        named, more = dict(zip(self._arguments, given, strict=False)), given[len(self._arguments) :]
        return self._operation(*more, **named)  # which raises the TypeError of one argument too many


HorovodAllreduce = _Function(allreduce, "tensor average name op prescale_factor postscale_factor process_set")  # noqa: F405
HorovodAllgather = _Function(allgather, "tensor name process_set")  # noqa: F405
HorovodBroadcast = _Function(broadcast, "tensor root_rank name process_set")  # noqa: F405
HorovodAlltoall = _Function(alltoall, "tensor splits name process_set")  # noqa: F405
HorovodReducescatter = _Function(reducescatter, "tensor op name process_set prescale_factor postscale_factor")  # noqa: F405

if not _typing.TYPE_CHECKING:  # a type checker takes all public names, which are the same
    __all__ = [name for name in dir() if not name.startswith("_") and type(globals()[name]) is not _Function]
