"""The callbacks of ``ringtrain.keras`` for the models of ``tf.keras``, Keras 3 or the legacy Keras 2."""

import tensorflow as tf

from ringtrain.keras.callbacks.checkpoint import BestModelHooks
from ringtrain.keras.callbacks.fit_start import StartHooks
from ringtrain.keras.callbacks.learning_rate import ScheduleHooks, WarmupHooks
from ringtrain.keras.callbacks.metrics import MetricHooks
from ringtrain.keras.callbacks.moving_statistics import StatisticsHooks


class BestModelCheckpoint(BestModelHooks, tf.keras.callbacks.ModelCheckpoint):
    __doc__ = BestModelHooks.__doc__


class BroadcastGlobalVariablesCallback(StartHooks, tf.keras.callbacks.Callback):
    __doc__ = StartHooks.__doc__


class MetricAverageCallback(MetricHooks, tf.keras.callbacks.Callback):
    __doc__ = MetricHooks.__doc__

    # Keras 2 then hands over NumPy's numbers in a dictionary that later callbacks see too.
    _supports_tf_logs: object = False


class MovingStatisticsAverageCallback(StatisticsHooks, tf.keras.callbacks.Callback):
    __doc__ = StatisticsHooks.__doc__


class LearningRateScheduleCallback(ScheduleHooks, tf.keras.callbacks.Callback):
    __doc__ = ScheduleHooks.__doc__


class LearningRateWarmupCallback(WarmupHooks, tf.keras.callbacks.Callback):
    __doc__ = WarmupHooks.__doc__


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "MovingStatisticsAverageCallback",
]


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
