"""``ShardedEmbedding`` and ``ShardedEmbeddingBag``: torch's modules, with the table's rows dealt over the ranks.

A call fetches each row that it needs once, from its owner (``ringtrain.embedding.trips``), and hands torch's own function
a small table of those; so all that torch does with a table is exact here. Backward, the small table's gradients go to the
owners, which add them in rank order. The shard's parameter then has a gradient like any other, for any optimizer.

In an elastic job a table has no rows before it is first used; ``ringtrain.embedding.kept_rows`` says which it has in each
world, and ``row_gradients`` there how gradients reach all who keep a row.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ringtrain._bootstrap import membership
from ringtrain._runtime.arguments import check_among
from ringtrain._runtime.context import current
from ringtrain._runtime.operations import Average, Sum
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of, place_in, size_of
from ringtrain._training.adapter.numbering import next_number
from ringtrain.embedding import initial
from ringtrain.embedding.dealing import Dealing
from ringtrain.embedding.kept_rows import KeptRows, Lines, Origin, kept_here, surviving
from ringtrain.embedding.layout import check_replicas
from ringtrain.embedding.row_gradients import RowGradients, SentAtOnce
from ringtrain.embedding.sharing import check_elastic_use, check_sharing
from ringtrain.embedding.storage import Rows, Storage
from ringtrain.embedding.trips import Table, Trip, before_a_trip
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.torch.eager import eager
from ringtrain.torch.shards import TableShard

_GRADIENT, _HAS_GRADIENT = "gradient", "has gradient"  # names that no optimizer uses
_DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


class _Sharded(torch.nn.Module):
    """A table of which this rank has some rows.

    Attributes:
        weight: this rank's rows, those that it keeps for others in an elastic job, and a spare one behind them
            (``shards.TableShard``); in host memory, whatever ``to`` says.
        dealing: which rank owns which row.
        rank: this rank's place in the process set.
        name: the same on all ranks; error messages bear it.
        replicas: of each row in an elastic job.
        kept: in an elastic job, what this rank keeps, and since which world; None before the first use.
        origin: where rows come from that nobody keeps: they are made, or in a checkpoint.
        fills_lost: whether those that are lost do.
        has_unused_gradient: whether ``weight.grad`` came in an elastic job and no step has used it.
        is_in_run: whether a ``TorchState`` in ``elastic.run`` has the table.
    """

    weight: TableShard
    after_a_loss = "Read them from a checkpoint, by load_tables with lost_only=True, or all of them;"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
        seed: int = 0,
        initializer: str | initial.Initializer = "normal",
        scale: float = 1.0,
        dealing: str = "modulo",
        storage: str = "memory",
        path: str | os.PathLike | None = None,
        resident_bytes: int = 1 << 30,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        replicas: int = 1,
    ):
        super().__init__()
        _check(max_norm, scale_grad_by_freq, dtype, op)
        check_replicas(replicas)
        self.num_embeddings, self.embedding_dim, self.sparse = num_embeddings, embedding_dim, sparse
        self.dealing = Dealing(num_embeddings, size_of(process_set), dealing)
        self.padding_idx = _row_of_padding(padding_idx, num_embeddings)
        self.rank = place_in(process_set)
        number = next_number(current(), id_of(process_set), "embedding")
        self.name = name or f"table.{number}"
        self._dtype = _DTYPES[dtype]
        self.replicas = replicas
        self.kept: KeptRows | None = None
        self.fills_lost = self.has_unused_gradient = self.is_in_run = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._carrier: RowGradients | SentAtOnce | None = None
        self._storage = Storage(storage, path, resident_bytes)
        made = initial.initializer(initializer, scale, seed, embedding_dim, self._dtype)
        self.origin = Origin(_with_padding(made, self.padding_idx))
        self._terms = (
            self.name, num_embeddings, embedding_dim, self.padding_idx, sparse, str(dtype), seed, dealing, op,
        )  # fmt: skip
        names = "name, rows, width, padding, sparse, dtype, seed, dealing, op"
        check_sharing(self._terms, names, f"embedding.table.{number}", process_set)
        if self.is_elastic:
            self._rows = self.new_rows(0, self.origin.rows)
        else:
            own, here, first = self.dealing, self.rank, self.origin.rows
            self._rows = self.new_rows(own.count(here), lambda places: first(own.ids(here, places)))
        self.weight = TableShard(torch.from_numpy(self._rows.array))
        self.weight.process_set, self.weight.op = process_set, op
        self.weight.table = self if self.is_elastic else None
        self.weight.outline = f"rows of {(*self._terms, replicas)}"
        current().serving.add(self)

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may come and go."""
        return membership.current() is not None

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, name={self.name!r}, "
            f"{self.dealing.count(self.rank)} rows on rank {self.rank} of {self.dealing.ranks}"
        )

    # ---- exchanges ----

    def as_table(self, kept: KeptRows | None = None) -> Table:
        """What an exchange must know, of what is kept in an elastic job; lets go of what is resident beyond the bound."""
        dealing, rows = (self.dealing, self._rows) if kept is None else (kept.layout.dealing, kept.rows)
        rows.let_go()
        return Table(self.name, dealing, self.embedding_dim, rows.array.dtype, rows.gather)

    def gradient(self, places: np.ndarray, values: np.ndarray, finite: bool) -> torch.Tensor:
        """The shard's gradient of sums that came for some places; bad news stands in the spare row."""
        count = len(self.weight)
        index, rows = torch.from_numpy(places), torch.from_numpy(values)
        if not finite:
            index = torch.cat([index, torch.tensor([count - 1])])
            rows = torch.cat([rows, rows.new_full((1, self.embedding_dim), float("inf"))])
        if not self.sparse:
            return torch.zeros_like(self.weight).index_copy_(0, index, rows)
        return torch.sparse_coo_tensor(
            index[None], rows, self.weight.shape, is_coalesced=True, check_invariants=False
        )  # fmt: skip

    def divided(self, sums: np.ndarray) -> np.ndarray:
        """The average of all ranks, or the sum, if that was asked for."""
        return sums / sums.dtype.type(self.dealing.ranks) if self.averages else sums

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the ranks; else they are summed."""
        return self.weight.op == Average

    def small(
        self, ids: torch.Tensor, rows: torch.Tensor, trip: Trip, number: int
    ) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """The small table, the ids in it, and its place of padding or None."""
        asked = trip.asked[number]
        if not len(asked.ids):  # torch wants a row, though no id asks for it
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        inverse = torch.from_numpy(asked.inverse).reshape(ids.shape).to(ids.device)
        padding = None
        if self.padding_idx is not None:
            padding = next(iter(np.flatnonzero(asked.ids == self.padding_idx).tolist()), None)
        return rows.to(ids.device), inverse, padding

    def rows(self) -> torch.Tensor:
        """The rows that this rank owns: a view, in the order of ``dealing.ids_of``. In an elastic job none before the first use."""
        count = 0 if self.is_elastic and self.kept is None else self.dealing.count(self.rank)
        self._rows.prepare(np.arange(count))
        return self.weight.detach()[:count]

    def set_rows(self, places: np.ndarray, values: np.ndarray) -> None:
        """Sets some of this rank's rows; values are cast to the table's dtype."""
        self._rows.put(places, values)

    def new_rows(self, count: int, first: initial.Initializer | None) -> Rows:
        """Storage for some rows, and a spare one of zeros; None if all rows are put."""
        if first is None:
            return Rows(count + 1, self.embedding_dim, self._dtype, None, self._storage)

        width, dtype = self.embedding_dim, self._dtype

        def with_spare(places: np.ndarray) -> np.ndarray:
            rows = np.zeros((len(places), width), dtype)
            rows[places < count] = first(places[places < count])
            return rows

        return Rows(count + 1, width, dtype, with_spare, self._storage)

    def new_lines(self, count: int, width: int, dtype: np.dtype, fresh: np.ndarray | None) -> Rows:
        """As ``KeepsRows`` has it; in memory, as torch's optimizers keep it."""
        made = Rows(count + 1, width, dtype, None)
        if fresh is not None:
            made.array[:] = fresh
        return made

    # ---- elastic jobs ----

    def train_by(self, optimizer: torch.optim.Optimizer, carrier: RowGradients | SentAtOnce) -> None:
        """Has gradients travel as a carrier says to the optimizer that trains the rows, whose state of a row moves with it."""
        self._optimizer, self._carrier = optimizer, carrier
        carrier.carry(self)
        optimizer.register_step_post_hook(lambda *_: self._note_step())

    @property
    def carrier(self) -> RowGradients | SentAtOnce | None:
        """What gradients travel with."""
        return self._carrier

    def optimizer_state(self) -> dict[str, torch.Tensor | float]:
        """What the optimizer keeps of the table."""
        return {} if self._optimizer is None else self._optimizer.state.get(self.weight, {})

    def lines(self, gradients: bool = True) -> dict[str, Lines]:
        """As ``KeepsRows`` has it: of what the optimizer keeps, and of a gradient that waits for a step."""
        state = self.optimizer_state()
        found = {key: Lines.of(_dense(value).numpy()) for key, value in state.items() if self._is_by_row(value)}
        if gradients and self.has_unused_gradient and (gradient := self.weight.grad) is not None:
            has = torch.zeros(len(self.weight), 1)
            has[gradient.coalesce().indices()[0] if gradient.is_sparse else slice(None)] = 1
            found |= {key: Lines.of(each.numpy(), begins_fresh=False) for key, each in
                      ((_GRADIENT, _dense(gradient)), (_HAS_GRADIENT, has))}  # fmt: skip
        return found

    def rest(self) -> dict[str, torch.Tensor | float]:
        """As ``KeepsRows`` has it."""
        return {key: value for key, value in self.optimizer_state().items() if not self._is_by_row(value)}

    def _is_by_row(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == len(self.weight)

    def origin_of_lost(self, told: Sequence[bool], words: str) -> Origin | None:
        """As ``KeepsRows`` has it: what each rank was told to begin lost rows from."""
        return self.origin if all(told) else None

    def take(self, kept: KeptRows) -> None:
        """What is kept of the table is this from now on; it may be what it is already."""
        if kept is self.kept:
            return
        self.kept = dataclasses.replace(kept, state={}, rest={})  # the optimizer has them from now on
        state = _tensors(kept.state)
        gradient = _sparse(state.pop(_GRADIENT, None), state.pop(_HAS_GRADIENT, None))
        self.dealing, self.rank, self._rows = kept.layout.dealing, kept.rank, kept.rows
        self.weight.grad = None
        self.weight.data = torch.from_numpy(kept.rows.array)
        self.weight.owned = self.dealing.count(self.rank)
        if gradient is not None:
            self.weight.grad = gradient if self.sparse else gradient.to_dense()
        if self._optimizer is not None and (state or kept.rest):
            self._optimizer.state[self.weight].update(state | kept.rest)
        self.fills_lost = False
        current().serving.add(self)

    def begin_from(self, origin: Origin, lost_only: bool = False) -> None:
        """Has rows come from somewhere where the table is next used: all, or those that nobody keeps any more."""
        self.origin, self.fills_lost = origin, lost_only
        if not lost_only:
            self.kept, self.has_unused_gradient = None, False

    def go_back_to(self, kept: KeptRows) -> None:
        """What is kept of the table is what was: rows, what the optimizer keeps of them, and no gradient."""
        self.optimizer_state().clear()
        self.has_unused_gradient = False
        self.take(kept)

    def begin_again(self, state: dict[str, Lines], rest: dict[str, torch.Tensor | float]) -> None:
        """Nothing is kept of the table, as before its first use; the optimizer has this of it."""
        self.begin_from(self.origin)
        self._rows = self.new_rows(0, self.origin.rows)
        self.weight.grad, self.weight.owned = None, 0
        self.weight.data = torch.from_numpy(self._rows.array)
        if self._optimizer is not None:
            self.optimizer_state().clear()
            self._optimizer.state[self.weight].update(_tensors(state) | rest)

    def add_gradient(self, places: np.ndarray, sums: np.ndarray, finite: bool) -> None:
        """A round was released: as autograd would, adds to ``weight.grad``."""
        self._rows.prepare(places)  # a row may be asked for nowhere but at its other keeper
        gradient = self.gradient(places, sums, finite)
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        self.has_unused_gradient = True

    def _note_step(self) -> None:
        self.has_unused_gradient = False

    # ---- what torch asks of a module ----

    def __deepcopy__(self, memo: dict[int, object]) -> "_Sharded":
        """Refused: a copy on each rank would be a second table, which the ranks have not agreed on."""
        raise UnsupportedError(
            f"embedding '{self.name}': a model must not hold sharded embeddings to be copied, but holds this one. Make a "
            "second table on all ranks, and load the state of the first."
        )

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "_Sharded":
        """Tables stay in host memory and keep their dtype, as the rest of the model moves; rows go where the ids are."""
        return self

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = TableShard(self.rows(), requires_grad=False)
        destination[f"{prefix}weight"].outline = self.weight.outline
        destination[f"{prefix}shard"] = TableShard(self._description(), requires_grad=False)

    def _description(self) -> torch.Tensor:
        kind = int(self.dealing.kind == "blocks")
        return torch.tensor([self.dealing.rows, self.dealing.ranks, self.rank, kind])

    def _load_from_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], prefix: str, local_metadata: dict, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Takes this rank's own shard, or a plain embedding's weight, of which it takes its rows."""
        weight, shard = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}shard")
        if weight is None:
            missing_keys.append(f"{prefix}weight")
            return
        expected = (self.num_embeddings, self.embedding_dim)
        if shard is not None and not torch.equal(torch.as_tensor(shard).cpu(), self._description()):
            error_msgs.append(
                f"embedding '{self.name}': {prefix}weight must be that of rank {self.rank} of {self.dealing.ranks} "
                f"({self.dealing.kind}), but is (rows, ranks, rank, blocks) {shard.tolist()}. "
                "Use save_tables and load_tables where the number of ranks changes."
            )
        elif shard is not None and self.is_elastic:
            error_msgs.append(
                f"embedding '{self.name}': {prefix}weight must be the whole table in an elastic job, but is one rank's rows. "
                "Use save_tables and load_tables."
            )
        elif shard is None and tuple(weight.shape) != expected:
            error_msgs.append(
                f"embedding '{self.name}': {prefix}weight must be of shape {expected}, but is {tuple(weight.shape)}."
            )
        elif self.is_elastic:
            self.begin_from(Origin(weight.detach().cpu().to(self.weight.dtype).numpy().copy().__getitem__))
        else:
            own = weight if shard is not None else weight[self.dealing.ids_of(self.rank)]
            self.set_rows(np.arange(len(own)), own.detach().cpu().numpy())


class ShardedEmbedding(_Sharded):
    """``torch.nn.Embedding`` for tables too large for a rank: the rows are dealt over the ranks of a process set.

    Example:
        >>> table = hvd.ShardedEmbedding(100_000_000, 64)
        >>> optimizer = torch.optim.SparseAdam(table.parameters())
        >>> table(ids).sum().backward()
        >>> optimizer.step()

    A call is collective: all ranks call the same tables in the same order, each with ids of its own, also none, and all
    or none go backward. N ranks with equal batches and a mean loss train as one process with ``nn.Embedding`` and all
    the batches. Any torch optimizer that takes sparse gradients trains ``weight``, distributed or not:
    ``DistributedOptimizer`` leaves it out of its sums, as do ``broadcast_parameters`` and
    ``broadcast_optimizer_state``.

    Args:
        num_embeddings: rows of the whole table.
        embedding_dim: numbers in a row.
        padding_idx: a row that begins with zeros and gets no gradient, as torch's.
        max_norm: refused: a row that is normed where it is looked up changes what other ranks have fetched.
        norm_type: of ``max_norm``; accepted for torch's sake.
        scale_grad_by_freq: refused: the counts would be those of one rank.
        sparse: whether ``weight.grad`` is sparse. False makes one of the size of the shard, for optimizers that want it.
        dtype: float32 or float64.
        name: the same on all ranks, for errors; made up if it is None.
        seed: of the first values, which are functions of (seed, row) and so of no number of ranks.
        initializer: ``"normal"``, ``"uniform"``, ``"zeros"``, or a function of rows, int64 (n,), to values (n, dim).
        scale: of the first values: standard deviation, or bound.
        dealing: ``"modulo"``, row i at rank i % N, or ``"blocks"``.
        storage: ``"memory"``, or ``"file"``: rows lie in a nameless file in ``path``, and are gone with the process.
        path: folder for ``"file"``, on a disk with room for this rank's rows.
        resident_bytes: of the file, about how many may be in memory.
        op: ``Average`` or ``Sum`` of the ranks' gradients; that of the optimizer of the rest.
        process_set: the ranks that share the table.
        replicas: 2 has each row kept a second time in an elastic job, on another host, or by another rank if there is one
            host; elsewhere nothing could use it, and it is not.

    Raises:
        InvalidArgumentError: an argument that cannot be; an id that is no row, when called: the same text on all ranks.
        MismatchError: ranks make different tables; the same text on all.
        RowsLostError: in an elastic job, when called, or at the end of a backward pass: the ranks that kept some rows are
            gone; the same text on all.
        UnsupportedError: ``max_norm``, ``scale_grad_by_freq``, another dtype; in an elastic job a process set, and a call
            that is neither in the loop of an ``hvd.elastic.State`` nor in ``elastic.run`` with a ``TorchState``.
    """

    @eager
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of ids: int32 or int64 of any shape, to shape (\\*ids, embedding_dim) on the ids' device."""
        return look_up([self], [(input,)])[0]

    def of_small(self, rows: torch.Tensor, ids: torch.Tensor, padding: int | None) -> torch.Tensor:
        """The result, from a small table."""
        return functional.embedding(ids, rows, padding)


