"""The start of a world and its end: what ``init`` and ``shutdown`` do, by MPI or TCP under a launcher, within the process else.

It chooses how to join the others, opens the context and makes it the default one. A rank calls this once or twice.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ringtrain._binding import log, options, tables
from ringtrain._binding._native import lib
from ringtrain._bootstrap import membership
from ringtrain._bootstrap.opening import (
    listen,
    make_room_for,
    mark_as_rank,
    open_alone,
    open_context,
    open_tcp,
    start_seconds,
)
from ringtrain._rendezvous import launcher, meeting
from ringtrain._rendezvous import rendezvous as places
from ringtrain._rendezvous.announce import announce_segments
from ringtrain._runtime import exits, inquiries, mpi, reports
from ringtrain._runtime.context import Context, default, is_initialized, make_default, of_thread, raise_unusable
from ringtrain._runtime.flight_recorder import record_of
from ringtrain._runtime.process_sets import hosts_of
from ringtrain._runtime.statistics import lateness_of, shares_of, traffic_of
from ringtrain.errors import InvalidArgumentError, RingtrainError, UnsupportedError

_start_lock = threading.Lock()


def open_beside() -> Context:
    """A further world of all ranks of this job, which is nobody's default; for ranks that no MPI has started."""
    chosen, introduced = options.resolve({}), launcher.find_introduced(options.environment())
    return _open_introduced(None, introduced, chosen) if introduced else open_alone(chosen)


def open_apart(rank: int, size: int, store: Any, seconds: float) -> Context:
    """A further world of some ranks of this job, which is nobody's default; they meet in a store of torch's.

    Args:
        rank, size: this rank's number among them, and how many they are.
        store: a ``torch.distributed.Store`` that they alone use.
        seconds: how long to wait for the others.

    Raises:
        UnsupportedError, TimeoutError: as ``init``.
    """
    chosen = options.resolve({"start_timeout_seconds": seconds})
    place = places.checked(rank, size, store, None, options.environment())
    assert place is not None
    return _open_at(place, chosen)


