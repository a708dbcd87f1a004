"""Files of the best model."""

from typing import TYPE_CHECKING

from ringtrain._runtime.context import current
from ringtrain.keras.types import Logs

if TYPE_CHECKING:  # each Keras puts its own ModelCheckpoint behind it
    from keras.callbacks import ModelCheckpoint as _ModelCheckpoint
else:
    _ModelCheckpoint = object


class BestModelHooks(_ModelCheckpoint):
    """Saves the model when a metric is the best so far. All ranks pass it; rank 0 writes.

    Example:
        >>> average = hvd.callbacks.MetricAverageCallback()
        >>> best = hvd.callbacks.BestModelCheckpoint("loss", filepath="best.keras")
        >>> model.fit(x, y, epochs=3, callbacks=[average, best])

    Put ``MetricAverageCallback`` before it.

    Args:
        monitor: the metric.
        verbose: 1 to say when it saves.
        save_weights_only: the weights alone, into a ``.weights.h5`` file.
        mode: "min", "max", or "auto" to tell by the metric's name.
        save_freq: "epoch", or a number of batches.
        filepath: ends in ``.keras``, ``.h5`` or ``.weights.h5``; Horovod's scripts set the attribute later instead.

    Raises:
        ValueError: when it would save: no ``filepath`` was given.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ):
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or f"best{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath

    def _save_model(self, epoch: int, batch: int | None, logs: Logs) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: expected a file path but found none. Pass filepath='best.keras'.")
        if current().rank == 0:
            super()._save_model(epoch, batch, logs)
