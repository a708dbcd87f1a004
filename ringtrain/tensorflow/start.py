"""The start of a TensorFlow script's world: ``init``, and what it says about the environment."""

from typing import Any

import ringtrain
from ringtrain import options
from ringtrain.log import logger
from ringtrain.tensorflow.library import current_slot


def init(comm: object = None, process_sets: object = None, **arguments: Any) -> None:
    """``ringtrain.init``; graphs that were traced in an earlier world run in this one from now on."""
    already = ringtrain.is_initialized()
    ringtrain.init(comm, process_sets, **arguments)
    current_slot()
    if not already and "TF_CONFIG" in options.environment() and ringtrain.rank() == 0:
        logger.warning(
            "TF_CONFIG is set, and ignored: the launcher decides which ranks there are. It describes the workers of "
            "tf.distribute; remove it from the environment to be rid of this line."
        )
