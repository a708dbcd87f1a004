"""``DistributedOptimizer(op=Adasum)`` of TensorFlow 1: every rank steps by itself, and then the ranks' steps are combined.

The delta optimizer of Maleki et al. (arXiv:2006.02924), as ``ringtrain.torch.modes.adasum`` has it: ``apply_gradients``
applies this rank's own gradients, and then gives each variable the value that it had before plus the Adasum of all
ranks' changes.
"""

from collections.abc import Iterable

import tensorflow as tf

from ringtrain.tensorflow import names
from ringtrain.tensorflow.gradients import GradientReduction
from ringtrain.tensorflow.types import Gradient
from ringtrain.tensorflow.watching import watched_by_names


class AdasumOptimizer(tf.compat.v1.train.Optimizer):
    """What an optimizer of TensorFlow 1 becomes; ``DistributedOptimizer`` sets the attributes."""

    _reduction: GradientReduction
    _stem: str  # of the names of the changes
    _compares: bool  # the variables of all ranks

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, tf.Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        """As in TensorFlow; what it returns is done when the variables have the values that all ranks agree on.

        On an error an eager step is undone; one of a graph leaves this rank's own step.
        """
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]  # all: another rank may have a gradient where this one has none
        # Copied in any case: where variables are references, what is read of one changes with it.
        starts = [tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(variable)) for variable in variables]
        with tf.control_dependencies(starts):
            applied = super().apply_gradients(pairs, global_step, name)
        with tf.control_dependencies(_dependencies(applied)):
            deltas = [variable.read_value() - start for variable, start in zip(variables, starts, strict=True)]
        try:
            combined = self._combined(deltas, variables, starts)
        except Exception:
            _assign(variables, starts)
            raise
        return _assign(variables, [start + delta for start, delta in zip(starts, combined, strict=True)])

    def _combined(
        self, deltas: list[tf.Tensor], variables: list[tf.Variable], starts: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        stem, reduction = names.claim_in_function(f"{self._stem}.delta"), self._reduction
        identities = names.of_gradients(stem, variables)
        return watched_by_names(
            self._compares, stem, variables, {}, reduction.process_set,
            lambda: reduction.reduce(deltas, identities, variables), starts,
        )  # fmt: skip


def _assign(variables: list[tf.Variable], values: list[tf.Tensor]) -> tf.Operation | None:
    return tf.group(*[variable.assign(value) for variable, value in zip(variables, values, strict=True)])


def _dependencies(applied: tf.Operation | None) -> list[tf.Operation]:
    return [] if applied is None or tf.executing_eagerly() else [applied]
