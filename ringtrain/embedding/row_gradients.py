"""Gradients of rows of sharded embeddings in an elastic job: they travel in the round of the optimizer that trains the rows.

Elsewhere they reach their owners within the backward pass. Here a rank keeps what it has for rows of others until the round,
so that they are released with the gradients of the rest, by all ranks or by none, and are sent again if the world is lost.
The sums go to all keepers of a row, and are the table's there when the round is released (``add_gradient``).
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringtrain._runtime.context import current
from ringtrain._runtime.operations import allgather
from ringtrain._runtime.process_sets import global_process_set
from ringtrain.embedding.kept_rows import KeptRows, kept_here
from ringtrain.embedding.moves import Sums, with_copies
from ringtrain.embedding.trips import Trip
from ringtrain.errors import MismatchError, WorldChangedError


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """What one backward pass has brought for one trip: for each of its tables, of the shapes of the rows that had come."""

    trip: Trip
    world: int
    tables: Sequence[Any]
    gradients: list[np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class _Reduced:
    tables: Sequence[Any]
    sums: list[Sums]
    finite: bool


class RowGradients:
    """Those of the tables that one optimizer trains.

    Args:
        came: a method, called in a backward pass that has brought some; None for nothing.
    """

    def __init__(self, came: Callable[[], None] | None = None):
        # Weak, as the object holds this one: no cycle to be collected.
        self._came = None if came is None else weakref.WeakMethod(came)
        self._tables: list[Any] = []
        self._waiting: list[_Waiting] = []
        self._reduced: list[_Reduced] = []  # held by this rank, and not released
        self._kept: dict[Any, KeptRows] = {}  # by table: what is kept in the world in which they were reduced

    def __reduce__(self) -> tuple:
        """A copy of a table is nobody's."""
        return type(None), ()

    def carry(self, table: Any) -> None:
        """Has gradients of a table travel here."""
        self._tables.append(table)

    def add(self, trip: Trip, world: int, tables: Sequence[Any], gradients: list[np.ndarray]) -> None:
        """Keeps what a backward pass has for the rows of a trip."""
        self._waiting.append(_Waiting(trip, world, tables, gradients))
        if self._came is not None and (came := self._came()) is not None:
            came()

    @property
    def waiting(self) -> int:
        """Backward passes whose gradients no round has taken."""
        return len(self._waiting)

    def reduce(self, name: str, share: int | None, gives_up: bool) -> None:
        """Sends what waits to its owners, in the present world, and holds what comes; nothing else changes.

        Args:
            name: of the operation, in the present world.
            share: what this rank's gradients count in an average; None if all count alike.
            gives_up: whether this rank will not use them.

        Raises:
            MismatchError: ranks that use them have gone backward unequally often; the same on all ranks.
            RowsLostError: rows are kept by nobody any more; the same on all ranks.
        """
        if not self._tables:
            return
        own = 1 if share is None else share
        told = allgather(np.array([[len(self._waiting), own, gives_up]], np.int64), name=name)
        counts, shares = told[:, 0], told[:, 1]
        if counts.min() != counts.max() and not told[:, 2].any():
            raise MismatchError(
                f"embedding '{self._tables[0].name}': all ranks must go backward through a table, or none, but did so "
                f"{counts.tolist()} times in this step, by rank. A rank without ids passes an empty tensor."
            )
        self.take_back()
        for waiting in self._waiting[: int(counts.min())]:
            self._reduced.append(self._sent(waiting, own, int(shares.sum())))

    def release(self) -> None:
        """All ranks hold the sums: they become gradients."""
        for table, kept in self._kept.items():
            table.take(kept)
        for reduced in self._reduced:
            for table, (places, values) in zip(reduced.tables, reduced.sums, strict=True):
                table.add_gradient(places, values, reduced.finite)
        del self._waiting[: len(self._reduced)]
        self.take_back()

    def take_back(self) -> None:
        """What is held is nothing any more; what waits stays."""
        self._reduced, self._kept = [], {}

    def forget(self) -> None:
        """The step is given up, or over."""
        self._waiting = []
        self.take_back()

    def _sent(self, waiting: _Waiting, share: int, total: int) -> _Reduced:
        for table in waiting.tables:
            if table not in self._kept:
                self._kept[table] = kept_here(table)
        kept = [self._kept[table] for table in waiting.tables]
        trip, gradients = waiting.trip, waiting.gradients
        if waiting.world != current().world:
            trip, gradients = _again(waiting, kept)
        if share != 1:
            gradients = [each * each.dtype.type(share) for each in gradients]
        sums, finite = trip.send_back(gradients)
        sums = [
            (places, values / values.dtype.type(total) if table.averages else values)
            for table, (places, values) in zip(waiting.tables, sums, strict=True)
        ]
        layouts = [each.layout for each in kept]
        return _Reduced(waiting.tables, with_copies(layouts, kept[0].rank, sums, f"{trip.name}.copies"), finite)


class SentAtOnce:
    """In ``elastic.run``: gradients travel in the backward pass, as in a job that is not elastic, and on to second keepers.

    What a world leaves half done when it is lost, the next one undoes: all go back to a commit.
    """

    def carry(self, table: Any) -> None:
        """They wait for nothing."""

    def add(self, trip: Trip, world: int, tables: Sequence[Any], gradients: list[np.ndarray]) -> None:
        """Sends what a backward pass has for the rows of a trip; the sums become gradients. All ranks call it.

        Raises WorldChangedError if the rows came in another world.
        """
        if world != current().world:
            raise WorldChangedError(
                f"embedding '{tables[0].name}': a backward pass must be in the world of its forward pass, but that is gone. "
                "Compute both anew."
            )
        layouts, rank = [table.kept.layout for table in tables], tables[0].kept.rank
        sums, finite = trip.send_back(gradients)
        own = [(places, table.divided(values)) for table, (places, values) in zip(tables, sums, strict=True)]
        for table, each in zip(tables, with_copies(layouts, rank, own, f"{trip.name}.copies"), strict=True):
            table.add_gradient(*each, finite)


def _again(waiting: _Waiting, kept: Sequence[KeptRows]) -> tuple[Trip, list[np.ndarray]]:
    """The trip in the present world, where rows have other owners, and the gradients in its order."""
    asked = waiting.trip.asked
    tables = [table.as_table(each) for table, each in zip(waiting.tables, kept, strict=True)]
    trip = Trip(tables, [each.ids for each in asked], global_process_set, fetches=False)
    gradients = []
    for each, values in zip(trip.asked, waiting.gradients, strict=True):
        ordered = np.empty_like(values)
        ordered[each.inverse] = values
        gradients.append(ordered)
    return trip, gradients
