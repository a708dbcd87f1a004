"""Moving statistics, of which each rank keeps its own: those of BatchNormalization."""

from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain.keras.types import Logs, Model, Variable
from ringtrain.keras.variables import average_variables

MOVING_STATISTICS = ("moving_mean", "moving_variance")


class StatisticsHooks:
    """Averages the moving statistics of BatchNormalization over the ranks before evaluation and before files are saved.

    Example:
        >>> model.fit(x, y, epochs=3, callbacks=[hvd.callbacks.MovingStatisticsAverageCallback()])

    Without it each rank evaluates with the statistics of its own data, and a file has those of the rank that wrote it.
    Put it before callbacks that save.

    Args:
        process_set: the ranks that are averaged over; another one keeps its own.
    """

    model: Model  # Keras sets it

    def __init__(self, process_set: ProcessSet = global_process_set):
        super().__init__()
        self._averaged_over = process_set

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Before ``evaluate``, and validation within ``fit``."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Before checkpoints."""
        self._average()

    def _average(self) -> None:
        if self._averaged_over.included():
            average_variables(moving_statistics(self.model), self._averaged_over)


def moving_statistics(model: Model) -> list[Variable]:
    """The variables of a model that hold moving statistics."""
    return [variable for variable in model.non_trainable_variables if _last_name(variable) in MOVING_STATISTICS]


def _last_name(variable: Variable) -> str:
    """Keras 3 names a variable ``moving_mean``, tf_keras ``batch_normalization/moving_mean:0``."""
    return variable.name.split("/")[-1].split(":")[0]
