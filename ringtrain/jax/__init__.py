"""ringtrain for JAX: collective operations inside compiled programs, and optax's optimizers on all ranks.

>>> import ringtrain.jax as hvd
>>> hvd.init()
>>> parameters = hvd.broadcast_parameters(parameters, root_rank=0)
>>> optimizer = hvd.DistributedGradientTransformation(optax.adamw(1e-3))
"""

try:
    import jax as _jax  # a missing one is reported here, not deep below
except ImportError as _problem:
    raise ImportError("ringtrain.jax needs JAX. Run: pip install jax") from _problem

from ringtrain import RingtrainError, Synchronous, join
from ringtrain._runtime.objects import allgather_object, broadcast_object
from ringtrain._runtime.operations import Compression
from ringtrain._training.adapter import basics
from ringtrain._training.adapter.basics import *  # noqa: F403 - what all adapters export, listed once
from ringtrain.jax import operations as _operations
from ringtrain.jax.gathering import gather_with_gradient
from ringtrain.jax.library import init
from ringtrain.jax.operations import *  # noqa: F403 - listed once, there
from ringtrain.jax.optax_transformation import DistributedGradientTransformation
from ringtrain.jax.trees import allreduce_gradients, broadcast_parameters

__all__ = [
    *basics.__all__,
    *_operations.__all__,
    "Compression", "DistributedGradientTransformation", "RingtrainError", "Synchronous", "allgather_object", "allreduce_gradients",
    "broadcast_object", "broadcast_parameters", "gather_with_gradient", "init", "join",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
