"""A table that changes itself, in an elastic job: which rows this rank has in which world, and what moves with them.

``kept_rows`` moves the rows, and what a rule keeps of each; so do gradients that no update has used.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringtrain._binding.log import logger
from ringtrain._bootstrap import membership
from ringtrain._runtime.context import current
from ringtrain._runtime.operations import Average
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain.embedding import row_rules, table_files
from ringtrain.embedding.dealing import Dealing
from ringtrain.embedding.initial import Initializer
from ringtrain.embedding.kept_rows import KeptRows, Lines, Origin, kept_here, surviving
from ringtrain.embedding.layout import check_replicas
from ringtrain.embedding.row_gradients import RowGradients, SentAtOnce
from ringtrain.embedding.sharing import check_elastic_use, on_all
from ringtrain.embedding.storage import IN_MEMORY, Rows, Storage
from ringtrain.embedding.trips import Table, Trip
from ringtrain.embedding.waiting import Waiting, nothing, together

_DTYPE = np.dtype(np.float32)
_CAME, _TAKEN = "gradients that came", "gradients of an update"  # names that no rule uses
_HAS = " of these"  # behind them: which rows have one
_STEP = "step"


class MovingRows:
    """The base of ``SelfUpdatingTable``.

    Args:
        dealing: who owns which row, as far as it is known before the first use.
        replicas: of each row.
        storage: where rows are.
        first: values of rows.

    Attributes:
        dealing: which rank owns which row.
        rank: this rank's place among those that share the table.
        replicas: as given.
        kept: in an elastic job, what this rank keeps, and since which world; None before the first use.
        origin: in an elastic job, where rows come from that nobody has kept.
        gradients: in an elastic job, those that wait for those of the rest.
        is_in_run: whether a ``KerasState`` in ``elastic.run`` has the table.
        step: updates that have changed rows.
    """

    name: str
    width: int
    rule: row_rules.RowOptimizer
    process_set: ProcessSet
    kept: KeptRows | None
    _op: int
    _rows: Rows
    _state: dict[str, Rows]
    after_a_loss = "Name a checkpoint before that happens, by load_table with lost_only=True;"

    def __init__(
        self, dealing: Dealing, replicas: int, storage: Storage, first: Initializer
    ):  # fmt: skip
        check_replicas(replicas)
        self.dealing, self.rank, self.replicas, self.step = dealing, 0, replicas, 0
        self._storage = storage
        self.origin, self.kept, self.gradients = Origin(first), None, RowGradients()
        self.gradients.carry(self)
        self.is_in_run = False
        self._lost_from: str | None = None
        self._came = self._taken = nothing(self.width, _DTYPE)  # since the last step; in the passes of an update

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may come and go."""
        return membership.current() is not None

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the ranks; else they are summed."""
        return self._op == Average

    @property
    def owned(self) -> int:
        """Rows that this rank owns; it may keep those of others behind them."""
        return 0 if self.is_elastic and self.kept is None else self.dealing.count(self.rank)

    def as_table(self, kept: KeptRows | None = None) -> Table:
        """What an exchange must know, of what is kept in an elastic job; lets go of what is resident beyond the bound."""
        dealing, rows = (self.dealing, self._rows) if kept is None else (kept.layout.dealing, kept.rows)
        rows.let_go()
        return Table(self.name, dealing, self.width, _DTYPE, rows.gather)

    # ---- its use in an elastic job ----

    def fetched(self, ids: np.ndarray) -> Trip:
        """Rows of ids; they are re-dealt first if ranks have come or gone, and all that is held when all ranks hold it."""
        self.check_use()

        def attempt() -> tuple[KeptRows, Trip]:
            kept = kept_here(self)
            return kept, Trip([self.as_table(kept)], [ids], global_process_set)

        kept, trip = surviving(attempt)
        self.take(kept)
        return trip

    def check_use(self) -> None:
        """Raises UnsupportedError in an elastic job, outside of what survives."""
        places = (
            "fit with hvd.elastic.Elastic(model), in the loop of hvd.elastic.State(model=..., optimizer=...), or in elastic.run with "
            "a KerasState of its model"
        )
        check_elastic_use(self.name, not self.is_elastic or self.kept is not None or self.is_in_run, places)

    def carry(self, trip: Trip, world: int, gradient: np.ndarray) -> None:
        """A backward pass has a gradient for the rows of a trip: it waits for those of the rest, or in ``elastic.run`` goes."""
        carrier = SentAtOnce() if self.is_in_run else self.gradients
        carrier.add(trip, world, [self], [np.array(gradient, _DTYPE)])

    def divided(self, sums: np.ndarray) -> np.ndarray:
        """The average of all ranks, or the sum, if that was asked for."""
        return sums / sums.dtype.type(self.dealing.ranks) if self.averages else sums

    def add_gradient(self, places: np.ndarray, sums: np.ndarray, finite: bool) -> None:
        """A round was released: its sums are what has come."""
        self._rows.prepare(places)  # a row may be asked for nowhere but at its other keeper
        self._came = together(self._came, Waiting(places, sums, finite=finite))

    def begin_from(self, folder: str, lost_only: bool) -> None:
        """Has rows come from what was saved: all, where the table is next used, or those that are lost from now on.

        Raises InvalidArgumentError if there is no whole table that fits.
        """
        origin = self._origin_in(folder)
        if lost_only:
            self._lost_from = folder
            return
        self.origin = origin
        self.begin_without_rows()

    def begin_without_rows(self) -> None:
        """Nothing is kept, as before the first use."""
        self.kept, self.step = None, 0
        self._came = self._taken = nothing(self.width, _DTYPE)
        self.gradients.forget()
        self._rows = self.new_rows(0, self.origin.rows)
        self._state = row_rules.state_of(self.rule, self._rows, IN_MEMORY)

    def saved_in(self, folder: str | os.PathLike) -> table_files.Saved:
        """What was saved of the table. Raises InvalidArgumentError if there is no whole one that fits."""
        saved = table_files.find(folder, self.name)
        for name, to in {"weight": self._rows, **self._state}.items():
            saved.check_width(to.array.shape[1], name)
        return saved

    def _origin_in(self, folder: str) -> Origin:
        saved = self.saved_in(folder)
        saved.check_rows(self.dealing)
        state = {name: functools.partial(saved.at, array=name) for name in self._state}
        return Origin(saved.at, state, {_STEP: int(saved.numbers.get(_STEP, 0))})

    # ---- KeepsRows ----

    @property
    def fills_lost(self) -> str | None:
        """The folder that lost rows come from."""
        return self._lost_from

    def origin_of_lost(self, told: Sequence[str | None], words: str) -> Origin | None:
        """By the folder that the lowest rank knows: those that join may not, or know an earlier one."""
        self._lost_from = next((each for each in told if each is not None), None)
        folder = self._lost_from
        if folder is None:
            return None
        found: list[Origin] = []
        on_all(f"{self.name}.lost", self.process_set, lambda: found.append(self._origin_in(folder)))
        if current().rank == 0:
            logger.warning(
                "embedding '%s': %s are lost with the ranks that kept them, and begin again with what was saved in %s.",
                self.name, words, folder,
            )  # fmt: skip
        return found[0]

    def new_rows(self, count: int, first: Initializer | None) -> Rows:
        """In memory or in a file."""
        if first is None:
            return Rows(count + 1, self.width, _DTYPE, None, self._storage)

        def with_spare(places: np.ndarray) -> np.ndarray:
            rows = np.zeros((len(places), self.width), _DTYPE)
            rows[places < count] = first(places[places < count])
            return rows

        return Rows(count + 1, self.width, _DTYPE, with_spare, self._storage)

    def new_lines(self, count: int, width: int, dtype: np.dtype, fresh: np.ndarray | None) -> Rows:
        """Where the rows are."""
        first = None if fresh is None else lambda places: np.tile(fresh, (len(places), 1))
        return Rows(count + 1, width, dtype, first, self._storage)

    def lines(self, gradients: bool = True) -> dict[str, Lines]:
        """What the rule keeps; and gradients that wait, without those that no update has begun with."""
        found = {}
        for name, rows in self._state.items():
            width = rows.array.shape[1]
            found[name] = Lines(rows, (width,), np.full(width, self.rule.begins_with(name), _DTYPE))
        for name, waiting in self._waiting().items():
            if waiting.passes and (gradients or name == _TAKEN):
                values, has = waiting.dense(len(self._rows.array))
                found |= {name: Lines.of(values, begins_fresh=False), name + _HAS: Lines.of(has, begins_fresh=False)}
        return found

    def rest(self) -> dict[str, Any]:
        """How often rows were changed, and what gradients that wait are of."""
        return {_STEP: self.step, **{name: (each.passes, each.finite) for name, each in self._waiting().items()}}

    def take(self, kept: KeptRows) -> None:
        """What is kept of the table is this from now on; it may be what it is already."""
        if kept is self.kept:
            return
        self.kept = KeptRows(kept.world, kept.layout, kept.rank, kept.rows, {}, {})
        self.dealing, self.rank, self._rows = kept.layout.dealing, kept.rank, kept.rows
        self._state = {name: kept.state[name].rows for name in self._state}
        self.step = kept.rest[_STEP]
        self._came, self._taken = (self._moved(kept, name) for name in (_CAME, _TAKEN))
        current().serving.add(self)

    def go_back_to(self, kept: KeptRows) -> None:
        """What is kept of the table is what was."""
        self.begin_without_rows()
        self.take(kept)

    def begin_again(self, state: dict[str, Lines], rest: dict[str, Any]) -> None:
        """Nothing is kept of the table, as before its first use."""
        self.begin_without_rows()

    def _waiting(self) -> dict[str, Waiting]:
        return {_CAME: self._came, _TAKEN: self._taken}

    def _moved(self, kept: KeptRows, name: str) -> Waiting:
        passes, finite = kept.rest.get(name, (0, True))
        if name not in kept.state:
            return nothing(self.width, _DTYPE)
        has = kept.state[name + _HAS].rows.array[:, 0]
        places = np.flatnonzero(has)
        return Waiting(places, kept.state[name].rows.gather(places), passes, finite)
