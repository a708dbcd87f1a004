"""The adapter for the legacy Keras 2, ``tf_keras``: the same names as ``ringtrain.keras``, on its own way to reduce.

tf_keras hands gradients to ``aggregate_gradients`` before it clips or looks for overflows, also where a
LossScaleOptimizer is around the optimizer; so the user's optimizer gets a class that reduces there.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
import tf_keras

from ringtrain import keras as keras3
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.keras import *  # noqa: F403 - what is not defined below is the same for both
from ringtrain.keras.pairing import Pairing
from ringtrain.keras.reduction import next_prefix
from ringtrain.keras.tensorflow_backend import scopes
from ringtrain.keras.variables import shared_name
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.tensorflow.compression import Compression, Compressor
from ringtrain.tensorflow.gradients import GradientReduction
from ringtrain.tensorflow.keras import legacy_callbacks as callbacks

__all__ = keras3.__all__


def DistributedOptimizer(  # noqa: N802 - the name that Horovod scripts call
    optimizer: tf_keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf_keras.optimizers.Optimizer:
    """Makes an optimizer of tf_keras update with the gradients of all ranks, and returns it.

    The arguments are those of ``ringtrain.keras.DistributedOptimizer``.

    Raises:
        InvalidArgumentError: not an optimizer of ``tf_keras.optimizers``, or an argument that cannot be.
        UnsupportedError: ``backward_passes_per_step`` above 1, which Keras 3 has, or one of ``optimizers.legacy``.
    """
    _check(optimizer, backward_passes_per_step)
    reduction = GradientReduction(
        "DistributedOptimizer", op, compression or Compression.none, sparse_as_dense, gradient_predivide_factor,
        groups or num_groups or None, process_set,
    )  # fmt: skip
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    prefix = next_prefix(name, process_set)
    inner._reducing = _Reducing(reduction, prefix)
    if not isinstance(inner, _Distributed):
        kind = type(inner)
        described = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        inner.__class__ = type(kind.__name__, (_Distributed, kind), described)
    return optimizer


def PartialDistributedOptimizer(*arguments: Any, **named: Any) -> None:  # noqa: N802 - Horovod's name
    """Raises UnsupportedError: Keras 3 has it."""
    raise UnsupportedError("PartialDistributedOptimizer: expected Keras 3 but found tf_keras. Use Keras 3.")


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
    **settings: Any,
) -> tf_keras.Model:
    """``tf_keras.models.load_model``, with the optimizer wrapped again; see ``ringtrain.keras.load_model``."""
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = tf_keras.models.load_model(filepath, custom_objects=objects or None)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **settings)
    return model


class _Reducing:
    """What a distributed optimizer owns: how it reduces, its names, and what was synchronized by hand."""

    def __init__(self, reduction: GradientReduction, prefix: str):
        self.reduction = reduction
        self.prefix = prefix
        self.pairing = Pairing(prefix)

    def reduce(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The pairs with gradients of all ranks."""
        process_set = self.reduction.process_set
        if process_set.size() == 1 or not process_set.included():
            return pairs
        variables = [variable for _, variable in pairs]
        names = [f"{self.prefix}.{place}.{shared_name(variable)}" for place, variable in enumerate(variables)]
        gradients = self.reduction.reduce([gradient for gradient, _ in pairs], names, variables)
        return list(zip(gradients, variables, strict=True))


class _Distributed:
    """The methods that a distributed optimizer has beyond, or around, those of the user's class."""

    @tf.autograph.experimental.do_not_convert
    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """What tf_keras calls before it clips: the reduction, unless ``synchronize`` was called before."""
        reducing = self._reducing
        if reducing.pairing.skipping:
            reducing.pairing.take(scopes())
            return list(grads_and_vars)
        reducing.pairing.require_none(scopes())
        return reducing.reduce(list(grads_and_vars))

    @tf.autograph.experimental.do_not_convert
    def synchronize(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Reduces gradients now; then apply them within ``skip_synchronize()``. See ``ringtrain.keras``."""
        reducing = self._reducing
        reducing.pairing.note(scopes(), True)
        return reducing.reduce(list(grads_and_vars))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this block ``apply_gradients`` takes the gradients as they are."""
        with self._reducing.pairing.skip():
            yield


def _check(optimizer: Any, passes: int) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        raise UnsupportedError(
            f"DistributedOptimizer: expected an optimizer of tf_keras.optimizers but found optimizers.legacy."
            f"{kind.__name__}. Use the one of the same name in tf_keras.optimizers."
        )
    if not isinstance(optimizer, tf_keras.optimizers.Optimizer):
        raise InvalidArgumentError(
            f"DistributedOptimizer: expected a tf_keras.optimizers.Optimizer but found a {kind.__module__}."
            f"{kind.__qualname__}. Keras 3 needs an environment without TF_USE_LEGACY_KERAS."
        )
    if passes != 1:
        raise UnsupportedError(
            f"DistributedOptimizer: backward_passes_per_step must be 1 for tf_keras, but is {passes!r}. Use Keras 3."
        )
