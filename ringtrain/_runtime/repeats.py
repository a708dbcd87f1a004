"""The short way of an operation that comes again: a named allreduce of one plain array in the world, waited for.

After other work a small operation takes as long as its code and data take to come back into the caches, most of them
Python's: arguments that are checked again, objects that are made to be dropped. What was submitted under a name before is
kept here as a filled C struct; a call that differs in nothing but the array's address writes that alone. Whatever else
comes takes the general way (``operations``), which is where arguments are refused.
"""

from typing import Any

import numpy as np

from ringtrain._binding import log, tables, tensor_memory
from ringtrain._binding._native import OK, CData, ffi, lib, take_error
from ringtrain._binding.tensor_memory import Buffer
from ringtrain._runtime import ranges
from ringtrain._runtime.context import Context, current
from ringtrain._runtime.pending import Operation, Request

_ALLREDUCE = tables.OPERATIONS["allreduce"].id
_SLICE_SECONDS = 0.1  # of a wait, before it goes on in slices (``Operation.wait``)
_BYTES = ffi.typeof("char[]")
_NULL = ffi.NULL


class Repeat:
    """A filled request of one name.

    Attributes:
        terms: the arguments that it was filled for, beside tensor and name.
        terms_ids: which objects these are: what is only equal, as True and 1.0, may have to be refused.
        dtype: NumPy's, of the arrays.
        shape: of the arrays.
        tensor: the struct whose addresses change.
        request: of these: the struct that is submitted,
        handle: where the handle comes,
        error: and the text of a refusal.
    """

    __slots__ = ("terms", "terms_ids", "dtype", "shape", "tensor", "request", "handle", "error", "_kept")

    def __init__(self, name: str, tensor: np.ndarray, terms: tuple, attributes: dict[str, Any]):
        self.terms, self.terms_ids = terms, tuple(map(id, terms))
        self.dtype, self.shape = tensor.dtype, tensor.shape
        filled = Request(_ALLREDUCE, 0, True)
        filled.name(ffi.new("char[]", name.encode()))
        filled.request.caller_waits = True
        filled.set_attributes(attributes)
        filled.describe((tensor_memory.as_buffer(tensor),), (None,))
        self._kept = filled
        self.tensor, self.request, self.handle, self.error = filled.first, filled.request, filled.handle, filled.error


def again(tensor: Any, name: Any, terms: tuple, in_place: bool) -> np.ndarray | None:
    """The result of an allreduce, if one under this name with such a tensor and the same terms was noted; else None.

    One function, since in cold caches each further one costs some microseconds. Raises what the general way does.

    Args:
        terms: the arguments beside tensor and name.
        in_place: whether the result goes into the tensor, and not into a fresh array.
    """
    if type(tensor) is not np.ndarray or type(name) is not str:
        return None
    context = current()
    repeat = context.repeats.pop(name, None)  # atomic: no other thread has it meanwhile
    if (
        repeat is None
        or tensor.dtype is not repeat.dtype
        or tensor.shape != repeat.shape
        or tuple(map(id, terms)) != repeat.terms_ids
        or ranges.wanted()
    ):
        return None
    result = tensor if in_place else np.empty(repeat.shape, repeat.dtype)
    try:
        source = ffi.from_buffer(_BYTES, tensor, in_place)
        target = source if in_place else ffi.from_buffer(_BYTES, result, True)
    except (ValueError, BufferError):  # not contiguous, or read-only
        return None
    repeat.tensor.data, repeat.tensor.output = source, target
    status = lib.rt_submit(context.native, repeat.request, repeat.handle, repeat.error)
    if status != OK:
        log.drain(context.native)
        context.raise_failure(status, take_error(repeat.error))
    handle = repeat.handle[0]
    try:
        status = lib.rt_wait(handle, _SLICE_SECONDS, _NULL)
    except BaseException:  # Ctrl-C: the operation may still be under way
        _operation(context, repeat, name, source, target)
        raise
    if status == OK:
        lib.rt_handle_free(handle)
    else:
        _operation(context, repeat, name, source, target).wait()
    context.repeats[name] = repeat
    return result


def _operation(context: Context, repeat: Repeat, name: str, source: CData, target: CData) -> Operation:
    """What was submitted, as what keeps its memory alive until it is finished."""
    dtype, shape = repeat.tensor.dtype, repeat.shape
    tensors = (Buffer(source, dtype, shape, owner=source),), (Buffer(target, dtype, shape, owner=target),)
    return Operation(context, repeat.handle[0], tensors, name)


def note(tensor: Any, name: Any, terms: tuple, attributes: dict[str, Any]) -> None:
    """Remembers an allreduce that has gone the general way, from its second time on.

    Args:
        attributes: what the terms mean, as ``Context.submit`` takes them.
    """
    if type(tensor) is not np.ndarray or type(name) is not str:
        return
    context = current()
    if context.comes_again(name) and tensor.flags.c_contiguous and tensor.dtype.isnative:
        context.repeats[name] = Repeat(name, tensor, terms, attributes)
