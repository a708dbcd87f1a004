"""One exchange of rows: ids to their owners, rows back, and later their gradients to the owners.

Three alltoalls; the sizes of each are agreed in the alltoall itself. Rows of several tables travel together, as flat
numbers: for each rank those of the first table, then those of the next. A set of one rank sends nothing.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np

from ringtrain._runtime.operations import alltoall
from ringtrain._runtime.process_sets import ProcessSet, members_of, size_of
from ringtrain._runtime.submission import preparing
from ringtrain.embedding import row_requests
from ringtrain.embedding.dealing import Dealing
from ringtrain.errors import InvalidArgumentError, UnsupportedError

Gather = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """What an exchange must know of a table.

    Attributes:
        name: the same on all ranks; errors and operations bear it.
        dealing: who owns which row.
        width: numbers in a row.
        dtype: of them.
        gather: rows of this rank by place: int32 (n,) to (n, width).
    """

    name: str
    dealing: Dealing
    width: int
    dtype: np.dtype
    gather: Gather


def name_of(tables: Sequence[str]) -> str:
    """Of the operations of an exchange, by the names of its tables."""
    return f"embedding.{tables[0]}" + (f"+{len(tables) - 1}" if len(tables) > 1 else "")


@contextmanager
def before_a_trip(tables: Sequence[str], process_set: ProcessSet) -> Iterator[None]:
    """For what comes before a ``Trip`` of tables of these names: what goes wrong in its block fails the trip on all ranks."""
    with preparing("alltoall", f"{name_of(tables)}.ids", process_set):
        yield


class Trip:
    """An exchange under way: what was asked for here, and what the others want.

    Attributes:
        asked: for each table what this rank needs.
        rows: for each table the rows that came, of shape (unique ids, width), in the order of ``asked.ids``.
        name: of its operations.
    """

    __slots__ = ("asked", "rows", "name", "_tables", "_wanted", "_process_set")

    def __init__(
        self, tables: Sequence[Table], ids: Sequence[np.ndarray], process_set: ProcessSet, fetches: bool = True
    ):
        """Fetches the rows of some ids.

        Args:
            tables: of one dtype, the same on all ranks in the same order.
            ids: for each table those that this rank needs, int64, flat, any number, also none.
            process_set: the ranks that share the tables; all of them take part.
            fetches: whether rows come back; else there is none in ``rows``, and gradients alone may be sent.

        Raises:
            InvalidArgumentError: an id of some rank is no row; the same text on all ranks.
            UnsupportedError: a rank has joined; on all others.
        """
        self._tables, self._process_set = tables, process_set
        self.name = name_of([table.name for table in tables])
        self._wanted = self._ask(ids)
        self.rows = self._fetch() if fetches else []

    def send_back(self, gradients: Sequence[np.ndarray]) -> tuple[list[tuple[np.ndarray, np.ndarray]], bool]:
        """Sends gradients of ``rows`` to the rows' owners. All ranks call it, once for each trip.

        Args:
            gradients: of the shapes of ``rows``.

        Returns:
            For each table the places here that have gradients, int64, and their sums over the ranks, added in rank
            order; and whether any rank sent what is not finite, or could become so in the sum: the same on all ranks.
        """
        ranks, dtype = size_of(self._process_set), self._tables[0].dtype
        finite = all(is_finite(gradient, ranks) for gradient in gradients)
        came, all_finite = gradients, finite
        if ranks > 1:
            flag = np.full(1, not finite, dtype)
            flat, splits = _by_rank(
                [np.ascontiguousarray(each, dtype) for each in gradients], self._counts_asked(), flag
            )
            flat, received = alltoall(flat, splits, f"{self.name}.gradients", self._process_set)
            self._require_all(received)
            came, flags = self._by_table(flat, [each.counts for each in self._wanted], head=1)
            all_finite = not flags.any()
        sums = [row_requests.added(wanted, rows) for wanted, rows in zip(self._wanted, came, strict=True)]
        return sums, all_finite

    def _ask(self, ids: Sequence[np.ndarray]) -> list[row_requests.Wanted]:
        ranks, tables = size_of(self._process_set), self._tables
        refusal = self._refusal(ids)
        if refusal is None:
            self.asked = [row_requests.ask(table.dealing, each) for table, each in zip(tables, ids, strict=True)]
        if ranks == 1:
            if refusal is not None:
                self._raise(0, refusal)
            return [row_requests.Wanted(each.places, each.counts) for each in self.asked]
        if refusal is None:
            numbers, splits = row_requests.question(self.asked, ranks)
        else:
            numbers, splits = row_requests.refusing(refusal, len(tables), ranks)
        came, received = alltoall(numbers, splits, f"{self.name}.ids", self._process_set)
        self._require_all(received)
        wanted = row_requests.read(came, received, len(tables))
        if isinstance(wanted, list):
            return wanted
        self._raise(*wanted)

    def _refusal(self, ids: Sequence[np.ndarray]) -> row_requests.Refusal | None:
        for number, (table, each) in enumerate(zip(self._tables, ids, strict=True)):
            wrong = row_requests.first_out_of_range(table.dealing, each)
            if wrong is not None:
                return row_requests.Refusal(number, wrong)
        return None

    def _raise(self, place: int, refusal: row_requests.Refusal) -> NoReturn:
        table = self._tables[refusal.table]
        raise InvalidArgumentError(
            f"embedding '{table.name}': ids must be from 0 to {table.dealing.rows - 1}, but rank "
            f"{members_of(self._process_set)[place]} has {refusal.id}. Look at its data, or make the table larger."
        )

    def _fetch(self) -> list[np.ndarray]:
        found = [table.gather(wanted.places) for table, wanted in zip(self._tables, self._wanted, strict=True)]
        if size_of(self._process_set) == 1:
            return found
        none = np.empty(0, self._tables[0].dtype)
        flat, splits = _by_rank(found, [each.counts for each in self._wanted], none)
        came, received = alltoall(flat, splits, f"{self.name}.rows", self._process_set)
        self._require_answer(received)
        return self._by_table(came, self._counts_asked(), head=0)[0]

    def _counts_asked(self) -> list[np.ndarray]:
        return [each.counts for each in self.asked]

    def _by_table(
        self, flat: np.ndarray, counts: Sequence[np.ndarray], head: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """What ``_by_rank`` of all ranks has made, for each table, and the heads."""
        widths = [table.width for table in self._tables]
        if len(widths) == 1 and not head:
            return [flat.reshape(-1, widths[0])], flat[:0]
        parts: list[list[np.ndarray]] = [[] for _ in widths]
        heads, end = [], 0
        for rank in range(len(counts[0])):
            heads.append(flat[end : end + head])
            end += head
            for table, width in enumerate(widths):
                start, end = end, end + int(counts[table][rank]) * width
                parts[table].append(flat[start:end])
        whole = [np.concatenate(each).reshape(-1, width) for each, width in zip(parts, widths, strict=True)]
        return whole, np.concatenate(heads)

    def _require_all(self, received: np.ndarray) -> None:
        """Raises UnsupportedError if a rank said nothing: whoever takes part says something."""
        self._require(received > 0)

    def _require_answer(self, received: np.ndarray) -> None:
        due = sum(counts * table.width for counts, table in zip(self._counts_asked(), self._tables, strict=True))
        self._require(received == due)

    def _require(self, spoke: np.ndarray) -> None:
        if not spoke.all():
            silent = members_of(self._process_set)[int(np.argmin(spoke))]
            raise UnsupportedError(
                f"embedding '{self._tables[0].name}': every rank must serve its rows, but rank {silent} has joined. "
                "Let ranks without data go on with empty batches (docs/embeddings.md, 'Uneven batches')."
            )


def _by_rank(
    parts: Sequence[np.ndarray], counts: Sequence[np.ndarray], head: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of several tables in the order in which they travel: for each rank ``head``, then its rows table by table.

    Returns the flat numbers, and how many go to each rank.
    """
    widths = [part.shape[1] for part in parts]
    splits = len(head) + sum(each * width for each, width in zip(counts, widths, strict=True))
    if len(parts) == 1 and not len(head):
        return parts[0].reshape(-1), splits
    pieces, ends = [], [0] * len(parts)
    for rank in range(len(splits)):
        pieces.append(head)
        for table, part in enumerate(parts):
            start, ends[table] = ends[table], ends[table] + int(counts[table][rank])
            pieces.append(part[start : ends[table]].reshape(-1))
    return np.concatenate(pieces), splits


def is_finite(gradient: np.ndarray, ranks: int) -> bool:
    """Whether a sum of as many such gradients is finite in any case; a NaN is found too, as it is not less."""
    if not gradient.size:
        return True
    most = np.finfo(gradient.dtype).max / ranks
    return bool(gradient.max() <= most) and bool(gradient.min() >= -most)
