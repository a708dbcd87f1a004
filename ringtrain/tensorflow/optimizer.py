"""``DistributedOptimizer`` for whatever optimizer a TensorFlow script has: those of Keras, and TensorFlow 1's.

Keras' optimizers are the business of ``ringtrain.tensorflow.keras``. One of ``tf.compat.v1.train`` stays the user's
object: its class is exchanged for one whose ``compute_gradients`` reduces.
"""

import importlib
from collections.abc import Iterable
from typing import TypeVar

import tensorflow as tf

from ringtrain._runtime.arguments import check_among
from ringtrain._runtime.operations import Adasum, Average
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._training.grouping import Groups
from ringtrain._training.mode import Mode, checked_mode
from ringtrain._training.needs import check_needs
from ringtrain._training.optimizer_arguments import check_passes, check_plain, given_groups
from ringtrain._training.powersgd import PowerSGD
from ringtrain.tensorflow import names
from ringtrain.tensorflow.accumulation import Accumulation
from ringtrain.tensorflow.adasum import AdasumOptimizer
from ringtrain.tensorflow.compression import Compression, Compressor
from ringtrain.tensorflow.gradients import GradientReduction
from ringtrain.tensorflow.types import Gradient, Pairs
from ringtrain.tensorflow.watching import watched_by_names

