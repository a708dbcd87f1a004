"""A context: one rank of one world, its operations, and the default context that ``init`` opens.

``operations``, ``process_sets`` and the adapters submit here; below are the native library and ``buffers``.
Every function may be called from any thread. ``testing.World`` makes a context current for a thread of its own.
"""

import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

from ringtrain import buffers, cuda_arrays, exits, launcher, log, mpi, nccl, options, reports, tables
from ringtrain._native import OK, PENDING, check, ffi, lib, take_text
from ringtrain.announce import announce_segments
from ringtrain.buffers import Buffer
from ringtrain.cuda_arrays import CudaArray
from ringtrain.errors import (
    ClosedError,
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
    RingtrainError,
    TimeoutError,
    of_status,
)

_SLICE_SECONDS = 0.1  # how long a wait may keep Ctrl-C and the library's log lines waiting
_DIMENSIONS = 8  # of one tensor in a pooled request; more get a request of their own
_OPERATION_IDS = {row.name: row.id for row in tables.OPERATIONS.values()}
_VOID = ffi.typeof("void *")
_HANDLE_OUT = ffi.typeof("rt_handle **")
_ERROR_OUT = ffi.typeof("char **")
_FORKED = (
    "the context must be used by the process that called init(), but this one was forked from it. Use spawn instead."
)


class _Request:
    """The C structs of one submission; kept in a pool, because making them costs more than filling them."""

    __slots__ = ("request", "tensors", "shapes", "handle", "error", "texts")

    def __init__(self, tensor_count: int, dimensions: int):
        self.request = ffi.new("rt_request *")
        self.tensors = ffi.new("rt_tensor[]", max(tensor_count, 1))
        self.shapes = ffi.new("int64_t[]", max(dimensions, 1))
        self.handle = ffi.new(_HANDLE_OUT)
        self.error = ffi.new(_ERROR_OUT)
        self.request.tensors = self.tensors
        self.texts: tuple = ()  # what the request points to, until the library has copied it

    def describe(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None]) -> None:
        """Fills the tensors of the request."""
        cast, shapes, place = ffi.cast, self.shapes, 0
        for tensor, buffer, output in zip(self.tensors, inputs, outputs, strict=False):
            tensor.data = cast(_VOID, buffer.address)
            tensor.output = ffi.NULL if output is None else cast(_VOID, output.address)
            tensor.dtype = buffer.dtype
            tensor.device = buffer.device
            tensor.stream = cast(_VOID, buffer.stream)
            tensor.ndim = len(buffer.shape)
            tensor.shape = shapes + place
            for extent in buffer.shape:
                shapes[place] = extent
                place += 1
        self.request.tensor_count = len(inputs)


