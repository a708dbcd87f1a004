"""How flat buckets of tensors are dealt over ranks: which elements of which tensor each rank keeps. Pure.

For optimizers of which each rank updates its share (``torch.modes.sharded_step``). A bucket is one flat array; its tensors begin at
multiples of ``ALIGNMENT``, and so do the shares, which are equally long: gaps and the end are padding.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

ALIGNMENT = 64  # elements: loops over vectors treat elements of a share as they do those of the whole tensor


class Piece(NamedTuple):
    """What a share has of one tensor.

    Attributes:
        tensor: its place in the bucket.
        first, last: the elements of the tensor, in row-major order; ``last`` is not one of them.
        at: where the first of them lies in the share.
    """

    tensor: int
    first: int
    last: int
    at: int


class BucketLayout(NamedTuple):
    """A bucket's elements.

    Attributes:
        counts: elements of each tensor.
        offsets: where each begins.
        share: elements of each rank's share.
        members: number of shares.
    """

    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    share: int
    members: int

    @property
    def total(self) -> int:
        """Elements of the bucket, padding included."""
        return self.share * self.members

    def pieces(self, member: int) -> list[Piece]:
        """What one member's share has, in the order of the tensors; nothing of the padding.

        Example:
            >>> laid_out([100, 70], members=2).pieces(1)
            [Piece(tensor=1, first=0, last=70, at=0)]
        """
        start, stop = member * self.share, (member + 1) * self.share
        found = []
        for tensor, (offset, count) in enumerate(zip(self.offsets, self.counts, strict=True)):
            first, last = max(start, offset), min(stop, offset + count)
            if first < last:
                found.append(Piece(tensor, first - offset, last - offset, first - start))
        return found


class Box(NamedTuple):
    """A part of a tensor: where it begins, and how far it reaches, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.sizes)

    def in_row(self, row: int) -> "Box":
        """The box of a tensor with a dimension more in front, in one of whose rows this one lies."""
        return Box((row, *self.offsets), (1, *self.sizes))


def boxes(shape: Sequence[int], first: int, last: int) -> list[Box]:
    """The boxes that a run of a tensor's elements in row-major order consists of, in that order.

    Example:
        >>> boxes([3, 4], 2, 8)  # the end of the first row, and the second one
        [Box(offsets=(0, 2), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(1, 4))]
    """
    if first >= last:
        return []
    if len(shape) < 2:
        return [Box((first,) * len(shape), (last - first,) * len(shape))]
    inner, row = shape[1:], math.prod(shape[1:])
    begin, end = -(-first // row), last // row  # of the rows that are all in it
    if begin > end:
        return [box.in_row(end) for box in boxes(inner, first - end * row, last - end * row)]
    head = (
        [box.in_row(begin - 1) for box in boxes(inner, first - (begin - 1) * row, row)] if first < begin * row else []
    )
    whole = [Box((begin, *(0 for _ in inner)), (end - begin, *inner))] if begin < end else []
    return [*head, *whole, *(box.in_row(end) for box in boxes(inner, 0, last - end * row))]


def laid_out(counts: Sequence[int], members: int) -> BucketLayout:
    """The layout of tensors of so many elements over so many members."""
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end += _rounded(count, ALIGNMENT)
    share = _rounded(-(-end // members), ALIGNMENT)
    return BucketLayout(tuple(counts), tuple(offsets), share, members)


def bucketed(kinds: Sequence[Hashable], sizes: Sequence[int], most_bytes: int) -> list[list[int]]:
    """Places of tensors by bucket: in order, of one kind each, and of at most so many bytes but for a tensor that has more.

    Example:
        >>> bucketed(["f", "f", "d", "f"], [4, 4, 8, 4], most_bytes=8)
        [[0, 1], [2], [3]]
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for place, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        places, held = open_buckets.get(kind, ([], 0))
        if places and held + size > most_bytes:
            places, held = [], 0
        if not places:
            buckets.append(places)
        places.append(place)
        open_buckets[kind] = places, held + size
    return buckets


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
