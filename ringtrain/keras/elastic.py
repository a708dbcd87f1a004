"""Elastic training with Keras is not offered yet: the names that Horovod's scripts use say so when they are called."""

from typing import Any

from ringtrain.errors import UnsupportedError


def _refuse(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: elastic training is not offered yet. Save checkpoints, and start the job again when a rank is lost."
    )


def run(func: Any) -> Any:
    """Raises UnsupportedError, which is a NotImplementedError."""
    raise _refuse("elastic.run")


class KerasState:
    """Raises UnsupportedError, which is a NotImplementedError."""

    def __init__(self, *arguments: Any, **named: Any):
        raise _refuse(f"elastic.{type(self).__name__}")


class CommitStateCallback(KerasState):
    """Raises UnsupportedError, which is a NotImplementedError."""


class UpdateBatchStateCallback(KerasState):
    """Raises UnsupportedError, which is a NotImplementedError."""


class UpdateEpochStateCallback(KerasState):
    """Raises UnsupportedError, which is a NotImplementedError."""
