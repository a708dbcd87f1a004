"""A board for `boards` that is a store of torch's: ``TCPStore``, ``FileStore``, that of torchrun's agent.

``set``, ``get``, ``wait`` and ``check`` are used. torchrun's agents keep their store when they start ranks anew, with the
same keys. Whoever can read the store can join the world, unless the ranks are given a secret that is not in it.
"""

import json
from datetime import timedelta
from typing import Any

from ringtrain import boards
from ringtrain.introducing import Call
from ringtrain.meeting import Introduction

_FUNCTIONS = ("set", "get", "wait", "check")


def is_store(store: object) -> bool:
    """Whether it has a store's functions."""
    return all(callable(getattr(store, name, None)) for name in _FUNCTIONS)


def host_of(store: Any) -> str:
    """The host of a ``TCPStore``, also below prefixes; "" for another store, and for anything else."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "")


def meet(store: Any, call: Call, secret: bytes) -> Introduction:
    """`boards.meet` in this store."""
    return boards.meet(Store(store), call, secret)


class Store:
    """A board; see `boards.Board`. A note that was taken off is an empty text: not every store can delete."""

    def __init__(self, store: Any):
        self._store = store
        self.name = type(store).__name__

    def write(self, name: str, value: Any) -> None:
        self._store.set(_key(name), json.dumps(value))

    def read(self, name: str) -> Any:
        text = self._store.get(_key(name)) if self._store.check([_key(name)]) else b""
        return json.loads(text) if text else None

    def remove(self, *names: str) -> None:
        for name in names:
            self._store.set(_key(name), "")

    def look_anew(self) -> None:
        """It is never old."""

    def wait(self, names: list[str], seconds: float) -> None:
        try:
            self._store.wait([_key(name) for name in names], timedelta(seconds=seconds))
        except Exception:  # torch's DistStoreError, a RuntimeError, or another of its store's: not all are there
            pass


def _key(name: str) -> str:
    return f"ringtrain/{name}"
