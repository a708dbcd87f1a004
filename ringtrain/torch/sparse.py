"""Sums of sparse tensors over the ranks: each sends the entries that it has, and every rank adds up what came.

``operations`` calls it for the user; optimizers submit a ``SparseAllreduce`` from a gradient's hook and wait for it in
their step. One grouped allgather carries three tensors: the sparse tensor's shape, its indices and its values. The
shape shows ranks that disagree about it, and how many ranks contributed once some have joined.
"""

from typing import Any

import torch

from ringtrain.context import Context, Operation
from ringtrain.errors import InvalidArgumentError, MismatchError, RingtrainError, UnsupportedError
from ringtrain.operations import Adasum, Average, Sum
from ringtrain.torch.tensors import DTYPE_IDS, buffer_of, wrap_memory

_SHAPE, _INDICES, _VALUES = range(3)  # the tensors of the group


class SparseAllreduce:
    """A pending reduction of the ranks' sparse COO tensors; call it, or ``wait()``, for the result.

    Entries of one index are added here before they travel, and again where they meet; 16-bit floats in float32. The
    result is coalesced and has the same bits on every rank.

    Args:
        context: of this rank.
        tensor: sparse COO of one shape and dtype on all ranks, with any number of entries, also none.
        name: identity among the ranks.
        op: ``Average`` or ``Sum``.
        process_set: id of the process set.
        prescale: factor on each contribution.
        postscale: factor on the result.

    Raises:
        InvalidArgumentError, UnsupportedError: another layout, dtype or op. The other ranks' operation fails too.
    """

    __slots__ = ("_name", "_op", "_postscale", "_operation", "_result")

    def __init__(
        self,
        context: Context,
        tensor: torch.Tensor,
        name: str | None,
        op: int = Average,
        process_set: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ):
        self._name = name or "unnamed"
        self._op = op
        self._postscale = postscale
        self._result: torch.Tensor | None = None
        try:
            _check(tensor, op)
            buffers = [buffer_of(part) for part in _parts(tensor.detach(), prescale)]
        except RingtrainError as problem:  # seen by this rank alone: the others must not wait for it
            context.refuse("allgather", name, process_set, problem)
        self._operation: Operation | None = context.submit(
            "allgather", name, buffers, [None] * len(buffers), process_set=process_set
        )

    def done(self) -> bool:
        """Whether the operation ended, well or not."""
        return self._operation is None or self._operation.done()

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Blocks until the operation is done; the result, coalesced, and the same one when called again.

        Raises MismatchError on every rank if the ranks' tensors have different shapes.
        """
        if self._operation is not None:
            self._operation.wait(timeout)
            shapes, indices, values = (_received(self._operation, part) for part in (_SHAPE, _INDICES, _VALUES))
            self._result = self._sum(shapes.tolist(), indices.t(), values)
            self._operation = None
        return self._result

    __call__ = wait

    def _sum(self, shapes: list[list[int]], indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        for place, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise MismatchError(
                    f"sparse allreduce '{self._name}': shape must be the same on all ranks, but the first "
                    f"contribution has {shapes[0]} and number {place} has {shape}. Pad to one shape."
                )
        total = torch.sparse_coo_tensor(indices, _widened(values), shapes[0], check_invariants=False).coalesce()
        factored = _scaled(total.values(), self._postscale)
        if self._op == Average:
            exact = None if values.is_floating_point() else "trunc"
            factored = torch.div(factored, len(shapes), rounding_mode=exact)
        return torch.sparse_coo_tensor(
            total.indices(), factored.to(values.dtype), total.shape, is_coalesced=True, check_invariants=False
        )


def _check(tensor: torch.Tensor, op: int) -> None:
    if op == Adasum:
        raise UnsupportedError("op must be Average or Sum, but is Adasum, which this release lacks.")
    if op not in (Average, Sum):
        raise InvalidArgumentError(f"op must be Average ({Average}) or Sum ({Sum}) for a sparse tensor, but is {op!r}.")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        found = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UnsupportedError(f"tensor: expected torch.sparse_coo but found {found}. Convert it with to_sparse().")
    if tensor.dtype not in DTYPE_IDS or tensor.dtype == torch.bool:
        raise InvalidArgumentError(f"tensor: expected a sparse tensor of numbers but found {tensor.dtype}. Convert it.")


def _parts(tensor: torch.Tensor, prescale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What travels, in rows: the shape, the entries' indices and their values."""
    entries = tensor if tensor.is_coalesced() else _summed_duplicates(tensor)
    shape = torch.tensor([list(tensor.shape)], dtype=torch.int64)
    return shape, entries.indices().t().contiguous(), _scaled(entries.values(), prescale).contiguous()


def _summed_duplicates(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_widened(tensor._values()).dtype).coalesce().to(tensor.dtype)


def _widened(values: torch.Tensor) -> torch.Tensor:
    """16-bit floats as float32, which sums are made in; all others as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Integers are scaled in double and truncated, as the operations for dense tensors do."""
    if factor == 1.0:
        return values
    return values * factor if values.is_floating_point() else (values.double() * factor).trunc().to(values.dtype)


def _received(operation: Operation, part: int) -> Any:
    _, shape, memory = operation.output(part)
    return wrap_memory(None, memory, operation.dtype(part), shape)
