"""What a rank keeps of a table in one world of an elastic job, and how that comes to be in the next one.

Rows are re-dealt where a table is next used in another world: there all ranks have taken the same steps with it, so each row
and what its optimizer keeps of it moves from whoever still has it, as it is. The move is part of that use, and is taken
(``take``) when all ranks hold it; until then each keeps what it had.
"""

import copy
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ringtrain.averaging.hosts import Place, ranks_by_host
from ringtrain.context import current
from ringtrain.elastic.transaction import under_way
from ringtrain.embedding.dealing import Dealing
from ringtrain.embedding.layout import Layout, laid_out, lost, sources, words_for
from ringtrain.embedding.moves import Move
from ringtrain.embedding.storage import Rows
from ringtrain.errors import InternalError, RingtrainError, RowsLostError
from ringtrain.objects import allgather_object
from ringtrain.operations import Max, allreduce
from ringtrain.pending import Operation

Result = TypeVar("Result")
_AT_ONCE = 1 << 16  # rows that are copied at a time
_GRADIENT, _HAS_GRADIENT = "gradient", "has gradient"  # names that no optimizer uses


@dataclasses.dataclass(frozen=True)
class Kept:
    """Rows of a table, and what its optimizer keeps of them.

    Attributes:
        world: number of the world in which they were dealt.
        layout: who keeps which.
        rank: this one in it.
        rows: in the layout's order, and a spare one behind them.
        state: what the optimizer keeps of each, by name, of as many lines.
        rest: what it keeps of the table as a whole.
        gradient: that no step has used yet, sparse; None if there is none.
    """

    world: int
    layout: Layout
    rank: int
    rows: Rows
    state: dict[str, torch.Tensor]
    rest: dict[str, Any]
    gradient: torch.Tensor | None = None


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


class _Told(NamedTuple):
    """What a rank says before rows move.

    Attributes:
        place: where it is.
        world: in which what it keeps was dealt; None if it keeps nothing.
        rank: in that world.
        layout: of that world.
        state: by name, shape and dtype of a line of what the optimizer keeps, and of a gradient.
        rest: as in ``Kept``.
        fills: whether lost rows come from a checkpoint.
    """

    place: Place
    world: int | None
    rank: int | None
    layout: Layout | None
    state: dict[str, tuple[tuple[int, ...], torch.dtype]]
    rest: dict[str, Any]
    fills: bool


def surviving(attempt: Callable[[], Result]) -> Result:
    """What a function between ranks returns, when all ranks have it; called again in another world if one is lost."""
    transaction = under_way()
    if transaction is None:
        return attempt()

    def attempts() -> Generator[Operation, None, Result]:
        yield from ()
        return attempt()

    return transaction.use_within(attempts)


def in_one_world(tables: Sequence[Any], function: Callable[[], Result]) -> Result:
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


def _is_dealt_here(table: Any) -> bool:
    return table.kept is not None and table.kept.world == current().world


def copied(table: Any) -> Callable[[], None]:
    """Copies what this rank keeps of a table, and what its optimizer does; returns what goes back to that, however often."""
    kept, rest = table.kept, copy.deepcopy(_rest(table))
    lines = {key: each.clone() for key, each in _lines(table).items() if key not in (_GRADIENT, _HAS_GRADIENT)}
    rows = None if kept is None else _copy_of(table, kept.rows)

    def go_back() -> None:
        state = {key: each.clone() for key, each in lines.items()}
        if kept is None or rows is None:
            table.begin_again(state | copy.deepcopy(rest))
        else:
            former = dataclasses.replace(kept, rows=_copy_of(table, rows), state=state, rest=copy.deepcopy(rest))
            table.go_back_to(former)

    return go_back


def kept_here(table: Any) -> Kept:
    """What this rank keeps of a table in the present world: as it is, or as it has come to be; then collective.

    Raises:
        RowsLostError: rows are kept by nobody any more, and nothing was said about where they come from; on all ranks.
    """
    return table.kept if _is_dealt_here(table) else _dealt(table)


def _dealt(table: Any) -> Kept:
    context, kept = current(), table.kept
    lines = _lines(table)
    told = allgather_object(
        _Told(
            Place(context.rank, context.local_rank, context.local_size, context.cross_rank),
            None if kept is None else kept.world,
            None if kept is None else kept.rank,
            None if kept is None else kept.layout,
            {key: (tuple(each.shape[1:]), each.dtype) for key, each in lines.items()},
            _rest(table),
            table.fills_lost,
        ),
        f"embedding.{table.name}.kept",
    )
    hosts = ranks_by_host([Place(*each.place) for each in told])
    dealing = Dealing(table.num_embeddings, context.size, table.dealing.kind)
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
    gone = lost(former, stays)
    if gone and not all(each.fills for each in told):
        with suppress(RingtrainError):  # until then nobody ends, so that all know
            allreduce(np.zeros(1, np.uint8), op=Max, name=f"embedding.{table.name}.lost")
        raise RowsLostError(
            f"embedding '{table.name}': every row must be kept by a rank that is left, but {words_for(former, gone)} are "
            f"lost with the ranks that kept them. Read them from a checkpoint, by load_tables with lost_only=True, or all of them; "
            "replicas=2 keeps each row on a second host."
        )
    move = Move(former, layout, sources(former, stays, layout.ranks), None if kept is None else kept.rank, context.rank)
    return _moved(table, move, lines, holders[0])


