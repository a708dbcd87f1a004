"""Whether this process is a rank of an elastic job, and which: the object behind it (`member`) is loaded by those alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringtrain._bootstrap.member import Member

_member: Member | None = None
_needed: list[str] = ["ringtrain.elastic"]  # modules, in order


def needs_to_join(*modules: str) -> None:
    """An adapter has these loaded before this process enters an elastic job: from then on the others wait for it."""
    _needed.extend(module for module in modules if module not in _needed)


def current() -> Member | None:
    """This process in its elastic job; None in a job of a fixed size, and before `init`."""
    return _member


def planned() -> int:
    """``Member.planned`` of this process; 0 in a job of a fixed size."""
    return 0 if _member is None else _member.planned


def enter(make: Callable[[], Member]) -> Member:
    """The same, made and begun at the first call."""
    global _member
    if _member is None:
        for module in _needed:
            importlib.import_module(module)
        made = make()
        made.begin()
        _member = made
    return _member
