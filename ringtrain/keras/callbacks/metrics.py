"""Metrics of all ranks instead of this rank's own."""

import numpy as np

from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.operations import allreduce
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, size_of
from ringtrain._training.adapter.checks import require_alike
from ringtrain.elastic.followed import surviving
from ringtrain.keras.types import Logs


class MetricHooks:
    """Averages the metrics of an epoch, validation's included, over the ranks.

    Example:
        >>> average = hvd.callbacks.MetricAverageCallback()
        >>> stop = keras.callbacks.EarlyStopping("loss", patience=3)  # behind it: decides alike on all ranks
        >>> model.fit(x, y, epochs=3, callbacks=[average, stop])

    Put it before callbacks that read them (checkpoints, early stopping, plateaus), which then decide alike everywhere.
    Ranks count alike unless they say how many samples stand behind their numbers: where shares are not equally large,
    that makes means over all samples of metrics that are means over a rank's own, such as the losses.

    Args:
        device: accepted for Horovod's sake.
        process_set: the ranks whose metrics are averaged; another one keeps its own.
        samples: how many this rank trains on in an epoch; on all ranks or none.
        validation_samples: how many it validates on, for the metrics whose names begin with ``val_``; on all ranks or
            none. A rank with 0 contributes nothing.

    Raises:
        MismatchError: at the end of an epoch, on all ranks: they have different metrics.
    """

    def __init__(
        self,
        device: str = "",
        process_set: ProcessSet = global_process_set,
        samples: int | None = None,
        validation_samples: int | None = None,
    ):
        super().__init__()
        self._averaged_over = process_set
        self._samples = {False: samples, True: validation_samples}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Replaces the numbers in ``logs``, which later callbacks and the history see."""
        if logs is not None and size_of(self._averaged_over) > 1 and self._averaged_over.included():
            logs.update(surviving(lambda: averaged(logs, self._averaged_over, self._samples)))


def averaged(logs: Logs, process_set: ProcessSet, samples: dict[bool, int | None]) -> dict[str, float]:
    """The metrics of ``logs``, each averaged over the ranks; what is no number is left out.

    Args:
        logs: by name.
        process_set: the ranks that take part.
        samples: behind this rank's metrics of training (False) and validation (True); None to let all ranks count
            alike.
    """
    own = {name: float(value) for name, value in sorted(logs.items()) if np.ndim(value) == 0 and _is_number(value)}
    everyone = allgather_object(list(own), "metrics.names", process_set)
    demand = "metrics: the names must be the same on all ranks"
    require_alike(demand, everyone, process_set, "Compile and validate alike everywhere")
    means: dict[str, float] = {}
    for validates, weight in samples.items():
        part = {name: value for name, value in own.items() if name.startswith("val_") == validates}
        if part:
            operation = "metrics.validation" if validates else "metrics.training"
            values = np.array(list(part.values()), np.float64)
            values = allreduce(values, operation, process_set=process_set, weight=weight)
            means.update(zip(part, values.tolist(), strict=True))
    return means


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or np.issubdtype(np.asarray(value).dtype, np.number)
