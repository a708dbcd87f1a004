"""The worlds of process groups: ``init_process_group`` opens ringtrain's or takes the one that is open, ``new_group`` opens more.

torch calls the members of a new group alone, where the core wants all ranks of a world to register a process set. So a
group of some ranks is a world of its own, and one of all ranks shares the world of the default group.
"""

import atexit
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ringtrain._binding import options as settings
from ringtrain._bootstrap import membership, start
from ringtrain._rendezvous import launcher
from ringtrain._runtime import context as contexts
from ringtrain._runtime.arguments import check_among
from ringtrain._runtime.context import Context
from ringtrain._runtime.rank_lists import ranks_text
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.torch.distributed.elastic_group import ElasticProcessGroup
from ringtrain.torch.distributed.process_group import RingtrainProcessGroup


class BackendOptions(Protocol):
    """torch's ``DistributedBackendOptions``, a private class."""

    store: dist.Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: Sequence[int]


_apart: "weakref.WeakSet[Context]" = weakref.WeakSet()  # worlds of groups of some ranks


def create(place: BackendOptions, options: object = None) -> RingtrainProcessGroup:
    """A process group for torch; ``Backend.register_backend`` hands this on.

    Args:
        place: torch's ``DistributedBackendOptions``: store, rank, size, timeout, name and members of the group.
        options: those of other backends; there are none of this one.

    Raises:
        InvalidArgumentError: ringtrain's world is open, with another rank or size; or options.
        RingtrainError: what ``init`` raises.
    """
    demand = "init_process_group: pg_options must be None for the backend 'ringtrain'"
    check_among(demand, options, [None], "docs/options.md has ringtrain's, as variables of the environment")
    members = place.global_ranks_in_group
    name = place.group_id
    if launcher.has_started_replicas(settings.environment()):  # torchrun's processes are no ranks of ringtrain's job
        context = _world_apart(place)
        return RingtrainProcessGroup(context, name, place.timeout, context.close, place.store)
    if not members:
        context, is_ours = _world(place)
        close = start.shutdown if is_ours else lambda: None
        if membership.current() is not None:
            return ElasticProcessGroup(context, name, place.timeout, close)
        return RingtrainProcessGroup(context, name, place.timeout, close, place.store)
    if membership.current() is not None:
        raise UnsupportedError(
            "new_group: an elastic job has its default group alone, since ranks come and go, but a group of "
            f"{ranks_text(members)} was to be made. Give hvd.elastic.State process_sets."
        )
    world = contexts.current()
    if list(members) == list(range(world.size)):
        return RingtrainProcessGroup(world, name, place.timeout, store=place.store)
    context = _world_apart(place)
    return RingtrainProcessGroup(context, name, place.timeout, context.close, place.store)


def _world(place: BackendOptions) -> tuple[Context, bool]:
    """The world of all ranks, and whether it was opened here."""
    is_ours = not contexts.is_initialized()
    if is_ours:
        if _is_announced(place):
            start.init()
        else:
            seconds = place.timeout.total_seconds()
            start.init(
                rank=place.group_rank, size=place.group_size, rendezvous=place.store, start_timeout_seconds=seconds
            )
    world = contexts.current()
    if membership.current() is not None and not _is_own_store(place.store):
        raise InvalidArgumentError(
            "init_process_group: in an elastic job ranks must not meet by torch's store, which ends with rank 0, but were to. "
            "Call init_process_group('ringtrain', init_method='ringtrain://')."
        )
    if (world.rank, world.size) != (place.group_rank, place.group_size):
        if is_ours:
            start.shutdown()
        raise InvalidArgumentError(
            f"init_process_group: torch's rank and size must be those of ringtrain's world, {world.rank} of {world.size}, but are "
            f"{place.group_rank} of {place.group_size}. Give rank=ringtrain.rank() and world_size=ringtrain.size()."
        )
    return world, is_ours


def _is_own_store(store: dist.Store) -> bool:
    """Whether it is of this process alone."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.HashStore)


def _is_announced(place: BackendOptions) -> bool:
    """Whether a launcher has started these ranks that introduces them to each other: then they need no store."""
    environ = settings.environment()
    if launcher.is_elastic(environ):
        return True
    found = launcher.find_introduced(environ) or launcher.find(environ)
    return found is not None and found.size == place.group_size


def _world_apart(place: BackendOptions) -> Context:
    if not _apart:
        atexit.register(_close_all)
    seconds = place.timeout.total_seconds()
    context = start.open_apart(place.group_rank, place.group_size, place.store, seconds)
    _apart.add(context)
    return context


def _close_all() -> None:
    for context in list(_apart):
        context.close()
