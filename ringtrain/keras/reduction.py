"""Reduction of one Keras optimizer's gradients: which ones travel, under which names, and when.

``optimizer.DistributedOptimizer`` makes one ``GradientReduction`` for each optimizer. It decides; a backend
(``tensorflow_backend``, ``torch_backend``) has the few lines that differ between the frameworks under Keras.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ringtrain.context import Context, current
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.keras.accumulation import AccumulationWindow
from ringtrain.keras.backends import backend
from ringtrain.keras.pairing import Pairing
from ringtrain.keras.variables import shared_name
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set, id_of

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
        self.prefix = next_prefix(name, settings.process_set)
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
        if any(_is_overwritten(variable) for variable in variables):
            raise UnsupportedError(
                f"apply '{self.prefix}': expected backward_passes_per_step=1 with float8 layers, whose maxima cannot "
                f"be added up, but found {self.window.passes}. Use Keras' gradient_accumulation_steps with them."
            )
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
        places: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        local = {id(variable) for layer in self.settings.local_layers for variable in layer.trainable_variables}
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None:
                places[_kind_of(variable, local)].append(place)
        for kind, combine in _KINDS.items():
            chosen = places[kind]
            combined = combine(self, [gradients[place] for place in chosen], [variables[place] for place in chosen])
            for place, gradient in zip(chosen, combined, strict=True):
                results[place] = gradient
        return results

    def _average(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        names = [self._name_of(variable) for variable in variables]
        return backend.reduce(gradients, names, variables, self.settings)

    def _maximum(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        return [
            backend.maximum(gradient, self._name_of(variable), self.settings)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _keep(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        if not self.settings.scale_local_gradients:
            return gradients
        return [backend.scaled(gradient, 1.0 / self.settings.process_set.size()) for gradient in gradients]

    def _name_of(self, variable: Any) -> str:
        """A name that is the same on all ranks: they see the variables in one order."""
        name = self._names.get(id(variable))
        if name is None:
            name = f"{self.prefix}.{len(self._names)}.{shared_name(variable)}"
            self._names[id(variable)] = name
            self._named.append(variable)
        return name


_KINDS = {
    "averaged": GradientReduction._average,
    "overwriting": GradientReduction._maximum,
    "local": GradientReduction._keep,
}


def _kind_of(variable: Any, local: set[int]) -> str:
    """What becomes of a variable's gradient: a row of ``_KINDS``."""
    if id(variable) in local:
        return "local"
    return "overwriting" if _is_overwritten(variable) else "averaged"


def _is_overwritten(variable: Any) -> bool:
    """Whether Keras stores the gradient in the variable: float8 scales by such maxima, which one does not average."""
    return getattr(variable, "overwrite_with_gradient", False)


def when(condition: Any, action: Callable[[], None]) -> None:
    """Runs the action if the condition, True or a boolean tensor, holds; also within a graph."""
    if condition is True:
        action()
    else:
        keras.ops.cond(condition, action, lambda: None)


def next_prefix(name: str | None, process_set: ProcessSet) -> str:
    """The beginning of an optimizer's names: the user's word for it, and its number in the process set."""
    counts = _optimizer_counts.setdefault(current(), {})
    return f"{name or 'optimizer'}.{next(counts.setdefault(id_of(process_set), itertools.count()))}"
