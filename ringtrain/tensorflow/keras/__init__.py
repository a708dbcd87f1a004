"""ringtrain for ``tf.keras``, with the names that Horovod's scripts use; they are those of ``ringtrain.keras``.

>>> import ringtrain.tensorflow.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size())), "mse")
>>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

import sys

import ringtrain.keras as _names
from ringtrain.keras import *  # noqa: F403 - listed there

for _submodule in ("callbacks", "elastic"):  # scripts import them by their own names too
    sys.modules[f"{__name__}.{_submodule}"] = getattr(_names, _submodule)

__all__ = list(_names.__all__)
