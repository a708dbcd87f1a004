"""Sharded embeddings on disk: each rank writes its rows, and any number of ranks reads them.

``ringtrain.embedding.table_files`` has the files; here is what of a model and an optimizer goes into them.
"""

import functools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ringtrain._runtime.objects import allgather_object, broadcast_object
from ringtrain._runtime.process_sets import members_of
from ringtrain.embedding import table_files
from ringtrain.embedding.kept_rows import Origin, in_one_world
from ringtrain.embedding.sharing import on_all, problem_of, raise_first
from ringtrain.errors import InvalidArgumentError
from ringtrain.torch.embedding import _Sharded, tables_in
from ringtrain.torch.shards import is_shard

_AS_TENSOR = ":tensor"  # behind the name of a number that the optimizer keeps as a tensor


def save_tables(
    folder: str | os.PathLike, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Writes the model's sharded embeddings, each rank its rows; no rank gathers a table. All ranks call it.

    Example:
        >>> model = torch.nn.Sequential(hvd.ShardedEmbedding(100_000_000, 64), torch.nn.Linear(64, 1))
        >>> hvd.save_tables(".", model)  # of all ranks one folder

    What is not sharded is saved as ever, by one rank: ``dense_state_dict``.

    Args:
        folder: exists, on a disk that all ranks share, or one on each host, whose files are brought together before
            another number of ranks reads them. A save over another one replaces it.
        model: tables are named by their place in it.
        optimizer: whose state of the rows is saved too; None to leave it out.

    Raises:
        InvalidArgumentError: on all ranks, if one cannot write, or another number of ranks has written there.
    """
    for name, table in tables_in(model):
        in_one_world([table], lambda: _save_on_all(folder, name, table, optimizer))  # noqa: B023


def load_tables(
    folder: str | os.PathLike, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None,
    lost_only: bool = False,
) -> None:  # fmt: skip
    """Reads what ``save_tables`` has written, with the same or another number of ranks. All ranks call it.

    Example:
        >>> model = torch.nn.Sequential(hvd.ShardedEmbedding(100_000_000, 64), torch.nn.Linear(64, 1))
        >>> hvd.save_tables(".", model)
        >>> hvd.load_tables(".", model)

    In an elastic job it asks no other rank, so it may stand before the loop: rows are read where the table is next used, and
    a rank that joins takes over those of the others instead.

    Args:
        folder: with the files of all ranks that wrote.
        model: with the same tables in the same places; a table may be dealt in another way.
        optimizer: whose state of the rows is set, as far as it was saved, after what ``load_state_dict`` sets.
        lost_only: after a ``RowsLostError``: rows that are still kept stay as they are. All ranks must want the same.

    Raises:
        InvalidArgumentError: on all ranks, if one does not find a whole table that fits.
    """
    for name, table in tables_in(model):
        if table.is_elastic:
            table.begin_from(_origin(_fitting(folder, name, table), table, optimizer is not None), lost_only)
            continue
        on_all(f"load_tables.{name}", table.weight.process_set, lambda: _load(folder, name, table, optimizer))  # noqa: B023


def plain_weight(folder: str | os.PathLike, name: str) -> torch.Tensor:
    """The weight of a saved table as ``torch.nn.Embedding`` has it, (rows, width); needs no world, and memory for all.

    Example:
        >>> model = torch.nn.Sequential(hvd.ShardedEmbedding(100_000_000, 64), torch.nn.Linear(64, 1))
        >>> hvd.save_tables(".", model)
        >>> hvd.barrier()  # all have written
        >>> weight = hvd.plain_weight(".", "0")  # the table is named by its place in the model

    Args:
        folder: what ``save_tables`` has written.
        name: of the table, as in the model.

    Raises:
        InvalidArgumentError: the table is not there as a whole.
    """
    return torch.from_numpy(table_files.find(folder, name).plain())


def dense_state_dict(part: torch.nn.Module | torch.optim.Optimizer) -> dict[str, object]:
    """``state_dict()`` without what belongs to rows of sharded embeddings: the same on all ranks, for one to save.

    Example:
        >>> if hvd.rank() == 0:
        ...     torch.save((hvd.dense_state_dict(model), hvd.dense_state_dict(optimizer)), "dense.pt")

    A model loads it with ``strict=False``. Load an optimizer's before ``load_tables``, which sets the rest.

    Args:
        part: a model, or an optimizer.

    Returns:
        The dictionary, as that of ``state_dict()``.
    """
    if isinstance(part, torch.nn.Module):
        return {name: value for name, value in part.state_dict().items() if not is_shard(value)}
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    whole = part.state_dict()
    kept = {place: state for place, state in whole["state"].items() if not is_shard(parameters[place])}
    return {**whole, "state": kept}


def load_dense_state_dict(model: torch.nn.Module, values: Mapping[str, object]) -> None:
    """Takes what ``dense_state_dict`` has returned of the same model.

    Raises InvalidArgumentError if it has other names.
    """
    shards = {name for name, value in model.state_dict().items() if is_shard(value)}
    told = model.load_state_dict(dict(values), strict=False)
    missing = [name for name in told.missing_keys if name not in shards]
    if missing or told.unexpected_keys:
        raise InvalidArgumentError(
            f"resume: a model's values must be those that were saved, but {missing} are missing and {told.unexpected_keys} are "
            "not among them. Make the model that was saved."
        )


# ---- all tables of a training, behind one step ----


class TrainedTable(NamedTuple):
    """A table of a training.

    Attributes:
        name: in files, the same on all ranks.
        table: the module.
        optimizer: that trains its rows; None if none does.
    """

    name: str
    table: _Sharded
    optimizer: torch.optim.Optimizer | None


def parts_of(values: Mapping[str, object]) -> list[TrainedTable]:
    """The tables in some modules, each once, with those of the optimizers beside them that train them."""
    optimizers = [value for value in values.values() if isinstance(value, torch.optim.Optimizer)]
    found: dict[int, TrainedTable] = {}
    for name, module in values.items():
        if isinstance(module, torch.nn.Module):
            for place, table in tables_in(module):
                found.setdefault(id(table), TrainedTable(f"{name}.{place}", table, _trainer_of(table, optimizers)))
    return list(found.values())


def save_parts(parts: Sequence[TrainedTable], folder_of: Callable[[str], Path]) -> Path:
    """Writes several tables, as they are in one world, into a folder of their own; all ranks call it.

    Args:
        parts: all of a training.
        folder_of: the folder for a token, another one in each attempt: ranks that die in one leave parts of it.

    Raises:
        InvalidArgumentError: on all ranks, if one cannot write.
        RowsLostError: rows are kept by nobody any more; on all ranks.
    """

    def attempt() -> tuple[Path, list[str | None]]:
        token = broadcast_object(secrets.token_hex(8), 0, "save_every.token")
        folder = folder_of(token)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            for part in parts:
                _save(folder, part.name, part.table, part.optimizer, token)

        return folder, allgather_object(problem_of(write), "save_every.written")

    folder, problems = in_one_world([part.table for part in parts], attempt)
    raise_first(problems, list(range(len(problems))))
    return folder


def load_parts(parts: Sequence[TrainedTable], folder: str | os.PathLike) -> str | None:
    """Takes this rank's rows of what ``save_parts`` has written; returns why it cannot. It asks no other rank."""

    def read() -> None:
        for name, table, optimizer in parts:
            if table.is_elastic:
                table.begin_from(_origin(_fitting(folder, name, table), table, optimizer is not None))
            else:
                _load(folder, name, table, optimizer)

    return problem_of(read)


def _trainer_of(table: _Sharded, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    for optimizer in optimizers:
        if any(each is table.weight for group in optimizer.param_groups for each in group["params"]):
            return optimizer
    return None


def _save_on_all(
    folder: str | os.PathLike, name: str, table: _Sharded, optimizer: torch.optim.Optimizer | None
) -> None:
    members = table.weight.process_set
    token = broadcast_object(secrets.token_hex(8), members_of(members)[0], f"save_tables.{name}", members)
    on_all(f"save_tables.{name}.done", members, lambda: _save(folder, name, table, optimizer, token))


def _save(
    folder: str | os.PathLike, name: str, table: _Sharded, optimizer: torch.optim.Optimizer | None, token: str
) -> None:
    arrays, numbers = {"weight": table.rows().numpy()}, {}
    for key, value in _state(optimizer, table).items():
        if isinstance(value, torch.Tensor) and value.dim():
            dense = value.to_dense() if value.is_sparse else value
            arrays[key] = dense[: table.dealing.count(table.rank)].cpu().numpy()
        elif isinstance(value, torch.Tensor):
            numbers[key + _AS_TENSOR] = value.item()
        elif isinstance(value, int | float):
            numbers[key] = value
    table_files.write(folder, name, table.rank, table.dealing, token, arrays, numbers)


def _load(folder: str | os.PathLike, name: str, table: _Sharded, optimizer: torch.optim.Optimizer | None) -> None:
    saved = _fitting(folder, name, table)
    for places, values in saved.share(table.dealing, table.rank):
        table.set_rows(places, values)
    if optimizer is None or len(saved.arrays) + len(saved.numbers) == 1:
        return
    state = optimizer.state[table.weight]
    for key in saved.arrays:
        if key != "weight":
            kept = np.zeros((len(table.weight), saved.width(key)), saved.dtype(key))
            for places, values in saved.share(table.dealing, table.rank, key):
                kept[places] = values
            state[key] = torch.from_numpy(kept)
    state.update(_numbers(saved))


def _origin(saved: table_files.Saved, table: _Sharded, with_state: bool) -> Origin:
    saved.check_rows(table.dealing)
    if not with_state:
        return Origin(saved.at)
    state = {key: functools.partial(saved.at, array=key) for key in saved.arrays if key != "weight"}
    return Origin(saved.at, state, _numbers(saved))


def _numbers(saved: table_files.Saved) -> dict[str, torch.Tensor | float]:
    return {
        key.removesuffix(_AS_TENSOR): torch.tensor(float(number)) if key.endswith(_AS_TENSOR) else number
        for key, number in saved.numbers.items()
    }


def _fitting(folder: str | os.PathLike, name: str, table: _Sharded) -> table_files.Saved:
    saved = table_files.find(folder, name)
    saved.check_width(table.embedding_dim)
    return saved


def _state(optimizer: torch.optim.Optimizer | None, table: _Sharded) -> dict[str, torch.Tensor | float]:
    return {} if optimizer is None else optimizer.state.get(table.weight, {})
