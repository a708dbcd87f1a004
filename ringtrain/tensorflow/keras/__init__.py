"""ringtrain for ``tf.keras``, with the names that Horovod's scripts use: for Keras 3 those of ``ringtrain.keras``, and
for the legacy Keras 2 (``TF_USE_LEGACY_KERAS=1``) those of its adapter.

>>> import ringtrain.tensorflow.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size())), "mse")
>>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

import importlib
import sys

import tensorflow as _tensorflow

_is_legacy = _tensorflow.keras.Model.__module__.startswith("tf_keras")
_names = importlib.import_module("ringtrain.tensorflow.keras.legacy" if _is_legacy else "ringtrain.keras")
globals().update({name: getattr(_names, name) for name in _names.__all__})
for _submodule in ("callbacks", "elastic"):  # scripts import them by their own names too
    sys.modules[f"{__name__}.{_submodule}"] = getattr(_names, _submodule)

__all__ = list(_names.__all__)
