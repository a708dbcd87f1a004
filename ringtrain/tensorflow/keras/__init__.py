"""ringtrain for ``tf.keras``, with the names that Horovod's scripts use: for Keras 3 those of ``ringtrain.keras``, and
for the legacy Keras 2 (``TF_USE_LEGACY_KERAS=1``) the same on its own way to reduce.

>>> import ringtrain.tensorflow.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size())), "mse")
>>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

import importlib as _importlib
import typing as _typing

import tensorflow as _tf

from ringtrain import keras as _keras3
from ringtrain._training.adapter.basics import loads_later as _loads_later
from ringtrain.tensorflow.keras.optimizer import DistributedOptimizer

if _typing.TYPE_CHECKING:
    from ringtrain.keras import *  # noqa: F403 - what is not defined here is the same for both

if _tf.keras.Model.__module__.startswith("tf_keras"):  # which is decided when TensorFlow is imported
    from ringtrain.tensorflow.keras.legacy import broadcast_global_variables, load_model
else:
    from ringtrain.keras import broadcast_global_variables, load_model

callbacks = _importlib.import_module(f"{__name__}.callbacks")  # "from … import" would find those of ringtrain.keras
elastic = _importlib.import_module(f"{__name__}.elastic")

__all__ = list(_keras3.__all__)

_get, __dir__ = _loads_later(globals(), dict.fromkeys(__all__, "ringtrain.keras"))
if not _typing.TYPE_CHECKING:  # what is not defined here is the same for both
    __getattr__ = _get
