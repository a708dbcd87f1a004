"""Elastic training for Keras 3 on TensorFlow or PyTorch, but not on JAX; ``ringtrain.elastic`` says what it is.

With ``Elastic`` no step is lost:

>>> import ringtrain.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001)), "mse")
>>> elastic = hvd.elastic.Elastic(model)
>>> model.fit(x, y, epochs=90, initial_epoch=elastic.epoch, callbacks=[elastic])

The other names are Horovod's:

>>> state = hvd.elastic.KerasState(model, epoch=0, batch=0)
>>> @hvd.elastic.run
... def train(state):
...     callbacks = [
...         hvd.elastic.UpdateEpochStateCallback(state),
...         hvd.elastic.UpdateBatchStateCallback(state),
...         hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
...     ]
...     model.fit(data, steps_per_epoch=500 // hvd.size(), epochs=90, initial_epoch=state.epoch, callbacks=callbacks)
>>> train(state)
"""

from collections.abc import Callable
from typing import TypeVar

import keras

from ringtrain import elastic
from ringtrain.elastic import BatchSampler, ObjectState, State
from ringtrain.keras.backends import backend
from ringtrain.keras.elastic.fit import ElasticHooks, batches
from ringtrain.keras.elastic.fit_hooks import CommitHooks, UpdateBatchHooks, UpdateEpochHooks
from ringtrain.keras.elastic.state import KerasState

__all__ = [
    "BatchSampler", "CommitStateCallback", "Elastic", "KerasState", "ObjectState", "State", "UpdateBatchStateCallback",
    "UpdateEpochStateCallback", "batches", "run",
]  # fmt: skip
Result = TypeVar("Result")


class CommitStateCallback(CommitHooks, keras.callbacks.Callback):
    __doc__ = CommitHooks.__doc__


class UpdateBatchStateCallback(UpdateBatchHooks, keras.callbacks.Callback):
    __doc__ = UpdateBatchHooks.__doc__


class UpdateEpochStateCallback(UpdateEpochHooks, keras.callbacks.Callback):
    __doc__ = UpdateEpochHooks.__doc__


class Elastic(ElasticHooks, keras.callbacks.Callback):
    __doc__ = ElasticHooks.__doc__


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """``ringtrain.elastic.run``, which also understands the errors of the framework under Keras.

    Example:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     update_epoch = hvd.elastic.UpdateEpochStateCallback(state)
        ...     model.fit(x, y, initial_epoch=state.epoch, epochs=3, callbacks=[update_epoch])
        >>> train(hvd.elastic.KerasState(model, epoch=0))

    Args:
        func: takes the state and further arguments.
    """
    return getattr(backend.hvd, "elastic", elastic).run(func)


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
