"""The elastic names of ``ringtrain.keras`` for the models of ``tf.keras``, Keras 3 or the legacy Keras 2."""

import tensorflow as tf

from ringtrain.elastic import BatchSampler, ObjectState, State
from ringtrain.keras.elastic.fit import ElasticHooks, batches
from ringtrain.keras.elastic.fit_hooks import CommitHooks, UpdateBatchHooks, UpdateEpochHooks
from ringtrain.keras.elastic.state import KerasState
from ringtrain.keras.types import Model, Optimizer
from ringtrain.tensorflow.elastic import run

__all__ = [
    "BatchSampler", "CommitStateCallback", "Elastic", "KerasState", "ObjectState", "State", "UpdateBatchStateCallback",
    "UpdateEpochStateCallback", "batches", "run",
]  # fmt: skip


class CommitStateCallback(CommitHooks, tf.keras.callbacks.Callback):
    __doc__ = CommitHooks.__doc__


class UpdateBatchStateCallback(UpdateBatchHooks, tf.keras.callbacks.Callback):
    __doc__ = UpdateBatchHooks.__doc__


class UpdateEpochStateCallback(UpdateEpochHooks, tf.keras.callbacks.Callback):
    __doc__ = UpdateEpochHooks.__doc__


class Elastic(ElasticHooks, tf.keras.callbacks.Callback):
    __doc__ = ElasticHooks.__doc__


class TensorFlowKerasState(KerasState):
    """``KerasState`` by the name that it has in ``ringtrain.tensorflow.elastic``.

    Example:
        >>> state = hvd.elastic.TensorFlowKerasState(model, epoch=0)

    Args:
        model: as for ``KerasState``.
        optimizer: as for ``KerasState``.
        backend: accepted for Horovod's sake.
        kwargs: as for ``KerasState``.
    """

    def __init__(self, model: Model, optimizer: Optimizer | None = None, backend: object = None, **kwargs: object):
        super().__init__(model, optimizer, **kwargs)


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
