"""The operations and the world's basics, where scripts for Horovod may import them: ``horovod.tensorflow.mpi_ops``.

This is also the list of them: ``ringtrain.tensorflow`` exports the same names.
"""

import typing as _typing

from ringtrain._training.adapter.basics import *  # noqa: F403 - what all adapters export, listed once
from ringtrain.common.util import gpu_available
from ringtrain.tensorflow.graph_world import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from ringtrain.tensorflow.library import init
from ringtrain.tensorflow.operations import *  # noqa: F403 - listed once, there

if not _typing.TYPE_CHECKING:  # a type checker takes all public names, which are the same
    __all__ = [name for name in dir() if not name.startswith("_")]
