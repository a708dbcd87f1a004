"""Phases in which the other ranks shall not complain that they wait for this one."""

import contextlib
from collections.abc import Iterator

from ringtrain._runtime.context import current
from ringtrain.errors import InvalidArgumentError


@contextlib.contextmanager
def long_phase(seconds: float) -> Iterator[None]:
    """Tells all ranks that this one will submit nothing for a while: a validation, a checkpoint, a download.

    Example:
        >>> with rt.long_phase(3600):
        ...     if rt.rank() == 0:
        ...         prepare_dataset()

    What waits for this rank is neither reported nor given up until ``seconds`` have passed or the block has ended; then
    the usual times begin anew. Death is still noticed at once.

    Args:
        seconds: how long it may take, at most.

    Returns:
        A context manager.

    Raises:
        InvalidArgumentError: ``seconds`` that cannot be.
    """
    if not 0 <= seconds < 1e9:
        raise InvalidArgumentError(f"long_phase: seconds must be in [0, 1e9), but is {seconds!r}.")
    context = current()
    context.expect_silence(seconds)
    try:
        yield
    finally:
        context.expect_silence(0.0)
