"""What a rank keeps of a table in one world of an elastic job, and how that comes to be in the next one; in every framework.

Rows are re-dealt where a table is next used in another world: there all ranks have taken the same steps with it, so each row
and what its optimizer keeps of it moves from whoever still has it, as it is. The move is part of that use, and is taken
(``take``) when all ranks hold it; until then each keeps what it had.
"""

import copy
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.operations import Max, allreduce
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import RankPlace, ranks_by_host
from ringtrain._training.step_guard import under_way
from ringtrain.elastic.followed import followed
from ringtrain.embedding.dealing import Dealing
from ringtrain.embedding.initial import Initializer
from ringtrain.embedding.layout import Layout, laid_out, lost, sources, words_for
from ringtrain.embedding.moves import Move
from ringtrain.embedding.storage import Rows
from ringtrain.errors import InternalError, RingtrainError, RowsLostError

Result = TypeVar("Result")
_AT_ONCE = 1 << 16  # rows that are copied at a time


class Lines(NamedTuple):
    """One thing that is kept of each row beside its numbers, such as what its optimizer has added up.

    Attributes:
        rows: a line of each, and a spare one behind them.
        shape: of one, where its optimizer has it.
        fresh: the line of a row that nobody has kept, flat; None for zeros.
    """

    rows: Rows
    shape: tuple[int, ...]
    fresh: np.ndarray | None = None

    @classmethod
    def of(cls, array: np.ndarray, begins_fresh: bool = True) -> "Lines":
        """An array that has a line for each row; the spare one is that of a fresh row."""
        flat = np.ascontiguousarray(array).reshape(len(array), -1)
        return cls(Rows.around(flat), array.shape[1:], flat[-1] if begins_fresh else None)


@dataclasses.dataclass(frozen=True)
class KeptRows:
    """Rows of a table, and what is kept of each beside.

    Attributes:
        world: number of the world in which they were dealt.
        layout: who keeps which.
        rank: this one in it.
        rows: in the layout's order, and a spare one behind them.
        state: what the optimizer keeps of each, and gradients that wait, by name.
        rest: what is kept of the table as a whole.
    """

    world: int
    layout: Layout
    rank: int
    rows: Rows
    state: dict[str, Lines]
    rest: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where rows come from that nobody keeps.

    Attributes:
        rows: of rows, int64 (n,), to (n, width).
        state: the same for what the optimizer keeps of each, by name.
        rest: what it keeps of the table as a whole.
    """

    rows: Callable[[np.ndarray], np.ndarray]
    state: Mapping[str, Callable[[np.ndarray], np.ndarray]] = dataclasses.field(default_factory=dict)
    rest: dict[str, Any] = dataclasses.field(default_factory=dict)


class KeepsRows(Protocol):
    """A table in an elastic job.

    Attributes:
        name: the same on all ranks.
        dealing: who owned which row in the last world; it says how many rows there are, and how they are dealt.
        replicas: of each row.
        origin: where rows come from that nobody has kept.
        kept: what this rank keeps; None before the first use.
        after_a_loss: what to do about lost rows, in words.
        is_in_run: whether a state in ``elastic.run`` has the table.
    """

    name: str
    dealing: Dealing
    replicas: int
    origin: Origin
    kept: KeptRows | None
    after_a_loss: str
    is_in_run: bool

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may come and go."""

    @property
    def fills_lost(self) -> Any:
        """What this rank knows of where lost rows come from; others are told. False if nothing."""

    def origin_of_lost(self, told: Sequence[Any], words: str) -> Origin | None:
        """Where lost rows come from, by what all ranks know; None if from nowhere. All ranks call it."""

    def new_rows(self, count: int, first: Initializer | None) -> Rows:
        """Storage for some rows, and a spare one of zeros; None if all rows are put."""

    def new_lines(self, count: int, width: int, dtype: np.dtype, fresh: np.ndarray | None) -> Rows:
        """Storage for a line of each of some rows, and a spare one; all of them fresh, or None if all are put."""

    def lines(self, gradients: bool = True) -> dict[str, Lines]:
        """What is kept of each row beside its numbers, with or without gradients of a step that is not done."""

    def rest(self) -> dict[str, Any]:
        """What is kept of the table as a whole."""

    def take(self, kept: KeptRows) -> None:
        """What is kept of the table is this from now on; it may be what it is already."""

    def go_back_to(self, kept: KeptRows) -> None:
        """What is kept of the table is what was, without gradients."""

    def begin_again(self, state: dict[str, Lines], rest: dict[str, Any]) -> None:
        """Nothing is kept of the table, as before its first use."""


