"""Whether this thread is within a part of the program that must not communicate: an optimizer's ``no_sync()`` block.

The optimizer enters ``accumulating()``; what else works at every forward or backward pass, such as ``buffers``, asks
``is_accumulating()`` and then sends nothing.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    """How many blocks this thread is in; ranks may be threads."""

    value: int = 0


_depth = _Depth()


@contextmanager
def accumulating() -> Iterator[None]:
    """A block in which this thread sends nothing; blocks nest."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def is_accumulating() -> bool:
    """Whether this thread is within a block."""
    return _depth.value > 0
