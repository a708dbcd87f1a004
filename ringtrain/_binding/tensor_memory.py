"""Memory of tensors: how arguments of any library and layout become addresses, and how results become arrays again.

NumPy arrays take the short way. Everything else on the host is seen through a NumPy view (DLPack, the buffer protocol,
``np.asarray``), what is on a GPU through ``cuda_arrays``; a framework may register a quicker way of its own. What is
not contiguous is copied on the host and refused on a GPU, never misread.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringtrain._binding import cuda_arrays, dlpack, tables
from ringtrain._binding._native import CData, ffi, lib
from ringtrain._binding.cuda_arrays import CudaArray
from ringtrain.errors import InvalidArgumentError, UnsupportedError

# What NumPy has no type for travels as whole numbers inside this module: bfloat16, and the floats of 8 bits.
_CARRIERS = {row.id: np.dtype(row.carrier) for row in tables.DTYPES.values()}
_ID_OF_DTYPE = {np.dtype(row.name): row.id for row in tables.DTYPES.values() if not row.is_foreign}
_FOREIGN = {row.name: row.id for row in tables.DTYPES.values() if row.is_foreign}
_FOREIGN_IDS = frozenset(_FOREIGN.values())
_READ_ONLY = "expected a tensor that may be written but found a read-only one. Use the form without '_'."
_UINTPTR = ffi.typeof("uintptr_t")
_VOID = ffi.typeof("void *")
_BYTES = ffi.typeof("char[]")
_ADDRESSES, _POINTERS = ffi.typeof("uintptr_t[]"), ffi.typeof("void **")


class Buffer:
    """Contiguous row-major memory of one tensor.

    Args:
        address: of the first byte, as a number or as a pointer of C.

    Attributes:
        pointer: to the first byte.
        dtype: id of a row of ``tables.DTYPES``.
        shape: number of elements along each dimension.
        device: index of a CUDA device, or -1 for host memory.
        stream: of a device, handle of the CUDA stream whose work until now the memory waits for; 0 is the legacy
            stream.
        owner: whatever keeps the memory alive.
    """

    __slots__ = ("pointer", "dtype", "shape", "device", "stream", "owner")

    def __init__(
        self,
        address: int | CData,
        dtype: int,
        shape: tuple[int, ...],
        device: int = -1,
        stream: int = 0,
        owner: object = None,
    ):
        self.pointer = ffi.cast(_VOID, address) if type(address) is int else address
        self.dtype = dtype
        self.shape = shape
        self.device = device
        self.stream = stream
        self.owner = owner

    @property
    def address(self) -> int:
        """Of the first byte."""
        return int(ffi.cast(_UINTPTR, self.pointer))

    @property
    def size_bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * tables.DTYPE_BY_ID[self.dtype].bytes


class HostBuffers(Sequence[Buffer]):
    """Host memory of several tensors in columns: a thousand small ones cost a few lists, and no object for each.

    An adapter that has looked at a group gives it to an operation in the tensors' place.

    Args:
        addresses: of the first bytes.
        dtypes: ids of rows of ``tables.DTYPES``.
        shapes: of each.
        owners: whatever keeps the memory alive.
    """

    __slots__ = ("column", "dtypes", "shapes", "_owners")

    def __init__(self, addresses: list[int], dtypes: list[int], shapes: list[tuple[int, ...]], owners: object):
        column = ffi.new(_ADDRESSES, addresses)
        self.column = ffi.cast(_POINTERS, column)
        self.dtypes = dtypes
        self.shapes = shapes
        self._owners = owners, column

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: Any) -> Any:
        return Buffer(self.column[index], self.dtypes[index], self.shapes[index], owner=self._owners)


class _Framework(NamedTuple):
    type: type
    as_buffer: Callable[[Any], Buffer]
    wrap_output: Callable[[Any, object, int, tuple[int, ...]], Any]
    own_memory: Callable[[Any], Buffer | None]
    current_stream: Callable[[Any], int]
    empty_like: Callable[[Any], Any]
    is_negated: Callable[[Any], bool]


_frameworks: list[_Framework] = []


def register_framework(
    tensor_type: type,
    as_buffer: Callable[[Any], Buffer],
    wrap_output: Callable[[Any, object, int, tuple[int, ...]], Any],
    own_memory: Callable[[Any], Buffer | None],
    current_stream: Callable[[Any], int],
    empty_like: Callable[[Any], Any],
    is_negated: Callable[[Any], bool],
) -> None:
    """Teaches this module a framework's tensors.

    Args:
        tensor_type: their class.
        as_buffer: the memory of a tensor, copied first if it is not contiguous.
        wrap_output: ``(like, memory, dtype, shape)`` to a tensor of the framework; ``memory`` speaks the buffer
            protocol and owns its bytes, or is a ``CudaArray``; ``like`` is the tensor that went in.
        own_memory: the memory of a tensor for writing, or None where it is not contiguous; then DLPack finds its
            strides.
        current_stream: of a tensor on a GPU: handle of the stream on which the framework works there at the moment.
        empty_like: of a tensor on a GPU: a contiguous one with the same dtype and shape beside it.
        is_negated: whether a tensor on the host, seen through DLPack, has the other sign.
    """
    _frameworks.append(
        _Framework(tensor_type, as_buffer, wrap_output, own_memory, current_stream, empty_like, is_negated)
    )


def as_buffer(tensor: Any) -> Buffer:
    """The memory of a tensor for reading: the tensor's own if it is contiguous and of a known type, else a copy.

    Raises:
        InvalidArgumentError: an element type without a row in the table, something that is no tensor at all, or a
            strided array on a GPU.
        UnsupportedError: memory of a device that is no CUDA device.
    """
    if type(tensor) is np.ndarray:
        own = _own_memory(tensor, for_writing=False)
        if own is not None:
            return own
    framework = _framework_of(tensor)
    if framework is not None:
        return framework.as_buffer(tensor)
    if cuda_arrays.is_on_cuda(tensor):
        return _cuda_buffer(tensor)
    view, dtype = _view(tensor)
    return _buffer_of(np.ascontiguousarray(view, _CARRIERS[dtype]).reshape(view.shape), dtype)


def own_buffer(array: Any, for_writing: bool) -> Buffer | None:
    """The memory of a plain NumPy array, as most are; None for whatever ``as_buffer`` and ``InPlace`` must look at."""
    return _own_memory(array, for_writing) if type(array) is np.ndarray else None


class InPlace:
    """The memory of a tensor for reading and writing. ``give_back`` copies the result home where a copy was needed."""

    __slots__ = ("buffer", "_tensor", "_view", "_copy", "_negated")

    def __init__(self, tensor: Any):
        """Raises what ``as_buffer`` does, and InvalidArgumentError for memory that must not be written."""
        self._tensor, self._copy = tensor, None
        if type(tensor) is np.ndarray:
            buffer = _own_memory(tensor, for_writing=True)
            if buffer is not None:
                self.buffer = buffer
                return
        framework = _framework_of(tensor)
        own = None if framework is None else framework.own_memory(tensor)
        if own is not None:
            self.buffer = own
            return
        if cuda_arrays.is_on_cuda(tensor):
            self.buffer = _cuda_buffer(tensor, for_writing=True)
            return
        self._view, dtype = _view(tensor)
        if tensor is not self._view and not hasattr(tensor, "__dlpack__") and not _exports_memory(tensor):
            raise InvalidArgumentError(
                f"expected a tensor to write to but found a {type(tensor).__name__}. Use the form without '_'."
            )
        if not self._view.flags.writeable:
            raise InvalidArgumentError(_READ_ONLY)
        self._negated = framework is not None and framework.is_negated(tensor)
        if self._view.flags.c_contiguous and self._view.dtype.isnative and not self._negated:
            self.buffer = _buffer_of(self._view, dtype)
        else:
            values = -self._view if self._negated else self._view
            self._copy = np.ascontiguousarray(values, _CARRIERS[dtype]).reshape(self._view.shape)
            self.buffer = _buffer_of(self._copy, dtype)

    def give_back(self, _operation: object = None) -> object:
        """The tensor that was given, with the result in it."""
        if self._copy is not None:
            self._view[...] = -self._copy if self._negated else self._copy
            self._copy = None
        return self._tensor


def empty_like(buffer: Buffer) -> tuple[np.ndarray, Buffer]:
    """Fresh host memory for a result of the same type and shape, as an array to give to ``wrap`` and as a buffer."""
    array = np.empty(buffer.shape, _CARRIERS[buffer.dtype])
    return array, _buffer_of(array, buffer.dtype)


def stream_of(tensor: Any) -> int:
    """Handle of the stream on which a tensor on a GPU was made, and on which its library goes on with the result."""
    framework = _framework_of(tensor)
    return cuda_arrays.stream_of(tensor) if framework is None else framework.current_stream(tensor)


def wrap(like: Any, memory: Any, dtype: int, shape: tuple[int, ...]) -> Any:
    """Memory as an array of the library that ``like`` came from; NumPy where that library has no way to take it.

    Args:
        like: the tensor that went in.
        memory: an object with the buffer protocol that owns the bytes, or a ``CudaArray``.
        dtype: id of a row of ``tables.DTYPES``.
    """
    if type(like) is np.ndarray and dtype not in _FOREIGN_IDS:
        return memory if type(memory) is np.ndarray else np.frombuffer(memory, _CARRIERS[dtype]).reshape(shape)
    framework = _framework_of(like)
    if framework is not None:
        return framework.wrap_output(like, memory, dtype, shape)
    if type(memory) is CudaArray:
        return cuda_arrays.in_library_of(like, memory)
    array = memory if type(memory) is np.ndarray else np.frombuffer(memory, _CARRIERS[dtype]).reshape(shape)
    if hasattr(like, "__dlpack__") and not isinstance(like, (np.ndarray, np.generic)):
        foreign = _to_library_of(like, array, dtype)
        if foreign is not None:
            return foreign
    return array.view(_foreign_to_numpy(dtype)) if dtype in _FOREIGN_IDS else array


def owned_memory(pointer: CData, size_bytes: int) -> object:
    """Memory that the native library handed over, as an object with the buffer protocol; the last user's end frees it."""
    return ffi.buffer(ffi.gc(pointer, lib.rt_free, size_bytes), size_bytes)