def init(
    comm: Any = None,
    process_sets: Any = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    rendezvous: Any = None,
    secret: bytes | None = None,
    **arguments: object,
) -> None:
    """Joins the world: all ranks that the launcher started, or a world of one without it. A second call does nothing.

    Example:
        >>> import ringtrain as rt
        >>> rt.init()
        >>> rt.rank(), rt.size()
        (0, 1)

    A launcher is ringtrainrun, an MPI's, Slurm's, or torchrun; RANK, WORLD_SIZE and MASTER_ADDR in the environment serve
    as well, with RINGTRAIN_SECRET unless MASTER_ADDR is 127.0.0.1. Whatever else has started the ranks gives each its
    `rank`, their number, and a place where they find each other.

    Args:
        comm: None or [] for all ranks; a list of ranks; or an mpi4py communicator, which is duplicated.
        process_sets: sets to register, the same on all ranks; ``"dynamic"`` is accepted, sets can always be added.
        rank, size, rendezvous: this rank's number, the number of ranks, and where they meet, the same on all: a free
            ``"host:port"`` of rank 0's, which listens there; ``"file:///folder"``, which all see and this user alone;
            or a ``torch.distributed.Store``. TCP connects the ranks then. Each listens at its address towards that host
            or MASTER_ADDR, else on this host alone; RINGTRAIN_NETWORK_INTERFACES names other networks.
        secret: 32 bytes that all ranks know, by which connections are proven; RINGTRAIN_SECRET has it in hexadecimal, or
            as a text of 16 bytes at least. It must be given for ``"host:port"`` but on the loopback; else rank 0 draws one.
        arguments: options by name; ``docs/options.md`` lists them.

    Raises:
        InvalidArgumentError: a wrong argument or option.
        MismatchError: ranks that disagree about their options or the process sets.
        UnsupportedError: the launcher's MPI is not the one that was found, or there is none; or the launcher, which
            introduces the ranks to each other where there is no MPI, has gone.
        TimeoutError: not all ranks came within ``start_timeout_seconds``.
    """
    with _start_lock:
        if is_initialized():
            if ignored := sorted(name for name, value in arguments.items() if value is not None):
                log.logger.warning("init: the world is open already, so %s has no effect. Call shutdown() before",
                                   ", ".join(ignored))  # fmt: skip
            return
        former = default()
        if former is not None and former.forked:
            raise_unusable(former)
        log.configure()
        chosen = options.resolve(arguments)
        place = places.checked(rank, size, rendezvous, secret, options.environment())
        if not mpi.is_communicator(comm):
            launcher.refuse_child(options.environment(), os.getpid())
        exits.install(_abort_at_exception, _leave_for_good)
        context = _open_world(comm, place, chosen)
        make_default(context)
        if context.rank == 0 and "RINGTRAIN_LAUNCHER" not in options.environment():  # which has said so
            for line in options.remarks(options.environment()):
                log.logger.warning("%s", line)
        if context.size > 1:
            signal_number = int(chosen.get("stack_signal", tables.OPTION_BY_NAME["stack_signal"].initial))
            lib.rt_ask_through(context.native, reports.answer_requests(signal_number, _show_lines))
            if context.rank == 0:
                inquiries.answer_with(_state)
    try:
        _register_process_sets(context, process_sets, comm)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leaves the world. Pending and later operations of the other ranks fail. ``init`` may be called again; MPI goes on.

    Example:
        >>> rt.init()
        >>> mean = rt.allreduce(array, name="last")
        >>> rt.shutdown()
    """
    _leave()


def _show_lines() -> None:
    context = default()
    if context is not None:
        log.drain(context.native)


def _state() -> bytes:
    """What ``ringtrain top`` is told of the world that is open, if this is its rank 0; else that it is not."""
    context = default()
    if context is None or context.rank != 0:
        return b"{}"
    try:
        told = {
            "rank": context.rank, "size": context.size, "hosts": hosts_of(context, 0), "program": " ".join(sys.orig_argv),
            "lateness": lateness_of(context), "counters": context.counters(), "traffic": traffic_of(context),
            "shares": shares_of(context), "flight_record": record_of(context), "stall": log.newest_stall(),
        }  # fmt: skip
    except RingtrainError:  # it has just been closed
        return b"{}"
    return json.dumps(told).encode()


def _leave(patience: float | None = None) -> str:
    """``shutdown``, with ``close``'s argument and result."""
    context = of_thread()
    if context is None or context.forked:
        return ""
    if context.explain is not None and context.has_failed:
        patience = 0.0  # whoever lives goes on in another world
    elif patience is None:
        context.settle()
    try:
        return context.close(patience)
    finally:
        if context is default():
            make_default(None)


def _leave_for_good(patience: float) -> str:
    """``_leave`` at the end of the process. In an elastic job nobody waits for a rank that has failed."""
    member = membership.current()
    if member is not None and patience == math.inf:
        member.finish()
    return _leave(0.0 if member is not None and patience != math.inf else patience)


def _leave_before_mpi_ends() -> None:
    """The program calls MPI_Finalize itself; the context's thread must not use MPI after it, nor wait in it for the others."""
    context = default()
    if context is None or not context.usable or not context.over_mpi:
        return
    log.logger.warning("MPI_Finalize was called on rank %d while its world was open; it is shut down now. "
                       "Call ringtrain.shutdown() before", context.rank)  # fmt: skip
    _leave()


def _open_world(comm: Any, place: places.Place | None, chosen: dict[str, str]) -> Context:
    environ = options.environment()
    started_by = launcher.find(environ)
    if not (comm is None or mpi.is_communicator(comm) or isinstance(comm, Sequence)):
        raise InvalidArgumentError(
            f"init: comm must be None, a list of ranks or an mpi4py communicator, but is {comm!r}."
        )
    if place is not None:
        return _open_met(comm, place, chosen)
    launcher.refuse_part_of_rank(environ)
    if launcher.is_elastic(environ):
        from ringtrain._bootstrap.elastic_opening import open_elastic  # which a job of a fixed size does not load

        return open_elastic(comm, chosen)
    if introduced := launcher.find_introduced(environ):
        return _open_introduced(comm, introduced, chosen)
    several = started_by is not None and started_by.announces_several
    may_be_tcp = several and not mpi.is_communicator(comm) and chosen.get("transport") != "mpi"
    if started_by is not None and may_be_tcp and (place := places.of_slurm(started_by, environ)):
        context = _open_met(comm, place, chosen)
        mpi.warn_if_bound(started_by, context.local_rank)
        return context
    if mpi.is_communicator(comm) or several:
        return _open_mpi(comm, started_by, chosen)
    if not launcher.is_alone(environ) and (
        place := places.of_torchrun(environ, start_seconds(chosen)) or places.of_variables(environ)
    ):
        return _open_met(comm, place, chosen)
    launcher.refuse_announced(environ)
    if comm:
        mpi.sorted_ranks(comm, 1)
    return open_alone(chosen)


