"""Gradients of Keras on JAX; see ``backends`` for who asks.

A step is mostly a program. It changes nothing but what it is given: in it variables have the values of ``stateless_apply``, and what
a condition's branch assigns has to come out of it. Operations are part of the program, and calls of the host run in the order in which
they were traced.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import io_callback
from keras.src.backend.common.stateless_scope import get_stateless_scope  # Keras has no public name for it
from numpy.typing import ArrayLike

import ringtrain.jax as hvd
from ringtrain._binding import tables
from ringtrain._runtime import operations
from ringtrain._runtime.process_sets import ProcessSet, size_of
from ringtrain._training import residuals
from ringtrain._training.drift import Settings
from ringtrain._training.grouping import Groups
from ringtrain._training.needs import check_needs
from ringtrain._training.powersgd import PowerSGD
from ringtrain._training.session import Session
from ringtrain._training.watch import Comparison, Watch
from ringtrain.elastic.followed import followed
from ringtrain.jax import names as naming
from ringtrain.jax.watching import FORMS, watched_in_a_program
from ringtrain.keras.presence import Combine, combine_each, reduce_present
from ringtrain.keras.stepping import CALLED
from ringtrain.keras.types import Flag

if TYPE_CHECKING:
    from ringtrain.embedding.table import SelfUpdatingTable
    from ringtrain.keras.reduction_settings import Settings as ReductionSettings

Result = TypeVar("Result")

columns = ["KERAS_BACKEND=jax"]
compiles_operations = carries_variables = True
rows_come_late = False


class Compression(operations.Compression):
    """``none``, ``fp16``, ``bf16``, ``int8``, ``int4`` and ``powersgd(rank)``."""

    powersgd = PowerSGD


class _Eager:
    """The scope of what runs outside of any program."""


_EAGER = _Eager()
is_traced = naming.tracing


def unconverted(method: Callable) -> Callable:
    """The method: JAX does not convert control flow."""
    return method


def is_compiled() -> bool:
    """XLA compiles the operations between ranks here."""
    return False


def scopes() -> list[object]:
    """The program that is being traced; outside of any, one object that stands for that."""
    return [naming.program() or _EAGER]


# ---- what a step is made of ----


def cond(condition: Flag, true: Callable[[], Result], false: Callable[[], Result]) -> Result:
    """``keras.ops.cond``, with what the branches assign to variables that the step was given."""
    if not isinstance(condition, jax.core.Tracer):
        return true() if condition else false()
    scope = get_stateless_scope()
    if scope is None:
        return jax.lax.cond(condition, true, false)
    given = list(scope.state_mapping)

    def branch(act: Callable[[], Result]) -> Callable[[], tuple[Result, list[jax.Array]]]:
        def run() -> tuple[Result, list[jax.Array]]:
            with keras.StatelessScope() as inner:
                inner.state_mapping = dict(scope.state_mapping)
                result = act()
            return result, [inner.state_mapping[each] for each in given]

        return run

    result, values = jax.lax.cond(condition, branch(true), branch(false))
    scope.state_mapping.update(zip(given, values, strict=True))
    return result


def on_host(
    function: Callable[..., list[np.ndarray]],
    inputs: Sequence[jax.Array | float],
    results: Sequence[tuple[tuple[int, ...], str]],
) -> list[np.ndarray | jax.Array]:
    """Calls a function with arrays when the step runs; returns its arrays, of these shapes and dtypes."""
    if not is_traced():
        return list(function(*(np.asarray(each) for each in inputs)))

    def call(*arrays: jax.Array) -> list[np.ndarray]:
        found = function(*(np.asarray(each) for each in arrays))
        return [np.asarray(each, dtype).reshape(shape) for each, (shape, dtype) in zip(found, results, strict=True)]

    expected = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    return list(io_callback(call, expected, *inputs, ordered=True))


def apply(
    plain: Any,
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[jax.Array],
    variables: Sequence[keras.Variable],
) -> None:
    """The update of the user's class; a LossScaleOptimizer has one for programs, since its conditions assign variables."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        plain.apply(gradients, variables)
        return
    trained, kept = optimizer._trainable_variables, optimizer.variables
    own = {id(variable): gradient for gradient, variable in zip(gradients, variables, strict=True)}
    values = [[each.value for each in held] for held in (kept, trained)]
    changed = plain.stateless_apply(values[0], [own.get(id(each)) for each in trained], values[1])
    for variable, value in zip([*trained, *kept], itertools.chain(*changed), strict=True):
        variable.assign(value)


def begin_anew(prefix: str) -> None:
    """All ranks make new steps: nothing is remembered of those before."""


def is_given(variable: keras.Variable) -> bool:
    """Whether a variable has its value in the step that runs: a program, and Keras' step, have no others."""
    scope = get_stateless_scope()
    return not is_traced() if scope is None else scope.get_current_value(variable) is not None


# ---- values ----


def operations_for(value: ArrayLike) -> ModuleType:
    """The module whose operations take a value."""
    return hvd


def tensor(value: ArrayLike) -> jax.Array:
    """A value as the operations take it."""
    return keras.ops.convert_to_tensor(value)


def own_name(name: str | None) -> str | None:
    """A name given to an operation."""
    return name


# ---- gradients ----


