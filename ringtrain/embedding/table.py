"""A table that changes itself: a rank's rows, and the rule that changes them as their gradients arrive.

For frameworks whose optimizers do not take a parameter that differs from rank to rank (``ringtrain.keras.layers``). It
is used from the framework's threads, for the rank that made it.
"""

import collections
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ringtrain import context as contexts
from ringtrain.embedding import checkpoints, initial, optimizers
from ringtrain.embedding.dealing import Dealing
from ringtrain.embedding.storage import Rows
from ringtrain.embedding.trips import Table, Trip
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.objects import allgather_object, broadcast_object
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set, members_of, place_in, size_of

_MOST_TRIPS = 64  # whose gradients may still come; those of predictions never do


class SelfUpdatingTable:
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

    Raises:
        InvalidArgumentError: an argument that cannot be.
        MismatchError: ranks make different tables; the same text on all.
    """

    def __init__(
        self, name: str, rows: int, width: int, optimizer: str | optimizers.RowOptimizer, seed: int = 0,
        initializer: str | initial.Initializer = "uniform", scale: float = 0.05, dealing: str = "modulo",
        storage: str = "memory", path: str | os.PathLike | None = None, resident_bytes: int = 1 << 30,
        op: int = Average, process_set: ProcessSet = global_process_set,
    ):  # fmt: skip
        self.name, self.width = name, width
        self.rule = optimizers.checked(optimizer)
        self.dealing = Dealing(rows, size_of(process_set), dealing)
        self.rank = place_in(process_set)
        self.step = 0
        self._context, self._process_set, self._op = contexts.current(), process_set, op
        self._agree((name, rows, width, seed, dealing, op, repr(self.rule)))
        dtype = np.dtype(np.float32)
        make = initial.initializer(initializer, scale, seed, width, dtype)
        self._rows = Rows(
            self.dealing.count(self.rank), width, dtype, lambda places: make(self.dealing.ids(self.rank, places)),
            storage, path, resident_bytes,
        )  # fmt: skip
        self._state = optimizers.state_of(self.rule, self._rows, storage, path)
        self._trips: collections.OrderedDict[int, Trip] = collections.OrderedDict()
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
        """
        with self._as_rank(), self._lock:
            table = Table(self.name, self.dealing, self.width, np.dtype(np.float32), self._rows.gather)
            self._rows.let_go()
            trip = Trip([table], [np.ascontiguousarray(ids, np.int64).reshape(-1)], self._process_set)
            rows = trip.rows[0] if len(trip.rows[0]) else np.zeros((1, self.width), np.float32)
            number = self._next_trip
            self._next_trip += 1
            self._trips[number] = trip
            trip.rows = []
            if len(self._trips) > _MOST_TRIPS:
                self._trips.popitem(last=False)
            return rows, trip.asked[0].inverse.reshape(np.shape(ids)), np.array(number)

    def update(self, number: Any, gradient: np.ndarray) -> np.ndarray:
        """Sends gradients of a trip's rows to their owners, who change the rows; all ranks call it together.

        Args:
            number: of the trip.
            gradient: of the shape of its rows.

        Returns:
            0, float32: a gradient of what the rows do not depend on. If a rank's gradients are not finite, no row changes.
        """
        with self._as_rank(), self._lock:
            trip = self._trips.pop(int(number), None)
            if trip is None:
                raise InvalidArgumentError(
                    f"embedding '{self.name}': a gradient must come within {_MOST_TRIPS} calls of the layer, and once, but this "
                    "one is of a call before, or the second. Compute gradients of a batch before the next ones."
                )
            [(places, values)], finite = trip.send_back([gradient[: len(trip.asked[0].ids)]])
            if finite:
                self.step += 1
                if self._op == Average:
                    values = values / np.float32(self.dealing.ranks)
                optimizers.apply(self.rule, self._rows, self._state, places, values, self.step)
            return np.float32(0)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the table and what the optimizer keeps, each rank its rows; all ranks call it.

        Raises InvalidArgumentError on all ranks, if one cannot write, or another number of ranks has written there.
        """
        with self._as_rank():
            token = broadcast_object(
                secrets.token_hex(8), members_of(self._process_set)[0], f"{self.name}.save", self._process_set
            )
            self._on_all("saved", lambda: self._save(folder, token))

    def load(self, folder: str | os.PathLike) -> None:
        """Reads what any number of ranks has saved; all ranks call it.

        Raises InvalidArgumentError on all ranks, if one does not find a whole table that fits.
        """
        with self._as_rank():
            self._on_all("loaded", lambda: self._load(folder))

    def rows(self) -> np.ndarray:
        """This rank's rows, in the order of ``dealing.ids_of``: a copy."""
        return self._rows.gather(np.arange(self.dealing.count(self.rank)))

    def _save(self, folder: str | os.PathLike, token: str) -> None:
        if checkpoints.saved_by_others(folder, self.name, self.dealing.ranks):
            raise InvalidArgumentError(
                f"embedding '{self.name}': {os.fspath(folder)!r} must hold no save by another number of ranks, but does. "
                "Save into a new folder."
            )
        arrays = {"weight": self._rows, **self._state}
        for each in arrays.values():
            each.prepare(np.arange(self.dealing.count(self.rank)))
        whole = {name: each.array for name, each in arrays.items()}
        checkpoints.write(folder, self.name, self.rank, self.dealing, token, whole, {"step": self.step})

    def _load(self, folder: str | os.PathLike) -> None:
        saved = checkpoints.find(folder, self.name)
        for name, to in {"weight": self._rows, **self._state}.items():
            if saved.width(name) != to.array.shape[1]:
                raise InvalidArgumentError(
                    f"embedding '{self.name}': {name} must have {to.array.shape[1]} numbers in a row, but has "
                    f"{saved.width(name)}."
                )
            for places, values in saved.share(self.dealing, self.rank, name):
                to.put(places, values)
        self.step = int(saved.numbers.get("step", 0))

    def _on_all(self, what: str, do: Any) -> None:
        problem = None
        try:
            do()
        except (OSError, InvalidArgumentError) as failed:
            problem = str(failed)
        problems = allgather_object(problem, f"{self.name}.{what}", self._process_set)
        for rank, each in zip(members_of(self._process_set), problems, strict=True):
            if each is not None:
                raise InvalidArgumentError(f"rank {rank}: {each}")

    def _agree(self, terms: tuple) -> None:
        everyone = allgather_object(terms, f"embedding.{self.name}.terms", self._process_set)
        for rank, theirs in zip(members_of(self._process_set), everyone, strict=True):
            if theirs != everyone[0]:
                raise MismatchError(
                    "ShardedEmbedding: (name, rows, width, seed, dealing, op, optimizer) must be the same on all ranks, but are "
                    f"{everyone[0]} on rank {members_of(self._process_set)[0]} and {theirs} on rank {rank}."
                )

    @contextmanager
    def _as_rank(self) -> Iterator[None]:
        """Acts for the rank that made the table: the framework calls from threads of its own."""
        before = contexts.of_thread()
        contexts.make_current(self._context)
        try:
            yield
        finally:
            contexts.make_current(before)
