"""Pairs an explicit ``synchronize()`` with the ``apply`` within ``skip_synchronize()`` that uses its gradients.

Within a ``tf.function`` both are calls at trace time, so what is remembered belongs to the graph that is being traced.
A condition's branch is a graph of its own and sees what was synchronized around it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.types import Flag


class _Synchronized:
    """One call of ``synchronize()``: whether an update is due after it, and the scopes that have made it."""

    def __init__(self, full: Flag):
        self.full = full
        self.applied_in: weakref.WeakSet = weakref.WeakSet()


class Pairing:
    """What one optimizer has synchronized and not yet applied.

    Args:
        name: the optimizer's, for messages.
    """

    def __init__(self, name: str):
        self.skipping = False
        self._name = name
        self._by_scope: weakref.WeakKeyDictionary[object, _Synchronized] = weakref.WeakKeyDictionary()

    @contextmanager
    def skip(self) -> Iterator[None]:
        """The block in which ``apply`` takes gradients as they are."""
        self.skipping = True
        try:
            yield
        finally:
            self.skipping = False

    def note(self, scopes: list[object], full: Flag) -> None:
        """Remembers a ``synchronize()`` in the innermost scope; one that was never applied is forgotten."""
        self._by_scope[scopes[0]] = _Synchronized(full)

    def take(self, scopes: list[object]) -> Flag:
        """For an ``apply`` that skips: whether an update is due. Each ``synchronize()`` serves once in a scope."""
        synchronized = self._pending(scopes)
        if synchronized is None:
            raise InvalidArgumentError(
                f"apply '{self._name}': expected synchronize() before an apply within skip_synchronize() but found "
                "none. Call both in the same tf.function, or both outside of one."
            )
        synchronized.applied_in.add(scopes[0])
        return synchronized.full

    def require_none(self, scopes: list[object]) -> None:
        """For an ``apply`` that reduces: refuses gradients that ``synchronize()`` has reduced already."""
        if self._pending(scopes) is not None:
            raise InvalidArgumentError(
                f"apply '{self._name}': expected skip_synchronize() around the apply that follows synchronize() but "
                "found none, and would reduce twice. Write: with optimizer.skip_synchronize(): optimizer.apply(...)."
            )

    def _pending(self, scopes: list[object]) -> _Synchronized | None:
        for scope in scopes:
            synchronized = self._by_scope.get(scope)
            if synchronized is not None:
                inner_most = scopes[0]
                done = inner_most in synchronized.applied_in or scope in synchronized.applied_in
                return None if done else synchronized
        return None
