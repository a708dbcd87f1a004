"""``send`` and ``recv`` of a process group: each becomes an operation of the core that only its two ranks hear of."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from ringtrain._runtime.context import Context
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.point_to_point import ANY_RANK
from ringtrain.torch.distributed import layouts
from ringtrain.torch.distributed.calls import back
from ringtrain.torch.distributed.layouts import carried
from ringtrain.torch.tensors import holds_its_values, lent_buffer, values_of


class Tags:
    """Names and tags of a group's sends and receives: no other group's.

    Args:
        context: of this rank, in the world of the group.
        name: torch's name of the group.
        number: of the group among those of its world: groups of all ranks share one.
    """

    def __init__(self, context: Context, name: str, number: int) -> None:
        self._context = context
        self._prefix = f"torch.distributed.{name}"
        self._numbers = itertools.count()
        self._first = number << 32  # torch's tags have 32 bits

    def submit(self, operation: str, values: Tensor, other: int, tag: int) -> Operation:
        """A send of, or a receive into, values in host memory."""
        buffer = lent_buffer(values)
        whom = "any rank" if other == ANY_RANK else f"rank {other}"
        name = f"{self._prefix}.{operation}.{next(self._numbers)} ({whom}, tag {tag})"
        return self._context.submit(
            operation, name, [buffer], [buffer], once=True, splits=[self._first + tag], root=other
        )


class BetweenTwo:
    """The part of a process group that has them.

    Attributes:
        _tags: of the group.
        _way: has ``track``, which makes torch's work of an operation.
    """

    _tags: Tags
    _way: Any

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Work:
        """Done when the tensor may be written again, which may be before the other rank has taken it."""
        layouts.check_one(tensors, "send")
        operation = self._tags.submit("send", _on_host(carried(values_of(tensors[0]))), to, tag)
        return self._way.track(operation, tensors, None)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """The next tensor that the other rank sends with this tag, of the same dtype and size."""
        layouts.check_one(tensors, "recv")
        values, place = _room_for(tensors[0])
        return self._way.track(self._tags.submit("receive", values, source, tag), tensors, place)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """``recv`` of the tensor that comes first; ``_source_rank`` of the work tells whose it was."""
        return self.recv(tensors, ANY_RANK, tag)


def _room_for(tensor: Tensor) -> tuple[Tensor, Callable[[Operation], None] | None]:
    """Where what is received goes, and what takes it home from there; None where that is its home."""
    if tensor.device.type == "cpu" and holds_its_values(tensor):
        return carried(tensor.detach()), None
    values = _on_host(carried(values_of(torch.empty_like(tensor))))
    return values, back([tensor], [values], "recv")


def _on_host(values: Tensor) -> Tensor:
    """The values in host memory, where the core has what is between two ranks."""
    return values if values.device.type == "cpu" else values.cpu()
