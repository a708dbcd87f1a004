"""The framework under Keras 3: the module with the lines that differ between TensorFlow, PyTorch and JAX.

The modules have the same functions: ``dense``, ``divided_by_size``, ``reduce``, ``completed``, ``like``, ``here``, ``maxima``,
``keeps_residuals``, ``settle_residuals``, ``watch``, ``watched``, ``dataset``, ``wire_of``, ``on_host``, ``scopes``,
``unconverted``, ``is_compiled``, ``is_traced``, ``cond``, ``apply``, ``begin_anew`` and ``is_given`` for gradients and the
step around them, ``operations_for``, ``tensor`` and ``own_name`` for values; ``rows_of`` for tables; and ``hvd``, the
adapter below, and ``Compression``. ``columns`` are those of ``_training.needs`` that hold for the framework;
``compiles_operations`` says whether XLA can have operations between ranks, and ``carries_variables`` whether a step changes those
of the optimizer alone; ``rows_come_late`` whether gradients travel even while another rank's row is missing.
"""

import importlib

import keras

from ringtrain._runtime.arguments import check_among
from ringtrain.errors import UnsupportedError

_MODULES = {
    "tensorflow": "ringtrain.tensorflow.keras_backend",
    "torch": "ringtrain.keras.torch_backend",
    "jax": "ringtrain.keras.jax_backend",
}


def module_of(name: str) -> str:
    """The module for a backend of Keras. Raises UnsupportedError for those that have none."""
    demand = f"ringtrain.keras: Keras' backend must be one of {', '.join(_MODULES)}"
    check_among(demand, name, _MODULES, "Set KERAS_BACKEND to one of them before keras is imported", UnsupportedError)
    return _MODULES[name]


backend = importlib.import_module(module_of(keras.backend.backend()))
