"""Checks of what training takes for granted: replicas that are equal, and numbers that are finite.

Both are collective, work on the tensors of any framework that the operations take, and raise the same error on every
rank.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringtrain._binding import device_memory, tables, tensor_memory
from ringtrain._binding._native import ffi, lib
from ringtrain._runtime.arguments import check_least
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.operations import Max, Min, allgather, allreduce
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of, members_of
from ringtrain._runtime.submission import preparing
from ringtrain.errors import MismatchError, RingtrainError

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]

_EXPONENT = {"float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}  # all ones: infinite, or not a number
_CHECKED_BYTES = 1 << 20  # at a time, so that a large tensor needs no large room


def check_replicas(tensors: Named, every: int = 1, process_set: ProcessSet = global_process_set) -> None:
    """Compares the tensors of all ranks bit by bit and names those that differ, and the odd ranks.

    Example:
        >>> rt.check_replicas(model.named_parameters(), every=100)

    Args:
        tensors: by name, such as ``model.named_parameters()``; the same names and order on all ranks. None stands for a
            tensor that there is not. Those on a GPU are copied to the host one by one, which waits for their stream.
        every: compares at the first call, and then at each ``every``-th, so that it can stand in the training loop.
        process_set: the ranks that take part.

    Raises:
        MismatchError: on every rank, if a tensor is not equal on all of them, or names differ. The odd ranks are those
            outside of the largest group of equals; where no group is the largest, nobody is blamed.
    """
    name = "check_replicas"
    with preparing("allreduce", f"{name}.names", process_set):
        check_least("check_replicas: every", every, 1)
    if current().count_call(f"{name}.{id_of(process_set)}") % every:
        return
    names, digests = _examined("check_replicas", tensors, process_set, digest)
    lowest = allreduce(digests, f"{name}.lowest", Min, process_set=process_set)
    highest = allreduce(digests, f"{name}.highest", Max, process_set=process_set)
    odd = np.flatnonzero(lowest != highest)
    if not odd.size:
        return
    first = int(odd[0])
    of_ranks = allgather(digests[first : first + 1], f"{name}.first", process_set)
    more = _more(int(odd.size), "differs", "differ")
    raise MismatchError(
        f"check_replicas '{names[first]}': the bits must be the same on all ranks, but {sides(of_ranks, process_set.ranks)}."
        f"{more} Broadcast the state from a rank that is right, and look for what this rank does alone."
    )


def check_finite(tensors: Named, process_set: ProcessSet = global_process_set) -> None:
    """Looks for infinities and NaNs, and names the first tensor that has one and the lowest rank that has it there.

    Example:
        >>> rt.check_finite((name, p.grad) for name, p in model.named_parameters())

    Args:
        tensors: by name; the same names and order on all ranks. Integers and None, a missing gradient, are finite.
        process_set: the ranks that take part.

    Raises:
        MismatchError: on every rank, if an element on any rank is not finite, or names differ.
    """
    names, finite = _examined("check_finite", tensors, process_set, _is_finite)
    world = current().size
    lowest = np.where(finite, world, current().rank)
    lowest = allreduce(lowest, "check_finite", Min, process_set=process_set)
    odd = np.flatnonzero(lowest < world)
    if odd.size:
        more = _more(int(odd.size), "has one", "have one")
        raise MismatchError(
            f"check_finite '{names[odd[0]]}': all elements must be finite, but rank {lowest[odd[0]]} has an infinite one "
            f"or a NaN.{more} Look at that rank's batch, or lower the learning rate."
        )


def _examined(
    check: str, tensors: Named, process_set: ProcessSet, look: Callable[[object], int]
) -> tuple[list[str], np.ndarray]:
    """The names of the tensors, which are the same on all ranks, and what ``look`` finds in each, as int64.

    Raises:
        MismatchError: on every rank, if names or their order differ.
        RingtrainError: on every rank, if ``look`` fails on one of them.
    """
    agreement = f"{check}.names"
    with preparing("allreduce", agreement, process_set):
        pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        names = [str(name) for name, _ in pairs]
        found = np.array([_look_at(name, tensor, look) for name, tensor in pairs], np.int64)
    require_same_names(check, names, process_set)
    return names, found


def require_same_names(what: str, names: Sequence[str], process_set: ProcessSet) -> None:
    """Compares a digest of names; collective, under ``what`` and ".names". Raises MismatchError on every rank if they differ."""
    agreement = f"{what}.names"
    digest = hashed("\0".join(names).encode("utf-8", "surrogatepass"))
    extremes = allreduce(np.array([digest, -digest]), agreement, Max, process_set=process_set)
    if extremes.sum():  # the largest is not the smallest
        difference = _name_difference(allgather_object(list(names), agreement, process_set), members_of(process_set))
        raise MismatchError(
            f"{what}: the tensors must have the same names in the same order on all ranks, but {difference}. "
            "Pass the same ones on every rank."
        )


def _look_at(name: str, tensor: object, look: Callable[[object], int]) -> int:
    try:
        return look(tensor)
    except RingtrainError as problem:
        raise type(problem)(f"'{name}': {problem}") from problem


def _name_difference(names: list[list[str]], ranks: Sequence[int]) -> str:
    """What is wrong; ``names`` are those of each rank."""
    for name in itertools.chain.from_iterable(names):
        without = [rank for rank, own in zip(ranks, names, strict=True) if name not in own]
        if without:
            return f"'{name}' is missing on {named_ranks(without)}"
    return f"not on {named_ranks([rank for rank, own in zip(ranks, names, strict=True) if own != names[0]])}"


class _Content(NamedTuple):
    """A tensor to look at: name of its element type, shape, bytes, and what keeps these alive."""

    dtype: str
    shape: tuple[int, ...]
    bytes: memoryview
    owner: object


_NOTHING = _Content("", (), memoryview(b""), None)  # of None, a gradient that there is not


def _content(tensor: object) -> _Content:
    if tensor is None:
        return _NOTHING
    memory = tensor_memory.as_buffer(tensor)
    dtype = tables.DTYPE_BY_ID[memory.dtype]
    if memory.device >= 0:
        return _Content(dtype.name, memory.shape, memoryview(device_memory.read_device(current().native, memory)), None)
    size = dtype.bytes * math.prod(memory.shape)
    return _Content(dtype.name, memory.shape, memoryview(ffi.buffer(ffi.cast("char *", memory.pointer), size)), memory)


def digest(tensor: object) -> int:
    """63 bits that depend on element type, shape, and every byte and its place."""
    content = _content(tensor)
    kind = hashed(f"{content.dtype}{content.shape}".encode())
    memory = ffi.from_buffer(content.bytes)
    return lib.rt_digest(memory, len(content.bytes), kind) >> 1


def hashed(*parts: bytes | memoryview) -> int:
    """63 bits of some content; slower than ``digest``, and such as nobody makes alike on purpose."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest(), "little") >> 1