class _Told(NamedTuple):
    """What a rank says before rows move.

    Attributes:
        place: where it is.
        world: in which what it keeps was dealt; None if it keeps nothing.
        rank: in that world.
        layout: of that world.
        state: by name, shape and dtype of a line of what is kept of each row.
        rest: as in ``KeptRows``.
        fills: as the table has it.
    """

    place: RankPlace
    world: int | None
    rank: int | None
    layout: Layout | None
    state: dict[str, tuple[tuple[int, ...], str]]
    rest: dict[str, Any]
    fills: Any


def surviving(attempt: Callable[[], Result]) -> Result:
    """What a function between ranks returns, when all ranks have it; called again in another world if one is lost."""
    transaction = under_way()
    if transaction is None:
        return attempt()
    if (state := followed()) is not None:
        return state.use_within(attempt)

    def attempts() -> Generator[Operation, None, Result]:
        yield from ()
        return attempt()

    return transaction.use_within(attempts)


def in_one_world(tables: Sequence[KeepsRows], function: Callable[[], Result]) -> Result:
    """What a function between ranks returns that uses rows of some tables, and the world in which these are dealt.

    In an elastic job rows are re-dealt before, if ranks have come or gone. If the world is lost meanwhile, the function is
    called again in another one; it must have no effect that this would spoil.
    """
    if not tables or not tables[0].is_elastic:
        return function()
    while True:
        for table in tables:
            table.take(surviving(lambda table=table: kept_here(table)))  # type: ignore[misc]
        done = surviving(lambda: (function(),) if all(_is_dealt_here(table) for table in tables) else None)
        if done is not None:
            return done[0]


def _is_dealt_here(table: KeepsRows) -> bool:
    return table.kept is not None and table.kept.world == current().world


def copied(table: KeepsRows) -> Callable[[], None]:
    """Copies what this rank keeps of a table, and what its optimizer does; returns what goes back to that, however often."""
    kept, rest = table.kept, copy.deepcopy(table.rest())
    lines = _copies_of(table, table.lines(gradients=False))
    rows = None if kept is None else _copy_of(kept.rows, table.new_rows(len(kept.rows.array) - 1, None))

    def go_back() -> None:
        state, own = _copies_of(table, lines), copy.deepcopy(rest)
        if kept is None or rows is None:
            table.begin_again(state, own)
        else:
            former = _copy_of(rows, table.new_rows(len(rows.array) - 1, None))
            table.go_back_to(dataclasses.replace(kept, rows=former, state=state, rest=own))

    return go_back


def kept_here(table: KeepsRows) -> KeptRows:
    """What this rank keeps of a table in the present world: as it is, or as it has come to be; then collective.

    Raises:
        RowsLostError: rows are kept by nobody any more, and nothing was said about where they come from; on all ranks.
    """
    if table.kept is not None and _is_dealt_here(table):
        return table.kept
    return _dealt(table)


def _dealt(table: KeepsRows) -> KeptRows:
    context, kept = current(), table.kept
    lines = table.lines()
    told = allgather_object(
        _Told(
            place=RankPlace(context.rank, context.local_rank, context.local_size, context.cross_rank),
            world=None if kept is None else kept.world,
            rank=None if kept is None else kept.rank,
            layout=None if kept is None else kept.layout,
            state={key: (each.shape, each.rows.array.dtype.str) for key, each in lines.items()},
            rest=table.rest(),
            fills=table.fills_lost,
        ),
        f"embedding.{table.name}.kept",
    )
    hosts = ranks_by_host([RankPlace(*each.place) for each in told])
    dealing = Dealing(table.dealing.rows, context.size, table.dealing.kind)
    layout = laid_out(dealing, hosts, table.replicas)
    holders = [each for each in told if each.world is not None]
    if not holders:
        return _begun(table, layout, lines)
    if len({each.world for each in holders}) > 1:
        raise InternalError(
            f"embedding '{table.name}': rows must be dealt in one world, but are in {[each.world for each in told]}."
        )
    former = holders[0].layout
    assert former is not None
    stays = {each.rank: rank for rank, each in enumerate(told) if each.rank is not None}
    origin = _origin_of_what_is_gone(table, former, lost(former, stays), told)
    move = Move(former, layout, sources(former, stays, layout.ranks), None if kept is None else kept.rank, context.rank)
    return _moved(table, move, lines, holders[0], origin)