class ShardedEmbeddingBag(_Sharded):
    """``torch.nn.EmbeddingBag`` with its rows dealt over the ranks; ``ShardedEmbedding`` says what holds for both.

    Example:
        >>> table = hvd.ShardedEmbeddingBag(100_000_000, 64, mode="sum")
        >>> bags = table(ids, offsets)

    Rows travel and bags are made where they are asked for, by torch itself: every mode is exact.

    Args:
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: as torch's.
        arguments: those of ``ShardedEmbedding``.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, mode: str = "mean", include_last_offset: bool = False, **arguments: Any
    ):  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, **arguments)
        check_among(f"embedding '{self.name}': mode must be sum, mean or max", mode, ("sum", "mean", "max"))
        self.mode, self.include_last_offset = mode, include_last_offset

    @eager
    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Bags of rows, (bags, embedding_dim); the arguments are those of ``torch.nn.EmbeddingBag``."""
        return look_up([self], [(input, offsets, per_sample_weights)])[0]

    def of_small(
        self, rows: torch.Tensor, ids: torch.Tensor, padding: int | None,
        offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The result, from a small table."""
        return functional.embedding_bag(
            ids, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip


class ShardedEmbeddingCollection(torch.nn.ModuleDict):
    """Several tables, looked up together: one exchange of ids, one of rows, one of gradients, however many there are.

    Example:
        >>> tables = hvd.ShardedEmbeddingCollection({"user": hvd.ShardedEmbedding(10**8, 64), "tags": hvd.ShardedEmbeddingBag(10**6, 16)})
        >>> found = tables({"user": users, "tags": (tags, offsets)})

    Args:
        tables: by name, ``ShardedEmbedding`` and ``ShardedEmbeddingBag`` of one dtype and one process set.

    Raises:
        InvalidArgumentError: other modules, or tables that cannot travel together.
    """

    def __init__(self, tables: Mapping[str, _Sharded]):
        super().__init__(dict(tables))
        given = list(tables.values())
        if not given or not all(isinstance(each, ShardedEmbedding | ShardedEmbeddingBag) for each in given):
            raise InvalidArgumentError("ShardedEmbeddingCollection: tables must be sharded embeddings, by name.")
        if len({(each.weight.dtype, id_of(each.weight.process_set)) for each in given}) > 1:
            raise InvalidArgumentError(
                "ShardedEmbeddingCollection: tables must have one dtype and one process set, but have several. "
                "Make a collection for each."
            )

    @eager
    def forward(self, inputs: Mapping[str, torch.Tensor | tuple]) -> dict[str, torch.Tensor]:
        """Results by name. ``inputs`` has for every table its ids, or a tuple of the arguments of its own ``forward``.

        Raises:
            InvalidArgumentError: a table has no ids, or there is none of a name.
        """
        modules = list(self.values())
        with _on_all(modules):
            if set(inputs) != set(self):
                raise InvalidArgumentError(
                    f"ShardedEmbeddingCollection: inputs must be for {sorted(self)}, but are for {sorted(inputs)}. "
                    "A table without ids gets an empty tensor."
                )
        calls = [given if isinstance(given, tuple) else (given,) for given in (inputs[name] for name in self)]
        return dict(zip(self, look_up(modules, calls), strict=True))


def look_up(modules: Sequence[_Sharded], calls: Sequence[tuple]) -> list[torch.Tensor]:
    """Results of several tables, each called with ids and what else its ``forward`` takes; one exchange."""
    with _on_all(modules):
        ids = [_flat(module, call[0]) for module, call in zip(modules, calls, strict=True)]
    if modules[0].is_elastic:
        trip = _trip_that_survives(modules, ids)
    else:
        trip = Trip([module.as_table() for module in modules], ids, modules[0].weight.process_set)
    fetched = _Fetch.apply(trip, modules, *(module.weight for module in modules))
    return [
        module.of_small(*module.small(call[0], rows, trip, number), *call[1:])
        for number, (module, call, rows) in enumerate(zip(modules, calls, fetched, strict=True))
    ]


def _on_all(modules: Sequence[_Sharded]) -> AbstractContextManager[None]:
    """What is wrong with the arguments of one rank is an error of all; in an elastic job, of the rank that ends for it."""
    first = modules[0]
    if first.is_elastic:
        return nullcontext()
    return before_a_trip([each.name for each in modules], first.weight.process_set)


def _trip_that_survives(modules: Sequence[_Sharded], ids: Sequence[np.ndarray]) -> Trip:
    """In an elastic job: rows are re-dealt first if ranks have come or gone, and all that is held when all ranks hold it."""
    _check_use(modules)

    def attempt() -> tuple[list[KeptRows], Trip]:
        kept = [kept_here(module) for module in modules]
        tables = [module.as_table(each) for module, each in zip(modules, kept, strict=True)]
        return kept, Trip(tables, ids, global_process_set)

    kept, trip = surviving(attempt)
    for module, each in zip(modules, kept, strict=True):
        module.take(each)
    return trip


class _Fetch(torch.autograd.Function):
    """The rows that a trip has brought; their gradients travel back by the same trip, or in an elastic job with others."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, trip: Trip, modules: Sequence[_Sharded], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.trip, ctx.modules = trip, modules
        ctx.world = modules[0].kept.world if modules[0].kept is not None else None
        return tuple(torch.from_numpy(rows) for rows in trip.rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = [gradient.contiguous().numpy() for gradient in gradients]
        if ctx.world is not None:
            ctx.modules[0].carrier.add(ctx.trip, ctx.world, ctx.modules, own)
            return (None,) * (2 + len(ctx.modules))
        sums, finite = ctx.trip.send_back(own)
        made = [
            module.gradient(places, module.divided(values), finite)
            for module, (places, values) in zip(ctx.modules, sums, strict=True)
        ]
        return None, None, *made


def tables_in(model: torch.nn.Module) -> list[tuple[str, _Sharded]]:
    """The sharded embeddings of a model, with their names in it."""
    return [(name or "table", each) for name, each in model.named_modules() if isinstance(each, _Sharded)]


def _check_use(modules: Sequence[_Sharded]) -> None:
    first = modules[0]
    check_elastic_use(
        first.name, first.kept is not None or first.is_in_run,
        "the loop of hvd.elastic.State(model=..., optimizer=...), or in elastic.run with a TorchState of its model",
    )  # fmt: skip
    trained = [each for each in modules if each.weight.requires_grad] if torch.is_grad_enabled() else []
    for each in trained:
        if each.carrier is None or each.carrier is not first.carrier:
            raise InvalidArgumentError(
                f"embedding '{each.name}': in an elastic job a table must be trained by an optimizer that is given to "
                "elastic.State with its model, or to TorchState, and by one that trains all tables of a collection, but is not."
            )


def _flat(module: _Sharded, ids: object) -> np.ndarray:
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
        found = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InvalidArgumentError(
            f"embedding '{module.name}': ids must be a tensor of int32 or int64, but are {found}."
        )
    return ids.detach().cpu().reshape(-1).to(torch.int64).numpy()


def _check(max_norm: float | None, by_frequency: bool, dtype: torch.dtype, op: int) -> None:
    demand = (
        "ShardedEmbedding: max_norm must be None, as norming a row where it is looked up would change what other ranks have fetched "
        "of it in the same step"
    )
    check_among(demand, max_norm, [None], "Norm the rows that come back instead", UnsupportedError)
    demand = "ShardedEmbedding: scale_grad_by_freq must be False, as a rank counts its own batch alone"
    check_among(demand, by_frequency, [False], error=UnsupportedError)
    demand = "ShardedEmbedding: dtype must be float32 or float64, in which gradients are added"
    check_among(demand, dtype, _DTYPES, "Cast what comes back, or use autocast", UnsupportedError)
    check_among("ShardedEmbedding: op must be Average or Sum", op, (Average, Sum))


def _tensors(state: Mapping[str, Lines]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(each.rows.array).reshape(-1, *each.shape) for key, each in state.items()}


def _dense(value: torch.Tensor) -> torch.Tensor:
    return (value.to_dense() if value.is_sparse else value).detach().contiguous()


def _sparse(gradient: torch.Tensor | None, has: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or has is None:
        return None
    places = has[:, 0].nonzero()[:, 0]
    return torch.sparse_coo_tensor(places[None], gradient[places], gradient.shape, is_coalesced=True)


def _with_padding(make: initial.Initializer, padding: int | None) -> initial.Initializer:
    """First values of which the row of padding is zeros."""

    def first(ids: np.ndarray) -> np.ndarray:
        rows = make(ids)
        rows[ids == padding] = 0
        return rows

    return first


def _row_of_padding(padding: int | None, rows: int) -> int | None:
    if padding is None:
        return None
    check_among(f"ShardedEmbedding: padding_idx must be a row of {rows}", padding, range(-rows, rows))
    return padding % rows