class Operation:
    """A submitted operation. It keeps its tensors alive until it is done, even when the object itself is dropped."""

    __slots__ = ("_context", "_handle", "_tensors", "_finished", "_on_gpu")

    def __init__(self, context: "Context", handle, tensors: tuple):
        self._context = context
        self._handle = handle
        self._tensors = tensors
        self._finished = False  # never becomes True on a GPU, where the end of ``wait`` is not that of the work
        self._on_gpu = bool(tensors[0]) and tensors[0][0].device >= 0

    def done(self) -> bool:
        """Whether it ended, well or not, a GPU's part included; does not block."""
        return lib.rt_poll(self._handle) != PENDING

    def settled(self) -> bool:
        """Whether ``wait`` returns at once; with tensors on a GPU that is as soon as all is on its queue."""
        if self._on_gpu:
            return lib.rt_wait(self._handle, 0.0, ffi.NULL) != PENDING
        return self._finished or lib.rt_poll(self._handle) != PENDING

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the operation is done; other Python threads run meanwhile, and Ctrl-C is answered.

        With tensors on a GPU it blocks only until all is on the GPU's queue; ``hold_back`` orders what follows.

        Raises:
            TimeoutError: ``timeout`` seconds passed; the operation goes on.
            RingtrainError: the operation failed; the class tells how, on every rank alike.
        """
        if self._finished:
            return
        slice_seconds = _SLICE_SECONDS if timeout is None else min(timeout, _SLICE_SECONDS)
        status = lib.rt_wait(self._handle, slice_seconds, ffi.NULL)
        if status == PENDING:
            status = self._wait_on(timeout, slice_seconds)
        if status != OK:
            self._raise(status)
        self._finished = not self._on_gpu

    def hold_back(self, stream: int) -> None:
        """Makes what a CUDA stream is given from now on wait for the result, on the GPU; after ``wait``.

        Args:
            stream: its handle; 0 is the legacy stream.
        """
        error = ffi.new(_ERROR_OUT)
        check(lib.rt_stream_wait(self._handle, ffi.cast(_VOID, stream), error), error)

    def allocated(self, index: int = 0) -> tuple[object, int, tuple[int, ...]]:
        """Memory, dtype and shape of an output that the library allocated, after ``wait``; once for each output.

        The memory is freed with its last user; it speaks the buffer protocol, or is a ``CudaArray``.
        """
        data, ndim, shape, error = (
            ffi.new("void **"),
            ffi.new("int32_t *"),
            ffi.new("int64_t[]", lib.RT_MOST_DIMENSIONS),
            ffi.new(_ERROR_OUT),
        )
        check(lib.rt_output(self._handle, index, data, ndim, shape, error), error)
        extents = tuple(shape[i] for i in range(ndim[0]))
        memory, dtype = lib.rt_take_output(self._handle, index), self.dtype(index)
        if self._on_gpu:
            device_memory = buffers.DeviceMemory(int(ffi.cast("uintptr_t", memory)), self._tensors[0][index].device)
            return self.array_in(device_memory, dtype, extents), dtype, extents
        size_bytes = math.prod(extents) * tables.DTYPE_BY_ID[dtype].bytes
        return buffers.owned_memory(memory, size_bytes) if memory else bytearray(size_bytes), dtype, extents

    def array_in(self, memory: buffers.DeviceMemory, dtype: int, shape: tuple[int, ...]) -> CudaArray:
        """Memory of a GPU as an array whose readers wait for this operation."""
        return CudaArray(memory.address, tables.DTYPE_BY_ID[dtype], shape, memory.device, memory, self.hold_back)

    def dtype(self, index: int = 0) -> int:
        """Id of the element type of a tensor."""
        return self._tensors[0][index].dtype

    def received_splits(self) -> list[int]:
        """alltoall: the rows that came from each member of the process set."""
        count = lib.rt_received_splits(self._handle, ffi.NULL, 0)
        rows = ffi.new("int64_t[]", max(count, 1))
        lib.rt_received_splits(self._handle, rows, count)
        return list(rows[0:count])

    def result(self) -> int:
        """join: the rank that joined last. add_process_set: the new id."""
        return lib.rt_result(self._handle)

    def _wait_on(self, timeout: float | None, waited: float) -> int:
        """The slow part of ``wait``: slice by slice, so that signals are handled and log lines appear."""
        deadline = None if timeout is None else time.monotonic() + timeout - waited
        while True:
            log.drain(self._context.native)
            remaining = _SLICE_SECONDS if deadline is None else deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(
                    f"wait: the operation must be done within {timeout} s, but is pending. Other ranks may be late."
                )
            status = lib.rt_wait(self._handle, min(remaining, _SLICE_SECONDS), ffi.NULL)
            if status != PENDING:
                return status

    def _raise(self, status: int) -> None:
        log.drain(self._context.native)
        error = ffi.new(_ERROR_OUT)
        lib.rt_wait(self._handle, 0.0, error)
        self._context.raise_failure(status, take_text(error[0]))

    def __del__(self):
        context = getattr(self, "_context", None)
        if context is None or context.forked:
            return
        if self._finished or lib.rt_poll(self._handle) != PENDING:
            lib.rt_handle_free(self._handle)
        else:
            context.adopt(self._handle, self._tensors)


class Context:
    """One rank of one world, opened by ``init`` or ``testing.World``.

    Attributes:
        native: the library's ``rt_context *``.
        usable: False once it was closed, and in the child of a fork.
        forked: True in the child of a fork, where the library's threads and locks did not come along.
        over_mpi: whether its world runs over MPI.
        chosen: its options that differ from the defaults, as text.
    """

    def __init__(self, native):
        self.native = native
        self.usable = True
        self.forked = False
        self.over_mpi = False
        self.chosen: dict[str, str] = {}
        self._world = ffi.new("rt_world *")
        lib.rt_world_of(native, self._world)
        self._requests: list[_Request] = []  # pool; append and pop are atomic
        self._orphans: list[tuple] = []  # pending operations whose Python object is gone, with their tensors
        self._failure_was_raised = False  # that of the world
        self._names: dict[str, object] = {}  # names as C text
        self._call_counts: dict[str, itertools.count] = {}
        self._name_counts: dict[tuple[str, int], itertools.count] = {}
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
        reduction: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        weight: int | None = None,
        compression: str = "none",
        root: int = -1,
        splits: Sequence[int] | None = None,
        process_set: int = 0,
        waits: bool = False,
        refusal: str | None = None,
    ) -> Operation:
        """Submits an operation on one tensor or on a group of them, and returns at once.

        Args:
            operation: name of a row of ``tables.OPERATIONS``.
            name: identity among the ranks; None numbers unnamed operations in the order of submission.
            inputs: the tensors, unchanged by the caller until the operation is done.
            outputs: for operations that keep the shape, where the results go (may be the inputs); else None for each.
            reduction: name of a row of ``tables.REDUCTIONS``, where the operation reduces.
            prescale: factor on each contribution.
            postscale: factor on the result.
            weight: what this rank's contribution counts in an average; None on all ranks to count them alike.
            compression: name of a row of ``tables.COMPRESSIONS``, where the operation reduces.
            root: global rank, where the operation is rooted.
            splits: alltoall: rows for each member; add_process_set: ranks; remove_process_set: the id.
            process_set: id of the process set.
            waits: True if ``wait`` follows at once.
            refusal: why the caller refuses this submission; announced to the peers, whose operation fails with it.

        Raises:
            NotInitializedError: the context was closed.
            InvalidArgumentError: what this rank alone can see to be wrong.
        """
        if not self.usable:
            _raise_unusable(self)
        if self._orphans:
            self._release_orphans()
        slot = self._take_request(inputs)
        request = slot.request
        text = self._native_name(operation, name, process_set)
        request.name = text
        request.cacheable = name is not None
        request.operation = _OPERATION_IDS[operation]
        request.reduction = tables.REDUCTIONS[reduction]
        request.process_set = process_set
        request.root = root
        request.prescale = prescale
        request.postscale = postscale
        own_weight = request.weight = ffi.NULL if weight is None else ffi.new("int64_t *", weight)
        request.compression = tables.COMPRESSIONS[compression]
        request.caller_waits = waits
        slot.texts = (text, own_weight, _set_splits(request, splits), _set_refusal(request, operation, refusal))
        slot.describe(inputs, outputs)
        status = lib.rt_submit(self.native, request, slot.handle, slot.error)
        handle, error = slot.handle[0], slot.error
        if status != OK:
            log.drain(self.native)
            self.raise_failure(status, take_text(error[0]))
        if len(slot.tensors) == 1:
            self._requests.append(slot)
        return Operation(self, handle, (inputs, outputs))

    def refuse(self, operation: str, name: str | None, process_set: int, problem: RingtrainError) -> None:
        """Announces to the peers what the front end found wrong before submission, then raises it here with their text."""
        try:
            self.submit(operation, name, (), (), process_set=process_set, refusal=str(problem))
        except RingtrainError as announced:
            raise type(problem)(str(announced)) from problem
        raise problem

    def allocate_on_device(self, device: int, size_bytes: int) -> buffers.DeviceMemory:
        """Fresh memory of a GPU; raises UnsupportedError without a driver, InternalError where there is not enough."""
        memory, error = ffi.new("void **"), ffi.new(_ERROR_OUT)
        check(lib.rt_device_allocate(self.native, device, size_bytes, memory, error), error)
        return buffers.DeviceMemory(int(ffi.cast("uintptr_t", memory[0])), device)

    def read_device(self, memory: Buffer) -> bytearray:
        """The bytes of a tensor on a GPU, once its stream has come so far. Blocks; raises InternalError if the GPU fails."""
        content = bytearray(math.prod(memory.shape) * tables.DTYPE_BY_ID[memory.dtype].bytes)
        stream, address, error = ffi.cast(_VOID, memory.stream), ffi.cast(_VOID, memory.address), ffi.new(_ERROR_OUT)
        to = ffi.from_buffer(content)
        if content:
            check(lib.rt_device_read(self.native, memory.device, stream, address, len(content), to, error), error)
        return content

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Registers a process set and returns its id; collective over all ranks of the world."""
        operation = self.submit("add_process_set", None, (), (), splits=ranks, waits=True)
        operation.wait()
        return operation.result()

    def remove_process_set(self, process_set: int) -> None:
        """Removes a process set by its id; collective over all ranks of the world."""
        self.submit("remove_process_set", None, (), (), splits=[process_set], waits=True).wait()

    def counters(self) -> dict[str, int]:
        """The counters of ``tables.COUNTERS``, by name."""
        values = ffi.new("int64_t[]", len(tables.COUNTERS))
        lib.rt_counters(self.native, values, len(tables.COUNTERS))
        return {row.name: values[row.id] for row in tables.COUNTERS}

    def lateness(self) -> list[str]:
        """The lines of ``rt_lateness``."""
        return take_text(lib.rt_lateness(self.native)).splitlines()

    def process_set_ranks(self, process_set: int) -> list[int] | None:
        """Members of a process set, ascending; None if there is no such set."""
        ranks = ffi.new("int32_t[]", self.size)
        count = lib.rt_process_set_ranks(self.native, process_set, ranks, self.size)
        return None if count < 0 else list(ranks[0:count])

    def start_timeline(self, path: str) -> None:
        """Starts to write a trace to ``path``; see ``ringtrain.start_timeline``."""
        error = ffi.new(_ERROR_OUT)
        check(lib.rt_timeline_start(self.native, os.fsencode(path), error), error)

    def stop_timeline(self) -> None:
        """Ends the trace and its file."""
        error = ffi.new(_ERROR_OUT)
        check(lib.rt_timeline_stop(self.native, error), error)

    def abort(self, cause: str) -> None:
        """Fails everything pending and everything later on all ranks with this cause; the first cause wins."""
        if self.usable:
            lib.rt_abort(self.native, cause.encode())

    def count_call(self, what: str) -> int:
        """How often this was called before with ``what``: for things that are done at every n-th call, on all ranks alike."""
        return next(self._call_counts.setdefault(what, itertools.count()))

    def expect_silence(self, seconds: float) -> None:
        """Keeps the other ranks from reporting or giving up what waits for this one, for so long; 0: it is back."""
        if not self.usable:
            _raise_unusable(self)
        lib.rt_long_phase(self.native, seconds)

    def close(self, patience: float | None = None) -> str:
        """Ends this rank's part of the world and fails what is pending here; later calls do nothing.

        Args:
            patience: seconds for the other ranks to end theirs; ``shutdown_timeout_seconds`` by default.

        Returns:
            The cause if the world has failed and no operation has said so; else "".
        """
        if not self.usable:
            return ""
        self.usable = False
        error = ffi.new(_ERROR_OUT)
        status = lib.rt_close(self.native, -1.0 if patience is None else patience, error)
        log.drain(self.native)
        self._release_orphans()
        if status == OK:
            return ""
        exits.note_failed_world()  # what is left is not to wait for the dead
        cause = take_text(error[0])
        return "" if self._failure_was_raised else cause

    def raise_failure(self, status: int, text: str) -> NoReturn:
        """Raises the error of a status, with its text."""
        problem = of_status(status)(text)
        self._failure_was_raised |= isinstance(problem, PeerLostError)
        raise problem

    def adopt(self, handle, tensors: tuple) -> None:
        """Takes over a pending operation whose Python object is gone; its tensors live until it is done."""
        self._orphans.append((handle, tensors))

    def _take_request(self, inputs: Sequence[Buffer]) -> _Request:
        if len(inputs) <= 1:
            dimensions = len(inputs[0].shape) if inputs else 0
            if dimensions <= _DIMENSIONS:
                try:
                    return self._requests.pop()
                except IndexError:
                    return _Request(1, _DIMENSIONS)
        return _Request(len(inputs), sum(len(buffer.shape) for buffer in inputs))

    def _native_name(self, operation: str, name: str | None, process_set: int):
        """The name as C text. Names that come again are kept, since a training step brings the same ones."""
        if name is None:
            count = self._name_counts.setdefault((operation, process_set), itertools.count(1))
            return ffi.new("char[]", f"{operation}.noname.{next(count)}".encode())
        text = self._names.get(name)
        if text is None:
            if len(self._names) >= 65536:
                self._names.clear()
            text = self._names[name] = ffi.new("char[]", str(name).encode())
        return text

    def _release_orphans(self) -> None:
        orphans, self._orphans = self._orphans, []
        for handle, tensors in orphans:
            if lib.rt_poll(handle) != PENDING:
                lib.rt_handle_free(handle)
            else:
                self._orphans.append((handle, tensors))

    def __del__(self):
        if not getattr(self, "forked", True):
            lib.rt_context_free(self.native)


