"""Elastic training for Keras, by Horovod's names; each raises UnsupportedError when it is used: PyTorch alone has it so far."""

from typing import Any, NoReturn

from ringtrain.common.elastic import Refused, refuse

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(Refused):
    """State of a model and its optimizer; making one raises UnsupportedError."""


class CommitStateCallback(Refused):
    """Would commit the state after some batches; making one raises UnsupportedError."""


class UpdateBatchStateCallback(Refused):
    """Would count batches in the state; making one raises UnsupportedError."""


class UpdateEpochStateCallback(Refused):
    """Would count epochs in the state; making one raises UnsupportedError."""


def run(func: Any) -> NoReturn:
    """Raises UnsupportedError where a script decorates its training function."""
    refuse("run")
