"""What goes wrong with an eager operation before it is submitted fails it on all ranks; see ``ringtrain._runtime.submission``.

Unnamed eager operations are counted by our library, and not by the context, so this needs a way of its own. While a
graph is built nothing is submitted, so what is raised there concerns this rank alone.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from ringtrain._runtime.context import current
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of
from ringtrain.errors import ProcessSetLostError, RingtrainError
from ringtrain.tensorflow.library import next_name


@contextlib.contextmanager
def preparing(operation: str, name: str | None, process_set: ProcessSet) -> Iterator[None]:
    """Within it an operation's arguments are looked at: any exception is announced to the peers, whose operation fails with it.

    Raises:
        InvalidArgumentError: with the text that the peers get; what was met is the cause.
        ProcessSetLostError: the process set has lost a member, as all ranks know.
    """
    try:
        yield
    except ProcessSetLostError:  # which all ranks know of
        raise
    except Exception as problem:  # announced, whatever it is
        if not tf.executing_eagerly():
            if not isinstance(problem, RingtrainError):
                raise
            raise type(problem)(f"{operation} '{name or 'unnamed'}': {problem}") from problem
        try:
            identity = id_of(process_set)
        except Exception:  # then the world's ranks are told
            identity = id_of(global_process_set)
        current().refuse(operation, name or next_name(operation, identity), identity, problem)
