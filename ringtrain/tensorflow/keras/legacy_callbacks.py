"""The callbacks of ``ringtrain.keras`` for models of tf_keras."""

from typing import Any

import tf_keras

from ringtrain.keras.callbacks.checkpoint import BestModelHooks
from ringtrain.keras.callbacks.learning_rate import ScheduleHooks, WarmupHooks
from ringtrain.keras.callbacks.metrics import MetricHooks
from ringtrain.keras.callbacks.start import StartHooks
from ringtrain.keras.callbacks.statistics import StatisticsHooks
from ringtrain.process_sets import ProcessSet, global_process_set


class BestModelCheckpoint(BestModelHooks, tf_keras.callbacks.ModelCheckpoint):
    __doc__ = BestModelHooks.__doc__


class BroadcastGlobalVariablesCallback(StartHooks, tf_keras.callbacks.Callback):
    __doc__ = StartHooks.__doc__

    def _process_set(self) -> ProcessSet:
        inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        reducing = getattr(inner, "_reducing", None)
        return global_process_set if reducing is None else reducing.reduction.process_set


class MetricAverageCallback(MetricHooks, tf_keras.callbacks.Callback):
    __doc__ = MetricHooks.__doc__

    # tf_keras then hands over NumPy's numbers in a dictionary that later callbacks see too.
    _supports_tf_logs: Any = False


class MovingStatisticsAverageCallback(StatisticsHooks, tf_keras.callbacks.Callback):
    __doc__ = StatisticsHooks.__doc__


class LearningRateScheduleCallback(ScheduleHooks, tf_keras.callbacks.Callback):
    __doc__ = ScheduleHooks.__doc__


class LearningRateWarmupCallback(WarmupHooks, tf_keras.callbacks.Callback):
    __doc__ = WarmupHooks.__doc__
