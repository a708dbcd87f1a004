"""A table that changes itself: a rank's rows, the rule that changes them, and the gradients that wait for it.

For frameworks whose optimizers do not take a parameter that differs from rank to rank (``ringtrain.keras.layers``). It
is used from the framework's threads, for the rank that made it.

Gradients reach their owners in the backward pass, and wait. ``accept`` makes them a pass of an update, ``change`` makes the
update, and ``drop`` gives up what came in a step that is skipped. All ranks do the same, since their optimizers decide alike.

In an elastic job gradients wait where they are made until those of the rest are added up, and travel then (``with_rows``), so
that a step is done for the table and the rest, or for neither; ``kept_rows`` says which rows a rank has in each world.
"""

import collections
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from ringtrain._runtime import context as contexts
from ringtrain._runtime.objects import broadcast_object
from ringtrain._runtime.operations import Average, Sum, allreduce
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of, members_of, place_in, size_of
from ringtrain.elastic.transparent import TransparentState
from ringtrain.embedding import initial, row_rules, table_files
from ringtrain.embedding.dealing import Dealing
from ringtrain.embedding.kept_rows import in_one_world
from ringtrain.embedding.moving import MovingRows
from ringtrain.embedding.sharing import check_sharing, on_all
from ringtrain.embedding.storage import Rows, Storage
from ringtrain.embedding.trips import Trip, is_finite
from ringtrain.embedding.waiting import Waiting, nothing, together
from ringtrain.errors import InvalidArgumentError, UnsupportedError

_MOST_TRIPS = 64  # whose gradients may still come; those of predictions never do
_MOST_PASSES = 1000  # that wait for a step; where none comes, no optimizer has the layer
_DTYPE = np.dtype(np.float32)
Result = TypeVar("Result")


