"""``DistributedOptimizer`` for Keras: the user's optimizer, which from then on updates with the gradients of all ranks.

The object stays the same one: its class becomes a subclass whose ``apply`` reduces the gradients and then calls the
user's, which clips, decays and updates. So its variables, iterations and files are what they were. ``reduction`` does
the reducing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import numpy as np

from ringtrain._bootstrap import membership
from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.operations import Average, Sum
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._training.mode import Mode, checked_mode
from ringtrain._training.needs import check_needs
from ringtrain._training.optimizer_arguments import check_passes, check_scaling, given_groups
from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.averaging import AveragingMethods, require_none
from ringtrain.keras.backends import backend
from ringtrain.keras.classes import likened, user_class
from ringtrain.keras.compilation import look_at_models
from ringtrain.keras.on_host import HostMethods
from ringtrain.keras.reduction import KerasReducer, when
from ringtrain.keras.reduction_settings import Settings
from ringtrain.keras.rows import check_all, combined_by, is_combined_by, settled
from ringtrain.keras.types import Compression, Flag, Gradient, Gradients, Layer, Optimizer, Tensor, Variable

if TYPE_CHECKING:  # the user's class comes behind it
    from keras.optimizers import Optimizer as _Base
else:
    _Base = object
_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[keras.Variable]] | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    mode: Mode | None = None,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer update with the gradients of all ranks, and returns it.

    Example:
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), "mse")
        >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    N ranks with equal batches and a mean loss then train as one process does with the N batches in one: gradients are
    averaged before they are clipped. In a world of one only ``backward_passes_per_step`` has an effect.

    Args:
        optimizer: any Keras optimizer, also a ``LossScaleOptimizer``; changed in place.
        name: the beginning of the names in error messages and traces.
        device_dense: accepted for Horovod's sake.
        device_sparse: accepted for Horovod's sake.
        compression: how gradients travel: ``Compression.none`` (default), ``fp16``, ``bf16``, ``int8``, ``int4`` or a
            class like them. int8 and int4 make up in the next step for what they lose in one.
            ``Compression.powersgd(rank=2)`` sends matrices as two factors of low rank, with the same feedback (``PowerSGD``);
            on the host, when all gradients of a step are there.
        sparse_as_dense: sends sparse gradients as dense ones.
        gradient_predivide_factor: with ``Average``, divides by this before the addition and by the rest after it.
        op: ``Average`` or ``Sum``.
        num_groups: Horovod's older spelling of ``groups`` with an int.
        groups: an int: that many groups of variables, each reduced as one operation, all or nothing; or the groups
            themselves as lists of variables. Those in none travel alone.
        backward_passes_per_step: calls of ``apply`` whose gradients are added here before they travel and update. A
            sum that is begun when the model is saved starts anew after loading.
        average_aggregated_gradients: whether those sums are divided by ``backward_passes_per_step``.
        process_set: the ranks that train together. On another rank the optimizer stays as it is.
        scale_local_gradients: for ``PartialDistributedOptimizer``.
        mode: when ranks exchange what: ``Synchronous()``, which is the default, ``LocalSteps(every=...)`` or ``OneStepLate()``;
            each has its own arguments. With ``LocalSteps`` the optimizer has ``synchronize()`` without arguments, which averages at
            once: all ranks call it after the same update, before they evaluate or save; in ``fit``
            BroadcastGlobalVariablesCallback does so, and calls ``flush()`` with ``OneStepLate``, at the end. docs/modes-together.md says
            which goes with what.

    Raises:
        InvalidArgumentError: not a Keras optimizer, or groups, ``op`` or a number that cannot be; or arguments that exclude each
            other.
        MismatchError: when it is applied, or by ``fit``: ranks that compare what they have train apart. In a graph of another loop
            it is a ``tf.errors.InvalidArgumentError`` with its text. The learning rate and other numbers are compared in each
            update, the variables in the tenth one, or the second with BroadcastGlobalVariablesCallback, and then once a second, or
            so seldom that it takes a thousandth of the time.
        UnsupportedError: when it is applied, to a model with a ``ShardedEmbedding``: with ``LocalSteps`` or local layers, it scales
            the loss or clips by the norm of all gradients; with ``OneStepLate``, it scales, clips or accumulates.
    """
    settings = Settings(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=checked_groups(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        mode=checked_mode(mode),
    )
    return distribute(optimizer, settings, name)


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[keras.Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.Layer | Sequence[keras.Layer] | None = None,
    scale_local_gradients: bool = True,
    mode: Mode | None = None,
) -> keras.optimizers.Optimizer:
    """``DistributedOptimizer`` that leaves the gradients of some layers to each rank.

    Example:
        >>> optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers[-1:])
        >>> model.compile(optimizer, "mse")  # the gradients of the last layer stay each rank's own

    Args:
        local_layers: a layer, or several, whose gradients do not travel. Give their variables to
            ``BroadcastGlobalVariablesCallback(local_variables=...)`` too, where ranks shall start from different ones.
        scale_local_gradients: whether local gradients are divided by the number of ranks, to match averaged ones.
        mode: as for ``DistributedOptimizer``, but for ``OneStepLate``; variables of local layers are neither compared nor averaged.

    Raises:
        InvalidArgumentError: as for ``DistributedOptimizer``, and for local layers that are none.
    """
    settings = Settings(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=given_groups("PartialDistributedOptimizer", 0, groups, "variable", stacklevel=2),
        process_set=process_set,
        local_layers=_layers(local_layers),
        scale_local_gradients=scale_local_gradients,
        mode=checked_mode(mode, "PartialDistributedOptimizer"),
    )
    return distribute(optimizer, settings, name)


def distribute(optimizer: _Optimizer, settings: Settings, name: str | None = None) -> _Optimizer:
    """Gives an optimizer the class and the reduction that make it distributed; one that has them gets new ones."""
    check_scaling("DistributedOptimizer", settings.op, settings.gradient_predivide_factor)
    check_passes(settings.backward_passes_per_step)
    powersgd = settings.powersgd is not None
    given = {
        "keras": True,
        "sum": settings.op == Sum,
        "groups": settings.groups is not None,
        "groups on the host": settings.groups is not None,
        "own compression": not powersgd and backend.wire_of(settings.compression) is None,
        "powersgd": powersgd,
        "process set": settings.process_set is not global_process_set,
        "local layers": bool(settings.local_layers),
        "elastic": membership.current() is not None,
    }
    check_needs([*settings.mode.columns, *(["Compression.powersgd"] if powersgd else []), *backend.columns], given)
    reduction = KerasReducer(settings, name)
    for kinds, make_distributed in _adapters:
        if isinstance(optimizer, kinds):
            make_distributed(optimizer, reduction)
            reduction.watching.step_with(optimizer)
            return optimizer
    raise _not_an_optimizer(optimizer)


def take_over(kinds: tuple[type, ...], make_distributed: Callable[[Any, KerasReducer], None]) -> None:
    """Adds another Keras, whose optimizers ``distribute`` hands over."""
    _adapters.append((kinds, make_distributed))


def reduction_of(optimizer: object) -> KerasReducer | None:
    """The reduction of a distributed optimizer; None for any other object."""
    return getattr(optimizer, "_gradient_reduction", None)


def hoist(optimizer: object) -> bool:
    """Has LossScaleOptimizer(DistributedOptimizer(x)), which ``compile`` makes, reduce gradients itself; False for all others.

    A LossScaleOptimizer looks for infinities in the gradients that it is given: they must be those of all ranks, or one
    rank would skip an update in which the others wait for it. The optimizer within stays distributed: the user has it, and may
    use it by itself, or compile with it again.
    """
    reduction = reduction_of(getattr(optimizer, "inner_optimizer", None))
    if reduction is None or reduction_of(optimizer) is not None:
        return False
    _make_distributed(optimizer, reduction)
    return True


class _Distributed(AveragingMethods, HostMethods, _Base):
    """The methods that a distributed optimizer has beyond, or around, those of the user's class."""

    _gradient_reduction: KerasReducer | None = None  # None in copies

    @backend.unconverted
    def apply(self, grads: Gradients, trainable_variables: Sequence[Variable] | None = None) -> None:
        """The user's ``apply`` with gradients of all ranks: reduced here, or by ``synchronize`` before."""
        reduction = self._gradient_reduction
        grads = list(grads)
        # A LossScaleOptimizer around this one may have reduced them.
        if reduction is None or not grads or is_combined_by(reduction):
            super().apply(grads, trainable_variables)
            return
        reduction.require_outermost()
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        check_all(self, variables)
        if reduction.settings.late:  # the rows' gradients are of this step
            grads = settled(grads, variables)
        scopes = backend.scopes()
        if reduction.pairing.skipping:
            full = reduction.pairing.take(scopes)
        else:
            reduction.pairing.require_none(scopes)
            full, grads = self._collect(grads, variables)

        def update() -> None:
            # The former may skip it, and the latter counts updates.
            if isinstance(self, keras.optimizers.LossScaleOptimizer) or reduction.settings.powersgd is not None:
                reduction.settle(lambda: self._uses(grads))
            with combined_by(reduction), reduction.accumulation.apart():
                backend.apply(super(_Distributed, self), self, grads, variables)

        local = reduction.local_steps
        if local is not None:
            self._know_all(local)
            local.know(reduction.kinds.not_local(variables), True)
        when(full, update if local is None else lambda: local.around(self._uses(grads), update))

    def stateless_apply(
        self, optimizer_variables: Sequence[Tensor], grads: Sequence[Tensor], trainable_variables: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Keras' own, by way of ``apply``: that of a LossScaleOptimizer looks for infinities in gradients of this rank alone."""
        reduction = self._gradient_reduction
        if reduction is None or is_combined_by(reduction):
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)
        plain = keras.optimizers.Optimizer
        return plain.stateless_apply(self, optimizer_variables, grads, trainable_variables)

    @property
    def variables(self) -> list[keras.Variable]:
        """Those of the user's class; on JAX, where a step is given all that it changes, with the sums of several passes."""
        plain: list[keras.Variable] = list(super().variables)
        if self._gradient_reduction is None or isinstance(getattr(self, "inner_optimizer", None), _Distributed):
            return plain  # that one has them
        return [*plain, *self._gradient_reduction.accumulation.carried]

    def save_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """Writes what the user's class does."""
        with self._as_in_files():
            super().save_own_variables(store)

    def load_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """Reads what the user's class does."""
        with self._as_in_files():
            super().load_own_variables(store)

    def _as_in_files(self) -> AbstractContextManager[None]:
        reduction = self._gradient_reduction
        return nullcontext() if reduction is None else reduction.accumulation.apart()

    def _uses(self, gradients: Gradients) -> Flag:
        """Whether ``apply`` uses gradients: a LossScaleOptimizer skips those that are not finite."""
        if not isinstance(self, keras.optimizers.LossScaleOptimizer):
            return True
        return self.check_finite([gradient for gradient in gradients if gradient is not None])

    @backend.unconverted
    def synchronize(
        self, grads_and_vars: Iterable[tuple[Gradient | None, Variable]] | None = None
    ) -> list[tuple[Gradient | None, Variable]]:
        """Reduces gradients now, to clip or unscale them for example; then apply them within ``skip_synchronize()``.

        With ``every`` it has no argument, and averages what the ranks have changed since the last time.

        Within a ``tf.function`` this pairing is made while the function is traced, so both must be in the same one.
        With ``backward_passes_per_step`` the pairs before the last pass hold this rank's gradients, and the ``apply``
        that follows does nothing.

        Args:
            grads_and_vars: as for ``apply_gradients``.

        Returns:
            The pairs, with reduced gradients.
        """
        reduction = self._gradient_reduction
        if self._averages_variables(grads_and_vars):
            return []
        pairs = list(grads_and_vars or ())
        if reduction is None or not pairs:
            return pairs
        reduction.require_outermost()
        variables = [variable for _, variable in pairs]
        full, gradients = self._collect([gradient for gradient, _ in pairs], variables)
        reduction.pairing.note(backend.scopes(), full)
        return list(zip(gradients, variables, strict=True))

    def _trained(self) -> list[Variable]:
        variables: list[Variable] = self._trainable_variables
        return variables

    def _apply_own(self, gradients: list[Tensor], variables: list[Variable]) -> None:
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            scale = self.dynamic_scale
            gradients = [gradient * keras.ops.cast(scale, gradient.dtype) for gradient in gradients]
        assert self._gradient_reduction is not None
        with combined_by(self._gradient_reduction), self._gradient_reduction.accumulation.apart():
            backend.apply(super(), self, gradients, variables)

    def register_local_var(self, variable: Variable) -> None:
        """Leaves the gradient of a variable to each rank, as ``PartialDistributedOptimizer`` does for whole layers."""
        if self._gradient_reduction is not None:
            self._gradient_reduction.kinds.keep_local(variable)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this block ``apply`` takes the gradients as they are, because ``synchronize()`` was called before."""
        reduction = self._gradient_reduction
        if reduction is None:
            yield
            return
        if reduction.settings.local is not None:
            require_none("skip_synchronize", True)
        with reduction.pairing.skip():
            yield

    def build(self, variables: Sequence[Variable]) -> None:
        """The user's ``build``, with room for accumulated gradients."""
        super().build(variables)
        if self._gradient_reduction is not None:
            self._gradient_reduction.accumulation.build(variables)

    def _collect(
        self, gradients: list[Gradient | None], variables: list[Variable]
    ) -> tuple[Flag, list[Gradient | None]]:
        if not self.built:  # Keras would build in apply, within the condition that an accumulation needs
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        assert self._gradient_reduction is not None
        scale = self.dynamic_scale if isinstance(self, keras.optimizers.LossScaleOptimizer) else None
        return self._gradient_reduction.collect(gradients, variables, scale)

    def __setattr__(self, name: str, value: object) -> None:
        # LossScaleOptimizer takes over the scaling of the optimizer that it is put around, by this very assignment.
        if name == "loss_scale_factor" and value is None and self._gradient_reduction is not None:
            self._gradient_reduction.note_surrounded(True)
        super().__setattr__(name, value)

    @classmethod
    def from_config(
        cls, config: dict[str, object], custom_objects: dict[str, object] | None = None
    ) -> keras.optimizers.Optimizer:
        """A distributed optimizer of the user's class with the same settings; all ranks must make it."""
        plain: type[keras.optimizers.Optimizer] = cls.__bases__[1]
        arguments = {} if custom_objects is None else {"custom_objects": custom_objects}
        return distribute(plain.from_config(config, **arguments), cls._settings)

    def __reduce__(self) -> tuple:
        """Copies and pickles are the plain optimizers that Keras makes; wrap them again to distribute them."""
        rebuild, arguments = super().__reduce__()
        return getattr(user_class(self, _Distributed), rebuild.__name__), arguments


def _make_distributed(optimizer: keras.optimizers.Optimizer, reduction: KerasReducer) -> None:
    if optimizer.built:
        reduction.accumulation.build(optimizer._trainable_variables)
    plain = user_class(optimizer, _Distributed)
    optimizer.__class__ = likened(_Distributed, plain, keras, _settings=reduction.settings)
    optimizer._gradient_reduction = reduction
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(inner, _Distributed):  # it lets pass what this one has reduced
        inner._gradient_reduction = reduction
        reduction.note_surrounded(False)


_adapters: list[tuple[tuple[type, ...], Callable[[Any, KerasReducer], None]]] = [
    ((keras.optimizers.Optimizer,), _make_distributed)
]


def reduction_within(optimizer: object) -> KerasReducer | None:
    """That of a distributed optimizer, or of the one within a LossScaleOptimizer; None for any other."""
    return reduction_of(optimizer) or reduction_of(getattr(optimizer, "inner_optimizer", None))


def communicates_on(optimizer: object) -> ProcessSet | None:
    """The ranks that an optimizer, or the one within a LossScaleOptimizer, reduces with; None if there are none."""
    reduction = reduction_within(optimizer)
    return reduction.settings.process_set if reduction is not None and reduction.settings.travels else None


look_at_models(keras.Model, communicates_on, hoist)


# ---- arguments ----


def checked_groups(
    num_groups: int, groups: int | Sequence[Sequence[Variable]] | None
) -> int | list[list[Variable]] | None:
    """The argument ``groups``, or ``num_groups``; raises InvalidArgumentError for what cannot be."""
    return given_groups("DistributedOptimizer", num_groups, groups, "variable", stacklevel=3)


def _layers(given: Layer | Sequence[Layer] | None) -> tuple[Layer, ...]:
    layers = () if given is None else tuple(given) if isinstance(given, (list, tuple, set)) else (given,)
    for layer in layers:
        demand = "PartialDistributedOptimizer: each of local_layers must be a layer"
        check_kind(demand, layer, ("trainable_variables",), "Pass layers of the model")
    return layers


def _not_an_optimizer(optimizer: object) -> InvalidArgumentError:
    kind = type(optimizer)
    advice = "Pass an object of keras.optimizers."
    if kind.__module__.startswith("tf_keras"):
        advice = "Import ringtrain.tensorflow.keras with TF_USE_LEGACY_KERAS=1 in the environment."
    return InvalidArgumentError(
        f"DistributedOptimizer: expected a keras.optimizers.Optimizer but found a {kind.__module__}."
        f"{kind.__qualname__}. {advice}"
    )
