"""Gradients of Keras on TensorFlow; see ``backends`` for who asks."""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

import ringtrain.tensorflow as hvd
from ringtrain._binding import tables
from ringtrain._runtime import operations
from ringtrain._training import residuals
from ringtrain._training.session import Session
from ringtrain._training.watch import Watch
from ringtrain.elastic.followed import followed
from ringtrain.keras.stepping import CALLED
from ringtrain.keras.types import Flag
from ringtrain.tensorflow.gradients import GradientReduction
from ringtrain.tensorflow.graph_world import divided_by_size as divided_by_size
from ringtrain.tensorflow.presence import begin_anew as begin_anew
from ringtrain.tensorflow.presence import complete, settle
from ringtrain.tensorflow.sparse import sum_duplicates
from ringtrain.tensorflow.surviving import reduced
from ringtrain.tensorflow.types import Gradient, Variable
from ringtrain.tensorflow.watching import FORMS
from ringtrain.tensorflow.watching import comparison as comparison
from ringtrain.tensorflow.watching import watched as watched

if TYPE_CHECKING:
    from ringtrain.embedding.table import SelfUpdatingTable
    from ringtrain.keras.reduction_settings import Settings

columns: list[str] = []
compiles_operations = carries_variables = False
rows_come_late = True
Compression = hvd.Compression


class _Eager:
    """The scope of what runs outside of any tf.function."""


_EAGER = _Eager()
unconverted = tf.autograph.experimental.do_not_convert  # Python's control flow in a method is meant as it stands


def operations_for(value: ArrayLike) -> ModuleType:
    """The module whose operations take a value: that of arrays in a graph of TensorFlow 1, whose nodes no session runs."""
    in_session = not tf.executing_eagerly() and not tf.inside_function()
    return operations if in_session and not tf.is_tensor(value) else hvd


def tensor(value: ArrayLike) -> np.ndarray | tf.Tensor:
    """A value as the operations of ``operations_for`` take it."""
    return np.asarray(value) if operations_for(value) is operations else tf.convert_to_tensor(value)


def own_name(name: str | None) -> str | None:
    """A name given to an operation; with a number where the graph that is being traced has it already."""
    return name if name is None or tf.executing_eagerly() else tf.compat.v1.get_default_graph().unique_name(name)


def is_compiled() -> bool:
    """Whether what is being traced will be compiled by XLA, which has no kernel for operations between ranks."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def is_traced() -> bool:
    """Whether what runs now becomes a graph, which runs later, and more than once."""
    return not tf.executing_eagerly()


def on_host(
    function: Callable[..., list[np.ndarray]],
    inputs: Sequence[tf.Tensor | float],
    results: Sequence[tuple[tuple[int, ...], str]],
) -> list[np.ndarray | tf.Tensor]:
    """Calls a function with arrays when the step runs; returns its arrays, of these shapes and dtypes, as tensors."""
    if tf.executing_eagerly():
        return list(function(*(np.asarray(each) for each in inputs)))
    found = tf.numpy_function(function, list(inputs), [tf.as_dtype(dtype) for _, dtype in results])
    return list(found) if results else []


def apply(
    plain: Any,
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
) -> None:
    """The update of the user's class, whose methods ``plain`` has."""
    plain.apply(gradients, variables)


def cond(condition: Flag, true: Callable[[], Any], false: Callable[[], Any]) -> Any:
    """What one of two functions returns; their errors keep their words, which ``keras.ops.cond`` puts its own around."""
    if tf.executing_eagerly() or isinstance(condition, bool):
        return true() if condition else false()
    return tf.cond(condition, true, false)


def is_given(variable: Variable) -> bool:
    """Whether a variable has its value in the step that runs: each has."""
    return True


def wire_of(compression: object) -> str | None:
    """The core's name for what a compression does; None for a class of the user's own."""
    return "none" if compression in (None, hvd.Compression.none) else getattr(compression, "wire", None)


