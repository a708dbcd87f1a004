"""Rows of sharded embeddings in the step of a Keras optimizer, which knows nothing of them but the layers' anchors.

Gradients of rows have reached their owners when a backward pass ends, and wait there. The optimizer that updates an anchor is
accompanied, whoever's it is; what it does to all gradients befalls those of the rows at the same place:

- What it divides gradients by, such as the scale of the loss, divides those of the rows.
- Where it skips a step the rows do. The anchor's gradient is infinite where a row's is on any rank, and so are all ranks'.
- Where it clips by a norm, the anchor's gradient is the norm of the whole table's for as long, so that Keras counts the rows;
  by what Keras makes of it the rows' gradient is multiplied. By value each rank clips that of its own rows.
- Where it only adds gradients up, those of the rows are added up, too.

An anchor itself never changes. In a graph of TensorFlow its value and its gradient say what runs after what, since calls of the
host have no order of their own: each call of a table's takes the gradient, and returns it.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import numpy as np

from ringtrain._runtime.process_sets import ProcessSet, id_of, size_of
from ringtrain.embedding.table import SelfUpdatingTable, norms
from ringtrain.errors import UnsupportedError
from ringtrain.keras.backends import backend
from ringtrain.keras.types import Flag, Gradients, Tensor, Variable

if TYPE_CHECKING:
    from ringtrain.keras.reduction import KerasReducer

_Results = list[Any]  # gradients in their places; those of the anchors are tensors
_Noted = TypeVar("_Noted")


class _StepUnderWay(threading.local):
    """The step that is being taken in this thread, or traced.

    Attributes:
        divisors: of all gradients, as functions, those of the outermost optimizer first.
        reductions: of the distributed optimizers that have combined them.
    """

    def __init__(self) -> None:
        self.divisors: list[Callable[[], Tensor | float]] = []
        self.reductions: list[KerasReducer] = []


_step = _StepUnderWay()


@contextmanager
def combined_by(reduction: "KerasReducer") -> Iterator[None]:
    """A block in which optimizers apply gradients that a distributed one has added up and combined over the ranks."""
    settings = reduction.settings
    passes = settings.backward_passes_per_step if settings.average_aggregated_gradients else 1
    with _noted(_step.reductions, reduction), _noted(_step.divisors, lambda: passes):
        yield


def is_combined_by(reduction: "KerasReducer") -> bool:
    """Whether this is within such a block of that distributed optimizer."""
    return any(each is reduction for each in _step.reductions)


def settled(gradients: Gradients, variables: Sequence[Variable]) -> _Results:
    """Changes rows at once by what has come of their gradients, and returns all gradients."""
    tables = _tables(variables, gradients)
    if not tables:
        return list(gradients)
    return _changed(tables, _taken(tables, gradients, 1), [1.0] * len(tables), 1, None)


def check(optimizer: keras.optimizers.Optimizer | None, name: str, process_set: ProcessSet) -> None:
    """Raises UnsupportedError if a model's optimizer does to gradients what those of a table's rows cannot share in.

    Args:
        optimizer: as the model, or the loop, has it.
        name: of the layer.
        process_set: the ranks that share its rows.
    """
    if optimizer is None:
        return
    inner = getattr(optimizer, "inner_optimizer", None)
    reductions = [*_step.reductions, _reduction_of(inner), _reduction_of(optimizer)]
    reduction = next((each for each in reversed(reductions) if each is not None), None)
    for each in (optimizer, inner):
        reason = None if each is None else _reason(each, reduction, process_set)
        if reason is not None:
            raise UnsupportedError(f"ShardedEmbedding '{name}': the model's optimizer must {reason}")


def check_all(optimizer: keras.optimizers.Optimizer, variables: Sequence[Variable]) -> None:
    """``check`` for the layers whose anchors are among the variables that an optimizer trains."""
    for table in _tables(variables).values():
        check(optimizer, table.name, table.process_set)


def _reason(
    optimizer: keras.optimizers.Optimizer, reduction: "KerasReducer | None", process_set: ProcessSet
) -> str | None:
    base = keras.optimizers.Optimizer
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if type(optimizer)._clip_gradients is not base._clip_gradients:
        return "not clip gradients in a way of its own (use clipnorm, global_clipnorm or clipvalue)."
    if reduction is not None and reduction.settings.late and _treats(optimizer, reduction):
        return (
            "not scale the loss, clip or accumulate gradients with OneStepLate, where those of the rest are of the step before. "
            "Leave one of them out."
        )
    if (scales or optimizer.global_clipnorm) and size_of(process_set) > 1 and not _combines(reduction, process_set):
        what = "scale the loss" if scales else "clip by the norm of all gradients (global_clipnorm)"
        return (
            f"not {what} by gradients that differ between the ranks that share its rows. Let a DistributedOptimizer combine "
            "all of them over these ranks in each step, without LocalSteps and local layers."
        )
    return None


def _treats(optimizer: keras.optimizers.Optimizer, reduction: "KerasReducer") -> bool:
    clips = any((optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue))
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or bool(optimizer.loss_scale_factor)
    passes = max(optimizer.gradient_accumulation_steps or 1, reduction.settings.backward_passes_per_step)
    return clips or scales or passes > 1


def _combines(reduction: "KerasReducer | None", process_set: ProcessSet) -> bool:
    """Whether all ranks that share a table see the same gradients of the rest in each step."""
    if reduction is None or reduction.settings.local is not None or reduction.kinds.some_are_local:
        return False
    return id_of(reduction.settings.process_set) == id_of(process_set)


def _reduction_of(optimizer: keras.optimizers.Optimizer | None) -> "KerasReducer | None":
    return getattr(optimizer, "_gradient_reduction", None)


def _tables(variables: Sequence[Variable], gradients: Gradients | None = None) -> dict[int, SelfUpdatingTable]:
    """The tables whose anchors are among some variables, and have a gradient, by the anchors' places."""
    found = {place: getattr(variable, "sharded_table", None) for place, variable in enumerate(variables)}
    return {
        place: table
        for place, table in found.items()
        if table is not None and (gradients is None or gradients[place] is not None)
    }


