"""``ringtrain.common.elastic``, as scripts for Horovod import it; and what says so where a framework has no elastic state yet."""

from typing import Any, NoReturn

from ringtrain.elastic import ObjectState, State, run_fn
from ringtrain.errors import UnsupportedError

__all__ = ["ObjectState", "Refused", "State", "refuse", "run_fn"]


def refuse(name: str) -> NoReturn:
    """Raises the error that an elastic name ends in which a framework does not have yet."""
    raise UnsupportedError(
        f"elastic '{name}': expected a state of NumPy arrays, Python objects or PyTorch, but found one of TensorFlow or Keras, "
        "which this release does not have. Save checkpoints on rank 0 and start the job again from the last one."
    )


class Refused:
    """The base of what a framework does not have yet; making one raises UnsupportedError, which names the class."""

    def __init__(self, *args: Any, **kwargs: Any):
        refuse(type(self).__name__)
