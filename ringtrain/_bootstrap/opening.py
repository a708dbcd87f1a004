"""Opens one rank of a world whose ranks are known: within the process, over TCP, or by whatever the library offers."""

import os
from collections.abc import Callable, Sequence

from ringtrain._binding import cuda_arrays, log, options, tables
from ringtrain._binding._native import CData, as_text, check, ffi, lib, take_answer
from ringtrain._bootstrap import descriptors, nccl
from ringtrain._rendezvous import launcher
from ringtrain._runtime import exits
from ringtrain._runtime.context import Context
from ringtrain.errors import InvalidArgumentError, UnsupportedError

_ERROR_OUT = ffi.typeof("char **")
DESCRIPTORS_OF_A_WORLD = 10  # over TCP, with two connections; see door.h and connections.h
DESCRIPTORS_OF_A_PEER = 4  # at most, for one link and one stream


def open_in_process(hub: CData, rank: int, chosen: dict[str, str]) -> Context:
    """Opens one rank of a hub (an ``rt_hub *``); blocks until all its ranks are opened."""
    return open_context(chosen, lib.rt_open_in_process, hub, rank)


def open_hub(size: int, layout: str = "") -> CData:
    """An ``rt_hub *`` that connects ``size`` ranks of this process; ``lib.rt_hub_close`` takes it back."""
    hub, error = ffi.new("rt_hub **"), ffi.new(_ERROR_OUT)
    check(lib.rt_hub_open(size, as_text(layout), hub, error), error)
    return hub[0]


def listen(addresses: str) -> tuple[CData, str]:
    """An ``rt_listener *`` for :func:`open_tcp`, and its addresses as the other ranks must be told.

    Args:
        addresses: ``"ip:port"`` for each link between the hosts, parted by commas; the port may be 0 (any) or a range such
            as ``4711-4720``. No others are listened on.

    Raises:
        InvalidArgumentError: not such a text, or this host cannot listen there.
    """
    listener, error = ffi.new("rt_listener **"), ffi.new(_ERROR_OUT)
    check(lib.rt_listen(as_text(addresses), listener, error), error)
    owned = ffi.gc(listener[0], lib.rt_listener_close)
    return owned, take_answer(lib.rt_listener_addresses(owned))


def open_tcp(
    listener: CData, rank: int, peers: Sequence[str], secret: bytearray, epoch: int, chosen: dict[str, str]
) -> Context:
    """Opens one rank of a world over TCP; blocks until all its ranks have. Who tells the ranks all this is the caller's.

    Args:
        listener: of :func:`listen`; it serves one world.
        rank: this rank's, the place of its own addresses in ``peers``.
        peers: the addresses of all ranks' listeners, by rank.
        secret: 32 bytes that this job alone knows; zeros afterwards.
        epoch: the world's number, below 2**64; ranks of another are not heard.
        chosen: options, as text.
    """
    if len(secret) != lib.RT_SECRET_BYTES:
        raise InvalidArgumentError(
            f"init over TCP: the secret must have {lib.RT_SECRET_BYTES} bytes, but has {len(secret)}. Draw that many."
        )
    lines = as_text("\n".join(peers))
    return open_context(chosen, lib.rt_open_tcp, listener, rank, lines, ffi.from_buffer("uint8_t[]", secret), epoch)


def open_alone(chosen: dict[str, str]) -> Context:
    hub = open_hub(1)
    try:
        return open_in_process(hub, 0, chosen)
    finally:
        lib.rt_hub_close(hub)


def make_room_for(size: int) -> None:
    """For the descriptors of a world over TCP. Raises UnsupportedError if the process may not open those without which none opens."""
    if lack := descriptors.lack(DESCRIPTORS_OF_A_WORLD, DESCRIPTORS_OF_A_WORLD + DESCRIPTORS_OF_A_PEER * size):
        raise UnsupportedError(f"init: {lack}")


def mark_as_rank(context: Context, size: int) -> None:
    """Notes for children and for the end of this process that it is a rank, of so many that the launcher has started."""
    mark = launcher.mark_of_rank(options.environment(), os.getpid(), context.rank)
    options.put_into_environment(launcher.RANK_PROCESS, mark)
    if context.size == size:
        exits.forget_failed_world()


def start_seconds(chosen: dict[str, str]) -> float:
    return float(chosen.get("start_timeout_seconds", tables.OPTION_BY_NAME["start_timeout_seconds"].initial))


def open_context(chosen: dict[str, str], function: Callable[..., int], *where: object) -> Context:
    native, error = ffi.new("rt_context **"), ffi.new(_ERROR_OUT)
    cuda_arrays.use_driver(chosen.get("cuda_lib", ""))
    nccl.suggest(options.environment())
    check(function(*where, options.as_lines(chosen), native, error), error)
    context = Context(native[0])
    context.chosen = chosen
    log.drain(context.native)
    return context
