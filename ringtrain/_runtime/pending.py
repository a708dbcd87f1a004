"""A request to the library on its way in, and the operation that it becomes: filled, waited for, taken over when dropped.

``context`` fills and submits requests, and makes the operations. Every function may be called from any thread.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from ringtrain._binding import device_memory, log, tables, tensor_memory
from ringtrain._binding._native import OK, PENDING, CData, check, ffi, lib, take_error
from ringtrain._binding.array_groups import ArrayGroup
from ringtrain._binding.cuda_arrays import CudaArray
from ringtrain._binding.tensor_memory import Buffer, HostBuffers
from ringtrain._runtime import ranges
from ringtrain.errors import TimeoutError

_DIMENSIONS = 8  # of the tensors of a new request; more get room when they come
_SLICE_SECONDS = 0.1  # how long a wait may keep Ctrl-C and the library's log lines waiting
_GPU_PAUSE_SECONDS = 20e-6  # from one look at a GPU's work to the next
_VOID = ffi.typeof("void *")
_POINTERS = ffi.typeof("void *[]")
_HANDLE_OUT = ffi.typeof("rt_handle **")
_ERROR_OUT = ffi.typeof("char **")
_TABLE_OF_KIND = {"kReduction": tables.REDUCTIONS, "kCompression": tables.COMPRESSIONS}
_INT64 = ffi.typeof("int64_t *")
_NULL = ffi.NULL


def _initial_of(row: tables.Attribute) -> Any:
    if row.kind == "kOwnCount":
        return ffi.NULL
    return row.initial if row.kind == "kFactor" else int(row.initial)


# Of each attribute: name, the table whose names are its values, whether it points to a count, the initial value in C.
_ATTRIBUTES = [
    (row.name, _TABLE_OF_KIND.get(row.kind), row.kind == "kOwnCount", _initial_of(row))
    for row in tables.ATTRIBUTES.values()
]


class Request:
    """The C structs of one submission, kept for the next one of its name.

    Mostly that differs in nothing but the addresses of its tensors, and writing these alone is what makes it cheap.

    Attributes:
        request: the ``rt_request``; what it points to is kept here, until the library has copied it.
        text: the operation's name as C text.
        attributes: what ``set_attributes`` was given last.
        first: the struct of its first tensor.
    """

    __slots__ = (
        "request", "text", "attributes", "handle", "error",
        "first", "_tensors", "_shapes", "_dtypes", "_extents", "_splits", "_counts",
    )  # fmt: skip

    def __init__(self, operation: int, process_set: int, cacheable: bool):
        self.request = ffi.new("rt_request *")
        self.request.operation = operation
        self.request.process_set = process_set
        self.request.cacheable = cacheable
        self.handle = ffi.new(_HANDLE_OUT)
        self.error = ffi.new(_ERROR_OUT)
        self.attributes: dict[str, Any] | None = None
        self._counts: list = []  # attributes of this rank's own, to which the struct points
        self._splits: CData = None
        self._shapes: Any = ()  # as described last; of one tensor its own, of several or none a list; None on a GPU
        self._dtypes: Any = None  # the same of their dtypes
        self._extents = ffi.new("int64_t[]", _DIMENSIONS)
        self._make_tensors(1)

    def _make_tensors(self, count: int) -> None:
        self._tensors = ffi.new("rt_tensor[]", count)
        self.first = self._tensors[0]  # a reference to a struct

    def name(self, text: CData) -> None:
        """Names the operation."""
        self.text = self.request.name = text

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        """Sets rows of ``tables.ATTRIBUTES``, the others to their initial values."""
        if attributes == self.attributes:  # mostly: a training step asks for what the one before has asked for
            return
        self.attributes, self._counts, request = None, [], self.request
        for name, table, counts, initial in _ATTRIBUTES:
            value = attributes.get(name)
            if value is None:
                value = initial
            elif counts:
                value = ffi.new(_INT64, value)
                self._counts.append(value)
            elif table is not None:
                value = table[value]
            setattr(request, name, value)
        if not attributes.keys() <= tables.ATTRIBUTES.keys():
            raise TypeError(f"a request has no {', '.join(attributes.keys() - tables.ATTRIBUTES.keys())}")
        self.attributes = attributes

    def set_splits(self, splits: Sequence[int] | None) -> None:
        """Sets the splits, of which most operations have none."""
        if splits is None and self._splits is None:
            return
        self._splits = None if splits is None else ffi.new("int64_t[]", list(splits))
        self.request.split_count = 0 if splits is None else len(splits)
        self.request.splits = _NULL if splits is None else self._splits

    def describe(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None]) -> None:
        """Fills the tensors of the request."""
        if type(inputs) is ArrayGroup:
            return self._take(inputs)
        if len(inputs) != 1:
            return self._describe_group(inputs, outputs)
        buffer, output = inputs[0], outputs[0]
        if buffer.shape != self._shapes or buffer.dtype != self._dtypes or buffer.device >= 0:
            return self._describe_all(inputs, outputs)
        first = self.first  # from here on the same as in the last submission
        first.data = buffer.pointer
        first.output = _NULL if output is None else output.pointer

    def _take(self, group: ArrayGroup) -> None:
        self._shapes = self._dtypes = None
        self.request.tensors, self.request.tensor_count = group.tensors, len(group)

    def _describe_group(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None]) -> None:
        read, shapes, dtypes = _columns(inputs)
        if read is None or shapes != self._shapes or dtypes != self._dtypes:
            return self._describe_all(inputs, outputs)
        written = read if outputs is inputs else _columns(outputs)[0]
        if written is None:
            return self._describe_all(inputs, outputs)
        lib.rt_place(self._tensors, len(inputs), read, written)

    def _describe_all(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None]) -> None:
        self._shapes = self._dtypes = None  # until all is written
        shapes, dtypes = [buffer.shape for buffer in inputs], [buffer.dtype for buffer in inputs]
        extents = [extent for shape in shapes for extent in shape]
        if len(extents) > len(self._extents):
            self._extents = ffi.new("int64_t[]", len(extents))
        self._extents[0 : len(extents)] = extents
        if len(inputs) > len(self._tensors):
            self._make_tensors(len(inputs))
        place, on_host = self._extents + 0, True
        for tensor, buffer, output in zip(self._tensors, inputs, outputs, strict=False):
            tensor.data = buffer.pointer
            tensor.output = _NULL if output is None else output.pointer
            tensor.dtype = buffer.dtype
            tensor.device = buffer.device
            tensor.stream = ffi.cast(_VOID, buffer.stream) if buffer.stream else _NULL
            tensor.ndim = len(buffer.shape)
            tensor.shape = place
            place += tensor.ndim
            on_host = on_host and buffer.device < 0
        self.request.tensors, self.request.tensor_count = self._tensors, len(inputs)
        if on_host and inputs:
            self._shapes, self._dtypes = (shapes[0], dtypes[0]) if len(inputs) == 1 else (shapes, dtypes)

    def give_room(self, outputs: Sequence[Buffer | None]) -> None:
        """Says how much the outputs hold, for an operation whose results have other rows than their inputs."""
        for tensor, output in zip(self._tensors, outputs, strict=False):
            if output is not None:
                tensor.output_bytes = output.size_bytes


def _columns(buffers: Sequence[Buffer | None]) -> tuple[CData | None, Sequence[tuple[int, ...]], Sequence[int]]:
    """Where tensors in host memory are, their shapes and dtypes; None where one is elsewhere, or has no place yet."""
    if type(buffers) is HostBuffers:
        return buffers.column, buffers.shapes, buffers.dtypes
    present = [buffer for buffer in buffers if buffer is not None and buffer.device < 0]
    if len(present) < len(buffers):
        return None, (), ()
    pointers = ffi.new(_POINTERS, [buffer.pointer for buffer in present])
    return pointers, [buffer.shape for buffer in present], [buffer.dtype for buffer in present]


class Submitter(Protocol):
    """What an operation needs of the ``Context`` that submitted it."""

    native: CData
    forked: bool
    awaits_gpus: bool

    def raise_failure(self, status: int, text: str) -> NoReturn:
        """Raises the error of a status, with its text."""

    def adopt(self, handle: CData, tensors: tuple) -> None:
        """Takes over a pending operation whose Python object is gone."""


class Operation:
    """A submitted operation. It keeps its tensors alive until it is finished, even when the object itself is dropped.

    With tensors on a GPU it has two ends, as the core's ``Handle`` has: done, when all is on the GPU's queue, and finished,
    when the GPU has passed it. Elsewhere both are one.
    """

    __slots__ = ("_context", "_handle", "_tensors", "_finished", "_on_gpu", "_name", "_kind")

    def __init__(self, context: Submitter, handle: CData, tensors: tuple, name: str = "", kind: str = ""):
        self._context = context
        self._handle = handle
        self._tensors = tensors
        self._name = name  # for people to read
        self._kind = kind or name  # what profilers add up: the name, if it will come again
        self._finished = False  # never becomes True on a GPU, where the end of ``wait`` is not that of the work
        inputs = tensors[0]
        self._on_gpu = len(inputs) > 0 and inputs[0].device >= 0

    def finished(self) -> bool:
        """Whether it ended, well or not, a GPU's part included; does not block."""
        return lib.rt_poll(self._handle) != PENDING

    def done(self) -> bool:
        """Whether ``wait`` returns at once; with tensors on a GPU that is as soon as all is on its queue."""
        if self._on_gpu:
            return lib.rt_wait(self._handle, 0.0, ffi.NULL) != PENDING
        return self._finished or lib.rt_poll(self._handle) != PENDING

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the operation is done; other Python threads run meanwhile, and Ctrl-C is answered.

        With tensors on a GPU it blocks only until all is on the GPU's queue; ``hold_back`` orders what follows. Where the
        context ``awaits_gpus`` it blocks until it is finished.

        Raises:
            TimeoutError: ``timeout`` seconds passed; the operation goes on.
            RingtrainError: the operation failed; the class tells how, on every rank alike.
        """
        if self._finished:
            return
        slice_seconds = _SLICE_SECONDS if timeout is None else min(timeout, _SLICE_SECONDS)
        if ranges.wanted():
            with ranges.around(f"ringtrain.wait: {self._kind}"):
                self._end_wait(lib.rt_wait(self._handle, slice_seconds, ffi.NULL), timeout, slice_seconds)
            return
        status = lib.rt_wait(self._handle, slice_seconds, ffi.NULL)
        if status == OK and not self._on_gpu:  # mostly; a further call costs as much as all else here
            self._finished = True
        else:
            self._end_wait(status, timeout, slice_seconds)

    def _end_wait(self, status: int, timeout: float | None, waited: float) -> None:
        """What ``wait`` has left to do after its first slice, which has ended with ``status``."""
        if status == PENDING:
            status = self._wait_on(timeout, waited)
        if status == OK and self._on_gpu and self._context.awaits_gpus:
            status = self._await_gpu(timeout)
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
            ffi.new("int64_t[]", lib.RT_MAX_DIMENSIONS),
            ffi.new(_ERROR_OUT),
        )
        check(lib.rt_output(self._handle, index, data, ndim, shape, error), error)
        extents = tuple(shape[i] for i in range(ndim[0]))
        memory, dtype = lib.rt_take_output(self._handle, index), self.dtype(index)
        if self._on_gpu:
            fresh = device_memory.DeviceMemory(int(ffi.cast("uintptr_t", memory)), self._tensors[0][index].device)
            return self.array_in(fresh, dtype, extents), dtype, extents
        size_bytes = math.prod(extents) * tables.DTYPE_BY_ID[dtype].bytes
        return tensor_memory.owned_memory(memory, size_bytes) if memory else bytearray(size_bytes), dtype, extents

    def has_filled(self, index: int) -> bool:
        """Whether a result with rows is in the output that was given for it, and not in memory of the library's, after ``wait``."""
        given = self._tensors[1][index]
        if given is None:
            return False
        data, error = ffi.new("void **"), ffi.new(_ERROR_OUT)
        ndim, shape = ffi.new("int32_t *"), ffi.new("int64_t[]", lib.RT_MAX_DIMENSIONS)
        check(lib.rt_output(self._handle, index, data, ndim, shape, error), error)
        return int(ffi.cast("uintptr_t", data[0])) == given.address

    def array_in(self, memory: device_memory.DeviceMemory, dtype: int, shape: tuple[int, ...]) -> CudaArray:
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

    @property
    def _label(self) -> str:
        return f"'{self._name}'" if self._name else "the operation"

    def _wait_on(self, timeout: float | None, waited: float) -> int:
        """The slow part of ``wait``: slice by slice, so that signals are handled and log lines appear."""
        deadline = None if timeout is None else time.monotonic() + timeout - waited
        while True:
            log.drain(self._context.native)
            remaining = _SLICE_SECONDS if deadline is None else deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(
                    f"wait: {self._label} must be done within {timeout} s, but is pending. Other ranks may be late."
                )
            status = lib.rt_wait(self._handle, min(remaining, _SLICE_SECONDS), ffi.NULL)
            if status != PENDING:
                return status

    def _await_gpu(self, timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := lib.rt_poll(self._handle)) == PENDING:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"wait: {self._label} must be done within {timeout} s, but a GPU is at work for it. Other ranks may be late."
                )
            time.sleep(_GPU_PAUSE_SECONDS)
        return status

    def _raise(self, status: int) -> None:
        log.drain(self._context.native)
        error = ffi.new(_ERROR_OUT)
        lib.rt_wait(self._handle, 0.0, error)
        self._context.raise_failure(status, take_error(error))

    def __del__(self) -> None:
        context = getattr(self, "_context", None)
        if context is None or context.forked or lib is None:  # as the interpreter ends, names of modules go first
            return
        if self._finished or lib.rt_poll(self._handle) != PENDING:
            lib.rt_handle_free(self._handle)
        else:
            context.adopt(self._handle, self._tensors)
