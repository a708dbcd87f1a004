"""What a replica that joins takes over: each process the state of the one at its place in the first replica.

Leaders send it to each other, one process's after the other.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ringtrain._runtime.context import current
from ringtrain._runtime.objects import broadcast_object
from ringtrain.torch.distributed.replica import Replica
from ringtrain.torch.distributed.replica_gradients import local
from ringtrain.torch.distributed.replica_sampler import ReplicaSampler
from ringtrain.torch.elastic.schedules import Schedule, is_plain, schedules_of
from ringtrain.torch.elastic.structure import structure_of, take_structure
from ringtrain.torch.elastic.transfer import keeps_identity

_NAME = "ringtrain.replicas.state"


class _Part(NamedTuple):
    """A tensor, or this process's part of a sharded one, on its way to another process."""

    values: torch.Tensor
    is_sharded: bool
    device: str  # "cpu" or another kind


class ReplicaState:
    """That of one process of a replica.

    Args:
        owner: has the values as attributes.
        names: of these.
    """

    def __init__(
        self,
        owner: object,
        names: list[str],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ReplicaSampler,
    ) -> None:
        self._owner, self._names = owner, names
        self._model, self._optimizer, self._sampler = model, optimizer, sampler
        self._groups = {"optimizer": len(optimizer.param_groups)}  # that it had at first
        self._schedules: dict[str, Schedule] = {}  # that were not given, by name
        self._is_there = False  # on all processes of this replica; the leader's to know
        self._in_transit: dict[str, Any] | None = None  # the state of a process, in its leader's hands

    def begin(self) -> None:
        """The loop begins: what sets the learning rates is there by now."""
        given = [getattr(self._owner, name) for name in self._names]
        found = schedules_of(self._optimizers, given)
        self._schedules = {name: each for name, each in found.items() if is_plain(each.state_dict())}

    def outline(self, processes: int) -> dict[str, str]:
        """What replicas must have alike; groups that came later are handed over."""
        groups = self._optimizer.param_groups[: self._groups["optimizer"]]
        count = sum(len(group["params"]) for group in groups)
        tensors = {
            name: f"{str(each.dtype).removeprefix('torch.')} of {tuple(each.shape)}, of which {tuple(local(each).shape)} on process 0"
            for name, each in _tensors(self._model)
        }
        return {
            "the number of processes": str(processes),
            "optimizer": f"{type(self._optimizer).__name__} of {count} parameters",
            "sampler": self._sampler.outline,
            **dict.fromkeys(self._names, "an object"),
            **dict.fromkeys(self._schedules, "a schedule that was not given"),
            **{f"model.{name}": each for name, each in tensors.items()},
        }

    def exchange(self, replica: Replica) -> None:
        """Has each process take the state over, unless it has it; leaders call this together."""
        gives = current().rank == 0
        for place in range(replica.size):
            if gives:
                replica.have_done("give", place)
            state = broadcast_object(self._in_transit, 0, _NAME)
            if not gives and not self._is_there:
                self._in_transit = state
                replica.have_done("take", place)
            self._in_transit = None
        self._is_there = True

    # ---- what leaders tell ----

    def give(self, replica: Replica, place: int) -> None:
        """The process at this place gives its state to the leader."""
        if replica.leads or place == replica.place:
            self._in_transit = replica.of(place, self._own)

    def take(self, replica: Replica, place: int) -> None:
        """The process at this place takes the state that the leader has."""
        if replica.leads or place == replica.place:
            state = replica.hand(place, self._in_transit)
            if place == replica.place:
                self._take_over(state)

    # ----

    @property
    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"optimizer": self._optimizer}

    def _own(self) -> dict[str, Any]:
        values = {name: getattr(self._owner, name) for name in self._names}
        states = [self._optimizer.state.get(each) for each in _parameters(self._optimizer)]
        return {
            "tensors": {name: _sent(each) for name, each in _tensors(self._model)},
            "structure": structure_of({"model": self._model}, self._optimizers, self._groups),
            "states": [each and {name: _sent(value) for name, value in each.items()} for each in states],
            "options": [{**group, "params": None} for group in self._optimizer.param_groups],
            "schedules": {name: each.state_dict() for name, each in self._schedules.items()},
            "values": {name: each.state_dict() if keeps_identity(each) else each for name, each in values.items()},
            "sampler": self._sampler.state_dict(),
        }

    def _take_over(self, kept: dict[str, Any]) -> None:
        for name, each in _tensors(self._model):
            local(each).copy_(kept["tensors"][name].values)
        take_structure(kept["structure"], {"model": self._model}, self._optimizers, self._groups)
        for parameter, values in zip(_parameters(self._optimizer), kept["states"], strict=True):
            self._optimizer.state.pop(parameter, None)
            if values is not None:
                self._optimizer.state[parameter] = {name: _taken(each, parameter) for name, each in values.items()}
        for group, options in zip(self._optimizer.param_groups, kept["options"], strict=True):
            group.update({**options, "params": group["params"]})
        for name, each in self._schedules.items():
            each.load_state_dict(kept["schedules"][name])
        for name, value in kept["values"].items():
            present = getattr(self._owner, name)
            if keeps_identity(present):
                present.load_state_dict(value)
            else:
                setattr(self._owner, name, value)
        self._sampler.load_state_dict(kept["sampler"])


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _sent(value: object) -> object:
    """A value of an optimizer's state, or a tensor of a model; tensors as parts."""
    if not isinstance(value, torch.Tensor):
        return value
    return _Part(local(value).cpu(), isinstance(value, DTensor), value.device.type)


def _taken(value: object, like: Any) -> object:
    """The same here, on the device of a parameter, and dealt as that is."""
    if not isinstance(value, _Part):
        return value
    values = value.values if value.device == "cpu" else value.values.to(like.device)
    if not value.is_sharded:
        return values
    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
