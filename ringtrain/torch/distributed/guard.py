"""``Guard``: a training with DistributedDataParallel in which the death of a rank costs no step."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ringtrain._runtime.arguments import check_kind
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.torch.coexistence import let_rest, shard_kind
from ringtrain.torch.distributed.elastic_group import ElasticProcessGroup
from ringtrain.torch.distributed.process_group import RingtrainProcessGroup
from ringtrain.torch.elastic.transparent import TransparentState
from ringtrain.torch.optimizer import DistributedOptimizer


class Guard(TransparentState):
    """A training with DDP that goes on when ranks die, and admits others: no step is lost, and no sample counted twice.

    Example:
        >>> guard = Guard(model, optimizer, sampler)
        >>> for epoch in guard.epochs(90):
        ...     for x, y in loader:  # whose sampler is that one
        ...         optimizer.zero_grad()
        ...         loss_of(model(x), y).backward()
        ...         optimizer.step()

    It has the promises and the methods of ``hvd.elastic.State`` (``survive``, ``on_change``, ``save_every``, ``resume``), and
    works likewise in a job that is not elastic. Gradients travel as ``hvd.DistributedOptimizer`` sends them, and DDP's
    own reducer rests: its buckets, its communication hooks and its broadcasts of buffers are not used.

    Args:
        model: a ``DistributedDataParallel`` over the backend "ringtrain".
        optimizer: of its parameters; changed in place.
        sampler: an ``ElasticSampler``, in place of torch's ``DistributedSampler``.
        schedule, objects: as of ``hvd.elastic.State``.

    Raises:
        InvalidArgumentError: another model, another backend, or a sampler that deals to a fixed number of ranks; and what
            ``hvd.elastic.State`` and ``hvd.DistributedOptimizer`` raise; or a second model or optimizer.
        UnsupportedError: a model that is sharded, or one with a communication hook, now or later.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        sampler: Any = None,
        schedule: Any = None,
        **objects: Any,
    ):
        _check(model, sampler)
        _refuse_further(objects)
        let_rest(model)
        distributed: Any = DistributedOptimizer(optimizer, model.module.named_parameters())
        model.no_sync = distributed.no_sync
        model.register_comm_hook = model._register_builtin_comm_hook = _refuse_hook
        self._group = model.process_group
        super().__init__(model.module, distributed, sampler, schedule, **objects)

    def epochs(self, count: int) -> Iterator[int]:
        """As ``hvd.elastic.State.epochs``; within it collectives of the default group are between ranks."""
        if isinstance(self._group, ElasticProcessGroup):
            self._group.begin()
        yield from super().epochs(count)


def _refuse_further(objects: Mapping[str, object]) -> None:
    for name, value in objects.items():
        if isinstance(value, (DistributedDataParallel, torch.optim.Optimizer)):
            raise InvalidArgumentError(
                f"Guard: expected one model and one optimizer but found another {type(value).__name__} as {name}. Give several "
                "models without DDP to hvd.elastic.State, with an hvd.DistributedOptimizer each."
            )


def _refuse_hook(*_: object, **__: object) -> None:
    raise UnsupportedError(
        "Guard: gradients must travel as they are, since DDP's reducer rests, but a communication hook was registered. Leave it "
        "out, or use hvd.DistributedOptimizer with compression= and hvd.elastic.State, without DDP."
    )


def _check(model: Any, sampler: object) -> None:
    if isinstance(model, torch.nn.Module) and any(map(shard_kind, model.parameters())):
        raise UnsupportedError(
            "Guard: expected a model of which each rank has a whole copy but found one whose parameters are sharded, as by FSDP. A "
            "shard is lost with its rank. Use ringtrain.torch.distributed.ShardedGuard, with replicas that have all shards."
        )
    demand = "Guard: the model must be a DistributedDataParallel"
    check_kind(demand, model, DistributedDataParallel, "Give hvd.elastic.State a model without that wrapper")
    demand = "Guard: the model's process group must be one of the backend 'ringtrain'"
    check_kind(demand, model.process_group, RingtrainProcessGroup, "Call init_process_group('ringtrain')")
    if model._comm_hooks:
        _refuse_hook()
    if isinstance(sampler, torch.utils.data.distributed.DistributedSampler):
        raise InvalidArgumentError(
            "Guard: expected an ElasticSampler but found torch's DistributedSampler, which deals to a fixed number of ranks. "
            "Give the loader and Guard hvd.elastic.ElasticSampler(dataset)."
        )
