"""Sums of sparse tensors over the ranks: each sends the entries that it has, and every rank adds up what came.

``reductions`` calls it for the user; optimizers submit a ``SparseAllreduce`` from a gradient's hook and wait for it in
their step. One grouped allgather carries three tensors: a head with the sparse tensor's shape, the number of its
entries and its weight in an average; the entries' indices; and their values. So all ranks see which of them disagree
about the shape, and which contributed, once some have joined.
"""

from collections.abc import Iterator

import torch

from ringtrain._runtime.arguments import check_among
from ringtrain._runtime.context import Context
from ringtrain._runtime.operations import Adasum, Average, PerItem, Sum
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import ranks_of
from ringtrain.errors import InvalidArgumentError, MismatchError, UnsupportedError
from ringtrain.torch.tensors import DTYPE_IDS, buffer_of, finish, received

_UNWEIGHTED = -1  # a contribution that counts as one
_DIVIDING = (Average, PerItem)
_HEAD, _INDICES, _VALUES = range(3)  # the tensors of the group


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
        weight: what this rank's tensor counts in an average, a whole number; None on all ranks to count them alike.

    Raises:
        InvalidArgumentError, UnsupportedError: another layout, dtype or op. The other ranks' operation fails too.
    """

    __slots__ = ("_name", "_op", "_postscale", "_divisor", "_operation", "_head", "_result")

    def __init__(
        self,
        context: Context,
        tensor: torch.Tensor,
        name: str | None,
        op: int = Average,
        process_set: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        weight: int | None = None,
    ):
        self._name = name or "unnamed"
        self._op = op
        self._postscale = postscale
        self._divisor = _all_members(context, process_set) if weight is None else None
        self._result: torch.Tensor | None = None
        try:
            _check(tensor, op, weight)
            parts = _parts(tensor.detach(), prescale, weight)
            buffers = [buffer_of(part) for part in parts]
        except Exception as problem:  # seen by this rank alone: the others must not wait for it
            context.refuse("allgather", name, process_set, problem)
        self._operation: Operation | None = context.submit(
            "allgather", name, buffers, [None] * len(buffers), process_set=process_set
        )
        self._head = parts[_HEAD]

    def done(self) -> bool:
        """Whether the operation ended, well or not, a GPU's part included."""
        return self._operation is None or self._operation.finished()

    def waiting(self) -> Iterator[Operation]:
        """The operation under way, which ``wait`` waits for."""
        if self._operation is not None:
            yield self._operation

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Blocks until the operation is done; the result, coalesced, and the same one when called again.

        Raises MismatchError on every rank if the tensors have different shapes, or only some have a weight.
        """
        if self._operation is not None:
            finish(self._operation, self._head, timeout)
            heads, indices, values = (
                received(self._operation, self._head, part) for part in (_HEAD, _INDICES, _VALUES)
            )
            self._result = self._sum(heads, indices.t(), values)
            self._operation = None
        return self._result

    __call__ = wait

    def _sum(self, heads: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        *_, counts, weights = heads.t()
        shape = _agreed_shape(self._name, heads)
        weights = weights.abs()  # without weights, ones
        factors = torch.ones_like(weights) if self._op == PerItem else weights
        weighted = _weighted(_widened(values), factors.repeat_interleave(counts))
        total = torch.sparse_coo_tensor(indices, weighted, shape, check_invariants=False).coalesce()
        result = _scaled(total.values(), self._postscale)
        if self._op in _DIVIDING:
            exact = None if values.is_floating_point() else "trunc"
            result = torch.div(result, self._divisor or max(weights.sum().item(), 1), rounding_mode=exact)
        return torch.sparse_coo_tensor(
            total.indices(), result.to(values.dtype), total.shape, is_coalesced=True, check_invariants=False
        )


def _all_members(context: Context, process_set: int) -> int | None:
    """What an average divides by where the world's options say all members; None for those that contribute."""
    if context.chosen.get("join_divisor") != "initial":
        return None
    return len(ranks_of(context, process_set) or ())


def _check(tensor: torch.Tensor, op: int, weight: int | None) -> None:
    if op == Adasum:
        raise UnsupportedError(
            "op must be Average or Sum, but is Adasum, which takes dense tensors. Convert the tensor with to_dense()."
        )
    demand = f"op must be Average ({Average}), Sum ({Sum}) or PerItem ({PerItem}) for a sparse tensor"
    check_among(demand, op, (*_DIVIDING, Sum))
    if op == PerItem and weight is None:
        raise InvalidArgumentError(
            "reduction peritem needs a weight, of how many items this rank's tensor is the sum. Pass weight; an "
            "optimizer gets it by count() before each backward pass."
        )
    if weight is not None and (op not in _DIVIDING or weight < 0 or not tensor.is_floating_point()):
        raise InvalidArgumentError(
            f"weight must be a whole number for the average of floating-point numbers, but is {weight!r}."
        )
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        found = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UnsupportedError(f"tensor: expected torch.sparse_coo but found {found}. Convert it with to_sparse().")
    if tensor.dtype not in DTYPE_IDS or tensor.dtype == torch.bool:
        raise InvalidArgumentError(f"tensor: expected a sparse tensor of numbers but found {tensor.dtype}. Convert it.")


def _agreed_shape(name: str, heads: torch.Tensor) -> list[int]:
    """The sparse tensors' shape; raises MismatchError where contributions differ in it, or in having a weight."""
    shapes = heads[:, :-2].tolist()
    for place, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise MismatchError(
                f"sparse allreduce '{name}': shape must be the same on all ranks, but the first contribution has "
                f"{shapes[0]} and number {place} has {shape}. Pad to one shape."
            )
    weights = heads[:, -1].tolist()
    if weights.count(_UNWEIGHTED) not in (0, len(weights)):
        raise MismatchError(
            f"sparse allreduce '{name}': weight must be given on all ranks or on none, but contributions have "
            f"{[None if weight == _UNWEIGHTED else weight for weight in weights]}. Pass it everywhere."
        )
    return shapes[0]


def _parts(
    tensor: torch.Tensor, prescale: float, weight: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What travels, in rows: the head, the entries' indices and their values."""
    entries = tensor if tensor.is_coalesced() else _summed_duplicates(tensor)
    values = _scaled(entries.values(), prescale).contiguous()
    head = torch.tensor(
        [[*tensor.shape, len(values), _UNWEIGHTED if weight is None else weight]],
        dtype=torch.int64,
        device=values.device,
    )
    return head, entries.indices().t().contiguous(), values


def _weighted(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each entry times its rank's weight. A weight of 0 takes nothing over, not even a NaN."""
    if bool((weights == 1).all()):
        return values
    weights = weights.reshape(-1, *[1] * (values.dim() - 1))
    return torch.where(weights == 0, torch.zeros_like(values), values * weights)


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
