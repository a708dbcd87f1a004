"""Clipping by the norm of all gradients, where each rank has the gradients of its own rows of a table."""

from collections.abc import Iterable

import torch

from ringtrain._runtime.operations import Max, Sum, allreduce
from ringtrain._runtime.process_sets import ProcessSet, id_of
from ringtrain.errors import InvalidArgumentError
from ringtrain.torch.shards import TableShard, is_shard


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for models with sharded embeddings; also without any.

    Example:
        >>> loss(model(x), y).backward()
        >>> norm = hvd.clip_grad_norm_(model.parameters(), max_norm=1.0)
        >>> optimizer.step()

    All ranks call it after the same backward pass. Gradients of the rest must be reduced, as they are when
    ``backward()`` of a ``DistributedOptimizer`` returns; the norms of the shards are added up over their ranks.

    Args:
        parameters: whose gradients count together; dense or sparse ones.
        max_norm: the most that the norm may be.
        norm_type: p of the p-norm; ``inf`` for the greatest.
        error_if_nonfinite: whether an infinite or NaN norm raises.

    Returns:
        The norm before, the same on all ranks; float64, a scalar.

    Raises:
        InvalidArgumentError: the norm is not finite, and that was to be said; or ``norm_type`` is not above 0.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    p = float(norm_type)
    if not p > 0:
        raise InvalidArgumentError(f"clip_grad_norm_: norm_type must be above 0, or inf, but is {norm_type!r}.")
    dense = [_power(each, p) for each in given if not is_shard(each) and each.grad is not None]
    total = _combined(dense, p)
    for process_set, shards in _by_set(given):
        from ringtrain.embedding.kept_rows import in_one_world  # only where there are tables

        tables = [shard.table for shard in shards if shard.table is not None]
        of_all = in_one_world(tables, lambda: _of_all_ranks(shards, p, process_set))  # noqa: B023
        total = _combined([total, of_all], p)
    norm = total if p == float("inf") else total ** (1 / p)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise InvalidArgumentError(f"clip_grad_norm_: the norm of the gradients must be finite, but is {norm.item()}.")
    factor = min(1.0, max_norm / (norm.item() + 1e-6)) if norm.isfinite() else (max_norm / norm).item()
    for each in given:
        if each.grad is not None:
            each.grad.mul_(factor)
    return norm


def _of_all_ranks(shards: Iterable[TableShard], p: float, process_set: ProcessSet) -> torch.Tensor:
    own = _combined([_power(shard, p) for shard in shards if shard.grad is not None], p)
    return torch.as_tensor(
        allreduce(own.numpy(), "clip_grad_norm", Max if p == float("inf") else Sum, process_set=process_set)
    )


def _by_set(parameters: Iterable[torch.Tensor]) -> Iterable[tuple[ProcessSet, list[TableShard]]]:
    """The shards, by the ranks that share them."""
    sets: dict[int, tuple[ProcessSet, list[TableShard]]] = {}
    for each in parameters:
        if isinstance(each, TableShard):
            members = each.process_set
            sets.setdefault(id_of(members), (members, []))[1].append(each)
    return sets.values()


def _power(parameter: torch.Tensor, p: float) -> torch.Tensor:
    """The sum of the p-th powers of a gradient, or the greatest, float64; entries of one row are added first."""
    if parameter.grad.is_sparse and not parameter.grad.is_coalesced():
        parameter.grad = parameter.grad.coalesce()
    if not isinstance(parameter, TableShard) and type(parameter.grad) is not torch.Tensor:
        # One of which this rank has a part alone: the norm is that of all ranks.
        norm = torch.linalg.vector_norm(parameter.grad, p).double().cpu()
        return norm if p == float("inf") else norm**p
    values = _counted(parameter, parameter.grad).detach().abs()
    if not values.numel():
        return torch.zeros((), dtype=torch.float64)
    if p == float("inf"):
        return values.max().double().cpu()
    return values.double().pow(p).sum().cpu()


def _counted(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Numbers of a gradient that this rank counts: of rows that several ranks keep, those that it owns, and the spare one."""
    values = gradient._values() if gradient.is_sparse else gradient
    if not isinstance(parameter, TableShard) or parameter.table is None:
        return values
    places = gradient._indices()[0] if gradient.is_sparse else torch.arange(len(gradient))
    return values[(places < parameter.owned) | (places == len(parameter) - 1)]


def _combined(powers: list[torch.Tensor], p: float) -> torch.Tensor:
    if not powers:
        return torch.zeros((), dtype=torch.float64)
    every = torch.stack(powers)
    return every.max() if p == float("inf") else every.sum()
