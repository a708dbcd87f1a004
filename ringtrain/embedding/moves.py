"""Rows that move when ranks have come or gone, and sums of gradients that go to second keepers of rows.

``layout`` decides; here that is carried out in the present world, by the core's alltoall. All ranks know from whom they get
which row, so that no row's number travels when rows move.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ringtrain._runtime.operations import alltoall
from ringtrain.embedding.layout import NOBODY, Layout

_AT_ONCE = 1 << 16  # rows of the whole table that move at a time
_COUNT = np.dtype(np.int32)
Sums = tuple[np.ndarray, np.ndarray]  # places, int64, ascending and each once; and what belongs there, (n, width)


@dataclasses.dataclass(frozen=True)
class Move:
    """From a former layout to one over the present world, which has the default context's ranks.

    Args:
        former: who kept what.
        layout: who will.
        sources: as ``layout.sources`` has them.
        was: this rank in the former world; None for one that has joined.
        rank: this rank now.
    """

    former: Layout
    layout: Layout
    sources: np.ndarray
    was: int | None
    rank: int

    def carry(
        self, name: str, width: int, dtype: np.dtype,
        gather: Callable[[np.ndarray], np.ndarray],
        put: Callable[[np.ndarray, np.ndarray], None],
        make: Callable[[np.ndarray], np.ndarray],
    ) -> None:  # fmt: skip
        """Moves one array that has a line for each row. All ranks call it.

        Args:
            name: the same on all ranks.
            width: numbers in a line.
            dtype: of them.
            gather: lines at former places of this rank: int64 (n,) to (n, width).
            put: takes places of the new layout, and their lines.
            make: of rows, int64 (n,), that nobody has any more, their lines.
        """
        ranks = range(self.layout.ranks)
        for start in range(0, self.layout.dealing.rows, _AT_ONCE):
            ids = np.arange(start, min(start + _AT_ONCE, self.layout.dealing.rows))
            sent = [self._between(ids, self.rank, to) for to in ranks]
            lines = [self._lines(each, gather, width, dtype) for each in sent]
            splits = np.array([each.size for each in lines])
            came, _ = alltoall(np.concatenate(lines).reshape(-1), splits, name)
            due = np.concatenate([self._between(ids, source, self.rank) for source in ranks])
            if len(due):
                put(self.layout.places(self.rank, due), came.reshape(-1, width))
            made = self._between(ids, NOBODY, self.rank)
            if len(made):
                put(self.layout.places(self.rank, made), np.asarray(make(made), dtype).reshape(-1, width))

    def _between(self, ids: np.ndarray, source: int, to: int) -> np.ndarray:
        """Those rows that a rank gets from another."""
        kept = np.zeros(self.layout.ranks, bool)
        kept[self.layout.parts(to)] = True
        ids = ids[kept[self.layout.dealing.owners(ids)]]
        return ids[self.sources[self.former.dealing.owners(ids), to] == source]

    def _lines(
        self, ids: np.ndarray, gather: Callable[[np.ndarray], np.ndarray], width: int, dtype: np.dtype
    ) -> np.ndarray:
        if self.was is None or not len(ids):
            return np.empty((0, width), dtype)
        return np.asarray(gather(self.former.places(self.was, ids)), dtype).reshape(-1, width)


def with_copies(layouts: Sequence[Layout], rank: int, sums: Sequence[Sums], name: str) -> list[Sums]:
    """What an owner has added up, at all places that keep the row. All ranks call it.

    The owner alone adds, and sends its sums on: so both keepers change a row by the same bits, and what travels is each
    row that has a gradient once, not once for each rank that has used it.

    Args:
        layouts: of several tables.
        rank: this one.
        sums: of each table for places of this rank's own part.
        name: the same on all ranks.
    """
    if not any(layout.has_copies for layout in layouts):
        return list(sums)
    texts = [_text(layouts, rank, to, sums) for to in range(layouts[0].ranks)]
    sent = np.frombuffer(b"".join(texts), np.uint8)
    came, received = alltoall(sent, np.array([len(each) for each in texts]), name)
    parts = [[each] for each in sums]
    end = 0
    for source, size in enumerate(received.tolist()):
        for table, copied in enumerate(_read(came[end : end + size].tobytes(), layouts, source, rank, sums)):
            parts[table].append(copied)
        end += size
    return [_joined(each) for each in parts]


def _text(layouts: Sequence[Layout], rank: int, to: int, sums: Sequence[Sums]) -> bytes:
    keeps = [to != rank and to in layout.keepers[rank] for layout in layouts]
    counts = [len(places) if kept else 0 for kept, (places, _) in zip(keeps, sums, strict=True)]
    pieces = [np.array(counts, _COUNT).tobytes()]
    for kept, (places, values) in zip(keeps, sums, strict=True):
        if kept:
            pieces += [places.astype(_COUNT).tobytes(), np.ascontiguousarray(values).tobytes()]
    return b"".join(pieces)


def _read(text: bytes, layouts: Sequence[Layout], source: int, rank: int, like: Sequence[Sums]) -> list[Sums]:
    counts = np.frombuffer(text, _COUNT, len(layouts)).tolist()
    end, found = _COUNT.itemsize * len(layouts), []
    for layout, count, (_, values) in zip(layouts, counts, like, strict=True):
        places = np.frombuffer(text, _COUNT, count, end).astype(np.int64)
        end += places.size * _COUNT.itemsize
        copied = np.frombuffer(text, values.dtype, count * values.shape[1], end).reshape(count, values.shape[1])
        end += copied.nbytes
        found.append((places + layout.starts(rank)[source] if count else places, copied))
    return found


def _joined(parts: Sequence[Sums]) -> Sums:
    return np.concatenate([places for places, _ in parts]), np.concatenate([values for _, values in parts])
