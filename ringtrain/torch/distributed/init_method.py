"""Where torch's default process group meets with ``init_method="ringtrain://"``: in ringtrain's world, whatever launcher there is."""

import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from ringtrain._binding import options
from ringtrain._bootstrap import membership, start
from ringtrain._runtime import context as contexts
from ringtrain._runtime.context import Context
from ringtrain._runtime.objects import broadcast_object


def meet(_url: str, *, timeout: timedelta, **_settings: object) -> Iterator[tuple[dist.Store, int, int]]:
    """Opens ringtrain's world unless it is open. Yields a store, the rank and the number of ranks.

    Raises:
        RingtrainError: what ``init`` raises.
    """
    if not contexts.is_initialized():
        start.init()
    world = contexts.current()
    yield _store(world, timeout), world.rank, world.size


def _store(world: Context, timeout: timedelta) -> dist.Store:
    """Of all ranks; in an elastic job of this process alone, since any rank may die and the group needs none."""
    if membership.current() is not None or world.size == 1:
        return dist.HashStore()
    host, port = told_address() or find_address(world)
    return dist.TCPStore(host, port, world.size, world.rank == 0 and not _is_torchruns(), timeout, multi_tenant=True)


def told_address() -> tuple[str, int] | None:
    """Where torch's store is according to the launcher, if it has said so."""
    environ = options.environment()
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return (host, int(port)) if host and port else None


def find_address(world: Context) -> tuple[str, int]:
    """A free one on the host of rank 0, for all ranks of the world, which call it together."""
    found = _free_address(world) if world.rank == 0 else None
    return broadcast_object(found, 0, "ringtrain.torch.distributed.store")


def _free_address(world: Context) -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return _name(world), int(probe.getsockname()[1])


def _name(world: Context) -> str:
    return "127.0.0.1" if world.local_size == world.size else socket.gethostname()


def _is_torchruns() -> bool:
    """Whether torchrun's agent has the store."""
    return options.environment().get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
