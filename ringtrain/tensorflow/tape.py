"""Gradient tapes whose ``gradient`` returns what all ranks have found together.

A distributed tape is the user's tape: only its class is exchanged, so it may be wrapped before, within or after the
``with`` block that records on it.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.operations import Average
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._training.grouping import Groups
from ringtrain._training.mode import Mode, checked_mode
from ringtrain._training.needs import check_needs
from ringtrain._training.optimizer_arguments import check_plain, given_groups
from ringtrain._training.powersgd import PowerSGD
from ringtrain.tensorflow import names
from ringtrain.tensorflow.compression import Compression, Compressor
from ringtrain.tensorflow.gradients import GradientReduction
from ringtrain.tensorflow.nodes import as_it_is
from ringtrain.tensorflow.types import Gradient, KerasLayer, Source, Structure
from ringtrain.tensorflow.watching import watched_by_names


class _DistributedTape(tf.GradientTape):
    """What a tape becomes; ``DistributedGradientTape`` sets the attributes."""

    _reduction: GradientReduction
    _local: dict[int, Source]  # by identity; Keras' variables have no hash of their own
    _scales_local: bool
    _compares: bool  # the variables of all ranks

    def register_local_source(self, source: Source) -> None:
        """Leaves the gradient of a variable out of the reduction: it differs from rank to rank on purpose."""
        self._local[id(source)] = source

    @as_it_is
    def gradient(
        self,
        target: Structure,
        sources: Structure,
        output_gradients: Structure = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Structure:
        """``tf.GradientTape.gradient``, reduced over the ranks.

        Args:
            target: as in TensorFlow.
            sources: variables or tensors, in a structure that all ranks share.
            output_gradients: as in TensorFlow.
            use_generic_names: name the gradients by their places alone; by default layer and variable stand there too.
            unconnected_gradients: as in TensorFlow. What is None counts zeros if another rank has it, else it stays
                None.

        Returns:
            Gradients in the structure of ``sources``. Those of local sources are not reduced, but divided by the number
            of ranks if so asked for, so that they match the averages beside them.
        """
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat_sources, flat = tf.nest.flatten(sources), tf.nest.flatten(gradients)
        stem = self._reduction.stem_of(names.claim_in_function("grad"), flat_sources)
        identities = (
            [f"{stem}_{place}" for place in range(len(flat))]
            if use_generic_names
            else names.of_gradients(stem, flat_sources)
        )

        def reduce() -> list[Gradient]:
            return self._reduction.reduce_but_local(flat, identities, flat_sources, self._local, self._scales_local)

        process_set = self._reduction.process_set
        reduced = watched_by_names(self._compares, stem, flat_sources, self._local, process_set, reduce)
        return tf.nest.pack_sequence_as(gradients, reduced)

    @as_it_is
    def get_local_and_global_gradients(
        self,
        target: Structure,
        sources: Sequence[Source],
        output_gradients: Structure = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Source, Gradient]], list[tuple[Source, Gradient]]]:
        """Two lists of ``(source, gradient)``: of the local sources, and of those that were reduced."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        return (
            [pair for pair in pairs if id(pair[0]) in self._local],
            [pair for pair in pairs if id(pair[0]) not in self._local],
        )


@as_it_is
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | PowerSGD = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    mode: Mode | None = None,
) -> tf.GradientTape:
    """Makes ``gradtape.gradient`` reduce the gradients over the ranks, and returns the tape.

    Example:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(images), labels)
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    Args:
        gradtape: the tape; it stays the same object.
        device_dense: accepted for Horovod's sake; TensorFlow places the operations.
        device_sparse: accepted for Horovod's sake.
        compression: how gradients travel; ``Compression.powersgd(rank=2)`` sends matrices as two factors of low rank, from the
            host, when all gradients of a step are there.
        sparse_as_dense: make ``tf.IndexedSlices`` dense first.
        op: ``Average`` or ``Sum``; or ``Adasum``, of dense gradients.
        gradient_predivide_factor: part of the average's divisor that is applied before the sum.
        num_groups: deprecated; ``groups`` as a number.
        groups: number of groups, or lists of variables whose gradients are one operation each.
        process_set: the ranks that take part.
        scale_local_gradients: divide the gradients of local sources by the number of ranks.
        mode: ``Synchronous()``, which is the default, or ``OneStepLate()``: ``gradient`` returns those of the step before, which
            have travelled while these were computed, and zeros at first. The last ones are ``late_gradients(variables)``.

    Raises:
        InvalidArgumentError: not a tape, or arguments that cannot be, or exclude each other.
        MismatchError: by ``gradient``, where the variables that it is asked about differ between ranks; in a graph a
            ``tf.errors.InvalidArgumentError`` with its text. They are compared in its twentieth call and once a second, or so
            seldom that it takes a thousandth of the time; ``replicas="differ"`` in the mode compares nothing.
    """
    check_kind("DistributedGradientTape: the tape must be a tf.GradientTape", gradtape, tf.GradientTape)
    check_plain("DistributedGradientTape", "tape", gradtape, _DistributedTape)
    chosen = checked_mode(mode, "DistributedGradientTape")
    check_needs(chosen.columns, {"tape": True}, "DistributedGradientTape")
    reduction = GradientReduction(
        "DistributedGradientTape", op, compression, sparse_as_dense, gradient_predivide_factor,
        given_groups("DistributedGradientTape", num_groups, groups, "variable", stacklevel=3), process_set, takes_adasum=True,
        mode=chosen,
    )  # fmt: skip
    kind = type(gradtape)
    gradtape.__class__ = type(kind.__name__, (_DistributedTape, kind), {})
    gradtape._reduction, gradtape._local, gradtape._scales_local = reduction, {}, scale_local_gradients
    gradtape._compares = chosen.compares
    return gradtape


@as_it_is
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: KerasLayer | Sequence[KerasLayer] | None = None,
    scale_local_gradients: bool = True,
    mode: Mode | None = None,
) -> tf.GradientTape:
    """``DistributedGradientTape`` that leaves the variables of ``local_layers`` (one or several) to each rank.

    Example:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(images), labels)
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[-1])  # whose gradients stay
        >>> gradients = tape.gradient(loss, model.trainable_variables)
    """
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
        groups, process_set, scale_local_gradients, mode=mode,
    )  # fmt: skip
    layers: Any = (
        local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers] if local_layers else []
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