# ---- what is done in the step ----


def _after(
    tables: dict[int, SelfUpdatingTable],
    gradients: Gradients,
    do: Callable[..., None],
    *inputs: Tensor | float,
) -> _Results:
    """All gradients, when a function of some inputs was called; it runs when those of the anchors are there."""
    given: _Results = [gradients[place] for place in tables]

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        do(*arrays[len(given) :])
        return [np.asarray(each) for each in arrays[: len(given)]]

    kinds = [((), keras.backend.standardize_dtype(each.dtype)) for each in given]
    scalars = [keras.ops.convert_to_tensor(each, "float32") for each in inputs]
    results = list(gradients)
    for place, result in zip(tables, backend.on_host(call, [*given, *scalars], kinds), strict=True):
        results[place] = backend.like(result, gradients[place])
    return results


def _taken(tables: dict[int, SelfUpdatingTable], gradients: Gradients, divisor: Tensor | float) -> _Results:
    """All gradients, when those of rows that have come were taken for the update."""

    def take(divisor: np.ndarray) -> None:
        for table in tables.values():
            table.accept(float(divisor))

    return _after(tables, gradients, take, divisor)


def _used(tables: dict[int, SelfUpdatingTable], gradients: Gradients, finite: Flag) -> _Results:
    """All gradients, when those of rows were dropped if the step is skipped."""

    def drop_unless(finite: np.ndarray) -> None:
        if not finite:
            for table in tables.values():
                table.drop()

    return _after(tables, gradients, drop_unless, keras.ops.cast(finite, "float32"))


def _with_norms(tables: dict[int, SelfUpdatingTable], gradients: Gradients, passes: int) -> _Results:
    """All gradients, those of the anchors being the norms of what was taken for the whole tables.

    Keras multiplies all of them by one factor, which TensorFlow does with numbers of one precision alone.
    """

    def of_all_ranks(*_: np.ndarray) -> list[np.ndarray]:
        return [np.array(each, np.float32) for each in norms(list(tables.values()), passes)]

    given = [gradients[place] for place in tables]
    results = list(gradients)
    found = backend.on_host(of_all_ranks, given, [((), "float32")] * len(given))
    widest = keras.backend.result_type(*(each.dtype for each in gradients if each is not None))
    for place, norm in zip(tables, found, strict=True):
        results[place] = keras.ops.cast(backend.like(norm, gradients[place]), widest)
    return results


