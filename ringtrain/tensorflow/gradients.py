"""Reduction of the gradients of one training step: what travels together, under which names, and what is left alone.

``tape`` and the optimizers' adapters call a ``GradientReduction`` with a step's gradients and get them back reduced.
In a graph each gradient is an operation of its own, so that it travels while backpropagation goes on; eager operations
run one after the other, so there all of them are one group. A gradient that is None stays None, and nothing is sent
for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ringtrain.errors import InvalidArgumentError
from ringtrain.gradient_arguments import check_scaling, runs_of
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.tensorflow.compression import Compression, Compressor
from ringtrain.tensorflow.nodes import as_it_is
from ringtrain.tensorflow.operations import allreduce, grouped_allreduce

Gradient = tf.Tensor | tf.IndexedSlices | None
Groups = int | Sequence[Sequence[Any]] | None


@dataclass(frozen=True)
class GradientReduction:
    """How gradients are reduced.

    Attributes:
        owner: who speaks in errors.
        op: ``Average`` or ``Sum``.
        compression: how gradients travel.
        sparse_as_dense: whether ``tf.IndexedSlices`` are made dense first.
        predivide: part of the average's divisor that is applied before the sum, against overflow.
        groups: number of groups, or lists of variables whose gradients are one operation each; None as the head says.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: a value outside of these.
    """

    owner: str
    op: int = Average
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    groups: Groups = None
    process_set: ProcessSet = global_process_set

    def __post_init__(self):
        check_scaling(self.owner, self.op, self.predivide)
        if self.groups is not None and not isinstance(self.groups, (int, list, tuple)) or self.groups == 0:
            raise InvalidArgumentError(
                f"{self.owner}: groups must be None, a number above 0 or lists of variables, but is {self.groups!r}."
            )

    @as_it_is
    def reduce(
        self, gradients: Sequence[Gradient], names: Sequence[str], variables: Sequence[Any] | None = None
    ) -> list[Gradient]:
        """The gradients, reduced over the ranks, in their order.

        Args:
            gradients: the same ones None, of the same shapes and dtypes on all ranks.
            names: identities of the gradients among the ranks; a graph adds a number to one that it has already.
            variables: what the gradients belong to, needed for ``groups`` that name variables.
        """
        if not tf.executing_eagerly():
            names = [tf.compat.v1.get_default_graph().unique_name(name) for name in names]
        reduced: list[Gradient] = [self._densified(gradient) for gradient in gradients]
        present = [index for index, gradient in enumerate(reduced) if gradient is not None]
        dense = [index for index in present if not isinstance(reduced[index], tf.IndexedSlices)]
        for members in self._grouped(dense, variables):
            inputs = [reduced[index] for index in members]
            # Not named by its size: ranks that lack different gradients then get an error instead of waiting.
            results = grouped_allreduce(inputs, op=self.op, name=names[members[0]], **self._factors())
            for index, result in zip(members, results, strict=True):
                reduced[index] = result
        for index in sorted(set(present) - set(dense)):
            reduced[index] = allreduce(reduced[index], op=self.op, name=names[index], **self._without_factors())
        return reduced

    def _densified(self, gradient: Gradient) -> Gradient:
        sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if sparse and self.sparse_as_dense else gradient

    def _grouped(self, dense: list[int], variables: Sequence[Any] | None) -> list[list[int]]:
        """Places of the gradients that are one operation, for each operation."""
        if not dense:
            return []
        if isinstance(self.groups, int):
            return runs_of(dense, self.groups)
        if self.groups is None:
            return [dense] if tf.executing_eagerly() else [[index] for index in dense]
        group_of = {id(variable): number for number, group in enumerate(self.groups) for variable in group}
        numbers = {index: group_of.get(id(variables[index]), -1 - index) for index in dense}
        return [[index for index in dense if numbers[index] == number] for number in dict.fromkeys(numbers.values())]

    def _factors(self) -> dict[str, Any]:
        return {
            "prescale_factor": 1.0 / self.predivide,
            "postscale_factor": self.predivide,
            **self._without_factors(),
        }

    def _without_factors(self) -> dict[str, Any]:
        return {"compression": self.compression, "process_set": self.process_set}


def unique_names(prefix: str, variables: Sequence[Any]) -> list[str]:
    """A name for each variable's gradient, the same on all ranks that make the same variables."""
    names: list[str] = []
    counts: dict[str, int] = {}
    for variable in variables:
        own = getattr(variable, "path", None) or getattr(variable, "name", "source")
        counts[own] = counts.get(own, 0) + 1
        names.append(f"{prefix}.{own}" if counts[own] == 1 else f"{prefix}.{own}.{counts[own]}")
    return names
