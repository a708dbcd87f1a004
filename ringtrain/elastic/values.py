"""The values of a state, by what can carry them: adapters of frameworks, or pickles."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringtrain.elastic.adapters import Adapter, adapter_of


class StateValues:
    """The attributes of a state that ranks which join take over.

    Attributes:
        names: of all of them, sorted.
    """

    def __init__(self, state: object, names: Iterable[str]):
        self._state = state
        self.names = sorted(names)

    def all(self) -> list[Any]:
        """In the order of their names."""
        return [getattr(self._state, name) for name in self.names]

    def by_adapter(self) -> dict[Adapter, list[Any]]:
        """Those that an adapter takes care of."""
        found: dict[Adapter, list[Any]] = {}
        for value in self.all():
            if (adapter := adapter_of(value)) is not None:
                found.setdefault(adapter, []).append(value)
        return found

    def plain(self) -> dict[str, Any]:
        """The others, by name."""
        values = {name: getattr(self._state, name) for name in self.names}
        return {name: value for name, value in values.items() if adapter_of(value) is None}

    def take(self, name: str, value: Any) -> None:
        """Another value for one of the others, or for an attribute beside them. An array stays the same object if it can."""
        if not _copied_into(getattr(self._state, name, None), value):
            setattr(self._state, name, value)


def _copied_into(own: Any, value: Any) -> bool:
    """Whether an array has got the values of another one: others may refer to it."""
    if not (isinstance(own, np.ndarray) and isinstance(value, np.ndarray) and own.flags.writeable):
        return False
    if own.dtype != value.dtype or own.shape != value.shape or own.dtype.hasobject:
        return False
    np.copyto(own, value)
    return True
