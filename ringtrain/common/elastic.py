"""Horovod's elastic training: the names are here, and each says why it cannot be used yet.

A script that only imports them runs. A job that fails ends with the first cause on every rank, and must be started
again from its last checkpoint.
"""

from typing import Any, NoReturn

from ringtrain.errors import UnsupportedError

__all__ = ["ObjectState", "State", "refuse", "run_fn"]


def refuse(name: str) -> NoReturn:
    """Raises the error that an elastic name ends in."""
    raise UnsupportedError(
        f"elastic '{name}': expected a world that may change its size but found one of a fixed size, which is all that "
        "this release has. Save checkpoints on rank 0 and start the job again from the last one."
    )


def run_fn(func: Any, reset: Any) -> NoReturn:
    """Raises UnsupportedError."""
    refuse("run_fn")


class State:
    """The base of elastic states; making one raises UnsupportedError, which names the class."""

    def __init__(self, *args: Any, **kwargs: Any):
        refuse(type(self).__name__)


class ObjectState(State):
    """State of plain Python objects; making one raises UnsupportedError."""
