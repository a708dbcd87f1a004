"""Loading of models whose optimizer goes on as a distributed one."""

import inspect
import os
import types
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import keras

from ringtrain._runtime.arguments import check_among
from ringtrain.keras.optimizer import DistributedOptimizer, reduction_of
from ringtrain.keras.types import Compression, Model


def load_model(
    filepath: str | os.PathLike,
    custom_optimizers: Sequence[Callable] | None = None,
    custom_objects: dict[str, Callable] | None = None,
    compression: Compression = None,
    legacy_opts: bool = False,
    **settings: Any,
) -> keras.Model:
    """``keras.models.load_model``, with the optimizer wrapped again.

    Example:
        >>> if hvd.rank() == 0:
        ...     model.save("model.keras")
        >>> hvd.barrier()  # behind it the file is there
        >>> model = hvd.load_model("model.keras")

    Files name the user's optimizer and load without ringtrain too, but then train without averaging.

    Args:
        filepath: as for Keras.
        custom_optimizers: optimizer classes of the user's own that the file may name.
        custom_objects: as for Keras; an optimizer may also be a function of its configuration, as in Horovod:
            ``lambda **config: hvd.DistributedOptimizer(Mine(**config))``, which then has the settings given there.
        compression: as for ``DistributedOptimizer``.
        legacy_opts: Horovod's switch for the optimizers of Keras 2; only False.
        settings: the other arguments of ``DistributedOptimizer``; files do not keep them.

    Raises:
        InvalidArgumentError: ``legacy_opts=True``.
    """
    check_among("load_model: legacy_opts must be False", legacy_opts, [False], "Keras 3 has no such optimizers")
    return load_wrapped(keras, filepath, custom_optimizers, custom_objects, {"compression": compression, **settings})


def load_wrapped(
    keras: ModuleType,
    filepath: str | os.PathLike,
    custom_optimizers: Sequence[Callable] | None,
    custom_objects: dict[str, Callable] | None,
    settings: dict[str, Any],
) -> Model:
    """What ``load_model`` does, with Keras 3 or tf_keras."""
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects |= {name: _loadable(kind) for name, kind in (custom_objects or {}).items()}
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", None)
    if optimizer is not None and reduction_of(optimizer) is None and reduction_of(inner) is None:
        DistributedOptimizer(optimizer, **settings)
    return model


def _loadable(kind: Callable) -> Callable:
    """The object; for a function of nothing but a configuration, a class, which is what Keras 3 makes objects of."""
    if not isinstance(kind, types.FunctionType):
        return kind
    if {parameter.kind for parameter in inspect.signature(kind).parameters.values()} != {inspect.Parameter.VAR_KEYWORD}:
        return kind
    return type(kind.__name__, (), {"from_config": staticmethod(lambda config, **_: kind(**config))})
