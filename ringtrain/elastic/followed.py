"""The state whose steps this process takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ringtrain._runtime.context import Context, current, is_initialized

if TYPE_CHECKING:
    from ringtrain.elastic.transparent import TransparentState

Result = TypeVar("Result")
_followed: TransparentState | None = None
# In a job that is not elastic one with a sampler, which weighs gradients there, too; ranks may be threads of a process. A state
# may lead to its context, by an optimizer of its, so it is not kept alive here.
_of_worlds: weakref.WeakKeyDictionary[Context, weakref.ref[TransparentState]] = weakref.WeakKeyDictionary()


def follow(state: TransparentState, elastic: bool) -> None:
    """Is the one that ``followed`` returns from now on."""
    global _followed
    if elastic:
        _followed = state
    else:
        _of_worlds[current()] = weakref.ref(state)


def followed() -> TransparentState | None:
    """The state whose steps this process takes, the one made last; None without one.

    In a job that is not elastic also None if it has no sampler: its gradients need nothing of it.
    """
    if _followed is not None or not _of_worlds or not is_initialized():
        return _followed
    refer = _of_worlds.get(current())
    return None if refer is None else refer()


def surviving(function: Callable[[], Result]) -> Result:
    """``survive`` of that state; the plain function without one."""
    state = followed()
    return function() if state is None else state.survive(function)
