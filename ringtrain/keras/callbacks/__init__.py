"""Callbacks for ``model.fit``, with the names that Horovod's scripts use. All ranks must pass the same ones."""

import keras

from ringtrain.keras.callbacks.checkpoint import BestModelHooks
from ringtrain.keras.callbacks.fit_start import StartHooks
from ringtrain.keras.callbacks.learning_rate import ScheduleHooks, WarmupHooks
from ringtrain.keras.callbacks.metrics import MetricHooks
from ringtrain.keras.callbacks.moving_statistics import StatisticsHooks
from ringtrain.keras.fitting import look_at_fits


class BestModelCheckpoint(BestModelHooks, keras.callbacks.ModelCheckpoint):
    __doc__ = BestModelHooks.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
        filepath: str | None = None,
    ):
        super().__init__(monitor, verbose, save_weights_only, mode, save_freq, filepath)


class BroadcastGlobalVariablesCallback(StartHooks, keras.callbacks.Callback):
    __doc__ = StartHooks.__doc__


class MetricAverageCallback(MetricHooks, keras.callbacks.Callback):
    __doc__ = MetricHooks.__doc__


class MovingStatisticsAverageCallback(StatisticsHooks, keras.callbacks.Callback):
    __doc__ = StatisticsHooks.__doc__


class LearningRateScheduleCallback(ScheduleHooks, keras.callbacks.Callback):
    __doc__ = ScheduleHooks.__doc__


class LearningRateWarmupCallback(WarmupHooks, keras.callbacks.Callback):
    __doc__ = WarmupHooks.__doc__


look_at_fits(keras.Model, keras.callbacks.Callback)

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
