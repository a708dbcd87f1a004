"""Gradients of tapes that are reduced on the host: by PowerSGD, or one step late.

What is kept from step to step is found by the names of the gradients and the variables that they belong to.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from ringtrain._runtime.process_sets import ProcessSet
from ringtrain._training.on_host import HostReducer, HostSettings
from ringtrain._training.session import Session
from ringtrain.tensorflow.kept import Kept
from ringtrain.tensorflow.types import Variable


class HostKept:
    """What some variables' gradients leave from step to step.

    Args:
        host: reduces them.

    Attributes:
        host: as given.
        places: among the variables, of those that had a gradient in the last step.
    """

    def __init__(self, host: HostReducer):
        self.host = host
        self.places: Sequence[int] = ()


_kept: Kept[HostKept] = Kept()


def reduced(
    kept: HostKept, gradients: Sequence[tf.Tensor], names: Sequence[str], places: Sequence[int]
) -> list[tf.Tensor]:
    """Dense gradients combined over the ranks, eager or when the graph runs; one step late those of the step before.

    Args:
        kept: from ``kept_of``.
        gradients: those that any rank has.
        names: of the gradients, before they are claimed in a graph, so that it may be traced again.
        places: of the gradients, among the variables.
    """
    host, chosen, reached = kept.host, list(names), list(places)
    settings = host.settings

    def on_host(*tensors: tf.Tensor | np.ndarray) -> list[np.ndarray]:
        arrays = [np.asarray(tensor) for tensor in tensors]
        if not settings.late:
            results = host.reduce(chosen, arrays)
            host.settle(all(bool(np.isfinite(result.astype(np.float64)).all()) for result in results))
            return results
        late = host.exchange(chosen, arrays, skips=False)
        kept.places = reached
        return late if host.applies else [np.zeros_like(array) for array in arrays]

    if tf.executing_eagerly():
        results = [tf.convert_to_tensor(result) for result in on_host(*gradients)]
    else:
        results = tf.numpy_function(on_host, list(gradients), [gradient.dtype for gradient in gradients])
    return [tf.ensure_shape(result, gradient.shape) for result, gradient in zip(results, gradients, strict=True)]


def late_gradients(variables: Sequence[Variable]) -> list[tf.Tensor | None]:
    """The gradients of the last step of tapes with ``mode=OneStepLate()``, which are left to be applied; None where there are none.

    Example:
        >>> optimizer.apply_gradients(zip(hvd.late_gradients(model.trainable_variables), model.trainable_variables))

    On all ranks, outside of a ``tf.function``, before the model is evaluated and at the end. The next step then begins
    with zeros again.

    Args:
        variables: what the tapes were asked about.
    """
    places = {id(variable): place for place, variable in enumerate(variables)}
    found: list[tf.Tensor | None] = [None] * len(places)
    for known, kept in _kept.of_this_rank():
        if kept.host.settings.late and any(id(variable) in places for variable in known):
            left = list(kept.host.take().values())
            for variable, gradient in zip([known[place] for place in kept.places], left, strict=False):
                if id(variable) in places:
                    found[places[id(variable)]] = tf.convert_to_tensor(gradient)
    return found


def kept_of(name: str, variables: Sequence[Variable], settings: HostSettings, process_set: ProcessSet) -> HostKept:
    """What the step before has left; nothing yet for other variables, or where something else was asked for.

    Args:
        name: of the first gradient.
        variables: all that were asked about, also those that have no gradient in this step.
        settings: how gradients are combined.
        process_set: the ranks that take part.
    """
    return _kept.find(
        name,
        variables,
        process_set,
        make=lambda: HostKept(HostReducer(Session(process_set), name, settings)),
        suits=lambda kept: kept.host.settings == settings,
    )
