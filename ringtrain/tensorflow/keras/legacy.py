"""The adapter for the legacy Keras 2, ``tf_keras``, on its own way to reduce.

tf_keras hands gradients to ``aggregate_gradients`` before it clips or looks for overflows, also where a
LossScaleOptimizer is around the optimizer; its older optimizers, those of ``optimizers.legacy``, call that
``_aggregate_gradients``. So the user's optimizer gets a class that reduces there. What is reduced, and when, is decided
by ``ringtrain.keras.reduction`` as for Keras 3.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision.loss_scale_optimizer import LossScaleOptimizer, LossScaleOptimizerV3

from ringtrain._runtime.arguments import check_among
from ringtrain.errors import UnsupportedError
from ringtrain.keras.accumulation import Accumulation
from ringtrain.keras.averaging import AveragingMethods, require_none
from ringtrain.keras.classes import likened, user_class
from ringtrain.keras.compilation import look_at_models
from ringtrain.keras.fitting import look_at_fits
from ringtrain.keras.loading import load_wrapped
from ringtrain.keras.on_host import HostMethods
from ringtrain.keras.optimizer import communicates_on, distribute, take_over
from ringtrain.keras.reduction import KerasReducer, mapped, when
from ringtrain.keras.types import Compression, Flag, Tensor
from ringtrain.keras.variables import broadcast_global_variables as refuse_to_broadcast
from ringtrain.tensorflow import functions
from ringtrain.tensorflow.keras.legacy_step import LegacyStep
from ringtrain.tensorflow.keras.legacy_step import Pairs as _Pairs
from ringtrain.tensorflow.keras_backend import dense, scopes, unconverted
from ringtrain.tensorflow.types import Gradient

if TYPE_CHECKING:  # the user's class comes behind it
    from tf_keras.optimizers import Optimizer as _Optimizer
else:
    _Optimizer = object


def load_model(
    filepath: str | os.PathLike,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Callable] | None = None,
    compression: Compression = None,
    legacy_opts: bool = False,
    **settings: object,
) -> tf_keras.Model:
    """``tf_keras.models.load_model``, with the optimizer wrapped again; see ``ringtrain.keras.load_model``.

    ``legacy_opts`` is accepted for Horovod's sake: the file says whether the optimizer is one of ``optimizers.legacy``.
    """
    return load_wrapped(tf_keras, filepath, custom_optimizers, custom_objects, {"compression": compression, **settings})


def broadcast_global_variables(root_rank: int) -> None:
    """In a graph of TensorFlow 1: gives all global variables the root's values, in Keras' session.

    Raises:
        UnsupportedError: in eager mode, which has no global variables.
    """
    if tf.executing_eagerly():
        refuse_to_broadcast(root_rank)
    tf_keras.backend.get_session().run(functions.broadcast_global_variables(root_rank))


class _Methods(AveragingMethods, HostMethods, _Optimizer):
    """The methods that a distributed optimizer has beyond, or around, those of the user's class."""

    _gradient_reduction: KerasReducer | None = None  # None in copies
    _step: LegacyStep
    _NOT_AGAIN: tuple[str, bool]  # the argument of ``apply_gradients`` for gradients of all ranks

    @property
    def _agg_helper(self) -> Accumulation | None:
        """What adds passes up, by Horovod's name, whose own tests ask for its ``counter``; None where nothing is added up."""
        reduction = self._gradient_reduction
        return None if reduction is None or reduction.accumulation.passes == 1 else reduction.accumulation

    @unconverted
    def synchronize(self, grads_and_vars: Iterable[tuple[Gradient, tf.Variable]] | None = None) -> _Pairs:
        """Reduces gradients now; then apply them within ``skip_synchronize()``. See ``ringtrain.keras``.

        With ``LocalSteps`` it has no argument, and averages what the ranks have changed since the last time.
        """
        if self._averages_variables(grads_and_vars):
            return []
        reduction, grads_and_vars = self._gradient_reduction, grads_and_vars or ()
        if reduction is None:
            return list(grads_and_vars)
        full, pairs = self._collect(list(grads_and_vars))
        reduction.pairing.note(scopes(), full)
        return pairs

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this block ``apply_gradients`` takes the gradients as they are."""
        if self._gradient_reduction is None:
            yield
            return
        if self._gradient_reduction.settings.local is not None:
            require_none("skip_synchronize", True)
        with self._gradient_reduction.pairing.skip():
            yield

    def register_local_var(self, variable: tf.Variable) -> None:
        """Leaves the gradient of a variable to each rank, as ``PartialDistributedOptimizer`` does for whole layers."""
        if self._gradient_reduction is not None:
            self._gradient_reduction.kinds.keep_local(variable)

    @classmethod
    def from_config(
        cls, config: dict[str, object], *arguments: object, **named: object
    ) -> tf_keras.optimizers.Optimizer:
        """A distributed optimizer of the user's class with the same settings; all ranks must make it."""
        plain: type[tf_keras.optimizers.Optimizer] = cls.__bases__[1]
        return distribute(plain.from_config(config, *arguments, **named), cls._settings)

    def _trained(self) -> list[tf.Variable]:
        return self._step.variables

    def _applied(self, full: Flag, apply: Callable[[], object]) -> None:
        """Has the user's ``apply`` run after an update's last pass, as a local step where it is one."""
        local = self._local_steps
        if local is None:
            when(full, apply)
            return
        self._know_all(local)
        when(full, lambda: local.around(True, apply))

    def _note_use(self) -> None:
        if self._gradient_reduction is not None and self._gradient_reduction.settings.powersgd is not None:
            self._gradient_reduction.settle(lambda: True)

    def _apply_own(self, gradients: list[Tensor], variables: list[tf.Variable]) -> None:
        self.apply_gradients(list(zip(gradients, variables, strict=True)), **{self._NOT_AGAIN[0]: self._NOT_AGAIN[1]})

    def _require_countable(self, reduction: KerasReducer, what: str) -> None:
        """What is kept on the host counts updates, each of them: raises UnsupportedError where that cannot be."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise UnsupportedError(
                f"apply '{reduction.prefix}': {what} must not be set in a graph of TensorFlow 1, but is. Leave eager execution "
                "on."
            )
        if getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            raise UnsupportedError(
                f"apply '{reduction.prefix}': {what} must not be set within a LossScaleOptimizer of tf_keras, but is: ranks "
                "that skip an update would not count it. Use mixed_bfloat16, or Keras 3."
            )

    def _of_all_ranks(self, computed: Iterable[tuple[Gradient, tf.Variable]]) -> _Pairs:
        """What ``compute_gradients`` returns in place of this rank's own."""
        pairs = list(computed)
        if self._gradient_reduction is None or not pairs:
            return pairs
        pairs = self._reduce(pairs)
        self._step.note_computed()
        return pairs

    def _reduced(self, pairs: _Pairs) -> _Pairs:
        """What tf_keras calls before it clips: the reduction, unless ``synchronize`` or ``compute_gradients`` has made it."""
        return pairs if self._step.take_computed() else self._reduce(pairs)

    def _reduce(self, pairs: _Pairs) -> _Pairs:
        reduction = self._gradient_reduction
        if reduction is None:
            return pairs
        if reduction.local_steps is not None:
            self._require_countable(reduction, "LocalSteps")
        if reduction.host is not None:
            self._require_countable(reduction, "OneStepLate" if reduction.settings.late else "PowerSGD")
        if reduction.pairing.skipping:
            self._step.note(reduction.pairing.take(scopes()))
            return pairs
        reduction.pairing.require_none(scopes())
        full, pairs = self._collect(pairs)
        self._step.note(full)
        return pairs

    def _collect(self, pairs: _Pairs) -> tuple[Flag, _Pairs]:
        reduction = self._gradient_reduction
        assert reduction is not None
        if not tf.compat.v1.executing_eagerly_outside_functions():
            demand = f"apply '{reduction.prefix}': backward_passes_per_step must be 1 in a graph of TensorFlow 1"
            check_among(demand, reduction.accumulation.passes, [1], "Leave eager execution on", UnsupportedError)
        # Of all ranks in one order, whatever this one lacks.
        gradients, variables = self._step.gradients_of(pairs)
        with tf.init_scope():
            reduction.accumulation.build(variables)
        if getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            gradients = reduction.with_overflows(gradients, variables)
        scale = None if reduction.accumulation.passes == 1 else self._step.scale
        if scale is not None:  # passes of one update may have several
            gradients = mapped(gradients, lambda gradient: dense(gradient) / tf.cast(scale, gradient.dtype))
        full, gradients = reduction.collect(gradients, variables)
        if scale is not None:
            gradients = mapped(gradients, lambda gradient: gradient * tf.cast(scale, gradient.dtype))
        if full is not True and getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            # An overflow must be seen by all ranks at a time: in the sums of a whole update.
            gradients = mapped(gradients, lambda gradient: tf.where(full, gradient, tf.zeros_like(gradient)))
        return full, _in_order_of(pairs, gradients, variables)


