"""Checks of what training takes for granted: replicas that are equal, and numbers that are finite.

Both are collective, work on the tensors of any framework that the operations take, and raise the same error on every rank.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ringtrain import buffers, tables
from ringtrain._native import ffi
from ringtrain.context import current
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.operations import Max, Min, allgather, allreduce
from ringtrain.process_sets import ProcessSet, global_process_set

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]

_EXPONENT = {"float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}  # all ones: infinite, or not a number
_CHECKED_BYTES = 1 << 20  # at a time, so that a large tensor needs no large room


def check_replicas(tensors: Named, every: int = 1, process_set: ProcessSet = global_process_set) -> None:
    """Compares the tensors of all ranks bit by bit and names those that differ, and the odd ranks.

    Args:
        tensors: by name, such as ``model.named_parameters()``; the same names and order on all ranks.
        every: compares at the first call, and then at each ``every``-th, so that it can stand in the training loop.
        process_set: the ranks that take part.

    Raises:
        MismatchError: on every rank, if a tensor is not equal on all of them. The odd ranks are those outside of the largest
            group of equals; where no group is the largest, nobody is blamed.

    Example:
        >>> rt.check_replicas(model.named_parameters(), every=100)
    """
    if every < 1:
        raise InvalidArgumentError(f"check_replicas: every must be 1 at least, but is {every}.")
    if current().count_call(f"check_replicas.{process_set.process_set_id}") % every:
        return
    names, memories = _described(tensors)
    digests = np.array([_digest(memory) for memory in memories], np.int64)
    name = f"check_replicas.{process_set.process_set_id}"
    lowest = allreduce(digests, f"{name}.lowest", Min, process_set=process_set)
    highest = allreduce(digests, f"{name}.highest", Max, process_set=process_set)
    odd = np.flatnonzero(lowest != highest)
    if not odd.size:
        return
    first = int(odd[0])
    of_ranks = allgather(digests[first : first + 1], f"{name}.first", process_set)
    raise MismatchError(
        f"check_replicas '{names[first]}': the bits must be the same on all ranks, but {_sides(of_ranks, process_set)}."
        f"{_more(odd.size)} Broadcast the state from a rank that is right, and look for what this rank does alone."
    )


def check_finite(tensors: Named, process_set: ProcessSet = global_process_set) -> None:
    """Looks for infinities and NaNs, and names the first tensor that has one and the lowest rank that has it there.

    Args:
        tensors: by name; the same names and order on all ranks. Integers are finite.
        process_set: the ranks that take part.

    Raises:
        MismatchError: on every rank, if an element on any rank is not finite.

    Example:
        >>> rt.check_finite((name, p.grad) for name, p in model.named_parameters())
    """
    names, memories = _described(tensors)
    world, rank = current().size, current().rank
    lowest = np.array([world if _is_finite(memory) else rank for memory in memories], np.int32)
    lowest = allreduce(lowest, f"check_finite.{process_set.process_set_id}", Min, process_set=process_set)
    odd = np.flatnonzero(lowest < world)
    if odd.size:
        raise MismatchError(
            f"check_finite '{names[odd[0]]}': all elements must be finite, but rank {lowest[odd[0]]} has an infinite one "
            f"or a NaN.{_more(odd.size)} Look at that rank's batch, or lower the learning rate."
        )


def _described(tensors: Named) -> tuple[list[str], list[buffers.Buffer]]:
    """Names, and the memory of each tensor."""
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    return [name for name, _ in pairs], [buffers.as_buffer(tensor) for _, tensor in pairs]


def _bytes(memory: buffers.Buffer) -> memoryview:
    size = tables.DTYPE_BY_ID[memory.dtype].bytes * int(np.prod(memory.shape, dtype=np.int64))
    return memoryview(ffi.buffer(ffi.cast("char *", memory.address), size))


def _digest(memory: buffers.Buffer) -> int:
    """63 bits that depend on every byte and its place."""
    return int.from_bytes(hashlib.blake2b(_bytes(memory), digest_size=8).digest(), "little") >> 1


def _is_finite(memory: buffers.Buffer) -> bool:
    dtype, content = tables.DTYPE_BY_ID[memory.dtype].name, _bytes(memory)
    for begin in range(0, len(content), _CHECKED_BYTES):
        part = content[begin : begin + _CHECKED_BYTES]
        if dtype in _EXPONENT:
            carrier, exponent = _EXPONENT[dtype]
            finite = ((np.frombuffer(part, carrier) & exponent) != exponent).all()
        else:
            finite = dtype not in ("float32", "float64") or np.isfinite(np.frombuffer(part, dtype)).all()
        if not finite:
            return False
    return True


def _sides(digests: np.ndarray, process_set: ProcessSet) -> str:
    """Who differs from whom: the smaller groups from the largest one, or all from each other."""
    ranks = np.array(process_set.ranks)
    values, counts = np.unique(digests, return_counts=True)
    groups = [ranks[digests == value].tolist() for value in values[np.argsort(-counts, kind="stable")]]
    if len(groups[0]) == len(groups[1]):
        return "those of " + " and of ".join(_ranks(group) for group in sorted(groups)) + " differ"
    odd = sorted(rank for group in groups[1:] for rank in group)
    return f"those of {_ranks(odd)} differ from those of {_ranks(groups[0])}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _more(count: int) -> str:
    return f" So it is with {count - 1} more." if count > 1 else ""
