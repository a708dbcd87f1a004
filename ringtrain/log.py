"""The logger ``ringtrain``: its level, and the native library's lines on their way into it."""

import logging

from ringtrain import _native, options

logger = logging.getLogger("ringtrain")


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
        logger.log(logging.INFO if level == "info" else logging.WARNING, text)
