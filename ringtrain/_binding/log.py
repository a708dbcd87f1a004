"""The logger ``ringtrain``: its level, and the native library's lines on their way into it."""

import logging
import time
from typing import NamedTuple

from ringtrain._binding import _native, options

logger = logging.getLogger("ringtrain")
_SECONDS_OF_ONE_REPORT = 1.0  # in which all operations come that have waited for as long


class Stall(NamedTuple):
    """A report of ranks that wait for others, as the native library words it.

    Attributes:
        operation: that they wait in; the first of those that are reported together.
        submitters, missing: ``ranks 0, 2-3``.
        at: seconds since 1970.
    """

    operation: str
    submitters: str
    missing: str
    at: float


_stalls: list[Stall] = []  # the newest one


def _stall_in(text: str) -> Stall | None:
    """What a line of the native library reports of ranks that wait; None if it says something else (see ``stall_watch.cc``)."""
    head, _, tail = text.partition("; missing ")
    head, _, submitters = head.rpartition(": submitted by ")
    operation, waiting, _ = head.rpartition(": waiting ")
    return Stall(operation, submitters, tail.partition(".")[0], time.time()) if tail and waiting else None


def newest_stall() -> Stall | None:
    """The last one that has been logged here, on the rank that coordinates; None if there was none."""
    return _stalls[0] if _stalls else None


def configure() -> None:
    """Applies ``RINGTRAIN_LOG_LEVEL``. A program that set up no logging gets a handler that prints what the level admits."""
    level = options.log_level()
    if level is None:
        return
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def drain(context: _native.CData) -> None:
    """Logs the lines that the native library keeps for this context (an ``rt_context *``)."""
    while line := _native.take_text(_native.lib.rt_log_next(context)):
        level, _, text = line.partition("|")
        stall = _stall_in(text)
        if stall and not (_stalls and stall.at - _stalls[0].at < _SECONDS_OF_ONE_REPORT):
            _stalls[:] = [stall]
        logger.log(logging.INFO if level == "info" else logging.WARNING, text)
