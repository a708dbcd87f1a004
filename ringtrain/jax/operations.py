"""The collective operations for JAX, in the argument order of ``ringtrain.operations``.

Inside ``jax.jit`` they become part of the program, where they are matched by name and may be under way by the hundred, in
any order on each rank; there a failed one raises ``jax.errors.JaxRuntimeError`` with ringtrain's text when the result is
used. Elsewhere they run at once and raise ringtrain's own errors. They work under ``grad``, ``jvp``, ``vmap``, ``scan``,
``cond`` and ``checkpoint``.

The dtypes are those of ``ringtrain.operations``: floats, integers with and without sign, bool, complex numbers of which
there are sums and averages, and floats of 8 bits, which are moved only.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ringtrain import arguments, operations, tables
from ringtrain.context import check_name, current
from ringtrain.errors import InvalidArgumentError
from ringtrain.jax import names
from ringtrain.jax.collective import Call, collective, in_reach
from ringtrain.jax.library import slots
from ringtrain.operations import Compression
from ringtrain.process_sets import ProcessSet, global_process_set, id_of, members_of
from ringtrain.submission import preparing

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "reducescatter"]

barrier = operations.barrier


def allreduce(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
) -> jax.Array:
    """Combines an array of one shape over all ranks; see ``ringtrain.allreduce``.

    Example:
        >>> jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.ones(2))

    Args:
        tensor: an array of any shape, the same on all ranks, or a number.
        name: identity among the ranks; without one, operations are matched by the function that is traced and their
            place in it, outside of programs in the order of the calls.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``; the first two have gradients.
        prescale_factor: factor on each contribution.
        postscale_factor: factor on the result.
        process_set: the ranks that take part.
        compression: how float32 and float64 travel between hosts.
    """
    given = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return run("allreduce", tensor, name, process_set, compression=compression, **given)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> jax.Array:
    """Concatenates the ranks' arrays along the first dimension, in rank order.

    Inside ``jax.jit`` the first dimension must be the same on all ranks; elsewhere it may differ.
    """
    return run("allgather", tensor, name, process_set)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Returns the root's array on every rank. ``root_rank`` is a global rank."""
    return run("broadcast", tensor, name, process_set, root_rank=root_rank)


def alltoall(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> jax.Array:
    """Sends an equal part of the first dimension to each rank and concatenates what came, in rank order.

    Unequal parts have ``ringtrain.alltoall`` with ``splits``, outside of ``jax.jit``.
    """
    return run("alltoall", tensor, name, process_set)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
) -> jax.Array:
    """Combines an array as ``allreduce`` does and leaves each rank its rows of the first dimension.

    Of n rows each of k ranks gets ``n // k``, the first ``n % k`` ranks one more.
    """
    given = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return run("reducescatter", tensor, name, process_set, compression=compression, **given)


def run(operation: str, tensor: Any, name: str | None, process_set: ProcessSet, **given: Any) -> jax.Array:
    """The result of an operation, whose further arguments are those of its function in ``ringtrain.operations``."""
    return start(operation, tensor, name, process_set, **given)()


def start(
    operation: str, tensor: Any, name: str | None, process_set: ProcessSet, **given: Any
) -> Callable[[], jax.Array]:
    """Starts an operation; the function that is returned waits for the result. In a program there is nothing to wait for."""
    if names.tracing() or isinstance(tensor, jax.core.Tracer):
        result = collective(_array(operation, tensor), _call(operation, name, process_set, **given))
        return lambda: result
    with preparing(operation, name, process_set):
        array = _array(operation, tensor)
    handle = getattr(operations, f"{operation}_async")(in_reach(array), name=name, process_set=process_set, **given)
    return lambda: jnp.asarray(handle.wait()[0] if operation == "alltoall" else handle.wait())


def _array(operation: str, tensor: Any) -> jax.Array:
    """What the user gave, or the number, as an array; raises InvalidArgumentError for a tree of arrays."""
    try:
        return jnp.asarray(tensor)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"tensor of {operation}: expected an array or a number but found {type(tensor).__name__}. Use allreduce_gradients or "
            "broadcast_parameters for a tree of arrays."
        ) from None


def _call(
    operation: str,
    name: str | None,
    process_set: ProcessSet,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
    root_rank: int = -1,
) -> Call:
    """The arguments, checked, as a program says them."""
    if name is not None:
        check_name(name)
    if not isinstance(compression, str) or compression not in tables.COMPRESSIONS:
        known = ", ".join(tables.COMPRESSIONS)
        raise InvalidArgumentError(f"compression must be one of {known}, but is {compression!r}.")
    ranks, own = members_of(process_set), current().rank
    root = arguments.root(root_rank)
    return Call(
        operation=operation,
        name=names.claim(operation) if name is None else name,
        slot=slots.current(),
        process_set_id=id_of(process_set),
        members=len(ranks),
        place=ranks.index(own) if own in ranks else -1,
        is_root=root == own,
        reduction=tables.REDUCTIONS[arguments.reduction(op)],
        prescale=arguments.number("prescale_factor", prescale_factor),
        postscale=arguments.number("postscale_factor", postscale_factor),
        compression=str(compression),
        root=root,
    )