def dense(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The gradient with all its rows."""
    return tf.convert_to_tensor(gradient)


def each_index_once(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """The gradient; of ``tf.IndexedSlices`` the rows of an index that comes twice are added up, as those of several ranks are.

    Keras' optimizers add up what they make of each row: Adam, Adagrad and RMSprop add up squares, where a dense gradient
    has the square of the sum.
    """
    return sum_duplicates(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def scopes() -> list[object]:
    """The graph being traced and those around it, from the inside; outside of any, one object that stands for that."""
    if tf.executing_eagerly():
        return [_EAGER]
    graph = tf.compat.v1.get_default_graph()
    found = [graph]
    while getattr(getattr(graph, "outer_graph", None), "outer_graph", None) is not None:
        graph = graph.outer_graph
        found.append(graph)
    return found


def reduce(
    gradients: Sequence[Gradient], names: Sequence[str], variables: Sequence[Variable], settings: "Settings"
) -> list[Gradient]:
    """The gradients combined over the ranks as ``reduction.Settings`` say."""
    combined = GradientReduction(
        "DistributedOptimizer",
        settings.op,
        settings.compression or hvd.Compression.none,
        settings.sparse_as_dense,
        settings.gradient_predivide_factor,
        settings.groups,
        settings.process_set,
    )
    return combined.reduce(gradients, names, variables)


def watch(session: Session, name: str, parameters: Sequence[Variable]) -> Watch:
    """What compares the ranks' steps with each other."""
    return Watch(session, name, CALLED, FORMS)


def completed(
    gradients: Sequence[Gradient], names: Sequence[str], variables: Sequence[Variable], settings: "Settings"
) -> list[Gradient]:
    """The gradients with zeros for those that only other ranks have; as in ``presence.complete``."""
    results, agreement = complete(gradients, names, variables, settings.process_set)
    settle(agreement)
    return results


def like(result: np.ndarray | tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    """What ``on_host`` has returned in the place of a gradient."""
    return tf.ensure_shape(tf.convert_to_tensor(result), gradient.shape)


def here(gradient: Gradient) -> Gradient:
    """The gradient as a tensor of the graph that is being traced: TensorFlow's optimizers take those of one graph."""
    return None if gradient is None else tf.identity(gradient)


def keeps_residuals(compression: object) -> bool:
    """Whether the core makes up for what a compression has lost of the gradients before."""
    return getattr(compression, "wire", None) in tables.WITHOUT_FEEDBACK


def settle_residuals(used: tf.Tensor | bool, session: Session, prefix: str) -> None:
    """``residuals.settle``, when the step runs."""

    def settle(used: np.ndarray | bool) -> None:
        residuals.settle(session, prefix, bool(used))

    if tf.executing_eagerly():
        settle(used)
    else:
        tf.numpy_function(settle, [used], [])


def maxima(
    gradients: Sequence[Gradient], names: Sequence[str], variables: Sequence[Variable], settings: "Settings"
) -> list[Gradient]:
    """The largest of the ranks' values, element by element."""
    if (state := followed()) is not None:
        name = f"{names[0]}.maxima" if names else ""
        return reduced(state, "DistributedOptimizer", gradients, name, hvd.Max, settings.process_set)
    completed, agreement = complete(gradients, names, variables, settings.process_set)
    results = [
        None if gradient is None else hvd.allreduce(gradient, op=hvd.Max, name=name, process_set=settings.process_set)
        for gradient, name in zip(completed, names, strict=True)
    ]
    settle(agreement)
    return results


def rows_of(table: "SelfUpdatingTable", ids: tf.Tensor, anchor: keras.Variable) -> tf.Tensor:
    """Rows of a ``SelfUpdatingTable``, whose gradients wait there; ``anchor`` gets that of ``SelfUpdatingTable.bring``."""
    ids = tf.convert_to_tensor(ids)

    def on_ranks(function: Callable, inputs: list[tf.Tensor], dtypes: list[tf.DType]) -> list[tf.Tensor]:
        return tf.numpy_function(function, inputs, dtypes, stateful=True)

    @tf.custom_gradient
    def fetch(anchored: tf.Tensor) -> Any:
        # The anchor's value is there when the rows were changed the last time: calls of the host have no order otherwise.
        rows, places, trip = on_ranks(
            lambda ids, _: table.look_up(ids), [ids, anchored], [tf.float32, tf.int64, tf.int64]
        )
        rows = tf.ensure_shape(rows, (None, table.width))

        def gradient(of_rows: tf.Tensor | tf.IndexedSlices, *_: tf.Tensor) -> tf.Tensor:
            zero = on_ranks(table.bring, [trip, tf.convert_to_tensor(of_rows)], [tf.float32])
            return tf.ensure_shape(zero[0] if isinstance(zero, list) else zero, ())

        return (rows, tf.ensure_shape(places, ids.shape)), gradient

    rows, places = fetch(tf.convert_to_tensor(anchor))
    if not anchor.trainable:  # a tape goes back to all that was read, also to what nobody asks gradients of
        rows = tf.stop_gradient(rows)
    return tf.gather(rows, places)


def dataset(reader: Callable[[], Iterator[object]], example: object) -> tf.data.Dataset:
    """What ``fit`` reads, batch by batch: each is asked for when its step begins, and none ahead.

    Args:
        reader: makes an iterator over batches of arrays.
        example: a batch.
    """

    def spec_of(array: ArrayLike) -> tf.TensorSpec:
        found = np.asarray(array)
        return tf.TensorSpec((None, *found.shape[1:]), found.dtype)

    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    made = tf.data.Dataset.from_generator(reader, output_signature=tf.nest.map_structure(spec_of, example))
    return made.with_options(options)
