"""One collective operation of our library as a node of the current graph, or run at once: its name, its gate, its slot.

``operations`` has the public forms, ``autograd`` the gradients; both come through ``run``.
"""

import contextlib
import struct
from collections.abc import Iterator, Sequence

import tensorflow as tf

from ringtrain._binding import tables
from ringtrain._runtime.context import check_name, current
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of
from ringtrain.errors import ProcessSetLostError, RingtrainError
from ringtrain.tensorflow import names
from ringtrain.tensorflow.library import current_slot, next_name, ops
from ringtrain.tensorflow.types import Takes

# For what a user's tf.function may call: AutoGraph would rewrite it, and all that it calls, at each tracing.
as_it_is = tf.autograph.experimental.do_not_convert


def run(
    operation: str,
    inputs: Sequence[Takes | Sequence[Takes]],
    name: str | None,
    process_set_id: int,
    **attributes: object,
) -> list[tf.Tensor]:
    """The results of an operation: values in eager mode, symbolic tensors while a graph is built.

    Args:
        operation: name of a row of ``tables.OPERATIONS``.
        inputs: arguments of the library's function, in its order.
        name: identity among the ranks; None numbers eager operations in the order of their submission and names those
            of a graph after what goes in.
        process_set_id: the ranks that take part.
        attributes: further attributes of the operation.
    """
    if name is not None:
        check_name(name)
    eager = tf.executing_eagerly()
    results = getattr(ops, f"ringtrain_{operation}")(
        *inputs,
        gates=[] if eager else [gate()],
        tensor_name=name or ("" if eager else names.claim_for(operation, inputs)),
        slot=current_slot(),
        by_iteration=int(not (eager or tf.compat.v1.executing_eagerly_outside_functions())),
        process_set=process_set_id,
        **attributes,
    )
    return list(results) if isinstance(results, (list, tuple)) else [results]


def bits(factor: float) -> int:
    """A factor as the library's operations take it: TensorFlow's float attributes have single precision."""
    return struct.unpack("<q", struct.pack("<d", factor))[0]


def factor(bits: int) -> float:
    """The factor behind ``bits``."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]


# The attributes that a node of an operation that reduces takes, with their initial values; a member's own has none.
REDUCING: dict[str, int] = {
    f"{row.name}_bits" if row.kind == "kFactor" else row.name: bits(row.initial)
    if row.kind == "kFactor"
    else int(row.initial)
    for row in tables.ATTRIBUTES.values()
    if row.scope == "kReduces" and row.kind != "kOwnCount"
}


def gate() -> tf.Tensor:
    """A resource of its own for an operation in a graph, whose only use is that TensorFlow orders it after no other."""
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="ringtrain_gate")


@contextlib.contextmanager
def preparing(operation: str, name: str | None, process_set: ProcessSet) -> Iterator[None]:
    """Within it an operation's arguments are looked at: any exception is announced to the peers, whose operation fails with it.

    Raises:
        InvalidArgumentError: with the text that the peers get; what was met is the cause.
        ProcessSetLostError: the process set has lost a member, as all ranks know.
    """
    try:
        yield
    except ProcessSetLostError:  # which all ranks know of
        raise
    except Exception as problem:  # announced, whatever it is
        if not tf.executing_eagerly():
            if not isinstance(problem, RingtrainError):
                raise
            raise type(problem)(f"{operation} '{name or 'unnamed'}': {problem}") from problem
        try:
            identity = id_of(process_set)
        except Exception:  # then the world's ranks are told
            identity = id_of(global_process_set)
        current().refuse(operation, name or next_name(operation, identity), identity, problem)