def _in_order_of(pairs: _Pairs, gradients: list[Gradient], variables: list[tf.Variable]) -> _Pairs:
    """The given pairs with new gradients, and behind them those that only other ranks had."""
    found = {id(variable): (gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)}
    given = [found.pop(id(variable)) for _, variable in pairs]
    return given + [pair for pair in found.values() if pair[0] is not None]


class _CurrentMethods(_Methods):
    """Those of ``tf_keras.optimizers``."""

    _NOT_AGAIN = ("skip_gradients_aggregation", True)

    def build(self, var_list: Iterable[tf.Variable]) -> None:
        """The user's ``build``."""
        var_list = list(var_list)
        if self._gradient_reduction is not None:
            self._step.know(var_list)
        super().build(var_list)

    @unconverted
    def compute_gradients(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Sequence[tf.Variable],
        tape: tf.GradientTape | None = None,
    ) -> _Pairs:
        """As in tf_keras, and as in Horovod those of all ranks; ``apply_gradients`` takes what is made of them as it is."""
        return self._of_all_ranks(super().compute_gradients(loss, var_list, tape))

    @unconverted
    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Gradient, tf.Variable]]) -> _Pairs:
        """The gradients of all ranks, as ``_reduced`` says."""
        return self._reduced(list(grads_and_vars))

    @unconverted
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, tf.Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **older: object,
    ) -> object:
        """The user's ``apply_gradients`` with gradients of all ranks, after an update's last pass."""
        pairs = list(grads_and_vars)
        apply = super().apply_gradients
        if self._gradient_reduction is None or not pairs:
            return apply(pairs, name, skip_gradients_aggregation, **older)
        with tf.init_scope():  # not in the condition of an accumulation
            self.build([variable for _, variable in pairs])
        if older.pop("experimental_aggregate_gradients", True) and not skip_gradients_aggregation:
            pairs = self.aggregate_gradients(pairs)
        self._step.take_computed()
        full = self._step.take()

        def update() -> object:
            self._note_use()
            return apply(pairs, name, skip_gradients_aggregation=True)

        if full is True and self._local_steps is None:
            return update()
        self._applied(full, update)
        return self.iterations


