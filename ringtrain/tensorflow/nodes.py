"""One collective operation of our library as a node of the current graph, or run at once: its name, its gate, its slot.

``operations`` has the public forms, ``autograd`` the gradients; both come through ``run``.
"""

import re
import struct
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringtrain.tensorflow.library import current_slot, ops

# For what a user's tf.function may call: AutoGraph would rewrite it, and all that it calls, at each tracing.
as_it_is = tf.autograph.experimental.do_not_convert


def run(
    operation: str, inputs: Sequence[Any], name: str | None, process_set_id: int, **attributes: Any
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
    eager = tf.executing_eagerly()
    results = getattr(ops, f"ringtrain_{operation}")(
        *inputs,
        gates=[] if eager else [_gate()],
        tensor_name=name or ("" if eager else unique_name(operation, inputs)),
        slot=current_slot(),
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


def unique_name(operation: str, inputs: Sequence[Any], ignore_name_scope: bool = False) -> str:
    """A name for an operation in the current graph, the same on all ranks that build the same graph.

    It is made of the names of the first and the last tensor, and of a number where that is not unique.
    """
    tensors = [tensor for tensor in tf.nest.flatten(list(inputs)) if hasattr(tensor, "name")]
    ends = [_stable(tensor.name) for tensor in (tensors if len(tensors) < 2 else (tensors[0], tensors[-1]))]
    if ignore_name_scope:
        ends = [end.rpartition("/")[2] for end in ends]
    label = "_".join(re.sub(r"[^A-Za-z0-9_/]", "_", end) for end in ends)
    return tf.compat.v1.get_default_graph().unique_name(f"{operation}.{label}")


def _stable(name: str) -> str:
    """A tensor's name without what differs between ranks: TensorFlow numbers what a graph captures, in each process."""
    return re.sub(r"(^|/)\d+(_\d+)?(?=:)", r"\1captured", name)


def _gate() -> tf.Tensor:
    """A resource of its own for an operation in a graph, whose only use is that TensorFlow orders it after no other."""
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="ringtrain_gate")
