"""Loading of models whose optimizer goes on as a distributed one."""

from typing import Any

import keras

from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
    **settings: Any,
) -> keras.Model:
    """``keras.models.load_model``, with the optimizer wrapped again.

    Files name the user's optimizer and load without ringtrain too, but then train without averaging.

    Args:
        filepath: as for Keras.
        custom_optimizers: optimizer classes of the user's own that the file may name.
        custom_objects: as for Keras.
        compression: as for ``DistributedOptimizer``.
        legacy_opts: Horovod's switch for the optimizers of Keras 2; only False.
        settings: the other arguments of ``DistributedOptimizer``; files do not keep them.

    Raises:
        InvalidArgumentError: ``legacy_opts=True``.
    """
    if legacy_opts:
        raise InvalidArgumentError(
            "load_model: legacy_opts must be False, but is True. Keras 3 has no such optimizers."
        )
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **settings)
    return model