def cuda_empty_like(tensor: Any) -> object | None:
    """A fresh tensor on the GPU of ``tensor``, from its own library; None from one that must not be written through pointers."""
    framework = _framework_of(tensor)
    return cuda_arrays.empty_like(tensor) if framework is None else framework.empty_like(tensor)


def _cuda_buffer(tensor: Any, for_writing: bool = False) -> Buffer:
    stream = cuda_arrays.stream_of(tensor)
    found = cuda_arrays.memory_of(tensor, stream)
    if for_writing and cuda_arrays.is_read_only(tensor, found):
        raise InvalidArgumentError(_READ_ONLY)
    return Buffer(found.address, found.dtype.id, found.shape, found.device, stream, found.owner)


def _own_memory(array: np.ndarray, for_writing: bool) -> Buffer | None:
    """The array's memory if it is of a known type, contiguous, and may be written where it must: what most arrays are."""
    dtype = _ID_OF_DTYPE.get(array.dtype)
    if dtype is None:
        return None
    try:  # asks all three in one call
        memory = ffi.from_buffer(_BYTES, array, for_writing)
    except (ValueError, BufferError, TypeError):
        return None
    return Buffer(memory, dtype, array.shape, -1, 0, memory)


def _buffer_of(array: np.ndarray, dtype: int) -> Buffer:
    # The exported buffer also keeps the array from being resized while the operation is pending.
    try:
        memory = ffi.from_buffer(array)
    except (ValueError, BufferError, TypeError):  # element types of extensions cannot be exported: their bytes can
        memory = ffi.from_buffer(array.view(_CARRIERS[dtype]))
    return Buffer(memory, dtype, array.shape, -1, 0, memory)


