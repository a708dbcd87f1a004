"""``TorchState``: models, optimizers, samplers and schedules of an elastic job, beside plain Python objects."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ringtrain._bootstrap import membership
from ringtrain._training.needs import check_needs
from ringtrain._training.session import NewWorld
from ringtrain.elastic import ObjectState
from ringtrain.embedding.committed_rows import CommittedRows
from ringtrain.embedding.row_gradients import SentAtOnce
from ringtrain.torch.elastic.sampler import ElasticSampler
from ringtrain.torch.elastic.transfer import keeps_identity, take_state_dict
from ringtrain.torch.functions import broadcast_optimizer_state, broadcast_parameters, is_added, set_state, state_of
from ringtrain.torch.hooks import number_anew
from ringtrain.torch.modes.base import State, mode_of
from ringtrain.torch.table_checkpoints import TrainedTable, dense_state_dict, load_dense_state_dict, parts_of

__all__ = [
    "ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateDictHandler", "StateHandler", "TorchState",
    "get_handler_registry", "set_handler_registry",
]  # fmt: skip


class StateHandler:
    """How one value is kept, brought back, and taken over from rank 0."""

    def __init__(self, value: Any):
        self.value = value
        self.save()

    def save(self) -> None:
        """Keeps a copy."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to it."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes the value of rank 0."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another object takes the place of this one."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Parameters and buffers of a model. The copy lies where the model does."""

    def save(self) -> None:
        """Keeps a copy; in an elastic job rows of tables have commits of their own (``committed_rows``)."""
        has_rows = _elastic_parts({"": self.value})
        self._saved = copy.deepcopy(dense_state_dict(self.value) if has_rows else self.value.state_dict())

    def restore(self) -> None:
        """Goes back to it."""
        if _elastic_parts({"": self.value}):
            load_dense_state_dict(self.value, _own_copies(self._saved))
        else:
            self.value.load_state_dict(_own_copies(self._saved))

    def sync(self) -> None:
        """Takes the values of rank 0."""
        broadcast_parameters(self.value, root_rank=0)


def _own_copies(saved: State) -> State:
    """The ``state_dict``, with copies of what modules may keep when they take it over, and change; of tensors they take values."""
    given = copy.copy(saved)
    for key in [key for key, value in saved.items() if is_added(key, value)]:
        given[key] = copy.deepcopy(saved[key])
    return given


class OptimizerStateHandler(StateHandler):
    """State and options of an optimizer, distributed or not. Gradients are not kept: a step begins anew."""

    def __init__(self, value: torch.optim.Optimizer):
        if mode_of(value) is not None:
            check_needs(value.mode.columns, {"elastic": True}, "State")
        super().__init__(value)

    def save(self) -> None:
        """Keeps a copy."""
        self._saved = copy.deepcopy(state_of(self.value))

    def restore(self) -> None:
        """Goes back to it, bit for bit, and drops the gradients."""
        torch.optim.Optimizer.zero_grad(self.value)  # which asks no other rank, as a distributed optimizer's does
        set_state(self.value, copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Takes that of rank 0."""
        broadcast_optimizer_state(self.value, root_rank=0)


class StateDictHandler(StateHandler):
    """Whatever has ``state_dict`` and ``load_state_dict``: a schedule of learning rates, a ``GradScaler``."""

    def save(self) -> None:
        """Keeps a copy."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Goes back to it."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Takes that of rank 0."""
        take_state_dict(self.value)


class SamplerStateHandler(StateDictHandler):
    """An ``ElasticSampler``, which deals what is left of the epoch anew when it takes a state."""


Registry = list[tuple[type, Callable[[Any], StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Pairs of a type and what handles its values; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replaces them."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """What a training consists of: modules, optimizers, samplers, schedules, and plain objects, each an attribute.

    Example:
        >>> state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
        >>> @hvd.elastic.run
        ... def train(state):
        ...     for state.epoch in range(state.epoch, 90):
        ...         for x, y in loader:
        ...             step(x, y)
        ...             state.sampler.record_batch(state.batch, len(x))
        ...             state.batch += 1
        ...             state.commit()
        ...         state.batch = 0
        ...         state.sampler.set_epoch(state.epoch + 1)
        >>> train(state)

    Args:
        model: a module, or None.
        optimizer: of it, distributed or not, or None.
        kwargs: further ones, and plain objects, by name. What has ``state_dict`` and ``load_state_dict`` keeps its
            identity; other objects are copied.
    """

    _handlers: dict[str, StateHandler]
    _rows: CommittedRows

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: object
    ):
        given = {
            **kwargs,
            **{name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None},
        }
        made = {name: _handler_of(value) for name, value in given.items()}
        handlers = {name: handler for name, handler in made.items() if handler is not None}
        self.__dict__["_handlers"] = handlers
        parts = _elastic_parts(given)
        self.__dict__["_rows"] = CommittedRows([part.table for part in parts])
        for part in parts:
            if part.optimizer is not None:
                part.table.train_by(part.optimizer, SentAtOnce())
        super().__init__(**{name: value for name, value in given.items() if name not in handlers})
        for name, handler in handlers.items():
            self.__dict__[name] = handler.value
        if membership.current() is not None and (modes := self._modes()):
            number_anew(modes)
        if model is None:
            self.__dict__.setdefault("model", None)
        if optimizer is None:
            self.__dict__.setdefault("optimizer", None)

    def __setattr__(self, name: str, value: object) -> None:
        handler = self._handlers.get(name)
        if handler is not None and value is not handler.value:
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keeps a copy of everything; with tables of an elastic job all ranks call it."""
        with self._rows.committing():
            for handler in self._handlers.values():
                handler.save()
            super().save()

    def restore(self) -> None:
        """Goes back to it."""
        self._restore_the_rest()
        self._rows.restore()

    def sync(self) -> None:
        """Takes everything from rank 0, and keeps a copy of it; rows of tables stay each rank's own."""
        if self._rows.sync():
            self._restore_the_rest()
        for name in sorted(self._handlers):
            self._handlers[name].sync()
        super().sync()
        self.save()

    def _restore_the_rest(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def reset(self) -> None:
        """Has distributed optimizers enter the new world in the order in which they were made, on all ranks alike."""
        for mode in self._modes():
            mode.enter_world(NewWorld.ANEW)

    def _modes(self) -> list[Any]:
        """Of the distributed optimizers that enter worlds, in that order."""
        modes = [mode_of(handler.value) for handler in self._handlers.values()]
        return sorted(
            (mode for mode in modes if mode is not None and mode.order() is not None), key=lambda mode: mode.order()
        )


def _elastic_parts(values: Mapping[str, object]) -> list[TrainedTable]:
    """Tables whose rows come and go with ranks."""
    return [part for part in parts_of(values) if part.table.is_elastic]


def _handler_of(value: object) -> StateHandler | None:
    """What keeps a value that is no plain object; None for one that is."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return StateDictHandler(value) if keeps_identity(value) else None
