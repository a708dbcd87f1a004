"""Reductions of a step that survives a change of the world: on the host, where they can be sent again.

An operation of a graph is over when it has failed. So a graph calls a function on the host here, with all gradients at once;
it returns when all ranks hold the results. Averages are weighed by the samples of the state's sampler, if it has one.
TensorFlow's tensors do not change, and are kept for nothing. With the gradients travels what ranks compare of the step.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ringtrain._runtime.operations import Adasum, Average, Sum
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._training.step_guard import require_all_ranks
from ringtrain._training.watch import Comparison
from ringtrain.elastic import TransparentState
from ringtrain.embedding.table import with_rows
from ringtrain.errors import UnsupportedError
from ringtrain.tensorflow.compression import Compressor
from ringtrain.tensorflow.types import Gradient, Source


def reduced(
    state: TransparentState,
    owner: str,
    tensors: Sequence[Gradient],
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
    compression: type[Compressor] = Compressor,
    predivide: float = 1.0,
    variables: Sequence[Source] = (),
) -> list[Gradient]:
    """Tensors reduced over the ranks as one operation, eager or when the graph runs.

    Args:
        state: whose step it is.
        owner: who speaks in errors.
        tensors: the same number on all ranks; ``tf.IndexedSlices`` get all their rows. Those that are None stay it, and
            must be so on all ranks.
        name: the same on all ranks.
        op: the reduction.
        process_set: must be that of all ranks.
        compression: must be one of ringtrain's own.
        predivide: part of the average's divisor that is applied before the sum.
        variables: whose gradients the tensors are; those of rows of tables travel with them.

    Raises:
        UnsupportedError: what cannot be done again in another world.
    """
    wire = _checked(owner, process_set, compression)
    if op in (Average, Sum, Adasum):
        state.check_gradients(owner, op)
    present = [place for place, tensor in enumerate(tensors) if tensor is not None]
    dense = [tf.convert_to_tensor(tensors[place]) for place in present]

    if not dense:
        return list(tensors)
    comparison = state.take_comparison()

    def on_host(rate: tf.Tensor | np.ndarray | float | None, *arrays: tf.Tensor | np.ndarray) -> list[np.ndarray]:
        given = [np.asarray(array) for array in arrays]

        def reduce() -> list[np.ndarray]:
            return state.grouped_allreduce(given, name, op, 1.0 / predivide, predivide, wire)

        add_up = reduce if comparison is None else functools.partial(comparison.around, reduce, rate)
        return with_rows(state, variables, op, add_up)

    results = list(tensors)
    for place, tensor, result in zip(present, dense, _called(on_host, comparison, dense), strict=True):
        results[place] = tf.ensure_shape(result, tensor.shape)
    return results


def _called(
    on_host: Callable[..., list[np.ndarray]], comparison: Comparison | None, tensors: list[tf.Tensor]
) -> list[np.ndarray | tf.Tensor]:
    """What it returns for the learning rate of a comparison and for tensors, of whose dtypes it is, when they are there."""
    rate = None if comparison is None else comparison.rate
    if tf.executing_eagerly():
        return on_host(rate, *tensors)
    dtypes = [tensor.dtype for tensor in tensors]
    if rate is None:
        on_host = functools.partial(on_host, None)
    else:
        tensors = [tf.convert_to_tensor(rate), *tensors]
    # In a graph behind the update before, since the host reads the variables where it must.
    compared = [] if comparison is None else [tf.convert_to_tensor(each) for _, each in comparison.parameters]
    with tf.control_dependencies(compared):
        return tf.numpy_function(on_host, tensors, dtypes)


def _checked(owner: str, process_set: ProcessSet, compression: type[Compressor]) -> str:
    """What travels, in the core's word."""
    if not tf.executing_eagerly() and not tf.inside_function():
        raise UnsupportedError(
            f"{owner}: with elastic.State gradients must be those of a tf.function, or eager, but are in a graph of "
            "TensorFlow 1. Use TensorFlowState and elastic.run."
        )
    require_all_ranks(owner, process_set, "TensorFlowState")
    wire = getattr(compression, "wire", None)
    if wire is None and compression is not Compressor:
        raise UnsupportedError(
            f"{owner}: with elastic.State compression must be one of hvd.Compression, but is {compression.__name__}. Use "
            "TensorFlowState and elastic.run."
        )
    return wire or "none"
