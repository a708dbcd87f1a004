"""Which rows a rank asks whom for in one exchange, and the bytes that say so. Pure.

A rank sends each member one text of 32-bit numbers: a head (``status``, ``table``, low and high half of an id), for
each table how many rows it asks for, and their places, table by table. Sizes travel with the exchange itself.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ringtrain.embedding.dealing import Dealing

HEAD = 4  # numbers
_FINE, _OUT_OF_RANGE = 0, 1


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The rows of one table that a rank needs, each once, ordered by owner and then by row.

    Attributes:
        ids: the rows, int64.
        counts: for each owner how many.
        places: where they lie there, int32.
        inverse: for each id that was asked for, in its order, the place in ``ids``; int64.
    """

    ids: np.ndarray
    counts: np.ndarray
    places: np.ndarray
    inverse: np.ndarray


def ask(dealing: Dealing, ids: np.ndarray) -> Asked:
    """What a rank asks for that needs some rows, with repetitions; ``ids`` is flat, int64 and within the table."""
    keys, inverse = _unique(dealing.keys(ids), dealing.block * dealing.ranks)
    owners, places = np.divmod(keys, dealing.block)
    counts = np.bincount(owners, minlength=dealing.ranks)
    return Asked(dealing.ids(owners, places), counts, places.astype(np.int32), inverse)


def _unique(keys: np.ndarray, below: int) -> tuple[np.ndarray, np.ndarray]:
    """``np.unique`` with the inverse, of int64 from 0 up to but not ``below``, in half its time.

    Each key is sorted together with its place, as one number, where both fit into 63 bits: NumPy sorts numbers faster
    than it finds the order of some.
    """
    bits = len(keys).bit_length()
    if bits + (below - 1).bit_length() > 63:
        unique, inverse = np.unique(keys, return_inverse=True)
        return unique, inverse.reshape(-1)
    both = (keys << bits) | np.arange(len(keys))
    both.sort()
    keys, places = both >> bits, both & ((1 << bits) - 1)
    begins = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=begins[1:])
    inverse = np.empty(len(keys), np.int64)
    inverse[places] = np.cumsum(begins) - 1
    return keys[begins], inverse


def first_out_of_range(dealing: Dealing, ids: np.ndarray) -> int | None:
    """The first id that is no row of the table; None where there is none."""
    if not ids.size or (ids.min() >= 0 and ids.max() < dealing.rows):
        return None
    return int(ids[(ids < 0) | (ids >= dealing.rows)][0])


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An id that is no row: in which of the exchange's tables."""

    table: int
    id: int


def question(asked: Sequence[Asked], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """What a rank sends to say which rows it needs of each table: the numbers, int32, and how many go to each rank."""
    head = np.zeros(HEAD, np.int32)
    ends = [np.concatenate(([0], np.cumsum(each.counts))) for each in asked]
    parts = []
    for rank in range(ranks):
        parts += [head, np.array([each.counts[rank] for each in asked], np.int32)]
        parts += [each.places[end[rank] : end[rank + 1]] for each, end in zip(asked, ends, strict=True)]
    splits = np.array([HEAD + len(asked) + sum(each.counts[rank] for each in asked) for rank in range(ranks)])
    return np.concatenate(parts), splits


def refusing(refusal: Refusal, tables: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """What a rank sends in place of ``question`` that cannot ask: every rank learns why."""
    low, high = np.array([refusal.id], np.int64).view(np.int32)
    text = np.concatenate(([_OUT_OF_RANGE, refusal.table, low, high], np.zeros(tables))).astype(np.int32)
    return np.tile(text, ranks), np.full(ranks, len(text))


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """The rows of one table that all ranks want of this one: in rank order, and in a rank's part each at most once.

    Attributes:
        places: where they lie here, int32.
        counts: of each rank.
    """

    places: np.ndarray
    counts: np.ndarray


def read(numbers: np.ndarray, splits: Sequence[int], tables: int) -> list[Wanted] | tuple[int, Refusal]:
    """What came from the ranks: what they want of each table, or the first that refuses, and why."""
    starts = np.concatenate(([0], np.cumsum(splits)))
    heads = [numbers[start : start + HEAD] for start in starts[:-1]]
    for rank, head in enumerate(heads):
        if head[0] != _FINE:
            return rank, Refusal(int(head[1]), int(np.ascontiguousarray(head[2:4]).view(np.int64)[0]))
    counts = np.stack([numbers[start + HEAD : start + HEAD + tables] for start in starts[:-1]]).astype(np.int64)
    ends = (starts[:-1] + HEAD + tables)[:, None] + np.cumsum(counts, axis=1)
    return [
        Wanted(
            np.concatenate([numbers[end - count : end] for end, count in zip(ends[:, t], counts[:, t], strict=True)]),
            counts[:, t],
        )
        for t in range(tables)
    ]


def added(wanted: Wanted, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that came from the ranks for places here, added up for each place: rank by rank, in this order.

    Args:
        wanted: whose rows they are.
        rows: shape (len(wanted.places), width).

    Returns:
        The places, ascending and each once, int64; and their sums, shape (places, width).
    """
    places, inverse = np.unique(wanted.places, return_inverse=True)
    total = np.zeros((len(places), rows.shape[1]), rows.dtype)
    end = 0
    for count in wanted.counts.tolist():
        if count:
            total[inverse[end : end + count]] += rows[end : end + count]
        end += count
    return places.astype(np.int64), total
