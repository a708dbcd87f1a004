"""The state of a training: what a rank goes back to after a failure, and what all ranks take over from rank 0."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ringtrain._bootstrap import membership
from ringtrain._runtime.objects import broadcast_object
from ringtrain._runtime.operations import Max, allreduce
from ringtrain.errors import HostsUpdatedInterrupt, InvalidArgumentError


class State:
    """What a training consists of, so that it goes on when ranks die and when others come: no step is lost.

    Example:
        >>> state = rt.elastic.State(weights=weights)
        >>> for step in state.steps(1000):
        ...     state.weights -= 0.1 * state.allreduce(gradient(state.weights, step))

    With values it is a ``TransparentState``, which has the arguments; without, and for classes derived from it, Horovod's base.
    A state of another kind defines ``save``, ``restore`` and ``sync``.
    """

    with_values: "type[State]"  # ``TransparentState``, which derives from this class and enters itself

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The arguments are those of ``TransparentState``."""
        if cls is State and kwargs:
            return super().__new__(cls.with_values)
        return super().__new__(cls)

    def __init__(self, **kwargs: Any):
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Has these called on every rank when another world has begun, before the state is synchronised.

        There size and rank are new, and a learning rate may follow the size. They may use collective operations.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Another world has begun."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, to go back to it after a failure; then ``check_host_updates``. To be called on all ranks alike.

        Raises:
            HostsUpdatedInterrupt: on all ranks at once, if ranks wait to join or to leave. ``elastic.run`` catches it.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Agrees with the other ranks on whether any of them wait to join or to leave: an allreduce of one number.

        To be called on all ranks alike. In a job of a fixed size it does nothing.

        Raises:
            HostsUpdatedInterrupt: on all ranks at once, if some do.
        """
        member = membership.current()
        if member is None:
            return
        wanted = allreduce(np.array([member.wants_pause], np.uint8), op=Max, name="ringtrain.elastic.pause")
        if wanted[0]:
            raise HostsUpdatedInterrupt

    def reset(self) -> None:
        """What the state itself does when another world has begun."""

    def save(self) -> None:
        """Keeps a copy."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes the state of rank 0, and keeps a copy of it."""
        raise NotImplementedError


class ObjectState(State):
    """Python objects and NumPy arrays, each an attribute.

    Example:
        >>> state = rt.elastic.ObjectState(weights=np.zeros(10), epoch=0)
        >>> state.epoch += 1
        >>> state.commit()

    Args:
        bcast_object, get_rank: accepted for Horovod's sake.
        kwargs: their names and values; whatever pickles. They are copied at each commit.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any):
        check_free_names(type(self).__name__, type(self), kwargs)
        super().__init__()
        self._names = sorted(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        ObjectState.save(self)

    def save(self) -> None:
        """Keeps a copy of the attributes."""
        self._saved = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Sets the attributes to what was saved last."""
        self._set(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Sets the attributes to those of rank 0, and saves them."""
        if self._names:
            self._set(broadcast_object(self._values(), 0, "ringtrain.elastic.state"))
            ObjectState.save(self)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def check_free_names(owner: str, kind: type, names: Iterable[str]) -> None:
    """Raises InvalidArgumentError for a name that a state of this class has itself, or keeps private."""
    taken = sorted(name for name in names if name.startswith("_") or hasattr(kind, name))
    if taken:
        raise InvalidArgumentError(
            f"{owner}: names must not be those of its methods, or private, but {', '.join(taken)} is. Choose another one."
        )