def wire_of(compression: object) -> str | None:
    """The core's name for what a compression does; None for all else."""
    if compression is None:
        return "none"
    return str(compression) if isinstance(compression, str) and compression in tables.COMPRESSIONS else None


def dense(gradient: jax.Array) -> jax.Array:
    """The gradient: JAX makes dense ones."""
    return gradient


each_index_once = here = dense


def divided_by_size(gradient: jax.Array, process_set: ProcessSet) -> jax.Array:
    """The gradient over the number of a set's ranks."""
    return gradient * (1.0 / size_of(process_set))


def like(result: np.ndarray, gradient: jax.Array) -> jax.Array:
    """What ``on_host`` has returned in the place of a gradient."""
    return jnp.asarray(result, gradient.dtype)


def reduce(
    gradients: Sequence[jax.Array | None],
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    settings: "ReductionSettings",
) -> list[jax.Array | None]:
    """The gradients combined over the ranks as ``reduction.Settings`` say; each group of them is one operation."""
    check_needs(columns, {"elastic.State": followed() is not None})

    def combine(places: list[int], found: list[jax.Array]) -> list[jax.Array]:
        return hvd.grouped_allreduce(
            [found[place] for place in places], names[places[0]], settings.op, 1.0 / settings.gradient_predivide_factor,
            settings.gradient_predivide_factor, settings.process_set, settings.compression or Compression.none,
        )  # fmt: skip

    groups = 1 if settings.groups is None else settings.groups
    return _reduce_present(gradients, names, variables, settings, groups, combine)


def completed(
    gradients: Sequence[jax.Array | None],
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    settings: "ReductionSettings",
) -> list[jax.Array | None]:
    """The gradients with zeros for those that only other ranks have."""
    return _reduce_present(gradients, names, variables, settings, 1, lambda places, found: [found[at] for at in places])


def maxima(
    gradients: Sequence[jax.Array | None],
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    settings: "ReductionSettings",
) -> list[jax.Array | None]:
    """The largest of the ranks' values, element by element."""

    def combine(places: list[int], found: list[jax.Array]) -> list[jax.Array]:
        sent = [found[place] for place in places]
        return hvd.grouped_allreduce(sent, names[places[0]], hvd.Max, process_set=settings.process_set)

    return _reduce_present(gradients, names, variables, settings, 1, combine)


def _reduce_present(
    gradients: Sequence[jax.Array | None],
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    settings: "ReductionSettings",
    groups: Groups,
    combine: Combine,
) -> list[jax.Array | None]:
    """In a program those that this rank has: JAX makes zeros of what has no gradient, and a rank may trace alone."""
    if is_traced():
        return combine_each(gradients, variables, groups, combine)
    return reduce_present(
        gradients, names, variables, settings, groups, combine, lambda variable: jnp.zeros_like(variable.value)
    )


def keeps_residuals(compression: object) -> bool:
    """Whether the core makes up for what a compression has lost of the gradients before."""
    return wire_of(compression) in tables.WITHOUT_FEEDBACK


def settle_residuals(used: Flag, session: Session, prefix: str) -> None:
    """``residuals.settle``, when the step runs."""

    def settle(used: np.ndarray) -> list[np.ndarray]:
        residuals.settle(session, prefix, bool(used))
        return []

    on_host(settle, [used], [])


# ---- whether ranks step alike ----


def watch(session: Session, name: str, parameters: Sequence[keras.Variable]) -> Watch:
    """What compares the ranks' steps with each other."""
    return Watch(session, name, CALLED, FORMS)


def comparison(
    watch: Watch,
    settings: Settings,
    rate: keras.Variable | jax.Array | float | None,
    parameters: Sequence[tuple[str, keras.Variable]],
) -> Comparison:
    """What a step compares, as ``tensorflow.watching.comparison`` has it: in a program, of what it was given."""
    if not is_traced():
        number = None if rate is None else keras.ops.convert_to_numpy(rate)
        return Comparison(watch, settings, number, parameters, lambda variable: np.asarray(variable.value))
    given = [(name, variable) for name, variable in parameters if is_given(variable)]
    return Comparison(watch, settings, rate if given else None, given, lambda variable: variable.value)


def watched(
    compared: Comparison, process_set: ProcessSet, reduce: Callable[[], list[jax.Array | None]]
) -> list[jax.Array | None]:
    """What ``reduce`` returns, once ranks have found that they step alike; as ``tensorflow.watching.watched`` has it."""
    if not is_traced():
        return compared.around(reduce, compared.rate)
    settings: dict[str, jax.Array | float] = {name: float(number) for name, number in compared.settings.items()}
    if compared.rate is not None:
        settings["learning_rate"] = keras.ops.convert_to_tensor(compared.rate)
    values = {name: variable.value for name, variable in compared.parameters}
    return watched_in_a_program(compared.watch, process_set, settings, values, reduce)


# ---- what there is not ----


def rows_of(table: "SelfUpdatingTable", ids: jax.Array, anchor: keras.Variable) -> jax.Array:
    """Rows of a ``SelfUpdatingTable``; refused when the layer is built."""
    raise AssertionError


def dataset(reader: Callable[[], Iterator[object]], example: object) -> None:
    """What ``fit`` reads of an elastic sampler."""
    check_needs(columns, {"survives on the host": True}, "elastic.batches")
