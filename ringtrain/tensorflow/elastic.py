"""Elastic training for TensorFlow, by Horovod's names; its states and `run` raise UnsupportedError: PyTorch alone has them so far."""

from typing import Any, NoReturn

from ringtrain.common.elastic import ObjectState, Refused, State, refuse

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(Refused):
    """State of variables; making one raises UnsupportedError."""


class TensorFlowKerasState(Refused):
    """State of a Keras model and its optimizer; making one raises UnsupportedError."""


def run(func: Any) -> NoReturn:
    """Raises UnsupportedError where a script decorates its training function."""
    refuse("run")