def _framework_of(tensor: Any) -> _Framework | None:
    for framework in _frameworks:
        if isinstance(tensor, framework.type):
            return framework
    return None


def _view(tensor: Any) -> tuple[np.ndarray, int]:
    """A strided NumPy view of anything, of a type that NumPy lacks as whole numbers, and the id of its element type."""
    if hasattr(tensor, "__dlpack__") and not isinstance(tensor, (np.ndarray, np.generic)):
        array, dtype = dlpack.view(tensor)
        return array, dtype.id
    if isinstance(tensor, np.ma.MaskedArray):
        raise InvalidArgumentError("expected a plain array but found a masked one. Fill it first.")
    try:
        array = _as_array(tensor)
    except (ValueError, TypeError, BufferError) as problem:
        raise InvalidArgumentError(f"expected an array but found a {type(tensor).__name__}: {problem}") from problem
    foreign = _FOREIGN.get(array.dtype.name)
    return (array, _id_of(array.dtype)) if foreign is None else (array.view(_CARRIERS[foreign]), foreign)


def _as_array(tensor: Any) -> np.ndarray:
    if isinstance(tensor, (bytes, bytearray)):
        return np.frombuffer(tensor, np.uint8)
    return np.asarray(tensor)


def _exports_memory(tensor: Any) -> bool:
    if isinstance(tensor, (np.ndarray, np.generic)):
        return isinstance(tensor, np.ndarray)
    try:
        memoryview(tensor)
    except TypeError:
        return False
    return True


def _id_of(dtype: np.dtype) -> int:
    identity = _ID_OF_DTYPE.get(dtype if dtype.isnative else dtype.newbyteorder("="))
    if identity is None:
        raise InvalidArgumentError(
            f"dtype must be one of {', '.join(tables.DTYPES)}, but is {dtype}. Cast before submitting."
        )
    return identity


def _foreign_to_numpy(dtype: int) -> np.dtype:
    name = tables.DTYPE_BY_ID[dtype].name
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        raise UnsupportedError(
            f"expected a NumPy type for a {name} result but found none. Run: pip install -U ml_dtypes"
        ) from None


def _to_library_of(like: Any, array: np.ndarray, dtype: int) -> object | None:
    """The array in the library of ``like``, by its ``from_dlpack``; None if it has none."""
    library = _namespace(like)
    if not hasattr(library, "from_dlpack"):
        return None
    try:
        foreign = library.from_dlpack(array)
        return foreign.view(getattr(library, tables.DTYPE_BY_ID[dtype].name)) if dtype in _FOREIGN_IDS else foreign
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError):
        return None  # documented: what cannot go back becomes NumPy


def _namespace(like: Any) -> Any:
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__()
    return sys.modules.get(type(like).__module__.split(".")[0])