def _open_introduced(comm: Any, introduced: launcher.Introduced, chosen: dict[str, str]) -> Context:
    """By TCP, with the ranks that the launcher introduces to this one."""
    if mpi.is_communicator(comm) or chosen.get("transport") == "mpi":
        given = "comm is an mpi4py communicator" if mpi.is_communicator(comm) else "transport is 'mpi'"
        raise UnsupportedError(
            f"init: MPI must have started the ranks if it is to connect them, but ringtrainrun did without it, and {given}. "
            "Start the job with ringtrainrun --transport mpi."
        )
    ranks = mpi.ranks_with(introduced.rank, comm, introduced.size) if comm else []
    if len(ranks) == 1:
        return open_alone(chosen)
    make_room_for(len(ranks) or introduced.size)
    if introduced.rank == 0 and not ranks:
        from ringtrain._rendezvous import lonely_mpi

        lonely_mpi.warn_when_loaded(introduced.size)
    listener, addresses = listen(introduced.listens)
    told = meeting.meet(introduced.rank, ranks, addresses, start_seconds(chosen))
    context = open_tcp(listener, told.rank, told.peers, told.secret, told.epoch, chosen)
    mark_as_rank(context, introduced.size)
    return context


def _open_met(comm: Any, place: places.Place, chosen: dict[str, str]) -> Context:
    """By TCP, with the ranks that meet without a launcher of ours."""
    if comm:
        raise InvalidArgumentError(
            "init: comm must be None where the ranks meet by themselves, but is given. "
            "Make a process set of these ranks, or let them meet elsewhere, with rank and size among them."
        )
    context = _open_at(place, chosen)
    if place.size > 1:
        mark_as_rank(context, place.size)
    return context


def _open_at(place: places.Place, chosen: dict[str, str]) -> Context:
    """By TCP, with the ranks that come to this place."""
    if place.size == 1:
        return open_alone(chosen)
    make_room_for(place.size)
    seconds = start_seconds(chosen)
    listens = places.listening_addresses(options.environment(), place.towards, place.hosts, seconds)
    listener, addresses = listen(listens)
    told = places.meet(place, listens, addresses, seconds)
    return open_tcp(listener, told.rank, told.peers, told.secret, told.epoch, chosen)


def _open_mpi(comm: Any, started_by: launcher.Launcher | None, chosen: dict[str, str]) -> Context:
    if chosen.get("transport") == "tcp" and started_by is not None:
        raise UnsupportedError(
            f"init: transport must be 'mpi' or 'auto' where {started_by.name} has started the ranks, but is 'tcp'. "
            "Start the job with ringtrainrun --transport tcp."
        )
    MPI = mpi.load(started_by, start_seconds(chosen))
    communicator = mpi.communicator(MPI, comm)
    context = open_context(chosen, lib.rt_open_mpi, os.fsencode(MPI.__file__), MPI._handleof(communicator))
    announce_segments()
    mark_as_rank(context, MPI.COMM_WORLD.Get_size())
    context.over_mpi = True
    mpi.before_finalize(MPI, _leave_before_mpi_ends)
    context.communicator = comm if mpi.is_communicator(comm) else None
    mpi.warn_if_bound(started_by, context.local_rank)
    mpi.warn_if_wire_waits(MPI, context.cross_size, context.rank)
    return context


def _register_process_sets(context: Context, process_sets: Any, comm: Any) -> None:
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return
    for process_set in process_sets:
        if hasattr(process_set, "register"):
            process_set.register(context, comm)
        elif not context.takes_over:
            context.add_process_set(process_set)


def _abort_at_exception(text: str, of_a_peer: bool) -> None:
    context = default()
    if context is not None:
        context.abort(text if of_a_peer else f"rank {context.rank} ended with an uncaught exception: {text}")