_AnOptimizer = TypeVar("_AnOptimizer")  # of TensorFlow 1 or Keras


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """What an optimizer of TensorFlow 1 becomes; ``DistributedOptimizer`` sets the attributes."""

    _reduction: GradientReduction
    _accumulation: Accumulation | None  # None: gradients are reduced in every pass
    _stem: str  # of the gradients' names
    _local: dict[int, tf.Variable]  # by identity
    _scales_local: bool
    _compares: bool  # the variables of all ranks

    def register_local_var(self, var: tf.Variable) -> None:
        """Leaves the gradient of a variable out of the reduction: it differs from rank to rank on purpose."""
        self._local[id(var)] = var

    def compute_gradients(self, *arguments: object, **further: object) -> Pairs:
        """As in TensorFlow; the gradients are reduced over the ranks.

        With ``backward_passes_per_step`` they are the pass's own until an update's last pass, where they are the
        reduced sums of all of its passes.
        """
        pairs = super().compute_gradients(*arguments, **further)
        variables = [variable for _, variable in pairs]
        stem = self._reduction.stem_of(names.claim_in_function(self._stem), variables)
        identities = names.of_gradients(stem, variables)

        reduction, local = self._reduction, self._local

        def reduce(gradients: list[Gradient]) -> list[Gradient]:
            return watched_by_names(
                self._compares, stem, variables, local, reduction.process_set,
                lambda: reduction.reduce_but_local(gradients, identities, variables, local, self._scales_local),
            )  # fmt: skip

        gradients = [gradient for gradient, _ in pairs]
        if self._accumulation is None:
            return list(zip(reduce(gradients), variables, strict=True))
        gradients = self._reduction.complete_but_local(gradients, identities, variables, self._local)
        return list(zip(self._accumulation.collect(gradients, variables, reduce), variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, tf.Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        """As in TensorFlow; with ``backward_passes_per_step`` only ``global_step`` moves before an update's last pass."""
        pairs = list(grads_and_vars)
        if self._accumulation is None:
            return super().apply_gradients(pairs, global_step, name)
        update = super().apply_gradients
        return self._accumulation.apply(pairs, lambda: update(pairs, global_step, name), global_step)


def DistributedOptimizer(
    optimizer: _AnOptimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | PowerSGD = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    mode: Mode | None = None,
) -> _AnOptimizer:
    """Makes an optimizer average its gradients over the ranks, and returns it.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.AdagradOptimizer(0.01 * hvd.size()))

    Args:
        optimizer: one of Keras, for which ``ringtrain.tensorflow.keras.DistributedOptimizer`` says more, or of
            ``tf.compat.v1.train``.
        name: the beginning of its gradients' names among the ranks; the optimizer keeps its own name.
        use_locking: accepted for Horovod's sake.
        device_dense: accepted for Horovod's sake; TensorFlow places the operations.
        device_sparse: accepted for Horovod's sake.
        compression: how gradients travel.
        sparse_as_dense: make ``tf.IndexedSlices`` dense first.
        backward_passes_per_step: passes whose gradients are added up before they are reduced. For an optimizer of
            ``tf.compat.v1.train`` in a graph for sessions, whose local variables hold the sums; not with ``Adasum``.
        op: ``Average`` or ``Sum``; or, for one of ``tf.compat.v1.train``, ``Adasum``: each rank applies its own
            gradients, and the changes of the variables are combined (``ringtrain.tensorflow.adasum``).
        gradient_predivide_factor: part of the average's divisor that is applied before the sum.
        average_aggregated_gradients: divide by ``backward_passes_per_step`` too.
        num_groups: deprecated; ``groups`` as a number.
        groups: number of groups, or lists of variables whose gradients are one operation each.
        process_set: the ranks that take part.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.
        mode: ``Synchronous()``, which is the default; for an optimizer of Keras also ``LocalSteps(every=...)`` or
            ``OneStepLate()``.

    Raises:
        InvalidArgumentError: something else than an optimizer, or a wrong argument.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _keras_optimizer(
            optimizer, name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
            sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups, groups=groups,
            process_set=process_set, scale_local_gradients=scale_local_gradients, mode=mode,
        )  # fmt: skip
    mode = checked_mode(mode)
    check_needs(mode.columns, {"tf1": True})
    reduction = GradientReduction(
        "DistributedOptimizer", op, compression, sparse_as_dense, gradient_predivide_factor,
        given_groups("DistributedOptimizer", num_groups, groups, "variable", stacklevel=2), process_set, takes_adasum=True,
    )  # fmt: skip
    check_passes(backward_passes_per_step)
    if op == Adasum:
        _check_for_adasum(backward_passes_per_step, average_aggregated_gradients)
    check_plain("DistributedOptimizer", "optimizer", optimizer, (_DistributedOptimizer, AdasumOptimizer))
    if not names.in_session_graph():
        demand = "DistributedOptimizer: backward_passes_per_step must be 1 for an optimizer of tf.compat.v1 outside of a graph for sessions"
        check_among(demand, backward_passes_per_step, [1], "Use an optimizer of Keras")
    kind, ours = type(optimizer), AdasumOptimizer if op == Adasum else _DistributedOptimizer
    optimizer.__class__ = type(kind.__name__, (ours, kind), {"__module__": kind.__module__})
    optimizer._reduction = reduction
    optimizer._accumulation = None
    if backward_passes_per_step > 1:
        optimizer._accumulation = Accumulation(backward_passes_per_step, average_aggregated_gradients)
    optimizer._stem = name or "DistributedOptimizer"
    optimizer._local, optimizer._scales_local = {}, scale_local_gradients
    optimizer._compares = mode.compares
    return optimizer


def _check_for_adasum(backward_passes_per_step: int, average_aggregated_gradients: bool) -> None:
    """What has no meaning where no gradients are sent."""
    for name, given, only in [
        ("backward_passes_per_step", backward_passes_per_step, 1),
        ("average_aggregated_gradients", average_aggregated_gradients, False),
    ]:
        demand = f"DistributedOptimizer: {name} must be {only} with op=Adasum, which sends no gradients"
        check_among(demand, given, [only], "Leave it out")


def _keras_optimizer(optimizer: _AnOptimizer, name: str | None, **arguments: object) -> _AnOptimizer:
    keras = importlib.import_module(
        "ringtrain.tensorflow.keras"
    )  # only now: Keras costs time, and a tape needs none of it
    return keras.DistributedOptimizer(optimizer, name, **arguments)
