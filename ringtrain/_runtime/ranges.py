"""Ranges in a profiler's trace around what is submitted and waited for, once an adapter has brought its framework's profiler.

No range is made while no profiler is on, and then nothing is asked but whether one is.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_nothing: AbstractContextManager[Any] = nullcontext()
_make: Callable[[str], AbstractContextManager[Any]] | None = None


# Whether a profiler is on: bool() is False, and as fast as a call can be. Read anew at each use, since `use` replaces it.
wanted: Callable[[], bool] = bool


def use(is_on: Callable[[], bool], make: Callable[[str], AbstractContextManager[Any]]) -> None:
    """Brings a profiler: whether it is on, and what makes a range of that name."""
    global wanted, _make
    wanted, _make = is_on, make


def around(name: str) -> AbstractContextManager[Any]:
    """A range, or nothing if no profiler is on."""
    return _make(name) if _make is not None and wanted() else _nothing
