"""The collective operations for JAX, in the argument order of ``ringtrain._runtime.operations``.

Inside ``jax.jit`` they become part of the program, where they are matched by name and may be under way by the hundred, in
any order on each rank; there a failed one raises ``jax.errors.JaxRuntimeError`` with ringtrain's text when the result is
used. Elsewhere they run at once and raise ringtrain's own errors. They work under ``grad``, ``jvp``, ``vmap``, ``scan``,
``cond`` and ``checkpoint``.

The dtypes are those of ``ringtrain._runtime.operations``: floats, integers with and without sign, bool, complex numbers of which
there are sums and averages, and floats of 8 bits, which are moved only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ringtrain._binding import tables
from ringtrain._runtime import arguments, operations
from ringtrain._runtime.context import check_name, current
from ringtrain._runtime.operations import Compression
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of, members_of
from ringtrain._runtime.submission import preparing
from ringtrain.errors import InvalidArgumentError
from ringtrain.jax import names
from ringtrain.jax.collective import RequestAttributes, collective, in_reach, together
from ringtrain.jax.library import slots

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allreduce", "reducescatter"]

barrier = operations.barrier


def allreduce(
    tensor: ArrayLike,
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


def grouped_allreduce(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
) -> list[jax.Array]:
    """``allreduce`` of several arrays as one operation, all or nothing; returns a list in their order.

    Example:
        >>> first, second = hvd.grouped_allreduce([parameters["w"], gradients["w"]], name="both")

    A program then has one operation, which begins when all arrays are there.

    Args:
        tensors: as many on all ranks; their shapes and dtypes may differ from one to the next. The other arguments are those of
            ``allreduce``.
    """
    given: dict[str, Any] = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    given["compression"] = compression
    if not tensors:
        return []
    if not names.tracing() and not any(isinstance(each, jax.core.Tracer) for each in tensors):
        with preparing("allreduce", name, process_set):
            arrays = [in_reach(_array("allreduce", each)) for each in tensors]
        results = operations.grouped_allreduce(arrays, name=name, process_set=process_set, **given)
        return [jnp.asarray(each) for each in results]
    arrays = [_array("allreduce", each) for each in tensors]
    return together(arrays, _call("allreduce", name, process_set, **given))


def allgather(tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> jax.Array:
    """Concatenates the ranks' arrays along the first dimension, in rank order.

    Example:
        >>> hvd.allgather(jnp.full(2, hvd.rank()), name="ranks").tolist()  # with two ranks
        [0, 0, 1, 1]

    Inside ``jax.jit`` the first dimension must be the same on all ranks; elsewhere it may differ. Arguments and result are those of
    ``ringtrain.allgather``.
    """
    return run("allgather", tensor, name, process_set)


def broadcast(
    tensor: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Returns the root's array on every rank. Arguments are those of ``ringtrain.broadcast``.

    Example:
        >>> weights = hvd.broadcast(parameters["w"], root_rank=0, name="w")
    """
    return run("broadcast", tensor, name, process_set, root_rank=root_rank)


def alltoall(tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> jax.Array:
    """Sends an equal part of the first dimension to each rank and concatenates what came, in rank order.

    Example:
        >>> received = hvd.alltoall(jnp.arange(4), name="rows")  # with two ranks: the first half of both goes to rank 0

    Unequal parts have ``ringtrain.alltoall`` with ``splits``, outside of ``jax.jit``.
    """
    return run("alltoall", tensor, name, process_set)


def reducescatter(
    tensor: ArrayLike,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = Compression.none,
) -> jax.Array:
    """Combines an array as ``allreduce`` does and leaves each rank its rows of the first dimension.

    Example:
        >>> hvd.reducescatter(jnp.ones((4, 3)), name="gradient").shape  # with two ranks
        (2, 3)

    Of n rows each of k ranks gets ``n // k``, the first ``n % k`` ranks one more.
    """
    given = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return run("reducescatter", tensor, name, process_set, compression=compression, **given)


def run(operation: str, tensor: ArrayLike, name: str | None, process_set: ProcessSet, **given: Any) -> jax.Array:
    """The result of an operation, whose further arguments are those of its function in ``ringtrain._runtime.operations``."""
    return start(operation, tensor, name, process_set, **given)()


def start(
    operation: str, tensor: ArrayLike, name: str | None, process_set: ProcessSet, **given: Any
) -> Callable[[], jax.Array]:
    """Starts an operation; the function that is returned waits for the result. In a program there is nothing to wait for."""
    if names.tracing() or isinstance(tensor, jax.core.Tracer):
        result = collective(_array(operation, tensor), _call(operation, name, process_set, **given))
        return lambda: result
    with preparing(operation, name, process_set):
        array = _array(operation, tensor)
    handle = getattr(operations, f"{operation}_async")(in_reach(array), name=name, process_set=process_set, **given)
    return lambda: jnp.asarray(handle.wait()[0] if operation == "alltoall" else handle.wait())


def _array(operation: str, tensor: ArrayLike) -> jax.Array:
    """What the user gave, or the number, as an array; raises InvalidArgumentError for a tree of arrays."""
    return as_array(
        f"tensor of {operation}", tensor, "Use allreduce_gradients or broadcast_parameters for a tree of arrays"
    )


def as_array(label: str, given: ArrayLike, advice: str) -> jax.Array:
    """An array, or a number as one; raises InvalidArgumentError, with the advice, for anything else."""
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{label}: expected an array or a number but found {type(given).__name__}. {advice}."
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
) -> RequestAttributes:
    """The arguments, checked, as a program says them."""
    if name is not None:
        check_name(name)
    known = list(tables.COMPRESSIONS)
    arguments.check_among(f"compression must be one of {', '.join(known)}", compression, known)
    ranks, own = members_of(process_set), current().rank
    root = arguments.root(root_rank)
    return RequestAttributes(
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
