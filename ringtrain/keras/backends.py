"""The framework under Keras 3: the module with the lines that differ between TensorFlow and PyTorch.

Both modules have the same functions: ``dense``, ``scaled``, ``reduce``, ``maximum``, ``scopes`` and ``unconverted``.
"""

import importlib

import keras

from ringtrain.errors import UnsupportedError

_MODULES = {"tensorflow": "ringtrain.keras.tensorflow_backend", "torch": "ringtrain.keras.torch_backend"}

if keras.backend.backend() not in _MODULES:
    raise UnsupportedError(
        f"ringtrain.keras: expected Keras on {' or '.join(_MODULES)} but found it on '{keras.backend.backend()}'. "
        "Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before keras is imported."
    )

backend = importlib.import_module(_MODULES[keras.backend.backend()])
