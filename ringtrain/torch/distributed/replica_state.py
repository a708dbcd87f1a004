"""What a replica that joins takes over: each process the state of the one at its place in the first replica.

Leaders send it to each other as bytes, one process's after the other.
"""

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ringtrain._runtime.context import current
from ringtrain._runtime.objects import broadcast_object
from ringtrain._runtime.operations import broadcast
from ringtrain.torch.distributed.replica import Replica
from ringtrain.torch.distributed.replica_gradients import local
from ringtrain.torch.distributed.replica_sampler import ReplicaSampler
from ringtrain.torch.elastic.transfer import keeps_identity

_NAME = "ringtrain.replicas.state"


class _Local(NamedTuple):
    """The part of a sharded tensor that a process has, on its way to another one."""

    values: torch.Tensor


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
        self._is_there = False  # on all processes of this replica; the leader's to know
        self._in_transit: bytes | None = None  # the state of a process, in its leader's hands

    def outline(self, processes: int) -> dict[str, str]:
        """What replicas must have alike."""
        count = len(_parameters(self._optimizer))
        tensors = {
            name: f"{str(each.dtype).removeprefix('torch.')} of {tuple(each.shape)}, of which {tuple(local(each).shape)} on process 0"
            for name, each in _tensors(self._model)
        }
        return {
            "the replica": f"{processes} processes",
            "optimizer": f"{type(self._optimizer).__name__} of {count} parameters",
            "sampler": self._sampler.outline,
            **{f"model.{name}": each for name, each in tensors.items()},
        }

    def exchange(self, replica: Replica) -> None:
        """Has each process take the state over, unless it has it; leaders call this together."""
        gives = current().rank == 0
        for place in range(replica.size):
            if gives:
                replica.tell("give", place)
            state = _of_first(self._in_transit)
            if not gives and not self._is_there:
                self._in_transit = state
                replica.tell("take", place)
            self._in_transit = None
        self._is_there = True

    # ---- what leaders tell ----

    def give(self, replica: Replica, place: int) -> None:
        """The process at this place gives its state to the leader."""
        if replica.leads or place == replica.place:
            self._in_transit = replica.of(place, self._packed)

    def take(self, replica: Replica, place: int) -> None:
        """The process at this place takes the state that the leader has."""
        if replica.leads or place == replica.place:
            state = replica.hand(place, self._in_transit)
            if place == replica.place:
                self._unpack(state)

    # ----

    def _packed(self) -> bytes:
        values = {name: getattr(self._owner, name) for name in self._names}
        whole = {
            "tensors": {name: local(each) for name, each in _tensors(self._model)},
            "trained": [each.requires_grad for each in self._model.parameters()],
            "states": [self._optimizer.state.get(each) for each in _parameters(self._optimizer)],
            "options": [{**group, "params": None} for group in self._optimizer.param_groups],
            "values": {name: each.state_dict() if keeps_identity(each) else each for name, each in values.items()},
            "sampler": self._sampler.state_dict(),
        }
        file = io.BytesIO()
        torch.save(pytree.tree_map_only(DTensor, lambda each: _Local(local(each)), whole), file)
        return file.getvalue()

    def _unpack(self, state: bytes) -> None:
        kept = torch.load(io.BytesIO(state), weights_only=False)
        for name, each in _tensors(self._model):
            local(each).copy_(kept["tensors"][name])
        for parameter, trains in zip(self._model.parameters(), kept["trained"], strict=True):
            parameter.requires_grad_(trains)
        for parameter, values in zip(_parameters(self._optimizer), kept["states"], strict=True):
            if values is None:
                self._optimizer.state.pop(parameter, None)
            else:
                self._optimizer.state[parameter] = {name: _dealt_as(parameter, each) for name, each in values.items()}
        for group, options in zip(self._optimizer.param_groups, kept["options"], strict=True):
            group.update({**options, "params": group["params"]})
        for name, value in kept["values"].items():
            present = getattr(self._owner, name)
            if keeps_identity(present):
                present.load_state_dict(value)
            else:
                setattr(self._owner, name, value)
        self._sampler.load_state_dict(kept["sampler"])


def _of_first(state: bytes | None) -> bytes:
    """What the leader of the first replica has, on all leaders."""
    size = broadcast_object(None if state is None else len(state), 0, f"{_NAME}.size")
    own = np.empty(size, np.uint8) if state is None else np.frombuffer(state, np.uint8)
    return broadcast(own, 0, _NAME).tobytes()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _dealt_as(parameter: Any, value: object) -> object:
    """A part of a sharded tensor as such, dealt as a parameter is here; any other value as it is."""
    if not isinstance(value, _Local):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        value.values, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