def _changed(
    tables: dict[int, SelfUpdatingTable], gradients: Gradients, factors: Sequence[Tensor | float], passes: int, bound: float | None
) -> _Results:  # fmt: skip
    """All gradients, those of the anchors being zeros, when rows were changed by what was taken."""

    def change(*factors: np.ndarray) -> None:
        for table, factor in zip(tables.values(), factors, strict=True):
            table.change(passes, float(factor), bound)

    results = _after(tables, gradients, change, *factors)
    for place in tables:
        results[place] = keras.ops.where(keras.ops.isfinite(results[place]), results[place] * 0, 0)
    return results


# ---- Keras' optimizers ----


def _accompany_updates(optimizer_class: type[keras.optimizers.Optimizer]) -> None:
    """Has rows share in whatever an optimizer does with unscaled gradients: it adds them up, or clips and uses them."""
    original = optimizer_class._backend_apply_gradients

    @backend.unconverted
    @functools.wraps(original)
    def _backend_apply_gradients(
        self: keras.optimizers.Optimizer, grads: Gradients, trainable_variables: Sequence[Variable]
    ) -> None:
        tables = _tables(trainable_variables, grads)
        if not tables:
            original(self, grads, trainable_variables)
            return
        check_all(self, trainable_variables)
        divisor = self.loss_scale_factor or 1
        for each in _step.divisors:
            divisor = divisor * each()
        with _clips_rows(self, tables):
            taken = _taken(tables, [backend.here(each) for each in grads], divisor)
            original(self, taken, trainable_variables)

    optimizer_class._backend_apply_gradients = _backend_apply_gradients


@contextmanager
def _clips_rows(optimizer: keras.optimizers.Optimizer, tables: dict[int, SelfUpdatingTable]) -> Iterator[None]:
    """Has rows be clipped and changed where an optimizer clips what it is about to use; there alone it does so."""
    clip = optimizer._clip_gradients
    passes = optimizer.gradient_accumulation_steps or 1

    def clip_with_rows(gradients: Gradients) -> _Results:
        if not (optimizer.clipnorm or optimizer.global_clipnorm):
            return _changed(tables, clip(gradients), [1.0] * len(tables), passes, optimizer.clipvalue)
        with_norms = _with_norms(tables, gradients, passes)
        clipped = clip(with_norms)
        factors = [_shrunk(with_norms[place], clipped[place]) for place in tables]
        return _changed(tables, clipped, factors, passes, None)

    vars(optimizer)["_clip_gradients"] = clip_with_rows  # Keras would track what is set in the usual way
    try:
        yield
    finally:
        del vars(optimizer)["_clip_gradients"]


def _shrunk(norm: Tensor, clipped: Tensor) -> Tensor:
    """By what clipping has multiplied a norm."""
    some = norm > 0
    return keras.ops.where(some, clipped / keras.ops.where(some, norm, 1.0), 1.0)


def _accompany_scaling(scaling_class: type[keras.optimizers.LossScaleOptimizer]) -> None:
    """Has rows be unscaled by the loss' scale, and skip the steps that are skipped."""
    original = scaling_class.apply

    @backend.unconverted
    @functools.wraps(original)
    def apply(
        self: keras.optimizers.LossScaleOptimizer,
        grads: Gradients,
        trainable_variables: Sequence[Variable] | None = None,
    ) -> None:
        trained = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        tables = _tables(trained, grads)
        if not tables:
            original(self, grads, trainable_variables)
            return
        check_all(self, trained)
        finite = self.check_finite([each for each in grads if each is not None])
        with _noted(_step.divisors, lambda: keras.ops.convert_to_tensor(self.dynamic_scale)):
            original(self, _used(tables, grads, finite), trained)

    scaling_class.apply = apply


@contextmanager
def _noted(where: list[_Noted], what: _Noted) -> Iterator[None]:
    where.append(what)
    try:
        yield
    finally:
        where.pop()


_accompany_updates(keras.optimizers.Optimizer)
_accompany_scaling(keras.optimizers.LossScaleOptimizer)
