"""Metrics of all ranks instead of this rank's own."""

from typing import Any

import numpy as np

from ringtrain.errors import MismatchError
from ringtrain.objects import allgather_object
from ringtrain.operations import allreduce
from ringtrain.process_sets import ProcessSet, global_process_set


class MetricHooks:
    """Averages the metrics of an epoch, validation's included, over the ranks.

    Put it before callbacks that read them (checkpoints, early stopping, plateaus), which then decide alike everywhere.
    Ranks count alike, so their shares of the data should be equally large.

    Args:
        device: accepted for Horovod's sake.
        process_set: the ranks whose metrics are averaged.

    Raises:
        MismatchError: at the end of an epoch, on all ranks: they have different metrics.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set):
        super().__init__()
        self._averaged_over = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the numbers in ``logs``, which later callbacks and the history see."""
        if logs is not None and self._averaged_over.size() > 1:
            logs.update(averaged(logs, self._averaged_over))


def averaged(logs: dict[str, Any], process_set: ProcessSet) -> dict[str, float]:
    """The metrics of ``logs``, each averaged over the ranks; what is no number is left out."""
    own = {name: float(value) for name, value in sorted(logs.items()) if np.ndim(value) == 0 and _is_number(value)}
    everyone = allgather_object(list(own), "metrics.names", process_set)
    for rank, names in zip(process_set.ranks, everyone, strict=True):
        if names != everyone[0]:
            raise MismatchError(
                f"metrics: the names must be the same on all ranks, but are {everyone[0]} on rank "
                f"{process_set.ranks[0]} and {names} on rank {rank}. Compile and validate alike everywhere."
            )
    means = allreduce(np.array(list(own.values()), np.float64), "metrics.values", process_set=process_set)
    return dict(zip(own, means.tolist(), strict=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or np.issubdtype(np.asarray(value).dtype, np.number)