class SelfUpdatingTable(MovingRows):
    """This rank's rows of a table, float32.

    Args:
        name: the same on all ranks.
        rows: of the whole table.
        width: numbers in a row.
        optimizer: a ``RowOptimizer``, or its name.
        seed: of the first values, functions of (seed, row).
        initializer: as in ``initial.initializer``.
        scale: of the first values.
        dealing: ``"modulo"`` or ``"blocks"``.
        storage: ``"memory"`` or ``"file"``, also of what the optimizer keeps of each row.
        path: folder for ``"file"``.
        resident_bytes: of each file, about how many may be in memory.
        op: ``Average`` or ``Sum`` of the ranks' gradients.
        process_set: the ranks that share the table.
        replicas: of each row in an elastic job; elsewhere there is one.

    Attributes:
        name: as given.
        process_set: as given.
        outline: what must be the same on all ranks, in words.

    The others are those of ``MovingRows``.

    Raises:
        InvalidArgumentError: an argument that cannot be.
        MismatchError: ranks make different tables; the same text on all.
        UnsupportedError: a process set in an elastic job.
    """

    def __init__(
        self, name: str, rows: int, width: int, optimizer: str | row_rules.RowOptimizer, seed: int = 0,
        initializer: str | initial.Initializer = "uniform", scale: float = 0.05, dealing: str = "modulo",
        storage: str = "memory", path: str | os.PathLike | None = None, resident_bytes: int = 1 << 30,
        op: int = Average, process_set: ProcessSet = global_process_set, replicas: int = 1,
    ):  # fmt: skip
        self.name, self.width = name, width
        self.rule = row_rules.checked(optimizer)
        self._context, self.process_set, self._op = contexts.current(), process_set, op
        terms = (name, rows, width, seed, dealing, op, repr(self.rule))
        self.outline = f"rows of {(*terms, replicas)}"
        first = initial.initializer(initializer, scale, seed, width, _DTYPE)
        where = Storage(storage, path, resident_bytes)
        super().__init__(Dealing(rows, size_of(process_set), dealing), replicas, where, first)
        check_sharing(terms, "name, rows, width, seed, dealing, op, optimizer", f"embedding.{name}.terms", process_set)
        if self.is_elastic:
            self.begin_without_rows()
        else:
            self.rank = place_in(process_set)
            self._rows = Rows(
                self.dealing.count(self.rank), width, _DTYPE, lambda places: first(self.dealing.ids(self.rank, places)), where
            )  # fmt: skip
            self._state = row_rules.state_of(self.rule, self._rows, where)
        self._trips: collections.OrderedDict[int, tuple[Trip, int]] = collections.OrderedDict()  # and their worlds
        self._next_trip = 0
        self._lock = threading.Lock()
        self._context.serving.add(self)

    def look_up(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of ids; all ranks call it together.

        Args:
            ids: whole numbers of any shape, with repetitions, any number of them.

        Returns:
            The rows that are needed, each once, float32 (n, width), n at least 1; for each id the place among them, int64
            of the shape of ``ids``; and the trip's number, int64, for ``update``.

        Raises:
            InvalidArgumentError: an id of some rank is no row; the same text on all ranks.
            RowsLostError: in an elastic job, the ranks that kept some rows are gone; the same text on all ranks.
            UnsupportedError: in an elastic job, outside of what survives.
        """
        with self._as_rank(), self._lock:
            flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
            trip = self.fetched(flat) if self.is_elastic else Trip([self.as_table()], [flat], self.process_set)
            rows = trip.rows[0] if len(trip.rows[0]) else np.zeros((1, self.width), np.float32)
            number = self._next_trip
            self._next_trip += 1
            self._trips[number] = trip, 0 if self.kept is None else self.kept.world
            trip.rows = []
            if len(self._trips) > _MOST_TRIPS:
                self._trips.popitem(last=False)
            return rows, trip.asked[0].inverse.reshape(np.shape(ids)), np.array(number)

    def bring(self, number: Any, gradient: np.ndarray) -> np.ndarray:
        """Sends gradients of a trip's rows to their owners, where they wait; all ranks call it together.

        Args:
            number: of the trip.
            gradient: of the shape of its rows.

        Returns:
            A gradient, float32, of what the rows do not depend on: 0, or infinity on all ranks if those of a rank are not
            finite.
        """
        with self._as_rank(), self._lock:
            found = self._trips.pop(int(number), None)
            if found is None:
                raise InvalidArgumentError(
                    f"embedding '{self.name}': a gradient must come within {_MOST_TRIPS} calls of the layer, and once, but this "
                    "one is of a call before, or the second. Compute gradients of a batch before the next ones."
                )
            trip, world = found
            own = gradient[: len(trip.asked[0].ids)]
            if self.is_elastic:  # those of the rest are infinite on all ranks with this one's
                finite = is_finite(own, self.dealing.ranks)
                self.carry(trip, world, own)
            else:
                [(places, values)], finite = trip.send_back([own])
                self._came = together(self._came, Waiting(places, values, finite=finite))
            if max(self._came.passes, self.gradients.waiting) > _MOST_PASSES:
                raise InvalidArgumentError(
                    f"embedding '{self.name}': a Keras optimizer must apply the gradients of each step, its layer's among them, "
                    f"but none has done so in {_MOST_PASSES} backward passes. Give apply() all trainable variables of the model."
                )
            return np.float32(0 if finite else np.inf)

    def accept(self, divisor: float = 1.0) -> None:
        """Makes what has come a pass of the next update: the average of the ranks, or their sum, over a number."""
        if self.gradients.waiting:
            raise UnsupportedError(
                f"embedding '{self.name}': in an elastic job gradients of rows must travel with those of the rest, but were not "
                "sent. Train all of the model's variables with a DistributedOptimizer."
            )
        if not self._came.passes:
            return
        ranks = self.dealing.ranks if self.averages and not self.is_elastic else 1
        self._taken = together(self._taken, self._came.divided(ranks).divided(divisor))
        self.drop()

    def drop(self) -> None:
        """Gives up what has come: its step is skipped."""
        self._came = nothing(self.width, _DTYPE)

    def change(self, passes: int = 1, factor: float = 1.0, bound: float | None = None) -> None:
        """Changes the rows by what was taken; none of them if gradients of some rank, or the factor, are not finite.

        Args:
            passes: that the gradient is the mean of.
            factor: that it is then multiplied by.
            bound: of each number, at last.
        """
        taken, self._taken = self._taken.divided(passes), nothing(self.width, _DTYPE)
        if not (taken.passes and taken.finite and np.isfinite(factor)):
            return
        values = taken.values if factor == 1 else taken.values * _DTYPE.type(factor)
        if bound is not None:
            values = values.clip(-bound, bound)
        with self._lock:
            self.step += 1
            row_rules.apply(self.rule, self._rows, self._state, taken.places, values, self.step)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the table and what the optimizer keeps, each rank its rows; all ranks call it.

        Raises:
            InvalidArgumentError: on all ranks, if one cannot write, or another number of ranks has written there.
            RowsLostError: as ``look_up``.
            UnsupportedError: as ``look_up``.
        """
        self.check_use()
        with self._as_rank():
            in_one_world([self], lambda: self._save_on_all(folder))

    def _save_on_all(self, folder: str | os.PathLike) -> None:
        token = broadcast_object(
            secrets.token_hex(8), members_of(self.process_set)[0], f"{self.name}.save", self.process_set
        )
        on_all(f"{self.name}.saved", self.process_set, lambda: self._save(folder, token))

    def load(self, folder: str | os.PathLike, lost_only: bool = False) -> None:
        """Reads what any number of ranks has saved; all ranks call it.

        In an elastic job it asks no other rank: rows are read where the table is next used, and a rank that joins takes over
        those of the others instead.

        Args:
            folder: with the files of all ranks that wrote.
            lost_only: in an elastic job, has rows come from there that are lost from now on; the others stay as they are.

        Raises:
            InvalidArgumentError: on all ranks, if one does not find a whole table that fits; in an elastic job on that rank.
        """
        if self.is_elastic:
            self.begin_from(os.fspath(folder), lost_only)
            return
        if lost_only:  # a death ends the job
            return
        with self._as_rank():
            on_all(f"{self.name}.loaded", self.process_set, lambda: self._load(folder))

    def rows(self) -> np.ndarray:
        """This rank's rows, in the order of ``dealing.ids_of``: a copy. In an elastic job none before the first use."""
        return self._rows.gather(np.arange(self.owned))

    def _save(self, folder: str | os.PathLike, token: str) -> None:
        arrays = {"weight": self._rows, **self._state}
        for each in arrays.values():
            each.prepare(np.arange(self.owned))
        whole = {name: each.array[: self.owned] for name, each in arrays.items()}
        table_files.write(folder, self.name, self.rank, self.dealing, token, whole, {"step": self.step})

    def _load(self, folder: str | os.PathLike) -> None:
        saved = self.saved_in(folder)
        for name, to in {"weight": self._rows, **self._state}.items():
            for places, values in saved.share(self.dealing, self.rank, name):
                to.put(places, values)
        self.step = int(saved.numbers.get("step", 0))

    @contextmanager
    def _as_rank(self) -> Iterator[None]:
        """Acts for the rank that made the table: the framework calls from threads of its own."""
        if self.is_elastic:  # the one rank of this process, in whatever world
            yield
            return
        with contexts.acting_for(self._context):
            yield


def norms(tables: Sequence[SelfUpdatingTable], passes: int = 1) -> list[float]:
    """The norm of the gradient that was taken for each whole table; all ranks that share them call it together.

    Args:
        tables: in an order that all ranks share.
        passes: that the gradients are the means of.
    """
    found = [0.0] * len(tables)
    with tables[0]._as_rank():
        sets = {id_of(table.process_set): table.process_set for table in tables}
        for number, process_set in sets.items():
            chosen = [place for place, table in enumerate(tables) if id_of(table.process_set) == number]
            whole = _squares([tables[place] for place in chosen], process_set)
            for place, square in zip(chosen, whole.tolist(), strict=True):
                found[place] = float(np.sqrt(square)) / passes
    return found


def _squares(tables: Sequence[SelfUpdatingTable], process_set: ProcessSet) -> np.ndarray:
    def added() -> np.ndarray:
        own = np.array([table._taken.up_to(table.owned).square for table in tables])  # not those kept for others
        return allreduce(own, f"embedding.{tables[0].name}.norms", Sum, process_set=process_set)

    return in_one_world(tables, added)


def with_rows(
    state: TransparentState | None, variables: Sequence[Any], op: int, function: Callable[[], Result]
) -> Result:
    """``state.survive`` for a function that adds up gradients over the ranks, with which those of rows travel.

    Rows' gradients are released with its result: all ranks use both, or none of them either.

    Args:
        state: whose step it is; None if there is none that must survive.
        variables: whose gradients these are; those that lead to a table have it as ``sharded_table``.
        op: the reduction.
        function: as for ``survive``.
    """
    if state is None:
        return function()
    tables = [each for each in map(_table_of, variables) if each is not None and each.is_elastic]

    def attempt() -> Result:
        result = function()
        for table in tables:
            table.gradients.reduce(f"embedding.{table.name}.round", state.share(op), gives_up=False)
        return result

    result = state.survive(attempt)
    for table in tables:
        table.gradients.release()
    return result


def _table_of(variable: Any) -> SelfUpdatingTable | None:
    return getattr(variable, "sharded_table", None)