def _origin_of_what_is_gone(table: KeepsRows, former: Layout, gone: list[int], told: Sequence[_Told]) -> Origin:
    """Where lost rows come from; raises RowsLostError on all ranks if some are lost, and that is not known."""
    if not gone:
        return table.origin
    words = words_for(former, gone)
    origin = table.origin_of_lost([each.fills for each in told], words)
    if origin is not None:
        return origin
    with suppress(RingtrainError):  # until then nobody ends, so that all know
        allreduce(np.zeros(1, np.uint8), op=Max, name=f"embedding.{table.name}.lost")
    raise RowsLostError(
        f"embedding '{table.name}': every row must be kept by a rank that is left, but {words} are "
        f"lost with the ranks that kept them. {table.after_a_loss} replicas=2 keeps each row on a second host."
    )


def _begun(table: KeepsRows, layout: Layout, lines: dict[str, Lines]) -> KeptRows:
    """First values, or those of where rows come from; nobody has others."""
    rank = current().rank
    count = layout.count(rank)
    first = table.origin.rows
    rows = table.new_rows(count, lambda places: first(layout.ids(rank, places)))
    state = {key: _fresh(table, count, each) for key, each in lines.items()}
    for start in range(0, count if table.origin.state else 0, _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, count))
        for key, values_of in table.origin.state.items():
            values = values_of(layout.ids(rank, places))
            if key not in state or state[key].rows.array.shape[1] != values.shape[1]:
                state[key] = Lines(
                    table.new_lines(count, values.shape[1], values.dtype, np.zeros(values.shape[1], values.dtype)),
                    values.shape[1:],
                )
            state[key].rows.put(places, values)
            state[key].rows.let_go()
    return KeptRows(current().world, layout, rank, rows, state, {**table.rest(), **table.origin.rest})


def _fresh(table: KeepsRows, count: int, lines: Lines) -> Lines:
    array = lines.rows.array
    fresh = np.zeros(array.shape[1], array.dtype) if lines.fresh is None else lines.fresh
    return lines._replace(rows=table.new_lines(count, array.shape[1], array.dtype, fresh))


def _moved(table: KeepsRows, move: Move, lines: dict[str, Lines], holder: _Told, origin: Origin) -> KeptRows:
    """What is left of all rows, where they are now. Lines and the rest are as one who keeps rows has them."""
    name, count = f"embedding.{table.name}.move", move.layout.count(move.rank)
    rows = table.new_rows(count, None)
    width, dtype = rows.array.shape[1], rows.array.dtype
    _carry(move, name, rows, None if table.kept is None else table.kept.rows, origin.rows)
    rows.put(np.array([count]), np.zeros((1, width), dtype))
    state = {}
    for key, (shape, code) in sorted(holder.state.items()):
        own, columns = lines.get(key), int(np.prod(shape))
        to = table.new_lines(count, columns, np.dtype(code), None)
        fresh = np.zeros(columns, np.dtype(code)) if own is None or own.fresh is None else own.fresh
        make = origin.state.get(key, lambda ids, fresh=fresh: np.tile(fresh, (len(ids), 1)))
        _carry(move, f"{name}.{key}", to, None if own is None else own.rows, make)
        spare = np.zeros((1, columns), to.array.dtype) if own is None else own.rows.array[-1:]
        to.put(np.array([count]), spare)
        state[key] = Lines(to, shape, None if own is None else own.fresh)
    return KeptRows(current().world, move.layout, move.rank, rows, state, holder.rest)


def _carry(move: Move, name: str, to: Rows, former: Rows | None, make: Callable[[np.ndarray], np.ndarray]) -> None:
    """Moves what there is of each row to where it is kept now; no more of a file is resident meanwhile than it may."""

    def gather(places: np.ndarray) -> np.ndarray:
        source = to if former is None else former  # the latter has some if any are asked for
        found = source.gather(places)
        source.let_go()
        return found

    def put(places: np.ndarray, lines: np.ndarray) -> None:
        to.put(places, lines)
        to.let_go()

    move.carry(name, to.array.shape[1], to.array.dtype, gather, put, make)


def _copies_of(table: KeepsRows, lines: dict[str, Lines]) -> dict[str, Lines]:
    made = {}
    for key, each in lines.items():
        count, width = each.rows.array.shape
        made[key] = each._replace(
            rows=_copy_of(each.rows, table.new_lines(count - 1, width, each.rows.array.dtype, None))
        )
    return made


def _copy_of(rows: Rows, made: Rows) -> Rows:
    for start in range(0, len(rows.array), _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, len(rows.array)))
        made.put(places, rows.gather(places))
        made.let_go()
        rows.let_go()
    return made
