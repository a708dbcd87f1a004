"""Reduction of one Keras optimizer's gradients: what travels together, under which names, and when.

``optimizer.DistributedOptimizer`` owns one ``GradientReduction`` for each optimizer. It decides; a backend
(``tensorflow_backend``, ``torch_backend``) has the few lines that differ between the frameworks under Keras.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras

from ringtrain.context import Context, current
from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.accumulation import AccumulationWindow
from ringtrain.keras.backends import backend
from ringtrain.keras.pairing import Pairing
from ringtrain.keras.variables import shared_name
from ringtrain.operations import Average, Max
from ringtrain.process_sets import ProcessSet, global_process_set, id_of

SPARSE = "sparse"  # in the place of a gradient's dtype

# Optimizers of one process set are numbered in the order of their making, which is the same on all its members;
# the names of two optimizers then never meet, whatever their models are called.
_optimizer_counts: "weakref.WeakKeyDictionary[Context, dict[int, itertools.count]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Settings:
    """The arguments of ``DistributedOptimizer`` that say how gradients are combined."""

    compression: Any = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: Any = None
    process_set: ProcessSet = global_process_set
    local_layers: Sequence[Any] = ()
    scale_local_gradients: bool = True

    @property
    def alone(self) -> bool:
        """Whether there is nobody to combine with: a world of one, or a set that this rank is no member of."""
        return self.process_set.size() == 1 or not self.process_set.included()


class Batch(NamedTuple):
    """Gradients that travel as one operation: its name and their places."""

    name: str
    places: list[int]


@dataclass(frozen=True)
class Operation:
    """What a backend has to do for a batch."""

    name: str
    tensors: list[Any]
    op: int
    scale: float  # divides each contribution, and multiplies the result


class GradientReduction:
    """Settings, names and window of one optimizer.

    Attributes:
        settings: how gradients are combined, the same on all ranks.
        prefix: of all names that this optimizer submits; unique among the optimizers of the process set.
        window: accumulates the gradients of several passes.
        pairing: remembers explicit ``synchronize()`` calls for the ``apply`` that follows.
        surrounded: whether a LossScaleOptimizer was put around the distributed optimizer.
    """

    def __init__(self, settings: Settings, name: str | None):
        self.settings = settings
        self.prefix = f"{name or 'optimizer'}.{_next_number(settings.process_set)}"
        self.window = AccumulationWindow(settings.backward_passes_per_step, settings.average_aggregated_gradients)
        self.pairing = Pairing(self.prefix)
        self.surrounded = False
        self._names: dict[int, str] = {}
        self._named: list[Any] = []  # keeps the variables, and so their ids, alive

    def require_outermost(self) -> None:
        """Refuses to wait for other ranks where a rank may pass by, and says what to do."""
        if self.surrounded:
            raise InvalidArgumentError(
                f"apply '{self.prefix}': expected DistributedOptimizer around LossScaleOptimizer but found it inside, "
                "where a rank whose own gradients overflow would leave the others waiting. Pass "
                "BroadcastGlobalVariablesCallback to fit(), which puts it right, or write "
                "DistributedOptimizer(LossScaleOptimizer(optimizer))."
            )

    def collect(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """One pass: adds gradients to the window, and reduces them when it is full.

        Returns:
            Whether it is full (True or a boolean tensor), and the gradients: reduced if so, else this rank's own.
        """
        if self.window.passes == 1:
            return True, self.reduce(gradients, variables)
        present = [place for place, gradient in enumerate(gradients) if gradient is not None]
        kept = [variables[place] for place in present]
        full, collected = self.window.collect(
            [backend.dense(gradients[place]) for place in present], kept, lambda totals: self.reduce(totals, kept)
        )
        results: list[Any] = [None] * len(gradients)
        for place, gradient in zip(present, collected, strict=True):
            results[place] = gradient
        return full, results

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients combined over all ranks, in their places; ``None`` stays ``None``."""
        results = list(gradients)
        if self.settings.alone:
            return results
        local = self._local_variables()
        for place, variable in enumerate(variables):
            if id(variable) in local and self.settings.scale_local_gradients and results[place] is not None:
                results[place] = backend.scaled(results[place], 1.0 / self.settings.process_set.size())
        batches = self._batches(gradients, variables, local)
        operations = [self._operation(batch, gradients, variables) for batch in batches]
        for batch, tensors in zip(batches, backend.perform(operations, self.settings), strict=True):
            for place, tensor in zip(batch.places, tensors, strict=True):
                results[place] = tensor
        return results

    def _batches(self, gradients: Sequence[Any], variables: Sequence[Any], local: set[int]) -> list[Batch]:
        kinds = [
            None if gradient is None or id(variable) in local else self._kind(gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        names = [self._name_of(variable) for variable in variables]
        return batches(self.prefix, names, kinds, self._groups_of(variables), together=not backend.in_graph())

    def _operation(self, batch: Batch, gradients: Sequence[Any], variables: Sequence[Any]) -> Operation:
        tensors = [gradients[place] for place in batch.places]
        if self.settings.sparse_as_dense:
            tensors = [backend.dense(tensor) for tensor in tensors]
        if _is_overwritten(variables[batch.places[0]]):
            return Operation(batch.name, tensors, Max, 1.0)
        return Operation(batch.name, tensors, self.settings.op, self.settings.gradient_predivide_factor)

    def _kind(self, gradient: Any, variable: Any) -> str:
        """What a gradient may share a batch with: its dtype, or nothing if it is sparse."""
        if backend.is_sparse(gradient) and not self.settings.sparse_as_dense:
            return SPARSE
        dtype = keras.backend.standardize_dtype(gradient.dtype)
        return f"{dtype}.overwritten" if _is_overwritten(variable) else dtype

    def _name_of(self, variable: Any) -> str:
        """A name that is the same on all ranks: they see the variables in one order."""
        name = self._names.get(id(variable))
        if name is None:
            name = f"{self.prefix}.{len(self._names)}.{shared_name(variable)}"
            self._names[id(variable)] = name
            self._named.append(variable)
        return name

    def _groups_of(self, variables: Sequence[Any]) -> list[int | None]:
        """The number of each variable's group, None for those that travel alone."""
        groups = self.settings.groups
        if groups is None:
            return [None] * len(variables)
        if isinstance(groups, int):
            return [place * min(groups, len(variables)) // len(variables) for place in range(len(variables))]
        numbers = {id(variable): number for number, group in enumerate(groups) for variable in group}
        return [numbers.get(id(variable)) for variable in variables]

    def _local_variables(self) -> set[int]:
        return {id(variable) for layer in self.settings.local_layers for variable in layer.trainable_variables}


def batches(
    prefix: str, names: Sequence[str], kinds: Sequence[str | None], groups: Sequence[int | None], together: bool
) -> list[Batch]:
    """What travels with what.

    Args:
        prefix: of the names of batches with several members.
        names: of the gradients.
        kinds: dtype of each gradient, ``SPARSE``, or None for one that does not travel.
        groups: number of the user's group of each gradient, or None.
        together: whether those without a group share a batch. In a graph each travels alone, as soon as it is computed;
            where TensorFlow runs operations one by one they share one, or each would wait for the one before.
    """
    members: dict[str, list[int]] = {}
    for place, (name, kind, group) in enumerate(zip(names, kinds, groups, strict=True)):
        if kind is None:
            continue
        if kind == SPARSE or (group is None and not together):
            key = name
        else:
            key = f"{prefix}.all.{kind}" if group is None else f"{prefix}.group.{group}.{kind}"
        members.setdefault(key, []).append(place)
    return [Batch(name, places) for name, places in members.items()]


def when(condition: Any, action: Callable[[], None]) -> None:
    """Runs the action if the condition, True or a boolean tensor, holds; also within a graph."""
    if condition is True:
        action()
    else:
        keras.ops.cond(condition, action, lambda: None)


def _is_overwritten(variable: Any) -> bool:
    """Whether Keras stores the gradient in the variable: float8 keeps maxima so, and a maximum is not averaged."""
    return getattr(variable, "overwrite_with_gradient", False)


def _next_number(process_set: ProcessSet) -> int:
    counts = _optimizer_counts.setdefault(current(), {})
    return next(counts.setdefault(id_of(process_set), itertools.count()))
