"""``ShardedGuard``: a training with FSDP2 in several replicas, in which the death of one costs no step.

Each process has its own part of the model. What FSDP2 has reduced within a replica goes to its leader, which averages it with
those of the other replicas, by the transaction of all elastic jobs, and gives each process its part back.
"""

from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ringtrain._binding import options
from ringtrain._rendezvous import launcher
from ringtrain._runtime.arguments import check_kind
from ringtrain.elastic.lossless import checked_progress
from ringtrain.elastic.state import check_free_names
from ringtrain.errors import InvalidArgumentError, NotInitializedError
from ringtrain.torch.coexistence import shard_kind
from ringtrain.torch.distributed.replica import Replica
from ringtrain.torch.distributed.replica_gradients import ReplicaGradients
from ringtrain.torch.distributed.replica_leaders import Replicas
from ringtrain.torch.distributed.replica_sampler import ReplicaSampler
from ringtrain.torch.distributed.replica_state import ReplicaState


class ShardedGuard:
    """A training with FSDP2 in several replicas that goes on when some die, and admits others: no step is lost.

    Example:
        >>> dist.init_process_group("ringtrain")  # the processes of this replica; any backend will do
        >>> fully_shard(model)
        >>> sampler = ReplicaSampler(dataset)
        >>> guard = ShardedGuard(model, optimizer, sampler)
        >>> for epoch in guard.epochs(90):
        ...     for x, y in loader:  # whose sampler is that one
        ...         optimizer.zero_grad()
        ...         loss_of(model(x), y).backward()
        ...         optimizer.step()

    A replica is what torchrun starts in one of ringtrain's slots: ``ringtrainrun --elastic -np 1:4 -H a:1,b:1,c:1,d:1 torchrun
    --standalone --nproc-per-node 8 train.py`` trains up to four replicas of eight processes each. When a process dies, its
    replica dies with it, and comes back with the state of a living one.

    Behind ``backward()`` gradients are the averages over all replicas, so that they may be clipped as those of one process. All
    processes of a replica run the same program, as FSDP2 wants it. It works likewise in a job that is not elastic, and under
    torchrun alone.

    Args:
        model: dealt over the processes of torch's default group, as by ``fully_shard``.
        optimizer: of its parameters, made behind ``fully_shard``.
        sampler: a ``ReplicaSampler``, which counts by itself from now on.
        schedule: of learning rates; whatever has ``state_dict`` and ``load_state_dict``.
        objects: what else a replica that joins takes over, each process from the one at its place; they become attributes.
            ``epoch`` and ``step`` are 0 unless they are given, as after loading a checkpoint.

    Attributes:
        epoch: that ``epochs`` is in.
        step: updates that the optimizer has made.

    Raises:
        InvalidArgumentError: a model that is not sharded, a parameter that is whole, or another sampler; by ``epochs`` also another
            number of processes, or other shapes, than in the other replicas.
        NotInitializedError: torch's default group is not there.
        UnsupportedError: ``--batch constant`` or ``balanced``: replicas must have as many samples each.
    """

    epoch: int
    step: int

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ReplicaSampler,
        schedule: Any = None,
        **objects: Any,
    ) -> None:
        _check(model, optimizer, sampler)
        check_free_names("ShardedGuard", type(self), objects)
        given = {"epoch": 0, "step": 0, **objects} | ({} if schedule is None else {"schedule": schedule})
        given |= checked_progress({name: given[name] for name in ("epoch", "step")})
        for name, value in given.items():
            setattr(self, name, value)
        self._listeners: list[Callable[[int, int], object]] = []
        self._told: int | None = None  # replicas that there were when listeners were called last; goes with the state
        self._has_looped = False
        self._sampler = sampler
        self._optimizer, self._known = optimizer, {id(each) for each in model.parameters()}
        self._state = state = ReplicaState(self, sorted({*given, "_told"}), model, optimizer, sampler)
        is_alone = not launcher.has_started_replicas(options.environment())
        self._replica = Replica({"deal": sampler.deal, "finish_window": sampler.finish_window}, is_alone)
        self._replica.deeds |= {"give": partial(state.give, self._replica), "take": partial(state.take, self._replica)}
        self._others = Replicas(self._replica, sampler, state, lambda: self.step)
        sampler.follow(self)
        self._replica.together(self._others.join)
        self._replica.look = lambda: self._others.place
        self._gradients = ReplicaGradients(self._replica, model, self._others.average)
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    @property
    def replica(self) -> int:
        """Number of this replica among those that there are; in the loop."""
        return self._replica.among[0]

    @property
    def replicas(self) -> int:
        """How many there are; in the loop."""
        return self._replica.among[1]

    # ---- the loop ----

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs up to ``count``, from the one that the others are in, or ``epoch``; to be used once.

        At first all replicas get the state of the first one. One that joins later goes on in the middle of an epoch.

        Raises:
            InvalidArgumentError: ``count`` is no number, or this is a second loop.
        """
        check_kind("ShardedGuard.epochs: count must be a number of epochs", count, int)
        if self._has_looped:
            raise InvalidArgumentError(
                "ShardedGuard: expected one loop over all epochs but found another one, in which replicas that join would not be. "
                "Count all epochs in one."
            )
        self._has_looped = True
        self._state.begin()
        self._meet(self._others.enter)
        while self.epoch < count:
            self._set_epoch()
            yield self.epoch
            self._meet(self._others.end_epoch)
            self.epoch += 1
            self._set_epoch()
            self._meet(self._others.pause)
        self._replica.together(self._others.finish)

    def on_change(self, function: Callable[[int, int], object]) -> None:
        """Has a function called between two steps when the number of replicas has changed, with the old and the new one.

        On all processes. A replica that joins calls it, too, before its first step.
        """
        self._listeners.append(function)

    def allgather_object(self, value: object) -> list[Any]:
        """What all processes of all replicas have given, by replica and process; in the loop, on all of them in one order.

        Example:
            >>> accuracy = sum(guard.allgather_object(right)) / len(dataset)

        Args:
            value: whatever pickles.
        """
        own: list[Any] = [None] * self._replica.size
        if self._replica.is_alone:
            dist.all_gather_object(own, value)
            return own
        dist.gather_object(value, own if self._replica.leads else None, 0)
        return self._replica.together(lambda: self._others.gathered(own))

    def before_draw(self) -> None:
        """The sampler draws for the next step: replicas join and leave here."""
        self._gradients.begin()
        self._meet(self._others.begin)

    # ----

    def _before_update(self, *_: object) -> None:
        if not self._sampler.has_drawn:
            raise InvalidArgumentError(
                "ShardedGuard: a step must have samples of the guard's sampler, but none was drawn. Give the loader sampler=sampler, and "
                "step within guard.epochs()."
            )
        _require_known(self._optimizer, self._known)
        self._gradients.average_rest()

    def _after_update(self, *_: object) -> None:
        self.step += 1
        self._others.has_updated = True
        self._gradients.begin()

    def _set_epoch(self) -> None:
        if self._sampler.epoch != self.epoch:
            self._sampler.set_epoch(self.epoch)

    def _meet(self, decide: Callable[[], object]) -> None:
        """Has leaders do something between two steps, behind which another number of replicas may be there."""
        self._replica.together(decide)
        former, self._told = self._told, self.replicas
        if former not in (None, self.replicas):
            for listener in self._listeners:
                listener(former, self.replicas)


def _check(model: Any, optimizer: Any, sampler: object) -> None:
    if not dist.is_initialized():
        raise NotInitializedError(
            "ShardedGuard: torch's default group must have the processes of this replica, but there is none. Call "
            "torch.distributed.init_process_group, and fully_shard, before."
        )
    check_kind("ShardedGuard: the model must be a torch.nn.Module", model, torch.nn.Module)
    check_kind("ShardedGuard: the optimizer must be one of torch.optim", optimizer, torch.optim.Optimizer)
    advice = "Give the loader and the guard ringtrain.torch.distributed.ReplicaSampler(dataset)"
    check_kind("ShardedGuard: the sampler must be a ReplicaSampler", sampler, ReplicaSampler, advice)
    _require_known(optimizer, {id(each) for each in model.parameters()})
    for name, each in model.named_parameters():
        if each.requires_grad and shard_kind(each) != "DTensor":
            raise InvalidArgumentError(
                f"ShardedGuard: parameters must be sharded over the replica, as by fully_shard, but {name!r} is a "
                f"{type(each).__name__}. Call fully_shard(model). A model of which each rank has a copy wants Guard or "
                "hvd.DistributedOptimizer."
            )


def _require_known(optimizer: torch.optim.Optimizer, known: Container[int]) -> None:
    """Raises InvalidArgumentError for parameters of something else, whose gradients nobody averages; ``known`` has ids."""
    if any(id(each) not in known for group in optimizer.param_groups for each in group["params"]):
        raise InvalidArgumentError(
            "ShardedGuard: the optimizer must train parameters of the model, but has others. Make it behind fully_shard, which "
            "replaces them."
        )