def _set_splits(request, splits: Sequence[int] | None):
    memory = ffi.NULL if splits is None else ffi.new("int64_t[]", list(splits))
    request.split_count, request.splits = 0 if splits is None else len(splits), memory
    return memory


def _set_refusal(request, operation: str, refusal: str | None):
    if refusal is None:
        memory = ffi.NULL
    else:
        memory = ffi.new("char[]", f"{operation} '{ffi.string(request.name).decode()}': {refusal}".encode())
    request.refusal = memory
    return memory


class _Current(threading.local):
    """The context of a thread of ``testing.World``; None elsewhere."""

    context: Context | None = None


_contexts: "weakref.WeakSet[Context]" = weakref.WeakSet()
_of_thread = _Current()
_default: Context | None = None
_default_lock = threading.Lock()


def open_in_process(hub, rank: int, chosen: dict[str, str]) -> Context:
    """Opens one rank of a hub (an ``rt_hub *``); blocks until all its ranks are opened."""
    return _open(chosen, lib.rt_open_in_process, hub, rank)


def open_hub(size: int, layout: str = ""):
    """An ``rt_hub *`` that connects ``size`` ranks of this process; ``lib.rt_hub_close`` takes it back."""
    hub, error = ffi.new("rt_hub **"), ffi.new(_ERROR_OUT)
    check(lib.rt_hub_open(size, layout.encode(), hub, error), error)
    return hub[0]


