"""Rows of sharded embeddings in ``elastic.run``: copies of what each rank keeps, to go back to when a world is lost.

What is not sharded a state takes from rank 0, so it is nothing to it that ranks were lost in the midst of a commit,
when some had made it and others not. Rows are each rank's own, and must all be of one commit:

- A rank first copies its rows; when all have, in an exchange, the copy is its commit; and when all know that, in another, it
  lets go of the one before. So of any two ranks one that has commit k as its last still has it, or has it already.
- Where a world begins, and any rank has gone back, all go back to the last commit of rank 0, from which they take the rest.

What a commit has of a world that is gone moves as ever: where the table is next used, from those who are left (``kept_rows``).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.operations import Max, allreduce
from ringtrain.embedding.kept_rows import KeepsRows, copied
from ringtrain.errors import InternalError

_TOLD, _COPIED, _COMMITTED = (f"ringtrain.elastic.rows.{each}" for each in ("told", "copied", "committed"))


class _AtStart(NamedTuple):
    """What a rank says where a world begins.

    Attributes:
        last: number of its last commit; None if it has made none.
        has_gone_back: whether a step of it was lost.
    """

    last: int | None
    has_gone_back: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Commit:
    number: int
    go_back: list[Callable[[], None]]  # for each table


class CommittedRows:
    """Those of the tables that one state has.

    Args:
        tables: in an order that all ranks share; their gradients are ``SentAtOnce``.
    """

    def __init__(self, tables: Sequence[KeepsRows]):
        self._tables = tables
        self._commits: list[
            _Commit
        ] = []  # the one before, while others may go back to it, and the last, or what becomes it
        self._last: int | None = None
        self._counted = 0  # commits that the others have made, too
        self._has_gone_back = False
        self._is_committed = False  # the rows are those of the last commit

    @contextmanager
    def committing(self) -> Iterator[None]:
        """A block that saves the rest of the state; a failure before it leaves the commit before, one behind it the new one."""
        if not self._tables:
            yield
            return
        number = self._counted + 1
        made = self._commits[-1].go_back if self._is_committed else [copied(table) for table in self._tables]
        self._commits = [*self._of(self._last), _Commit(number, made)]
        allreduce(np.zeros(1, np.uint8), op=Max, name=_COPIED)
        yield
        self._last = self._counted = number
        self._is_committed = False
        allreduce(np.zeros(1, np.uint8), op=Max, name=_COMMITTED)
        self._commits = self._of(number)

    def restore(self) -> None:
        """Goes back to this rank's last commit, if it has one."""
        if self._last is not None:
            self._go_back_to(self._last)
            self._has_gone_back = True

    def sync(self) -> bool:
        """Has all ranks go back to one commit if one has gone back; all call it where a world begins. Returns whether one has."""
        if not self._tables:
            return False
        told = [_AtStart(*each) for each in allgather_object((self._last, self._has_gone_back), _TOLD)]
        agreed, goes_back = told[0].last, any(each.has_gone_back for each in told)
        if goes_back and agreed is not None and self._last is not None:
            if not (self._has_gone_back and self._last == agreed):
                self._go_back_to(agreed)
            self._commits, self._is_committed = self._of(agreed), True
        self._last = None if self._last is None else agreed
        self._counted, self._has_gone_back = agreed or 0, False
        for table in self._tables:
            table.is_in_run = True
        return goes_back

    def _of(self, number: int | None) -> list[_Commit]:
        return [each for each in self._commits if each.number == number]

    def _go_back_to(self, number: int) -> None:
        found = self._of(number)
        if not found:
            numbers = [each.number for each in self._commits]
            raise InternalError(f"elastic.run: rows of commit {number} must be kept, but only those of {numbers} are.")
        for go_back in found[0].go_back:
            go_back()
