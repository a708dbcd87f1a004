"""``DistributedOptimizer`` for Keras: the user's optimizer, which from then on updates with the gradients of all ranks.

The object stays the same one: its class becomes a subclass whose ``apply`` reduces the gradients and then calls the
user's, which clips, decays and updates. So its variables, iterations and files are what they were. ``reduction`` does
the reducing.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from ringtrain.errors import InvalidArgumentError
from ringtrain.gradient_arguments import check_passes, check_scaling, given_groups
from ringtrain.keras.backends import backend
from ringtrain.keras.reduction import GradientReduction, Settings, when
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set


def DistributedOptimizer(  # noqa: N802 - the name that Horovod scripts call
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer update with the gradients of all ranks, and returns it.

    N ranks with equal batches and a mean loss then train as one process does with the N batches in one: gradients are
    averaged before they are clipped. In a world of one only ``backward_passes_per_step`` has an effect.

    Args:
        optimizer: any Keras optimizer, also a ``LossScaleOptimizer``; changed in place.
        name: the beginning of the names in error messages and traces.
        device_dense: accepted for Horovod's sake.
        device_sparse: accepted for Horovod's sake.
        compression: how gradients travel: ``Compression.none`` (default), ``fp16``, ``bf16`` or a class like them.
        sparse_as_dense: sends sparse gradients as dense ones.
        gradient_predivide_factor: with ``Average``, divides by this before the addition and by the rest after it.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: calls of ``apply`` whose gradients are added here before they travel and update. A
            window that is begun when the model is saved starts anew after loading.
        average_aggregated_gradients: whether those sums are divided by ``backward_passes_per_step``.
        num_groups: Horovod's older spelling of ``groups`` with an int.
        groups: an int: that many groups of variables, each reduced as one operation, all or nothing; or the groups
            themselves as lists of variables. Those in none travel alone.
        process_set: the ranks that train together. On another rank the optimizer stays as it is.
        scale_local_gradients: for ``PartialDistributedOptimizer``.

    Raises:
        InvalidArgumentError: not a Keras optimizer, or groups, ``op`` or a number that cannot be.

    Example:
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), "mse")
        >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """
    settings = Settings(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=_checked_groups(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return distribute(optimizer, settings, name)


def PartialDistributedOptimizer(  # noqa: N802 - the name that Horovod scripts call
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """``DistributedOptimizer`` that leaves the gradients of some layers to each rank.

    Args:
        local_layers: a layer, or several, whose gradients do not travel. Give their variables to
            ``BroadcastGlobalVariablesCallback(local_variables=...)`` too, where ranks shall start from different ones.
        scale_local_gradients: whether local gradients are divided by the number of ranks, to match averaged ones.
    """
    layers = [] if local_layers is None else local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    settings = Settings(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=_checked_groups(0, groups),
        process_set=process_set,
        local_layers=tuple(layers),
        scale_local_gradients=scale_local_gradients,
    )
    return distribute(optimizer, settings, name)


def distribute(
    optimizer: keras.optimizers.Optimizer, settings: Settings, name: str | None = None
) -> keras.optimizers.Optimizer:
    """Gives an optimizer the class and the reduction that make it distributed; one that has them gets new ones."""
    _check_settings(optimizer, settings)
    reduction = GradientReduction(settings, name)
    if optimizer.built:
        reduction.window.build(optimizer._trainable_variables)
    _make_distributed(optimizer, reduction)
    return optimizer


def reduction_of(optimizer: Any) -> GradientReduction | None:
    """The reduction of a distributed optimizer; None for any other object."""
    return getattr(optimizer, "_gradient_reduction", None)


def hoist(optimizer: Any) -> bool:
    """Turns LossScaleOptimizer(DistributedOptimizer(x)), which ``compile`` makes, inside out; False for all others.

    A LossScaleOptimizer looks for infinities in the gradients that it is given: they must be those of all ranks, or one
    rank would skip an update in which the others wait for it.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    reduction = reduction_of(inner)
    if reduction is None:
        return False
    inner.__class__ = plain_class(inner)
    del inner._gradient_reduction
    reduction.surrounded = False
    _make_distributed(optimizer, reduction)
    return True


def plain_class(optimizer: keras.optimizers.Optimizer) -> type:
    """The user's class of an optimizer, distributed or not."""
    kind = type(optimizer)
    return kind.__bases__[1] if issubclass(kind, _Distributed) else kind


class _Distributed:
    """The methods that a distributed optimizer has beyond, or around, those of the user's class."""

    _gradient_reduction: GradientReduction | None = None  # None in copies

    @backend.unconverted
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """The user's ``apply`` with gradients of all ranks: reduced here, or by ``synchronize`` before."""
        reduction = self._gradient_reduction
        grads = list(grads)
        if reduction is None or not grads:
            super().apply(grads, trainable_variables)
            return
        reduction.require_outermost()
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        scopes = backend.scopes()
        if reduction.pairing.skipping:
            full = reduction.pairing.take(scopes)
        else:
            reduction.pairing.require_none(scopes)
            full, grads = self._collect(grads, variables)
        when(full, lambda: super(_Distributed, self).apply(grads, variables))

    @backend.unconverted
    def synchronize(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Reduces gradients now, to clip or unscale them for example; then apply them within ``skip_synchronize()``.

        Within a ``tf.function`` this pairing is made while the function is traced, so both must be in the same one.
        With ``backward_passes_per_step`` the pairs before the last pass hold this rank's gradients, and the ``apply``
        that follows does nothing.

        Args:
            grads_and_vars: as for ``apply_gradients``.

        Returns:
            The pairs, with reduced gradients.
        """
        pairs = list(grads_and_vars)
        reduction = self._gradient_reduction
        if reduction is None or not pairs:
            return pairs
        reduction.require_outermost()
        variables = [variable for _, variable in pairs]
        full, gradients = self._collect([gradient for gradient, _ in pairs], variables)
        reduction.pairing.note(backend.scopes(), full)
        return list(zip(gradients, variables, strict=True))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this block ``apply`` takes the gradients as they are, because ``synchronize()`` was called before."""
        reduction = self._gradient_reduction
        if reduction is None:
            yield
            return
        with reduction.pairing.skip():
            yield

    def build(self, variables: Sequence[Any]) -> None:
        """The user's ``build``, with room for accumulated gradients."""
        super().build(variables)
        if self._gradient_reduction is not None:
            self._gradient_reduction.window.build(variables)

    def _collect(self, gradients: list[Any], variables: list[Any]) -> tuple[Any, list[Any]]:
        if not self.built:  # Keras would build in apply, within the condition that an accumulation window needs
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        return self._gradient_reduction.collect(gradients, variables)

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer takes over the scaling of the optimizer that it is put around, by this very assignment.
        if name == "loss_scale_factor" and value is None and self._gradient_reduction is not None:
            self._gradient_reduction.surrounded = True
        super().__setattr__(name, value)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """A distributed optimizer of the user's class with the same settings; all ranks must make it."""
        plain = cls.__bases__[1]
        arguments = {} if custom_objects is None else {"custom_objects": custom_objects}
        return distribute(plain.from_config(config, **arguments), cls._settings)

    def __reduce__(self) -> tuple:
        """Copies and pickles are the plain optimizers that Keras makes; wrap them again to distribute them."""
        rebuild, arguments = super().__reduce__()
        return getattr(plain_class(self), rebuild.__name__), arguments


def _make_distributed(optimizer: keras.optimizers.Optimizer, reduction: GradientReduction) -> None:
    plain = plain_class(optimizer)
    # Files name an optimizer by its class's module: the public one, as they do for the plain class.
    is_public = getattr(keras.optimizers, plain.__name__, None) is plain
    described = {
        "__module__": keras.optimizers.__name__ if is_public else plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_settings": reduction.settings,
    }
    optimizer.__class__ = type(plain.__name__, (_Distributed, plain), described)
    optimizer._gradient_reduction = reduction


# ---- arguments ----


def _checked_groups(num_groups: int, groups: Any) -> int | list[list[Any]] | None:
    groups = given_groups(num_groups, groups, "variables", stacklevel=3)
    members = [id(variable) for group in groups for variable in group] if isinstance(groups, list) else []
    if len(set(members)) < len(members):
        raise InvalidArgumentError("DistributedOptimizer: groups must hold each variable once, but hold one twice.")
    return groups


def _check_settings(optimizer: Any, settings: Settings) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        advice = "Pass an object of keras.optimizers."
        if kind.__module__.startswith("tf_keras"):
            advice = "Import ringtrain.tensorflow.keras with TF_USE_LEGACY_KERAS=1 in the environment."
        raise InvalidArgumentError(
            f"DistributedOptimizer: expected a keras.optimizers.Optimizer but found a {kind.__module__}."
            f"{kind.__qualname__}. {advice}"
        )
    check_scaling("DistributedOptimizer", settings.op, settings.gradient_predivide_factor)
    check_passes(settings.backward_passes_per_step)
