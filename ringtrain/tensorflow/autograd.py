"""Gradients of the operations, for ``tf.GradientTape`` and ``tf.gradients``; importing this registers them.

Each backward pass is an operation of its own, on the gradients of all ranks. The factors are Horovod's: an allreduce
and an alltoall carry the exact gradient of the sum of all ranks' losses, an allgather and a broadcast its average over
the ranks, and a reducescatter ``size`` times the exact one.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringtrain import tables
from ringtrain.context import current
from ringtrain.errors import UnsupportedError
from ringtrain.operations import Average, Sum
from ringtrain.tensorflow import nodes

_Gradients = list[tf.Tensor | None]


class _Forward:
    """The operation that a backward pass belongs to."""

    def __init__(self, operation: tf.Operation):
        self._operation = operation
        self._process_set: int = operation.get_attr("process_set")
        self._name = tf.compat.as_str(operation.get_attr("tensor_name"))

    @property
    def members(self) -> list[int]:
        """Ranks of the process set, ascending."""
        return current().process_set_ranks(self._process_set)

    def attributes(self, *names: str) -> dict[str, Any]:
        """Attributes of the operation, by name."""
        return {name: self._operation.get_attr(name) for name in names}

    def run(self, operation: str, inputs: Sequence[Any], label: str = "gradient", **attributes: Any) -> list[tf.Tensor]:
        """Runs an operation of the backward pass, under a name that follows from the forward one's."""
        name = f"{self._name}.{label}" if self._name else None
        if name and not tf.executing_eagerly():
            name = tf.compat.v1.get_default_graph().unique_name(name)
        return nodes.run(operation, inputs, name, self._process_set, **attributes)

    def mean(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """The average of the gradients over the ranks."""
        return self.run(
            "allreduce", [gradients], reduction=Average, prescale_bits=_ONE, postscale_bits=_ONE, compression=0
        )

    def require_linear(self) -> None:
        """Raises UnsupportedError for a reduction without a gradient."""
        reduction = self._operation.get_attr("reduction")
        if reduction not in (Average, Sum):
            kind = self._operation.type.removeprefix("Ringtrain").lower()
            raise UnsupportedError(
                f"backward of {kind} '{self._name or 'unnamed'}': gradients need op Average or Sum, but it is "
                f"{tables.REDUCTION_BY_ID[reduction].capitalize()}. Use tf.stop_gradient before the operation."
            )

    def complete(self, gradients: Sequence[tf.Tensor]) -> _Gradients:
        """Gradients for all inputs: none for the gates."""
        return [*gradients, *[None] * self._operation.get_attr("G")]


_ONE = nodes.bits(1.0)


@tf.RegisterGradient("RingtrainAllreduce")
def _of_allreduce(operation: tf.Operation, *gradients: Any) -> _Gradients:
    forward = _Forward(operation)
    forward.require_linear()
    factors = forward.attributes("reduction", "prescale_bits", "postscale_bits", "compression")
    return forward.complete(forward.run("allreduce", [_dense(gradients)], **factors))


@tf.RegisterGradient("RingtrainAllgather")
def _of_allgather(operation: tf.Operation, *gradients: Any) -> _Gradients:
    """This rank's rows of the averaged gradient."""
    forward = _Forward(operation)
    means = forward.mean(_dense(gradients))
    own = [tf.shape(tensor, tf.int64)[:1] for tensor in operation.inputs[: len(means)]]
    rows = forward.run("allgather", [own], label="rows")
    me = forward.members.index(current().rank)
    starts = [tf.reduce_sum(counts[:me]) for counts in rows]
    return forward.complete(
        [mean[start : start + count[0]] for mean, start, count in zip(means, starts, own, strict=True)]
    )


@tf.RegisterGradient("RingtrainBroadcast")
def _of_broadcast(operation: tf.Operation, *gradients: Any) -> _Gradients:
    """The averaged gradient on the root, zeros elsewhere."""
    forward = _Forward(operation)
    means = forward.mean(_dense(gradients))
    is_root = current().rank == operation.get_attr("root")
    return forward.complete(means if is_root else [tf.zeros_like(mean) for mean in means])


@tf.RegisterGradient("RingtrainAlltoall")
def _of_alltoall(operation: tf.Operation, gradient: Any, _: Any) -> _Gradients:
    """Every row goes back where it came from."""
    forward = _Forward(operation)
    rows, _ = forward.run("alltoall", [tf.convert_to_tensor(gradient), operation.outputs[1]])
    return forward.complete([rows, None])


@tf.RegisterGradient("RingtrainReducescatter")
def _of_reducescatter(operation: tf.Operation, *gradients: Any) -> _Gradients:
    forward = _Forward(operation)
    forward.require_linear()
    factors = forward.attributes("prescale_bits", "postscale_bits")
    factor = nodes.factor(factors["prescale_bits"]) * nodes.factor(factors["postscale_bits"])
    if operation.get_attr("reduction") == Sum:
        factor *= len(forward.members)
    scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in _dense(gradients)]
    return forward.complete(forward.run("allgather", [scaled]))


def _dense(gradients: Sequence[Any]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


for _type in ("RingtrainBarrier", "RingtrainJoin", "RingtrainWorld"):
    tf.no_gradient(_type)
