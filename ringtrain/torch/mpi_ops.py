"""The operations and the world's basics, where scripts for Horovod may import them: ``horovod.torch.mpi_ops``.

This is also the list of them: ``ringtrain.torch`` exports the same names.
"""

import typing as _typing

from ringtrain import barrier, init, join
from ringtrain.basics import *  # noqa: F403 - what all adapters export, listed once
from ringtrain.torch.handles import poll, synchronize
from ringtrain.torch.operations import *  # noqa: F403 - listed once, there
from ringtrain.torch.reductions import *  # noqa: F403 - listed once, there

if not _typing.TYPE_CHECKING:  # a type checker takes all public names, which are the same
    __all__ = [name for name in dir() if not name.startswith("_")]
