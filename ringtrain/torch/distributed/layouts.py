"""How torch's collectives lie in the core's: which tensor goes in, and where the pieces of what comes out belong. Pure.

The core's operations on rows cut the first dimension. What torch gathers, scatters and exchanges in lists becomes rows of
one flat tensor, so that shapes may differ from rank to rank.
"""

from collections.abc import Sequence

import torch

from ringtrain._binding import tables
from ringtrain._runtime.arguments import check_among
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.torch.tensors import DTYPE_IDS, holds_its_values, values_of

ReduceOp = torch.distributed.ReduceOp.RedOpType
_REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "average",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PREMUL_SUM: "sum",
    ReduceOp.BAND: "bitand",
    ReduceOp.BOR: "bitor",
    ReduceOp.BXOR: "bitxor",
}

# The core's operation for reduce_scatter: reduces, and each rank keeps its rows.
SUMS_OF_ROWS = next(row.name for row in tables.OPERATIONS.values() if row.reduces and row.adjoint == "allgather")


def reduction_of(op: torch.distributed.ReduceOp) -> dict[str, object]:
    """The attributes of the core's request for a ``ReduceOp``. Raises UnsupportedError for one that the core lacks."""
    kind = getattr(op, "op", op)
    known = [each.name for each in _REDUCTIONS]
    demand = f"torch.distributed: op must be one of {', '.join(known)} for ringtrain"
    check_among(demand, getattr(kind, "name", kind), known, error=UnsupportedError)
    attributes: dict[str, object] = {"reduction": _REDUCTIONS[kind]}
    if kind == ReduceOp.PREMUL_SUM:
        attributes["prescale"] = _factor(op)
    return attributes


def _factor(op: torch.distributed.ReduceOp) -> float:
    factor = op.__getstate__()[1]  # torch offers no other way to read it
    demand = "torch.distributed: the number of factors of PREMUL_SUM must be 1"
    check_among(demand, torch.as_tensor(factor).numel(), [1], "Multiply the tensor before", UnsupportedError)
    return float(factor)


def check_places(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raises InvalidArgumentError for a result whose elements share memory, as those of ``expand`` do: it has no room for them."""
    for tensor in tensors:
        if any(step == 0 and extent > 1 for step, extent in zip(tensor.stride(), tensor.shape, strict=True)):
            raise InvalidArgumentError(
                f"{what}: each element of a result must have memory of its own, but the tensor of shape {tuple(tensor.shape)} "
                f"has the strides {tensor.stride()}. Pass clone(), or contiguous()."
            )


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor that is only moved, in a dtype that the core knows: as bytes, if it has none for its own."""
    return tensor if tensor.dtype in DTYPE_IDS else tensor.reshape(-1).view(torch.uint8)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of several tensors of one dtype in one row of elements, for moving: their own memory, or a copy."""
    given = [each for each in tensors if each.numel()] or tensors[:1]
    if (whole := joined(given)) is not None:
        return whole
    pieces = [carried(values_of(each)).reshape(-1) for each in given]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of tensors of one dtype that lie one directly behind the other, as one row of elements; None if they do not."""
    first = tensors[0]
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for each in tensors:
        if (each.data_ptr(), each.untyped_storage().data_ptr()) != (place, storage) or each.dtype != first.dtype:
            return None
        if not holds_its_values(each):
            return None
        place += each.nbytes
    return carried(first.detach().as_strided((sum(each.numel() for each in tensors),), (1,)))


def room(outputs: Sequence[torch.Tensor], source: torch.Tensor, own: int | None) -> torch.Tensor | None:
    """The memory of outputs as one row of elements into which an operation can write; None if they have none.

    Args:
        outputs: in which the result belongs.
        source: the operation's input. It may share memory with the result only where it belongs there itself.
        own: bytes from the beginning of the result to where the input belongs in it, negative if the result belongs into
            the input; None if they may share nothing.
    """
    if not outputs or not outputs[0].numel() or outputs[0].is_cuda or (to := joined(outputs)) is None:
        return None
    if to.dtype != source.dtype:
        return None
    apart = to.data_ptr() + to.nbytes <= source.data_ptr() or source.data_ptr() + source.nbytes <= to.data_ptr()
    return to if apart or (own is not None and source.data_ptr() == to.data_ptr() + own) else None


def elements(tensor: torch.Tensor) -> int:
    """How many elements ``flat`` makes of a tensor."""
    return tensor.numel() if tensor.dtype in DTYPE_IDS else tensor.nbytes


def deal(row: torch.Tensor, tensors: Sequence[torch.Tensor], what: str) -> None:
    """Copies the elements of a flat tensor into several tensors, in their order, each as many as it has.

    Raises InvalidArgumentError if there are more or fewer.
    """
    wanted = sum(elements(each) for each in tensors)
    if row.numel() != wanted:
        raise InvalidArgumentError(
            f"{what}: the output must hold what the ranks have sent, {row.numel()} elements, but has {wanted}. "
            "Give outputs of the shapes of the inputs."
        )
    place = 0
    for tensor in tensors:
        count = elements(tensor)
        piece = row[place : place + count]
        if tensor.dtype not in DTYPE_IDS:
            piece = piece.view(tensor.dtype) if count else piece.to(tensor.dtype)
        tensor.detach().copy_(piece.view(tensor.shape))
        place += count


def check_one(tensors: Sequence[object], what: str) -> None:
    """Raises InvalidArgumentError for anything but a list of one, which is all that one rank has had since torch 1.13."""
    check_length(tensors, 1, "the tensor of this rank; call it once for each", what)


def check_length(tensors: Sequence[object], length: int, entries: str, what: str) -> None:
    """Raises InvalidArgumentError for a list that has not so many entries."""
    check_among(f"{what}: the number of tensors in a list must be {length}, {entries}", len(tensors), [length])


def split_rows(splits: Sequence[int], tensor: torch.Tensor, size: int, what: str) -> list[int]:
    """Elements for each rank, from rows of the first dimension; of equal parts if there are no splits.

    Raises InvalidArgumentError if they do not add up.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    counts = list(splits) or [rows // size] * size
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise InvalidArgumentError(
            f"{what}: expected {size} splits that add up to the {rows} rows but found {counts}. "
            "Without splits the rows must divide by the number of ranks."
        )
    row = elements(tensor) // rows if rows else 0
    return [count * row for count in counts]
