"""The start of a JAX script's world."""

from typing import Any

import ringtrain
from ringtrain.jax.library import slots


def init(comm: object = None, process_sets: object = None, **arguments: Any) -> None:
    """``ringtrain.init``; programs that were compiled in an earlier world of as many ranks run in this one from now on.

    Example:
        >>> import ringtrain.jax as hvd
        >>> hvd.init()
    """
    ringtrain.init(comm, process_sets, **arguments)
    slots.current()
