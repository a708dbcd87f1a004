"""Gradients of the operations, for ``tf.GradientTape`` and ``tf.gradients``; importing this registers them.

Each backward pass is an operation of its own, on the gradients of all ranks. Which one, and its factors,
``ringtrain._training.adapter.adjoints`` says for every adapter; here it is performed.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringtrain._binding import tables
from ringtrain._runtime.context import current
from ringtrain._runtime.operations import Average
from ringtrain._runtime.process_sets import ranks_of
from ringtrain._training.adapter.adjoints import Takes, adjoint_of, factor, require_linear
from ringtrain.tensorflow import names, nodes
from ringtrain.tensorflow.graph_world import rank_op, size_op
from ringtrain.tensorflow.types import Gradient

_Gradients = list[tf.Tensor | None]


class _Forward:
    """The operation that a backward pass belongs to."""

    def __init__(self, operation: tf.Operation):
        self._operation = operation
        self._process_set: int = operation.get_attr("process_set")
        self._name = tf.compat.as_str(operation.get_attr("tensor_name"))
        self.row = tables.OPERATIONS[operation.type.removeprefix("Ringtrain").lower()]

    @property
    def inputs(self) -> Sequence[tf.Tensor]:
        """The tensors, without the gates."""
        return self._operation.inputs[: len(self._operation.outputs)]

    @property
    def outputs(self) -> Sequence[tf.Tensor]:
        """The results."""
        return self._operation.outputs

    @property
    def size(self) -> tf.Tensor:
        """Number of ranks of the process set; in a graph when it runs, as what follows."""
        return size_op(self._process_set)

    @property
    def place(self) -> int | tf.Tensor:
        """This rank's place in the process set; only the world's outlives the world."""
        if self._process_set == 0:
            return rank_op()
        return (ranks_of(current(), self._process_set) or []).index(current().rank)

    @property
    def is_root(self) -> tf.Tensor:
        """Whether this rank is the root of the operation."""
        return tf.equal(rank_op(), self._operation.get_attr("root"))

    @property
    def attributes(self) -> dict[str, Any]:
        """What the operation's reduction was asked for, as its node takes it."""
        return {name: self._operation.get_attr(name) for name in nodes.REDUCING}

    def run(
        self,
        operation: str,
        inputs: Sequence[tf.Tensor | list[tf.Tensor]],
        label: str = "gradient",
        **attributes: object,
    ) -> list[tf.Tensor]:
        """Runs an operation of the backward pass, under a name that follows from the forward one's."""
        name = names.claim(f"{self._name}.{label}") if self._name else None
        return nodes.run(operation, inputs, name, self._process_set, **attributes)

    def require_linear(self) -> None:
        """Raises UnsupportedError for a reduction without a gradient."""
        operation = f"{self.row.name} '{self._name or 'unnamed'}'"
        require_linear(operation, self._operation.get_attr("reduction"), "Use tf.stop_gradient")

    def complete(self, gradients: Sequence[tf.Tensor | None]) -> _Gradients:
        """Gradients for all inputs: none for the gates."""
        return [*gradients, *[None] * self._operation.get_attr("G")]


def _gradient(operation: tf.Operation, *gradients: Gradient) -> _Gradients:
    """Gradients of the results to gradients of the inputs."""
    forward = _Forward(operation)
    adjoint = adjoint_of(forward.row.name)
    if forward.row.reduces:
        forward.require_linear()
    carried = _CARRIERS[adjoint.carrier](forward, gradients)
    if adjoint.takes is Takes.ROOTS:
        carried = _on_root(forward, carried)
    if adjoint.takes is Takes.OWN_ROWS:
        carried = _own_rows(forward, carried)
    return forward.complete(carried)


# ---- carriers ----


def _by_allreduce(forward: _Forward, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    averages = adjoint_of(forward.row.name).averages
    attributes = {**nodes.REDUCING, "reduction": Average} if averages else forward.attributes
    return forward.run("allreduce", [_dense(gradients)], **attributes)


def _by_allgather(forward: _Forward, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    asked = forward.attributes
    scales = nodes.factor(asked["prescale_bits"]), nodes.factor(asked["postscale_bits"])
    by = factor(asked["reduction"], *scales, tf.cast(forward.size, tf.float64))
    return forward.run("allgather", [[gradient * tf.cast(by, gradient.dtype) for gradient in _dense(gradients)]])


def _by_alltoall(forward: _Forward, gradients: Sequence[Gradient]) -> list[tf.Tensor | None]:
    """Every row goes back where it came from; the splits have no gradient."""
    rows, _ = forward.run("alltoall", [tf.convert_to_tensor(gradients[0]), forward.outputs[1]])
    return [rows, None]


_CARRIERS = {"allreduce": _by_allreduce, "allgather": _by_allgather, "alltoall": _by_alltoall}


# ---- what a rank takes ----


def _on_root(forward: _Forward, carried: list[tf.Tensor]) -> list[tf.Tensor]:
    is_root = forward.is_root
    return [tf.where(is_root, each, tf.zeros_like(each)) for each in carried]


def _own_rows(forward: _Forward, carried: list[tf.Tensor]) -> list[tf.Tensor]:
    own = [tf.shape(tensor, tf.int64)[:1] for tensor in forward.inputs]
    rows = forward.run("allgather", [own], label="rows")
    me = forward.place
    starts = [tf.reduce_sum(counts[:me]) for counts in rows]
    return [each[start : start + count[0]] for each, start, count in zip(carried, starts, own, strict=True)]


def _dense(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


for _row in tables.OPERATIONS.values():
    if _row.adjoint:
        tf.RegisterGradient(f"Ringtrain{_row.name.capitalize()}")(_gradient)
for _type in ("RingtrainBarrier", "RingtrainJoin", "RingtrainWorld"):
    tf.no_gradient(_type)