def _begun(table: Any, layout: Layout, lines: dict[str, torch.Tensor]) -> Kept:
    """First values, or those of where rows come from; nobody has others."""
    rank = current().rank
    count = layout.count(rank)
    first = table.origin.rows
    rows = table.new_rows(count, lambda places: first(layout.ids(rank, places)))
    state = {key: each[-1:].repeat(count + 1, *[1] * (each.dim() - 1)) for key, each in lines.items()}
    ids = layout.ids(rank, np.arange(count))
    for key, values_of in table.origin.state.items():
        values = torch.from_numpy(values_of(ids))
        state[key] = torch.cat([values, values.new_zeros(1, values.shape[1])])
    rest = {**_rest(table), **table.origin.rest}
    return Kept(current().world, layout, rank, rows, state, rest)


def _moved(table: Any, move: Move, lines: dict[str, torch.Tensor], holder: _Told) -> Kept:
    """What is left of all rows, where they are now. Lines and the rest are as one who keeps rows has them."""
    name, width, count = f"embedding.{table.name}.move", table.embedding_dim, move.layout.count(move.rank)
    rows = table.new_rows(count, None)
    former = rows if table.kept is None else table.kept.rows

    def gather(places: np.ndarray) -> np.ndarray:
        lines = former.gather(places)
        former.let_go()
        return lines

    def put(places: np.ndarray, lines: np.ndarray) -> None:
        rows.put(places, lines)
        rows.let_go()

    move.carry(name, width, rows.array.dtype, gather, put, table.origin.rows)
    put(np.array([count]), np.zeros((1, width), rows.array.dtype))
    state = {}
    for key, (shape, dtype) in sorted(holder.state.items()):
        own = lines.get(key)
        state[key] = torch.zeros(count + 1, *shape, dtype=dtype)
        if own is not None:
            state[key][-1] = own[-1]
        flat = state[key].numpy().reshape(count + 1, -1)
        given = None if own is None else own.numpy().reshape(len(own), -1)
        move.carry(
            f"{name}.{key}", flat.shape[1], flat.dtype,
            lambda places, given=given: given[places],  # type: ignore[misc]
            lambda places, values, flat=flat: flat.__setitem__(places, values),  # type: ignore[misc]
            lambda ids, key=key, flat=flat: _begins_with(table, key, ids, flat[-1]),  # type: ignore[misc]
        )  # fmt: skip
    gradient = _sparse(state.pop(_GRADIENT, None), state.pop(_HAS_GRADIENT, None))
    return Kept(current().world, move.layout, move.rank, rows, state, holder.rest, gradient)


def _begins_with(table: Any, key: str, ids: np.ndarray, fresh: np.ndarray) -> np.ndarray:
    """Lines of lost rows: what was saved, or what rows begin with."""
    if key in table.origin.state:
        return table.origin.state[key](ids)
    return np.tile(fresh if key not in (_GRADIENT, _HAS_GRADIENT) else fresh * 0, (len(ids), 1))


def _copy_of(table: Any, rows: Rows) -> Rows:
    made = table.new_rows(len(rows.array) - 1, None)
    for start in range(0, len(rows.array), _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, len(rows.array)))
        made.put(places, rows.gather(places))
        made.let_go()
        rows.let_go()
    return made


# ---- what an optimizer keeps ----


def _lines(table: Any) -> dict[str, torch.Tensor]:
    """Dense, with a line for each row and the spare one: what its optimizer keeps, and a gradient that waits for a step."""
    lines = {key: _dense(value) for key, value in table.optimizer_state().items() if _is_by_row(table, value)}
    if table.has_unused_gradient and (gradient := table.weight.grad) is not None:
        has = torch.zeros(len(table.weight), 1)
        has[gradient.coalesce().indices()[0] if gradient.is_sparse else slice(None)] = 1
        lines |= {_GRADIENT: _dense(gradient), _HAS_GRADIENT: has}
    return lines


def _rest(table: Any) -> dict[str, Any]:
    return {key: value for key, value in table.optimizer_state().items() if not _is_by_row(table, value)}


def _is_by_row(table: Any, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == len(table.weight)


def _dense(value: torch.Tensor) -> torch.Tensor:
    return (value.to_dense() if value.is_sparse else value).detach().contiguous()


def _sparse(gradient: torch.Tensor | None, has: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or has is None:
        return None
    places = has[:, 0].nonzero()[:, 0]
    return torch.sparse_coo_tensor(places[None], gradient[places], gradient.shape, is_coalesced=True)