def _is_finite(tensor: object) -> bool:
    content = _content(tensor)
    for begin in range(0, len(content.bytes), _CHECKED_BYTES):
        part = content.bytes[begin : begin + _CHECKED_BYTES]
        if content.dtype in _EXPONENT:
            carrier, exponent = _EXPONENT[content.dtype]
            finite = ((np.frombuffer(part, carrier) & exponent) != exponent).all()
        else:
            finite = (
                content.dtype not in ("float32", "float64") or np.isfinite(np.frombuffer(part, content.dtype)).all()
            )
        if not finite:
            return False
    return True


def sides(digests: np.ndarray, ranks: Sequence[int] | np.ndarray) -> str:
    """Who differs from whom: the smaller groups from the largest one, or all from each other.

    Args:
        digests: one of each rank.
        ranks: their numbers.
    """
    ranks = np.array(ranks)
    values, counts = np.unique(digests, return_counts=True)
    groups = [ranks[digests == value].tolist() for value in values[np.argsort(-counts, kind="stable")]]
    if len(groups[0]) == len(groups[1]):
        return "those of " + " and of ".join(named_ranks(group) for group in sorted(groups)) + " differ"
    odd = sorted(rank for group in groups[1:] for rank in group)
    return f"those of {named_ranks(odd)} differ from those of {named_ranks(groups[0])}"


def require_alike(demand: str, told: Sequence[object], process_set: ProcessSet, advice: str) -> None:
    """Looks for the first rank that has told something else than the first one.

    Args:
        demand: what must be, in a sentence without an end.
        told: by each rank of the set.
        process_set: the ranks.
        advice: what to do, likewise.

    Raises:
        MismatchError: the same on all ranks, if there is one.
    """
    ranks = members_of(process_set)
    for rank, theirs in zip(ranks, told, strict=True):
        if theirs != told[0]:
            raise MismatchError(
                f"{demand}, but found {told[0]} on rank {ranks[0]} and {theirs} on rank {rank}. {advice}."
            )


def named_ranks(ranks: list[int]) -> str:
    """Ranks as errors write them: ``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _more(count: int, singular: str, plural: str) -> str:
    """How many tensors beside the named one: `` 1 more tensor differs.``; "" if there are none."""
    verb = singular if count == 2 else plural
    return f" {count - 1} more tensor{'s' if count > 2 else ''} {verb}." if count > 1 else ""
