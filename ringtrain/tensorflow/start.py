"""The start of a TensorFlow script's world: ``init``, and what it says about the environment."""

import functools
from typing import Any

import ringtrain
from ringtrain._binding import options
from ringtrain._binding.log import logger
from ringtrain.tensorflow.library import current_slot


def init(comm: object = None, process_sets: object = None, **arguments: Any) -> None:
    """``ringtrain.init``; graphs that were traced in an earlier world run in this one from now on.

    Example:
        >>> hvd.init()
        >>> print(f"rank {hvd.rank()} of {hvd.size()}")
    """
    ringtrain.init(comm, process_sets, **arguments)
    current_slot()
    if ringtrain.rank() == 0:
        _warn_of_tf_config()


@functools.cache
def _warn_of_tf_config() -> None:
    """Says once that the variable is ignored, if it is set."""
    if "TF_CONFIG" in options.environment():
        logger.warning(
            "TF_CONFIG is set, and ignored: the launcher decides which ranks there are. It describes the workers of "
            "tf.distribute; remove it from the environment to be rid of this line."
        )
