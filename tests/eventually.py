"""Waiting in tests for what another thread or process is about to do: until it is so, and never for a time that is guessed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")
DEADLINE = 60.0  # seconds; only a test that fails waits for so long
BETWEEN_LOOKS = 0.01


def eventually(condition: Callable[[], Found], what: str, deadline: float = DEADLINE) -> Found:
    """Calls `condition` until what it returns is true, and returns that.

    Raises AssertionError with `what`, a sentence that should have come true, once `deadline` seconds have passed.
    """
    until = time.monotonic() + deadline
    while not (found := condition()):
        assert time.monotonic() < until, f"after {deadline:.0f} s it is not so: {what}"
        time.sleep(BETWEEN_LOOKS)
    return found
