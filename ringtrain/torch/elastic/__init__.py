"""Elastic training for PyTorch: ``State(model=..., optimizer=...)`` loses no step; the other names are Horovod's.

``ringtrain.elastic`` says what these are, and docs/elastic.md what each is for.
"""

from typing import Any

from ringtrain import elastic
from ringtrain.elastic import ObjectState, run
from ringtrain.torch.elastic.sampler import ElasticSampler
from ringtrain.torch.elastic.state import TorchState
from ringtrain.torch.elastic.transparent import TransparentState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "TransparentState", "run"]


class _AnyState(type):
    """All elastic states are instances of ``State``, whatever module they come from."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, elastic.State) if cls is State else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, elastic.State) if cls is State else super().__subclasscheck__(subclass)


class State(elastic.State, metaclass=_AnyState):
    """What a training consists of, so that it goes on when ranks die and when others come: no step is lost.

    Example:
        >>> state = hvd.elastic.State(model, optimizer, sampler=sampler)
        >>> for epoch in state.epochs(90):
        ...     for x, y in loader:  # whose sampler is that one
        ...         optimizer.zero_grad()
        ...         loss_of(model(x), y).backward()
        ...         optimizer.step()

    Give it the model, the distributed optimizer, the sampler, and whatever else all ranks must have alike.

    With a model or an optimizer it is a ``TransparentState``, which has the arguments; without, and for classes derived from
    it, Horovod's base, for ``elastic.run``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The arguments are those of ``TransparentState``."""
        if cls is State and (args or kwargs):
            return TransparentState(*args, **kwargs)
        return super().__new__(cls)


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
