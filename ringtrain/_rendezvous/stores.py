"""A board for `by_note` that is a store of torch's: ``TCPStore``, ``FileStore``, that of torchrun's agent.

``set``, ``get`` and ``check`` are used. torchrun's agents keep their store when they start ranks anew, with the
same keys. Whoever can read the store can join the world, unless the ranks are given a secret that is not in it.
"""

import json
from typing import Any

from ringtrain._rendezvous.by_note import meet_by_note
from ringtrain._rendezvous.introducing import Call
from ringtrain._rendezvous.meeting import Introduction


def meet(store: Any, call: Call, listens: str, secret: bytes) -> Introduction:
    """`at_rank_zero.meet` by a note in this store."""
    return meet_by_note(Store(store), call, listens, secret)


class Store:
    """A board; see `by_note.Board`. A note that was taken off is an empty text: not every store can delete."""

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

    def leave(self) -> None:
        """It is the user's."""

    def look_anew(self) -> None:
        """It is never old."""


def _key(name: str) -> str:
    return f"ringtrain/{name}"