def gpu_libraries(chosen: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Version and path of each GPU library that was found, or "" and what is wrong; loads them.

    Args:
        chosen: options, of which ``cuda_lib`` and ``nccl_lib`` count.
    """
    suggest_nccl(nccl.suggested_path(), options.environment().get("NCCL_SOCKET_IFNAME", ""))
    paths = (os.fsencode(chosen.get(name, "")) for name in ("cuda_lib", "nccl_lib"))
    lines = take_text(lib.rt_gpu_libraries(*paths)).splitlines()
    return {name: (version, path) for name, version, path in (line.split("|", 2) for line in lines)}


def suggest_nccl(path: str, interfaces: str) -> None:
    """Names a file of NCCL to take if the process has none and the user named none; before the first tensor on a GPU.

    Args:
        path: the file, or "".
        interfaces: what ``NCCL_SOCKET_IFNAME`` says, for the texts of NCCL's errors.
    """
    lib.rt_suggest_nccl(os.fsencode(path), interfaces.encode())


def current() -> Context:
    """The context of this thread: that of its ``testing.World``, else the one that ``init`` opened.

    Raises:
        NotInitializedError: there is none.
    """
    context = _of_thread.context or _default
    if context is None or not context.usable:
        _raise_unusable(context)
    return context


def is_default(context: Context) -> bool:
    """Whether this is the context that ``init`` opened, and not a rank of a ``testing.World``."""
    return context is _default


def make_current(context: Context | None) -> None:
    """Makes a context that of this thread; None gives the thread the default one again."""
    _of_thread.context = context


def init(comm: object = None, process_sets: object = None, **arguments: object) -> None:
    """Joins the world: all ranks that the launcher started, or a world of one without it. A second call does nothing.

    Args:
        comm: None or [] for all ranks; a list of ranks; or an mpi4py communicator, which is duplicated.
        process_sets: sets to register, the same on all ranks; ``"dynamic"`` is accepted, sets can always be added.
        arguments: options by name; ``docs/options.md`` lists them.

    Raises:
        InvalidArgumentError: a wrong argument or option.
        MismatchError: ranks that disagree about their options or the process sets.
        UnsupportedError: the launcher's MPI is not the one that was found, or there is none.
        TimeoutError: not all ranks came within ``start_timeout_seconds``.

    Example:
        >>> import ringtrain as rt
        >>> rt.init()
        >>> rt.rank(), rt.size()
        (0, 1)
    """
    global _default
    with _default_lock:
        if is_initialized():
            return
        if _default is not None and _default.forked:
            _raise_unusable(_default)
        log.configure()
        chosen = options.resolve(arguments)
        exits.install(_abort_at_exception, _leave)
        _default = _open_world(comm, chosen)
        if _default.size > 1:
            signal_number = int(chosen.get("stack_signal", tables.OPTION_BY_NAME["stack_signal"].initial))
            lib.rt_ask_through(_default.native, reports.answer_requests(signal_number, _show_lines))
    try:
        _register_process_sets(_default, process_sets, comm)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leaves the world. Pending and later operations of the other ranks fail. ``init`` may be called again; MPI goes on."""
    _leave()


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` not yet since."""
    context = _of_thread.context or _default
    return context is not None and context.usable


def _show_lines() -> None:
    context = _default
    if context is not None:
        log.drain(context.native)


def _leave(patience: float | None = None) -> str:
    """``shutdown``, with ``close``'s argument and result."""
    global _default
    context = _of_thread.context or _default
    if context is None or context.forked:
        return ""
    try:
        return context.close(patience)
    finally:
        if context is _default:
            _default = None


def _open_world(comm: object, chosen: dict[str, str]) -> Context:
    environ = options.environment()
    started_by = launcher.find(environ)
    if not (comm is None or mpi.is_communicator(comm) or isinstance(comm, Sequence)):
        raise InvalidArgumentError(
            f"init: comm must be None, a list of ranks or an mpi4py communicator, but is {comm!r}."
        )
    if mpi.is_communicator(comm) or (started_by is not None and started_by.announces_several):
        return _open_mpi(comm, started_by, chosen)
    launcher.refuse_torchrun(environ)
    if comm:
        mpi.sorted_ranks(comm, 1)
    hub = open_hub(1)
    try:
        return open_in_process(hub, 0, chosen)
    finally:
        lib.rt_hub_close(hub)


def _open_mpi(comm: object, started_by: launcher.Launcher | None, chosen: dict[str, str]) -> Context:
    seconds = float(chosen.get("start_timeout_seconds", tables.OPTION_BY_NAME["start_timeout_seconds"].initial))
    MPI = mpi.load(started_by, seconds)
    communicator = mpi.communicator(MPI, comm)
    context = _open(chosen, lib.rt_open_mpi, os.fsencode(MPI.__file__), MPI._handleof(communicator))
    announce_segments()
    if context.size == MPI.COMM_WORLD.Get_size():
        exits.forget_failed_world()
    context.over_mpi = True
    mpi.warn_if_bound(started_by, context.local_rank)
    mpi.warn_if_wire_waits(MPI, context.cross_size, context.rank)
    return context


def _open(chosen: dict[str, str], function: Callable[..., int], *where: object) -> Context:
    native, error = ffi.new("rt_context **"), ffi.new(_ERROR_OUT)
    cuda_arrays.use_driver(chosen.get("cuda_lib", ""))
    suggest_nccl(nccl.suggested_path(), options.environment().get("NCCL_SOCKET_IFNAME", ""))
    check(function(*where, options.as_lines(chosen), native, error), error)
    context = Context(native[0])
    context.chosen = chosen
    log.drain(context.native)
    return context


def _register_process_sets(context: Context, process_sets: object, comm: object) -> None:
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return
    for process_set in process_sets:
        if hasattr(process_set, "register"):
            process_set.register(context, comm)
        else:
            context.add_process_set(process_set)


def _abort_at_exception(text: str, of_a_peer: bool) -> None:
    if _default is not None:
        _default.abort(text if of_a_peer else f"rank {_default.rank} ended with an uncaught exception: {text}")


def _raise_unusable(context: Context | None) -> None:
    if context is not None and context.forked:
        raise ClosedError(_FORKED)
    raise NotInitializedError(
        "ringtrain.init() must be called first, but was not, or shutdown() came since. Call init() again."
    )


def _mark_forked() -> None:
    for context in _contexts:
        context.usable, context.forked = False, True


os.register_at_fork(after_in_child=_mark_forked)
