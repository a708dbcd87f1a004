"""Gradients of a sharded model as averages over the replicas: parts go to the leader, averages come back.

FSDP2 has averaged them within the replica by then. The leader sends one flat tensor of each dtype, with the parts of all processes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ringtrain.torch.backward import call_at_end
from ringtrain.torch.distributed.replica import Replica

Average = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class ReplicaGradients:
    """Those of a model, in one process of a replica.

    Args:
        replica: of this process.
        model: whose passes are followed.
        average: of flat tensors over all replicas; for leaders.
    """

    def __init__(self, replica: Replica, model: torch.nn.Module, average: Average) -> None:
        self._replica, self._model, self._average = replica, model, average
        self._is_queued = False  # the average, behind the backward pass that is under way
        self._are_averages = False  # since the last update
        self._sizes: dict[tuple[int, ...], list[int]] = {}  # of flat tensors by dtype, by parameters
        model.register_forward_hook(self._follow_outputs)

    def average_rest(self) -> None:
        """Before an update: averages what no backward pass has, as of a loss that the model's outputs were not part of."""
        if not self._are_averages:
            self._average_all()

    def begin(self) -> None:
        """Other gradients may come."""
        self._are_averages = False

    # ---- behind a backward pass ----

    def _follow_outputs(self, _model: object, _inputs: object, outputs: object) -> None:
        self._is_queued = False  # also if the last pass has failed
        for each in _tensors_in(outputs):
            if each.requires_grad:
                each.register_hook(self._queue)

    def _queue(self, _gradient: torch.Tensor) -> None:
        """Behind what FSDP2 queues for the end of the pass, which it has done when the first callback is called."""
        if not self._is_queued:
            self._is_queued = True
            call_at_end(lambda: call_at_end(self._average_pass))

    def _average_pass(self) -> None:
        self._is_queued = False
        self._average_all()

    # ---- the average ----

    def _average_all(self) -> None:
        groups = self._trained()
        if not any(each.grad is not None for group in groups for each in group):
            return  # FSDP2 keeps them, as of all but the last of several passes
        self._are_averages = True
        if self._replica.is_alone:
            return
        packed = [_packed(*each) for each in zip(groups, self._sizes_of(groups), strict=True)]
        parts = [self._replica.gather(each) for each in packed]
        averages: list[torch.Tensor | None] = [None] * len(parts)

        def average() -> None:
            averages[:] = self._average(parts)

        self._replica.together(average)
        for group, average_of_all, own in zip(groups, averages, packed, strict=True):
            _unpack(group, self._replica.scatter(average_of_all, own))

    def _trained(self) -> list[list[torch.nn.Parameter]]:
        """The parameters that may have gradients, by dtype; also such as no optimizer has yet, since clipping looks at all."""
        trained = [each for each in self._model.parameters() if each.requires_grad]
        dtypes = sorted({each.dtype for each in trained}, key=str)
        return [[each for each in trained if each.dtype == dtype] for dtype in dtypes]

    def _sizes_of(self, groups: list[list[torch.nn.Parameter]]) -> list[int]:
        """Elements of a flat tensor, by dtype: the most of any process, which tell each other once what they train."""
        key = tuple(id(each) for group in groups for each in group)
        if key not in self._sizes:
            found: list[Any] = [None] * self._replica.size
            dist.all_gather_object(found, [sum(local(each).numel() + 1 for each in group) for group in groups])
            self._sizes[key] = [max(each) for each in zip(*found, strict=True)]
        return self._sizes[key]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, in its memory; the tensor itself if it is whole."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _tensors_in(outputs: object) -> Iterator[torch.Tensor]:
    """Those of a module's outputs: a tensor, or containers of some."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple, Mapping)):
        for each in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors_in(each)


def _packed(group: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """Parts of gradients in so many elements, and behind them a number for each: 1 if it is there.

    So a replica where a parameter had no part in the loss counts with zeros, and one that had none anywhere keeps none.
    """
    marks = local(group[0]).new_tensor([float(each.grad is not None) for each in group])
    parts = [*map(_values, group), marks]
    rest = marks.new_zeros(size - sum(map(len, parts)))  # parts of other processes may have a row more
    return torch.cat([*parts, rest])


def _values(parameter: torch.Tensor) -> torch.Tensor:
    like = local(parameter)
    return like.new_zeros(like.numel()) if parameter.grad is None else local(parameter.grad).reshape(-1)


def _unpack(group: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
    sizes = [*(local(each).numel() for each in group), len(group)]
    *parts, marks = packed[: sum(sizes)].split(sizes)
    for parameter, part, is_there in zip(group, parts, marks.tolist(), strict=True):
        if is_there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            target = local(parameter.grad)
            target.copy_(part.view_as(target))
