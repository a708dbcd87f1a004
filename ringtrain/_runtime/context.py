"""A context: one rank of one world, what it submits and what it tells; and the one that the calling thread uses.

``operations``, ``process_sets`` and the adapters submit here; ``start`` opens the default context. Every function may
be called from any thread. ``testing.World`` makes a context current for a thread of its own.
"""

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from ringtrain._binding import log, tables
from ringtrain._binding._native import (
    OK,
    PENDING,
    CData,
    as_text,
    counted,
    ffi,
    lib,
    take_error,
)
from ringtrain._binding.tensor_memory import Buffer
from ringtrain._runtime import exits, ranges
from ringtrain._runtime.pending import Operation, Request
from ringtrain.errors import (
    ClosedError,
    ForkedError,
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
    RingtrainError,
    TimeoutError,
    UnsupportedError,
    of_status,
    status_of_refusal,
)

_MOST_REPEATS = 4096  # names, some 2 KB each
_MOST_REQUESTS = 4096  # that are kept for the next step, a kilobyte each, and 56 bytes for each tensor of a group
_MOST_NAMES = 65536
_IN_FLIGHT = "in flight"  # in the core's words of a name that was submitted and is not done
_OPERATION_IDS = {row.name: row.id for row in tables.OPERATIONS.values()}
_LONGEST_REFUSAL = 4000  # bytes: a text travels to all ranks
_ROOM_FOR_RANK = 32  # of them: the core adds on which it was found
_VOID = ffi.typeof("void *")
_HANDLE_OUT = ffi.typeof("rt_handle **")
_ERROR_OUT = ffi.typeof("char **")
_FORKED = (
    "the context must be used by the process that called init(), but this one was forked from it. Use spawn instead."
)


class Peer(NamedTuple):
    """A rank of an elastic job, for its whole life, whatever its number is.

    Attributes:
        uid: 32 hexadecimal digits, drawn for the process.
        host: its host's name.
        slot: its place there.
    """

    uid: str
    host: str
    slot: int


