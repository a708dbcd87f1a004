"""Elastic training for Keras, by Horovod's names; each raises UnsupportedError with the reason when it is used."""

from typing import Any, NoReturn

from ringtrain.common.elastic import State, refuse

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(State):
    """State of a model and its optimizer; making one raises UnsupportedError."""


class CommitStateCallback(State):
    """Would commit the state after some batches; making one raises UnsupportedError."""


class UpdateBatchStateCallback(State):
    """Would count batches in the state; making one raises UnsupportedError."""


class UpdateEpochStateCallback(State):
    """Would count epochs in the state; making one raises UnsupportedError."""


def run(func: Any) -> NoReturn:
    """Raises UnsupportedError where a script decorates its training function."""
    refuse("run")