class _Older(_Methods):
    """Those of ``tf_keras.optimizers.legacy``."""

    _NOT_AGAIN = ("experimental_aggregate_gradients", False)

    _HAS_AGGREGATE_GRAD = True  # or tf_keras would not tell them that gradients are reduced already

    @unconverted
    def _compute_gradients(self, *arguments: object, **named: object) -> _Pairs:
        """What ``minimize`` calls: as in Horovod those of all ranks, which ``apply_gradients`` takes as they are."""
        return self._of_all_ranks(super()._compute_gradients(*arguments, **named))

    @unconverted
    def _aggregate_gradients(self, grads_and_vars: Iterable[tuple[Gradient, tf.Variable]]) -> _Pairs:
        return self._reduced(list(grads_and_vars))

    @unconverted
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, tf.Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> object:
        """The user's ``apply_gradients`` with gradients of all ranks, after an update's last pass."""
        pairs = list(grads_and_vars)
        apply = super().apply_gradients
        if self._gradient_reduction is None or not pairs:
            return apply(pairs, name, experimental_aggregate_gradients)
        if experimental_aggregate_gradients:
            self._step.know(variable for _, variable in pairs)
            with tf.init_scope():  # not in the condition of an accumulation
                self._create_all_weights([variable for _, variable in pairs])
            present = [pair for pair in pairs if pair[0] is not None]
            pairs = self._aggregate_gradients(self._transform_unaggregated_gradients(present))
        self._step.take_computed()
        full = self._step.take()

        def update() -> object:
            self._note_use()
            return apply(pairs, name, experimental_aggregate_gradients=False)

        if full is True and self._local_steps is None:
            return update()
        self._applied(full, update)
        return self.iterations if tf.executing_eagerly() else tf.no_op()  # a LossScaleOptimizer wants an operation


class _Scaling(_Optimizer):
    """The methods of a LossScaleOptimizer around a distributed optimizer: those of the optimizer within."""

    @unconverted
    def synchronize(self, grads_and_vars: Iterable[tuple[Gradient, tf.Variable]]) -> _Pairs:
        """Reduces gradients now; then apply them within ``skip_synchronize()``."""
        return self.inner_optimizer.synchronize(grads_and_vars)

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """A block within which ``apply_gradients`` takes the gradients as they are."""
        return self.inner_optimizer.skip_synchronize()

    def register_local_var(self, variable: tf.Variable) -> None:
        """Leaves the gradient of a variable to each rank."""
        self.inner_optimizer.register_local_var(variable)


def _make_distributed(optimizer: tf_keras.optimizers.Optimizer, reduction: KerasReducer) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    methods = _Older if isinstance(inner, tf_keras.optimizers.legacy.Optimizer) else _CurrentMethods
    plain = user_class(inner, _Methods)
    inner.__class__ = likened(methods, plain, tf_keras, _settings=reduction.settings)
    inner._gradient_reduction, inner._step = reduction, LegacyStep(reduction)
    if inner is not optimizer and not isinstance(optimizer, _Scaling):
        optimizer.__class__ = likened(_Scaling, type(optimizer), tf_keras)


def _tell_scales(scaling_class: type, method: str) -> None:
    """Has a class of LossScaleOptimizers say what it multiplies the loss by, to the optimizer within that adds gradients up."""
    original = getattr(scaling_class, method)

    @unconverted
    @functools.wraps(original)
    def compute(self: Any, *arguments: object, **named: object) -> _Pairs:
        step = getattr(self.inner_optimizer, "_step", None)
        with step.scaled_by(self.loss_scale) if isinstance(step, LegacyStep) else nullcontext():
            return original(self, *arguments, **named)

    setattr(scaling_class, method, compute)


_tell_scales(LossScaleOptimizerV3, "compute_gradients")
_tell_scales(LossScaleOptimizer, "_compute_gradients")  # of `optimizers.legacy`
take_over((tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer), _make_distributed)
look_at_models(tf_keras.Model, communicates_on)
look_at_fits(tf_keras.Model, tf_keras.callbacks.Callback)
