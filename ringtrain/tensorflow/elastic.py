"""Elastic training for TensorFlow, by Horovod's names; each raises UnsupportedError with the reason when it is used."""

from typing import Any, NoReturn

from ringtrain.common.elastic import ObjectState, State, refuse

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(State):
    """State of variables; making one raises UnsupportedError."""


class TensorFlowKerasState(State):
    """State of a Keras model and its optimizer; making one raises UnsupportedError."""


def run(func: Any) -> NoReturn:
    """Raises UnsupportedError where a script decorates its training function."""
    refuse("run")
