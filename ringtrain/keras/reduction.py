"""Reduction of one Keras optimizer's gradients: which ones travel, under which names, and when.

``optimizer.DistributedOptimizer`` makes one ``KerasReducer`` for each optimizer. It decides; a backend
(``tensorflow.keras_backend``, ``torch_backend``, ``jax_backend``) has the few lines that differ between the frameworks under Keras.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ringtrain._runtime.arguments import check_among
from ringtrain._runtime.operations import Average
from ringtrain._runtime.process_sets import id_of, is_alone
from ringtrain._training import residuals
from ringtrain._training.mode import LocalSteps
from ringtrain._training.needs import check_needs
from ringtrain._training.on_host import HostReducer
from ringtrain._training.session import NewWorld, Session
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.keras.accumulation import Accumulation, zeros_of
from ringtrain.keras.backends import backend
from ringtrain.keras.kinds import VariableKinds, is_overwritten
from ringtrain.keras.naming import GradientNames
from ringtrain.keras.pairing import Pairing
from ringtrain.keras.reduction_settings import Settings
from ringtrain.keras.types import Flag, Gradient, Gradients, Tensor, Variable
from ringtrain.keras.watching import StepWatch

if TYPE_CHECKING:  # loaded by those who average
    from ringtrain.keras.local_steps import AveragedVariables


class KerasReducer:
    """Settings, names and accumulated gradients of one optimizer.

    Attributes:
        settings: how gradients are combined, the same on all ranks.
        names: of the gradients. kinds: what becomes of each. watching: has ranks find that they step alike.
        accumulation: of the gradients of several passes.
        local_steps: of a worker that averages now and then; None where each step is exact, and in a world of one
            without an outer optimizer.
        functions: how often all ranks have made the function of their steps anew.
    """

    def __init__(self, settings: Settings, name: str | None):
        self.settings = settings
        self.accumulation = Accumulation(settings.backward_passes_per_step, settings.average_aggregated_gradients)
        averages = (
            settings.local is not None
            and settings.process_set.included()
            and (not is_alone(settings.process_set) or settings.local.outer is not None)
        )
        self.local_steps: AveragedVariables | None = None
        if averages and settings.local:
            self.local_steps = self._local_steps(settings.local)
        self.names = GradientNames(lambda: id_of(settings.process_set), name)
        self.kinds = VariableKinds(settings.local_layers)
        self.watching = StepWatch(settings, self.names, self.kinds)
        self.functions = 0
        self._surrounded = False  # whether a LossScaleOptimizer was put around the distributed optimizer
        self._skips = False  # whether a LossScaleOptimizer leaves out gradients that are not finite

    @property
    def prefix(self) -> str:
        """Of all names that this optimizer submits."""
        return self.names.prefix

    @functools.cached_property
    def host(self) -> HostReducer | None:
        """Reduces on the host, where PowerSGD or ``delay`` was asked for; None where the backend reduces."""
        how = self.settings.on_host
        if how is None or not self.settings.travels:
            return None
        return HostReducer(Session(self.settings.process_set), f"{self.prefix}.", how)

    @functools.cached_property
    def pairing(self) -> Pairing:
        """Remembers explicit ``synchronize()`` calls for the ``apply`` that follows."""
        return Pairing(self.prefix)

    def _local_steps(self, mode: LocalSteps) -> "AveragedVariables":
        from ringtrain.keras.local_steps import AveragedVariables

        wire = backend.wire_of(self.settings.compression) or "none"
        return AveragedVariables(mode, wire, self.settings.process_set, lambda: self.watching.stepping)

    def enter_world(self, change: NewWorld) -> None:
        """Goes on in this world under the same names, which graphs have; sums that are begun go on with their step.

        All ranks call it when a world has begun, before any optimizer is used, in one order.
        """
        self.names.enter_world(change)
        if change is NewWorld.ANEW:
            self.accumulation.forget()

    def begin_function(self) -> None:
        """All ranks make a new function of their steps, which may train other variables than the one before."""
        self.functions += 1
        self.accumulation.begin_function()
        backend.begin_anew(f"{self.prefix}.")

    def note_surrounded(self, surrounded: bool) -> None:
        """A LossScaleOptimizer was put around the distributed optimizer, or taken away."""
        self._surrounded = surrounded

    def require_outermost(self) -> None:
        """Refuses to wait for other ranks where a rank may pass by, and says what to do."""
        if self._surrounded:
            raise InvalidArgumentError(
                f"apply '{self.prefix}': expected DistributedOptimizer around LossScaleOptimizer but found it inside, "
                "where a rank whose own gradients overflow would leave the others waiting. Write "
                "DistributedOptimizer(LossScaleOptimizer(optimizer)); fit() and train_on_batch() put it right by themselves."
            )

    def collect(
        self, gradients: Gradients, variables: Sequence[Variable], scale: Tensor | None = None
    ) -> tuple[Flag, list[Gradient | None]]:
        """One pass: adds gradients up, and reduces them when it was an update's last.

        Args:
            gradients: of this rank.
            variables: what they belong to.
            scale: that a LossScaleOptimizer has multiplied them by; None without one.

        Returns:
            Whether they are to be applied (True or a boolean tensor), and the gradients: reduced if so, else this rank's own.
        """
        if scale is not None:
            gradients = self.with_overflows(gradients, variables)
        if not self.settings.late or self.host is None:
            return self._collected(gradients, variables)
        self._skips = scale is not None  # a graph is traced for one kind of optimizer
        if scale is not None:  # each step has its own
            gradients = mapped(
                gradients, lambda gradient: backend.dense(gradient) / keras.ops.cast(scale, gradient.dtype)
            )
        full, gradients = self._collected(gradients, variables)
        if scale is not None:
            gradients = mapped(gradients, lambda gradient: gradient * keras.ops.cast(scale, gradient.dtype))
        host = self.host
        # In a graph behind the exchange, which says it: with something that came of that, as calls of the host have no order.
        behind = [keras.ops.reshape(each, (-1,))[:1] for each in gradients if each is not None][:1]
        applies = backend.on_host(lambda *_: [np.array(host.applies)], behind, [((), "bool")])[0]
        applies = keras.ops.reshape(applies, ())
        return (applies if full is True else keras.ops.logical_and(full, applies)), gradients

    def with_overflows(self, gradients: Gradients, variables: Sequence[Variable]) -> list[Gradient | None]:
        """The gradients, of which one that travels is not finite where one is that stays: all ranks skip a step, or none."""
        kinds = self.kinds.of(variables)
        travelling = [
            place for place, gradient in enumerate(gradients) if gradient is not None and kinds[place] == "averaged"
        ]
        results = list(gradients)
        if self.settings.alone or not travelling:
            return results
        for gradient, kind in zip(gradients, kinds, strict=True):
            if gradient is not None and kind == "local":
                carrier = backend.dense(results[travelling[0]])
                zero = keras.ops.sum(backend.dense(gradient) * 0)  # or not a number
                results[travelling[0]] = carrier + keras.ops.cast(zero, carrier.dtype)
        return results

    def _collected(self, gradients: Gradients, variables: Sequence[Variable]) -> tuple[Flag, list[Gradient | None]]:
        if self.accumulation.passes == 1:
            return True, self.reduce(gradients, variables)
        if any(is_overwritten(variable) for variable in variables):
            demand = f"apply '{self.prefix}': backward_passes_per_step must be 1 with float8 layers, whose maxima cannot be added up"
            advice = "Use Keras' gradient_accumulation_steps with them"
            check_among(demand, self.accumulation.passes, [1], advice, UnsupportedError)
        dense = [None if gradient is None else backend.dense(gradient) for gradient in gradients]
        return self.accumulation.collect(dense, variables, lambda totals: self.reduce(totals, variables))

    def reduce(self, gradients: Gradients, variables: Sequence[Variable]) -> list[Gradient | None]:
        """The gradients combined over all ranks, in their places.

        One that is ``None`` counts as zeros where another rank has it, and stays ``None`` where nobody has.
        """
        if backend.is_compiled() and (self.local_steps is not None or self.settings.travels):
            raise UnsupportedError(
                f"apply '{self.prefix}': expected a function without jit_compile but found one with it, and XLA cannot "
                "compile the operations between ranks. Leave jit_compile out, or compile the parts around apply."
            )
        if self.local_steps is None:
            exact = self.settings.local is None and self.settings.travels
            how = self.settings if exact else None
            return self.watching.watched(variables, lambda: self._combined(gradients, variables, how))
        return self._in_phase(self.local_steps, gradients, variables)

    def _in_phase(
        self, local: "AveragedVariables", gradients: Gradients, variables: Sequence[Variable]
    ) -> list[Gradient | None]:
        """``reduce`` for a local step: exact over all ranks at the beginning, then over those of a host, or not at all."""
        exact = replace(self.settings, compression=None)
        neighbours = local.neighbours()
        within = None if neighbours is None or neighbours.size() == 1 else replace(exact, process_set=neighbours)
        over_all = None if self.settings.alone else exact
        if not local.mode.warmup:
            return self._combined(gradients, variables, within)
        if not backend.is_traced():
            return self._combined(gradients, variables, over_all if local.warms_up else within)
        dense = [None if gradient is None else backend.dense(gradient) for gradient in gradients]
        present: list[int] = []  # both branches return the same ones: the first is traced first

        def exactly() -> list[Gradient | None]:
            reduced = self._combined(dense, variables, over_all)
            present[:] = [place for place, gradient in enumerate(reduced) if gradient is not None]
            return [reduced[place] for place in present]

        def locally() -> list[Gradient | None]:
            own = self._combined(dense, variables, within)
            return [zeros_of(variables[place]) if own[place] is None else own[place] for place in present]

        results: list[Gradient | None] = [None] * len(dense)
        for place, result in zip(
            present, backend.cond(local.asks_whether_it_warms_up(), exactly, locally), strict=True
        ):
            results[place] = result
        return results

    def _combined(
        self, gradients: Gradients, variables: Sequence[Variable], how: Settings | None
    ) -> list[Gradient | None]:
        """The gradients in their places, of sparse ones each index once; None leaves them to this rank."""
        if how is None:
            return mapped(gradients, backend.each_index_once)
        results = list(gradients)
        for variable in variables:
            self.names.of(variable)  # each has its place, also one without a gradient on this rank
        places: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        for place, (gradient, kind) in enumerate(zip(gradients, self.kinds.of(variables), strict=True)):
            if gradient is not None or kind != "local":
                places[kind].append(place)
        if how.late:
            own = {"local layers": bool(places["local"]), "float8": bool(places["overwriting"])}
            check_needs(how.mode.columns, own, f"apply '{self.prefix}'")
        if places["local"] and how.mode.compares:
            self.watching.require_no_norm_of_all()
        for kind, combine in _KINDS.items():
            chosen = places[kind]
            combined = combine(
                self, [gradients[place] for place in chosen], [variables[place] for place in chosen], how
            )
            for place, gradient in zip(chosen, combined, strict=True):
                results[place] = gradient
        return results

    def settle(self, is_used: Callable[[], Flag]) -> None:
        """Says whether the update uses the reduced gradients, or skips them: so compression knows what was lost with them.

        Args:
            is_used: called where that matters; True, False or such a tensor.
        """
        if self.host is not None:
            if self.host.settings.powersgd is not None:
                host = self.host
                backend.on_host(lambda used: _settled(host, used), [is_used()], [])
        elif self._core_keeps_residuals:
            backend.settle_residuals(is_used(), Session(self.settings.process_set), f"{self.prefix}.")

    @property
    def _core_keeps_residuals(self) -> bool:
        settings = self.settings
        return settings.local is None and not settings.alone and backend.keeps_residuals(settings.compression)

    def compression_state(self) -> dict[str, dict[str, np.ndarray]]:
        """What compression has lost of the gradients, by name; on all ranks together, and the same on all."""
        if self.host is not None:
            return self.host.compression_state()
        if not self._core_keeps_residuals:
            return {}
        return residuals.of_all_ranks(Session(self.settings.process_set), self._averages, f"{self.prefix}.")

    def load_compression_state(
        self, state: Mapping[str, Mapping[str, np.ndarray]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Goes on with what ``compression_state`` has returned, on all ranks.

        Args:
            state: that.
            shapes: of the gradients, by name.

        Raises:
            InvalidArgumentError: it is something else, or of a model with other variables.
        """
        if self.host is not None:
            self.host.load_compression_state(state, shapes)
        elif self._core_keeps_residuals:
            residuals.load(Session(self.settings.process_set), self._averages, f"{self.prefix}.", state)

    @property
    def _averages(self) -> bool:
        return self.settings.op == Average

    def _average(
        self, gradients: list[Gradient | None], variables: list[Variable], how: Settings
    ) -> list[Gradient | None]:
        names = [self.names.of(variable) for variable in variables]
        if how.on_host is None or self.host is None:
            return backend.reduce(gradients, names, variables, how)
        return self._on_host(self.host, gradients, names, variables, how)

    def _on_host(
        self,
        host: HostReducer,
        gradients: list[Gradient | None],
        names: list[str],
        variables: list[Variable],
        how: Settings,
    ) -> list[Any]:
        """The gradients in their places; those of PowerSGD, or of the step before, or this rank's own where it has none."""
        if how.late and not backend.is_traced():  # before any rank is asked what it has: it may have met an error
            host.arrive()
        results = backend.completed(gradients, names, variables, how)
        present = [place for place, gradient in enumerate(results) if gradient is not None]
        if not present:
            return results
        chosen, skips = [names[place] for place in present], self._skips
        dense = [backend.dense(results[place]) for place in present]

        def reduce(*arrays: np.ndarray) -> list[np.ndarray]:
            return host.exchange(chosen, arrays, skips) if how.late else host.reduce(chosen, arrays)

        kinds = [
            (tuple(variables[place].shape), keras.backend.standardize_dtype(gradient.dtype))
            for place, gradient in zip(present, dense, strict=True)
        ]
        for place, gradient, result in zip(present, dense, backend.on_host(reduce, dense, kinds), strict=True):
            results[place] = backend.like(result, gradient)
        return results

    def _maximum(
        self, gradients: list[Gradient | None], variables: list[Variable], how: Settings
    ) -> list[Gradient | None]:
        names = [self.names.of(variable) for variable in variables]
        return backend.maxima(gradients, names, variables, how)

    def _keep(
        self, gradients: list[Gradient | None], variables: list[Variable], how: Settings
    ) -> list[Gradient | None]:
        own = mapped(gradients, backend.each_index_once)
        if not self.settings.scale_local_gradients:
            return own
        return [backend.divided_by_size(gradient, self.settings.process_set) for gradient in own]


_KINDS = {
    "averaged": KerasReducer._average,
    "overwriting": KerasReducer._maximum,
    "local": KerasReducer._keep,
}


def mapped(gradients: Gradients, change: Callable[[Any], Gradient]) -> list[Gradient | None]:
    """What a function makes of each gradient that is there."""
    return [None if gradient is None else change(gradient) for gradient in gradients]


def _settled(host: HostReducer, used: np.ndarray) -> list[np.ndarray]:
    host.settle(bool(used))
    return []


def when(condition: Flag, action: Callable[[], object]) -> None:
    """Runs the action if the condition, True or a boolean tensor, holds; also within a graph."""

    def act() -> None:
        action()  # without its result, which the other branch has not

    if condition is True:
        act()
    else:
        backend.cond(condition, act, lambda: None)