class Context:
    """One rank of one world, opened by ``init`` or ``testing.World``.

    Attributes:
        native: the library's ``rt_context *``.
        repeats: filled requests by name, of ``ringtrain._runtime.repeats``; none while operations wait to be released.
        usable: False once it was closed, and in the child of a fork.
        forked: True in the child of a fork, where the library's threads and locks did not come along.
        over_mpi: whether its world runs over MPI.
        chosen: its options that differ from the defaults, as text.
        joins: how often its ranks have all joined.
        met: process sets with names under which their ranks have compared what they train.
        communicator: the mpi4py communicator that ``init`` was given, or None.
        explain: in an elastic job, what makes of the error of a world that has ended the one that is raised; None else.
        ended_because: why its world has ended, in the words of an elastic job's launcher; "" before.
        aborted: whether this rank has given the world up, with a cause of its own.
        serving: what others need this rank for as long as it lives, such as its rows of a table; see ``join``.
        unsettled: what may be on its way when this rank has done all its steps, and is to come before the world closes.
        closing: what has something to say when this rank closes its part of the world, in that order; see ``close``.
        world: in an elastic job, the number that the launcher has given its world; 0 else.
        awaits_gpus: whether who waits for an operation waits for its part on a GPU, too: what is to be released must be
            there, and not on a queue that goes with the world.
        peers: in an elastic job, who its ranks are, by rank; empty else.
        takes_over: whether this rank has joined a job that had begun, and has not got its state yet.
        sets: in an elastic job, the process sets that were added in this world, or go on in it; of a rank that takes
            over, those that it has made and is to take over.
    """

    def __init__(self, native: CData):
        self.native = native
        self.usable = True
        self.forked = False
        self.over_mpi = False
        self.chosen: dict[str, str] = {}
        self.joins = 0
        self.met: set[tuple[Any, str]] = set()
        self.serving: weakref.WeakSet[Any] = weakref.WeakSet()
        self.unsettled: weakref.WeakSet[Any] = weakref.WeakSet()
        self.closing: dict[Any, None] = {}
        self.communicator: object = None
        self.explain: Callable[[Context, RingtrainError], RingtrainError] | None = None
        self.ended_because = ""
        self.aborted = False
        self.world = 0
        self.awaits_gpus = False
        self.peers: tuple[Peer, ...] = ()
        self.takes_over = False
        self.sets: list[Any] = []
        self._world = ffi.new("rt_world *")
        lib.rt_world_of(native, self._world)
        self._requests: dict[tuple, Request] = {}  # by what they are for; those that are being filled are not in it
        self.repeats: dict[str, Any] = {}
        self._came: set[str] = set()  # names that may come again
        # Where names were submitted, which takes half a microsecond each.
        self._places: dict[tuple[str, int], str] | None = {} if log.logger.isEnabledFor(logging.DEBUG) else None
        self._orphans: list[tuple] = []  # pending operations whose Python object is gone, with their tensors
        self._failure_was_raised = False  # that of the world
        self._names: dict[str, object] = {}  # names as C text
        self._call_counts: dict[str, itertools.count] = {}
        self._name_counts: dict[tuple[str, int], itertools.count] = {}
        self._counted = {"local_steps": 0, "synchronisations": 0}
        _contexts.add(self)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._world.size

    @property
    def local_rank(self) -> int:
        """This rank among those of its host."""
        return self._world.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks of this host."""
        return self._world.local_size

    @property
    def cross_rank(self) -> int:
        """Place of this host among the hosts that have this local rank."""
        return self._world.cross_rank

    @property
    def cross_size(self) -> int:
        """Number of hosts that have this local rank."""
        return self._world.cross_size

    @property
    def site(self) -> int:
        """Number of this rank's site."""
        return self._world.site

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return bool(self._world.homogeneous)

    def submit(
        self,
        operation: str,
        name: str | None,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer | None],
        *,
        splits: Sequence[int] | None = None,
        process_set: int = 0,
        waits: bool = False,
        once: bool = False,
        room: bool = False,
        **attributes: Any,
    ) -> Operation:
        """Submits an operation on one tensor or on a group of them, and returns at once.

        Args:
            operation: name of a row of ``tables.OPERATIONS``.
            name: identity among the ranks; None numbers unnamed operations in the order of submission.
            inputs: the tensors, unchanged by the caller until the operation is done.
            outputs: for operations that keep the shape, where the results go (may be the inputs); else None for each, or
                with ``room`` memory for the result, which is used if that has as many bytes (``has_filled``).
            splits: alltoall: rows for each member; add_process_set: ranks; remove_process_set: the id.
            process_set: id of the process set.
            waits: True if ``wait`` follows at once.
            once: True if the name will not come again, so that nobody remembers it.
            room: True if some outputs are room for rows.
            attributes: rows of ``tables.ATTRIBUTES`` that differ from their initial values: a name of the table that
                the kind says, a number, or None for no count of this rank's own.

        Raises:
            NotInitializedError: the context was closed.
            InvalidArgumentError: what this rank alone can see to be wrong. The peers' operation fails with the same
                text.
        """
        return self.submit_with(
            attributes, operation, name, inputs, outputs, splits, process_set, waits=waits, once=once, room=room
        )

    def submit_with(
        self,
        attributes: dict[str, Any],
        operation: str,
        name: str | None,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer | None],
        splits: Sequence[int] | None = None,
        process_set: int = 0,
        *,
        waits: bool = False,
        once: bool = False,
        room: bool = False,
    ) -> Operation:
        """``submit`` for a caller that has the attributes in a dict, which nobody changes afterwards."""
        if not self.usable:
            raise_unusable(self)
        if self._orphans:
            self._release_orphans()
        named = name is not None and not once
        key = (operation, name, process_set) if named else (operation, process_set, len(inputs), "")
        try:
            slot = self._requests.pop(key, None)  # atomic: no other thread fills it meanwhile
        except TypeError:  # a name that is a list, say
            slot = None
        if slot is None:
            text = self._native_name(operation, name, process_set, once)
            slot = Request(_OPERATION_IDS[operation], process_set, named)
            slot.name(text)
        elif not named:
            slot.name(self._native_name(operation, name, process_set, once))
        try:
            if attributes is not slot.attributes:
                slot.set_attributes(attributes)
            slot.set_splits(splits)
            slot.describe(inputs, outputs)
            if room:
                slot.give_room(outputs)
        except Exception as problem:  # a number that has no place in the C struct, or no memory for it
            self._refuse(operation, slot.text, process_set, problem)
        request = slot.request
        request.caller_waits = waits
        if ranges.wanted():
            with ranges.around(f"ringtrain.{operation}" if once else f"ringtrain.{operation}: {name or 'unnamed'}"):
                status = lib.rt_submit(self.native, request, slot.handle, slot.error)
        else:
            status = lib.rt_submit(self.native, request, slot.handle, slot.error)
        if status != OK:
            log.drain(self.native)
            refusal = take_error(slot.error)
            self.raise_failure(
                status, refusal + self._places_of(name, process_set) if _IN_FLIGHT in refusal else refusal
            )
        if self._places is not None and name is not None:
            self._places[name, process_set] = exits.place_of_caller()
        handle = slot.handle[0]
        if len(self._requests) >= _MOST_REQUESTS:
            self._requests.clear()
        self._requests[key] = slot
        return Operation(self, handle, (inputs, outputs), name or operation, operation if once else "")

    def _places_of(self, name: str | None, process_set: int) -> str:
        """Where a name that is in flight comes again, and where it came first."""
        again = f" It comes again at {exits.place_of_caller()}"
        if self._places is None:
            return f"{again}; with RINGTRAIN_LOG_LEVEL=debug this says where it came first."
        return f"{again}, and came first at {self._places.get((name or '', process_set), 'a place that is not known')}."

    def refuse(self, operation: str, name: str | None, process_set: int, problem: Exception) -> NoReturn:
        """Announces to the peers what was met before submission, and raises it here with the text that they get.

        Args:
            operation: name of a row of ``tables.OPERATIONS``.
            name: as in ``submit``; an unnamed operation takes its number.
            process_set: id of the process set.
            problem: raised again with its class if that is one of this package, else as an InvalidArgumentError.
        """
        if not self.usable:
            raise problem
        self._refuse(operation, self._native_name(operation, name, process_set), process_set, problem)

    def _refuse(self, operation: str, name: CData, process_set: int, problem: Exception) -> NoReturn:
        """``refuse`` under a name that is C text already."""
        ours = isinstance(problem, RingtrainError)
        words = (
            str(problem) if ours else f"all ranks must submit it, but rank {self.rank} could not: {_summary(problem)}"
        )
        refusal = as_text(f"{operation} '{ffi.string(name).decode()}': {words}", _LONGEST_REFUSAL - _ROOM_FOR_RANK)
        request, handle, error = ffi.new("rt_request *"), ffi.new(_HANDLE_OUT), ffi.new(_ERROR_OUT)
        request.name, request.refusal = name, refusal
        request.refusal_status = told = status_of_refusal(problem)
        request.operation, request.process_set = _OPERATION_IDS[operation], process_set
        status = lib.rt_submit(self.native, request, handle, error)
        log.drain(self.native)
        if ours and status == told:
            raise type(problem)(take_error(error)) from problem
        try:
            self.raise_failure(status, take_error(error))
        except RingtrainError as announced:
            raise announced from problem

    def join(self) -> int:
        """Blocks until all ranks have joined, and returns the one that came last.

        Raises UnsupportedError while others need what is on this rank, in ``serving``.
        """
        if self.serving and self.size > 1:
            own_words = next((each.refuses_join for each in self.serving if hasattr(each, "refuses_join")), None)
            raise UnsupportedError(
                own_words
                or "join: this rank must go on serving its rows of sharded embeddings, but would serve nobody any more. Let "
                "ranks without data go on with empty batches (docs/embeddings.md, 'Uneven batches')."
            )
        operation = self.submit("join", None, (), (), waits=True)
        operation.wait()
        self.joins += 1
        return operation.result()

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Registers a process set and returns its id; collective over all ranks of the world."""
        operation = self.submit("add_process_set", None, (), (), splits=ranks, waits=True)
        operation.wait()
        return operation.result()

    def remove_process_set(self, process_set: int) -> None:
        """Removes a process set by its id; collective over all ranks of the world."""
        self.submit("remove_process_set", None, (), (), splits=[process_set], waits=True).wait()

    def counters(self) -> dict[str, int]:
        """The counters of ``tables.COUNTERS``, by name, and those of local steps, which the library knows nothing of."""
        values = ffi.new("int64_t[]", len(tables.COUNTERS))
        lib.rt_counters(self.native, values, len(tables.COUNTERS))
        return {**{row.name: values[row.id] for row in tables.COUNTERS}, **self._counted}

    def count(self, counter: str, amount: int = 1) -> None:
        """Adds to one of the counters of local steps."""
        self._counted[counter] += amount

    def burst_bytes(self) -> int:
        """Of small operations that nobody waits for: from so many on they leave."""
        return lib.rt_burst_bytes(self.native)

    def abort(self, cause: str) -> None:
        """Fails everything pending and everything later on all ranks with this cause; the first cause wins."""
        if self.usable:
            self.aborted = True
            lib.rt_abort(self.native, as_text(cause))

    def count_call(self, what: str) -> int:
        """How often this was called before with ``what``: for things that are done at every n-th call, on all ranks alike."""
        return next(self._call_counts.setdefault(what, itertools.count()))

    def expect_silence(self, seconds: float) -> None:
        """Keeps the other ranks from reporting or giving up what waits for this one, for so long; 0: it is back."""
        if not self.usable:
            raise_unusable(self)
        lib.rt_long_phase(self.native, seconds)

    def await_state_from(self, first: int) -> None:
        """Ranks from this one on take the state over, and are waited for: their silence counts sooner. ``size``: none do any more."""
        lib.rt_await_state_from(self.native, first)

    def settle(self) -> None:
        """Before this rank leaves: takes what is on its way to it, as long as the world lives."""
        if self.usable and not self.has_failed:
            for each in list(self.unsettled):
                each.settle()

    def close(self, patience: float | None = None) -> str:
        """Ends this rank's part of the world and fails what is pending here; later calls do nothing.

        Args:
            patience: seconds for the other ranks to end theirs; ``shutdown_timeout_seconds`` by default.

        Returns:
            The cause if the world has failed and no operation has said so; else "".
        """
        if not self.usable:
            return ""
        for each in self.closing:
            each.close(self)
        self.usable = False
        error = ffi.new(_ERROR_OUT)
        status = lib.rt_close(self.native, -1.0 if patience is None else patience, error)
        log.drain(self.native)
        self._release_orphans()
        if status == OK:
            return ""
        exits.note_failed_world()  # what is left is not to wait for the dead
        cause = take_error(error)
        return "" if self._failure_was_raised else cause

    def suspects(self, why: int) -> list[int]:
        """Ranks with which this one finds fault, another host by its lowest; why: `RT_SILENT` and the like."""
        ranks = ffi.new("int32_t[]", self.size)
        return list(ranks[0 : counted(lib.rt_suspects(self.native, why, ranks, self.size))])

    def raise_failure(self, status: int, text: str) -> NoReturn:
        """Raises the error of a status, with its text."""
        problem = of_status(status)(text)
        self._failure_was_raised |= isinstance(problem, PeerLostError)
        if self.explain is not None and isinstance(problem, (PeerLostError, ClosedError, TimeoutError)):
            self._failure_was_raised = True
            problem = self.explain(self, problem)
        raise problem

    @property
    def has_failed(self) -> bool:
        """Whether its world is known to have ended by a failure."""
        return self._failure_was_raised or bool(self.ended_because)

    def adopt(self, handle: CData, tensors: tuple) -> None:
        """Takes over a pending operation whose Python object is gone; its tensors live until it is done."""
        self._orphans.append((handle, tensors))
        self.repeats.clear()  # the general way looks after it

    def comes_again(self, name: str) -> bool:
        """Whether a filled request may be kept for this name, which has come before."""
        if len(self._came) >= _MOST_REPEATS:
            self._came.clear()
            self.repeats.clear()
        came = name in self._came
        self._came.add(name)
        return came and not self._orphans

    def _native_name(self, operation: str, name: Any, process_set: int, once: bool = False) -> CData:
        """The name as C text. Names that come again are kept, since a training step brings the same ones."""
        if name is None:
            count = self._name_counts.setdefault((operation, process_set), itertools.count(1))
            return ffi.new("char[]", f"{operation}.noname.{next(count)}".encode())
        if once and name:
            return ffi.new("char[]", name.encode())
        try:
            return self._names[name]
        except (KeyError, TypeError):  # a new one, or a list
            return self._new_name(operation, name, process_set)

    def _new_name(self, operation: str, name: Any, process_set: int) -> CData:
        """Refuses what is no name, under the nearest text that is one."""
        try:
            check_name(name)
        except InvalidArgumentError as problem:
            nearest = as_text(name if isinstance(name, str) else type(name).__name__, _LONGEST_REFUSAL)
            self._refuse(operation, nearest, process_set, problem)
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        text = self._names[name] = ffi.new("char[]", name.encode())
        return text

    def _release_orphans(self) -> None:
        orphans, self._orphans = self._orphans, []
        for handle, tensors in orphans:
            if lib.rt_poll(handle) != PENDING:
                lib.rt_handle_free(handle)
            else:
                self._orphans.append((handle, tensors))

    def __del__(self, free: Callable[[CData], None] = lib.rt_context_free) -> None:
        if not getattr(self, "forked", True):
            free(self.native)  # not by a global name: a context that outlives this module finds none


def check_name(name: object) -> None:
    """Raises InvalidArgumentError for what cannot name an operation: it would be cut, and taken for another one."""
    if not isinstance(name, str):
        raise InvalidArgumentError(
            f"the name must be a str, but is of type {type(name).__name__}. Pass a text, or None for a number."
        )
    if "\0" in name:
        raise InvalidArgumentError(f"the name must not contain a NUL character, but is {name!r}. Leave it out.")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"the name must be text that UTF-8 can encode, but is {name!r}. Leave the surrogates out."
        ) from None


def _summary(problem: Exception) -> str:
    """The class and the words of an exception, which may fail to say them."""
    try:
        words = str(problem)
    except Exception:  # somebody else's __str__
        words = ""
    return f"{type(problem).__name__}: {words}" if words else type(problem).__name__


class _Current(threading.local):
    """The context of a thread of ``testing.World``; None elsewhere."""

    context: Context | None = None


_contexts: "weakref.WeakSet[Context]" = weakref.WeakSet()
_own = _Current()
_default: Context | None = None


def current() -> Context:
    """The context of this thread: that of its ``testing.World``, else the one that ``init`` opened.

    Example:
        >>> context = rt.current()
        >>> print(f"rank {context.rank} of {context.size}")

    Raises:
        NotInitializedError: there is none.
    """
    context = _own.context or _default
    if context is None or not context.usable:
        raise_unusable(context)
    return context


def is_default(context: Context) -> bool:
    """Whether this is the context that ``init`` opened, and not a rank of a ``testing.World``."""
    return context is _default


def make_current(context: Context | None) -> None:
    """Makes a context that of this thread; None gives the thread the default one again."""
    _own.context = context


def own() -> Context | None:
    """The context of this thread, one of ``testing.World``; None elsewhere, where threads share the default one."""
    return _own.context


@contextmanager
def acting_for(context: Context | None) -> Iterator[None]:
    """Within it this thread acts for a rank, whichever it acts for else: frameworks call from threads of their own.

    Args:
        context: of the rank; None changes nothing.
    """
    before = _own.context
    _own.context = context or before
    try:
        yield
    finally:
        _own.context = before


def default() -> Context | None:
    """The context that ``init`` opened; None before it, and after ``shutdown``."""
    return _default


def make_default(context: Context | None) -> None:
    """Makes a context that of all threads which have none of their own."""
    global _default
    _default = context


def of_thread() -> Context | None:
    """What ``current`` looks at: a context that may be closed, or None."""
    return _own.context or _default


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` not yet since.

    Example:
        >>> if not rt.is_initialized():
        ...     rt.init()
    """
    context = _own.context or _default
    return context is not None and context.usable


def raise_unusable(context: Context | None) -> NoReturn:
    """Raises what a call needs to hear that finds no open context, or one of before a fork."""
    if context is not None and context.forked:
        raise ForkedError(_FORKED)
    raise NotInitializedError(
        "ringtrain.init() must be called first, but was not, or shutdown() came since. Call init() again. "
        "(In the words of Horovod's scripts: Horovod has not been initialized; use hvd.init().)"
    )


def _mark_forked() -> None:
    for context in _contexts:
        context.usable, context.forked = False, True


os.register_at_fork(after_in_child=_mark_forked)
