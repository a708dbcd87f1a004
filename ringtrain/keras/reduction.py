"""Reduction of one Keras optimizer's gradients: which ones travel, under which names, and when.

``optimizer.DistributedOptimizer`` makes one ``KerasReducer`` for each optimizer. It decides; a backend
(``tensorflow_backend``, ``torch_backend``) has the few lines that differ between the frameworks under Keras.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from ringtrain._training.mode import SYNCHRONOUS, LocalSteps, Mode, OneStepLate
from ringtrain._training.needs import check_needs
from ringtrain.averaging.worker import ComparedSettings
from ringtrain.context import current
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.gradients.drift import Settings as NamedSettings
from ringtrain.gradients.on_host import HostReducer, HostSettings
from ringtrain.gradients.powersgd import PowerSGD
from ringtrain.gradients.session import Session
from ringtrain.gradients.watch import Comparison, Watch
from ringtrain.keras.accumulation import Accumulation
from ringtrain.keras.backends import backend
from ringtrain.keras.local_steps import AveragedVariables
from ringtrain.keras.pairing import Pairing
from ringtrain.keras.stepping import CALLED, Stepping
from ringtrain.keras.variables import own_name, path_of
from ringtrain.numbering import keep_number, next_number
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set, id_of, is_alone

_KIND = "optimizer"  # of objects that are numbered


@dataclass(frozen=True)
class Settings:
    """The arguments of ``DistributedOptimizer`` that say how gradients are combined."""

    compression: Any = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: Any = None
    process_set: ProcessSet = global_process_set
    local_layers: Sequence[Any] = ()
    scale_local_gradients: bool = True
    mode: Mode = SYNCHRONOUS

    @property
    def local(self) -> LocalSteps | None:
        """How workers average, where that is the mode."""
        return self.mode if isinstance(self.mode, LocalSteps) else None

    @property
    def late(self) -> bool:
        """Whether an update applies the gradients of the one before."""
        return isinstance(self.mode, OneStepLate)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to combine with: a world of one, or a set that this rank is no member of."""
        return is_alone(self.process_set) or not self.process_set.included()

    @property
    def travels(self) -> bool:
        """Whether gradients go through the core: to others, or in a world of one to come back one step late."""
        return not self.alone or (self.late and bool(self.process_set.included()))

    @property
    def powersgd(self) -> PowerSGD | None:
        """How gradients are approximated; None if they are not."""
        return self.compression if isinstance(self.compression, PowerSGD) else None

    @property
    def on_host(self) -> HostSettings | None:
        """How they are reduced on the host; None where the backend does it."""
        if self.powersgd is None and not self.late:
            return None
        return HostSettings(
            averages=self.op == Average,
            prescale=1.0 / self.gradient_predivide_factor,
            postscale=self.gradient_predivide_factor,
            compression="none" if self.powersgd is not None else backend.wire_of(self.compression) or "none",
            powersgd=self.powersgd,
            late=self.late,
        )

    def terms(self) -> dict[str, Any]:
        """What ranks compare before ``fit``."""
        powersgd = None if self.powersgd is None else repr(self.powersgd)
        wire = None if self.powersgd is not None else backend.wire_of(self.compression)
        return {"mode": self.mode.name, **self.mode.terms(), "powersgd": powersgd, "compression": wire}


class KerasReducer:
    """Settings, names and accumulated gradients of one optimizer.

    Attributes:
        settings: how gradients are combined, the same on all ranks.
        accumulation: of the gradients of several passes.
        local_steps: of a worker that averages now and then; None where each step is exact, and in a world of one
            without an outer optimizer.
    """

    def __init__(self, settings: Settings, name: str | None):
        self.settings = settings
        self.accumulation = Accumulation(settings.backward_passes_per_step, settings.average_aggregated_gradients)
        averages = (
            settings.local is not None
            and settings.process_set.included()
            and (not is_alone(settings.process_set) or settings.local.outer is not None)
        )
        self.local_steps = self._local_steps(settings.local) if averages and settings.local else None
        self._surrounded = False  # whether a LossScaleOptimizer was put around the distributed optimizer
        self._name = name
        self._local: list[Any] = []
        self._names: dict[int, str] = {}
        self._named: list[Any] = []  # keeps the variables, and so their ids, alive
        self._stepping: Stepping | None = None
        self._skips = False  # whether a LossScaleOptimizer leaves out gradients that are not finite

    @functools.cached_property
    def prefix(self) -> str:
        """Of all names that this optimizer submits: the user's word for it, and its number; asking for it is its first use.

        Optimizers are numbered in that order, so a rank may make further ones, as rank 0 does that loads a file; and the
        names of two never meet, whatever their models are called.
        """
        return f"{self._name or 'optimizer'}.{self._number}"

    @functools.cached_property
    def _number(self) -> int:
        self._context = current()
        return next_number(self._context, id_of(self.settings.process_set), _KIND)

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

    def _local_steps(self, mode: LocalSteps) -> AveragedVariables:
        compared = ComparedSettings(self._stepping_with, CALLED) if mode.compares else None
        wire = backend.wire_of(self.settings.compression) or "none"
        return AveragedVariables(mode, wire, self.settings.process_set, compared)

    def _stepping_with(self) -> NamedSettings:
        stepping = self._stepping
        return {} if stepping is None else stepping.all_settings()

    @property
    def watch(self) -> Watch | None:
        """Compares what the ranks have; None where they may differ, or have nobody to differ from."""
        settings = self.settings
        compares = settings.mode.compares and settings.local is None and not settings.alone
        return self._watch if compares else None

    @functools.cached_property
    def _watch(self) -> Watch:
        return backend.watch(Session(self.settings.process_set), self.prefix, self._named)

    def step_with(self, optimizer: Any) -> None:
        """Says whose gradients these are."""
        self._stepping = Stepping(optimizer)

    def enter_world(self) -> None:
        """Goes on in this world: under the same names, which graphs have, and without sums that are begun.

        All ranks call it when a world has begun, before any optimizer is used, in one order.
        """
        number = self._number
        if self._context is not current():
            self._context = current()
            keep_number(self._context, id_of(self.settings.process_set), _KIND, number)
        self.accumulation.forget()
        if self.host is not None:
            self.host.enter_world()

    def go_on_in_world(self) -> None:
        """As ``enter_world``, in the midst of a step, or between two: what is added up goes on."""
        if "_number" in self.__dict__ and self._context is not current():
            self._context = current()
            keep_number(self._context, id_of(self.settings.process_set), _KIND, self._number)

    def keep_local(self, variable: Any) -> None:
        """Leaves the gradient of a variable to each rank."""
        self._local.append(variable)

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

    def collect(self, gradients: Sequence[Any], variables: Sequence[Any], scale: Any = None) -> tuple[Any, list[Any]]:
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
            gradients = _each(
                gradients, lambda gradient: backend.dense(gradient) / keras.ops.cast(scale, gradient.dtype)
            )
        full, gradients = self._collected(gradients, variables)
        if scale is not None:
            gradients = _each(gradients, lambda gradient: gradient * keras.ops.cast(scale, gradient.dtype))
        host = self.host
        # In a graph behind the exchange, which says it: with something that came of that, as calls of the host have no order.
        behind = [keras.ops.reshape(each, (-1,))[:1] for each in gradients if each is not None][:1]
        applies = backend.on_host(lambda *_: [np.array(host.applies)], behind, ["bool"])[0]
        applies = keras.ops.reshape(applies, ())
        return (applies if full is True else keras.ops.logical_and(full, applies)), gradients

    def with_overflows(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients, of which one that travels is not finite where one is that stays: all ranks skip a step, or none."""
        local = {id(variable) for variable in self._local_variables()}
        kinds = [_kind_of(variable, local) for variable in variables]
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

    def _collected(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        if self.accumulation.passes == 1:
            return True, self.reduce(gradients, variables)
        if any(_is_overwritten(variable) for variable in variables):
            raise UnsupportedError(
                f"apply '{self.prefix}': expected backward_passes_per_step=1 with float8 layers, whose maxima cannot "
                f"be added up, but found {self.accumulation.passes}. Use Keras' gradient_accumulation_steps with them."
            )
        dense = [None if gradient is None else backend.dense(gradient) for gradient in gradients]
        return self.accumulation.collect(dense, variables, lambda totals: self.reduce(totals, variables))

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
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
            return self._watched(variables, lambda: self._combined(gradients, variables, how))
        return self._in_phase(self.local_steps, gradients, variables)

    def _in_phase(self, local: AveragedVariables, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
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

        def exactly() -> list[Any]:
            reduced = self._combined(dense, variables, over_all)
            present[:] = [place for place, gradient in enumerate(reduced) if gradient is not None]
            return [reduced[place] for place in present]

        def locally() -> list[Any]:
            own = self._combined(dense, variables, within)
            return [keras.ops.zeros_like(variables[place]) if own[place] is None else own[place] for place in present]

        results: list[Any] = [None] * len(dense)
        for place, result in zip(
            present, keras.ops.cond(local.asks_whether_it_warms_up(), exactly, locally), strict=True
        ):
            results[place] = result
        return results

    def _combined(self, gradients: Sequence[Any], variables: Sequence[Any], how: Settings | None) -> list[Any]:
        """The gradients in their places, of sparse ones each index once; None leaves them to this rank."""
        if how is None:
            return _each(gradients, backend.each_index_once)
        results = list(gradients)
        for variable in variables:
            self._name_of(variable)  # each has its place, also one without a gradient on this rank
        places: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        local = {id(variable) for variable in self._local_variables()}
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            kind = _kind_of(variable, local)
            if gradient is not None or kind != "local":
                places[kind].append(place)
        if how.late:
            own = {"local layers": bool(places["local"]), "float8": bool(places["overwriting"])}
            check_needs(how.mode.columns, own, f"apply '{self.prefix}'")
        if places["local"] and how.mode.compares:
            self._require_no_norm_of_all()
        for kind, combine in _KINDS.items():
            chosen = places[kind]
            combined = combine(
                self, [gradients[place] for place in chosen], [variables[place] for place in chosen], how
            )
            for place, gradient in zip(chosen, combined, strict=True):
                results[place] = gradient
        return results

    def _require_no_norm_of_all(self) -> None:
        """Refuses to clip by a norm that each rank has another one of, since gradients of its own are within."""
        norm = None if self._stepping is None else self._stepping.settings().get("global_clipnorm")
        if norm:
            raise UnsupportedError(
                f"apply '{self.prefix}': global_clipnorm must be None with variables whose gradients stay on their rank, but is "
                f"{norm}: each rank would clip the gradients of all by a norm of its own, and train apart. Use clipnorm or clipvalue."
            )

    def _watched(self, variables: Sequence[Any], combine: Callable[[], list[Any]]) -> list[Any]:
        """What ``combine`` returns, once ranks have found that they step alike, where they must."""
        compared = self._comparison(variables)
        return combine() if compared is None else backend.watched(compared, self.settings.process_set, combine)

    def _comparison(self, variables: Sequence[Any]) -> Comparison | None:
        watch, stepping = self.watch, self._stepping
        if watch is None or stepping is None:
            return None
        local = {id(variable) for variable in self._local_variables()}
        parameters = [(path_of(each), each) for each in variables if _kind_of(each, local) == "averaged"]
        return backend.comparison(watch, stepping.settings(), stepping.rate(), parameters)

    def compare_now(self, variables: Sequence[Any], always: bool) -> None:
        """Compares the ranks' settings and variables between two steps. Collective.

        Args:
            variables: those that training changes.
            always: the variables too, whatever it takes; else where that is a small part of the time since the last look.

        Raises:
            MismatchError: they differ; the same on all ranks.
        """
        compared = None if backend.is_traced() else self._comparison(variables)
        if compared is not None:
            compared.watch.ask(always)
            compared.around(lambda: None, compared.rate)

    def averaged_after_local_steps(self, variables: Sequence[Any]) -> list[Any]:
        """Those of the variables that workers average: not those that each rank keeps to itself."""
        local = {id(variable) for variable in self._local_variables()}
        return [variable for variable in variables if id(variable) not in local]

    def settle(self, is_used: Callable[[], Any]) -> None:
        """Says whether the update uses the reduced gradients, or skips them: so compression knows what was lost with them.

        Args:
            is_used: called where that matters; True, False or such a tensor.
        """
        if self.host is not None:
            if self.host.settings.powersgd is not None:
                host = self.host
                backend.on_host(lambda used: _settled(host, used), [is_used()], [])
        elif (
            self.settings.local is None
            and not self.settings.alone
            and backend.keeps_residuals(self.settings.compression)
        ):
            backend.settle_residuals(is_used(), Session(self.settings.process_set), f"{self.prefix}.")

    @property
    def keeps_some_local(self) -> bool:
        """Whether gradients of some variables stay on their rank."""
        return bool(self._local_variables())

    def _local_variables(self) -> list[Any]:
        of_layers = [variable for layer in self.settings.local_layers for variable in layer.trainable_variables]
        return of_layers + self._local

    def _average(self, gradients: list[Any], variables: list[Any], how: Settings) -> list[Any]:
        names = [self._name_of(variable) for variable in variables]
        if how.on_host is None or self.host is None:
            return backend.reduce(gradients, names, variables, how)
        return self._on_host(self.host, gradients, names, variables, how)

    def _on_host(
        self, host: HostReducer, gradients: list[Any], names: list[str], variables: list[Any], how: Settings
    ) -> list[Any]:
        """The gradients in their places; those of PowerSGD, or of the step before, or this rank's own where it has none."""
        if how.late and not backend.is_traced():  # before any rank is asked what it has: it may have met an error
            host.enter_world()
            host.arrive()
        results = backend.completed(gradients, names, variables, how)
        present = [place for place, gradient in enumerate(results) if gradient is not None]
        if not present:
            return results
        chosen, skips = [names[place] for place in present], self._skips
        dense = [backend.dense(results[place]) for place in present]

        def reduce(*arrays: np.ndarray) -> list[np.ndarray]:
            return host.exchange(chosen, arrays, skips) if how.late else host.reduce(chosen, arrays)

        dtypes = [keras.backend.standardize_dtype(gradient.dtype) for gradient in dense]
        for place, gradient, result in zip(present, dense, backend.on_host(reduce, dense, dtypes), strict=True):
            results[place] = backend.like(result, gradient)
        return results

    def _maximum(self, gradients: list[Any], variables: list[Any], how: Settings) -> list[Any]:
        names = [self._name_of(variable) for variable in variables]
        return backend.maxima(gradients, names, variables, how)

    def _keep(self, gradients: list[Any], variables: list[Any], how: Settings) -> list[Any]:
        own = _each(gradients, backend.each_index_once)
        if not self.settings.scale_local_gradients:
            return own
        return [backend.divided_by_size(gradient, self.settings.process_set) for gradient in own]

    def named(self, variables: Sequence[Any]) -> dict[str, Any]:
        """Variables by the names of their gradients, without the prefix; in an order that all ranks share."""
        return {self._name_of(variable).removeprefix(f"{self.prefix}."): variable for variable in variables}

    def _name_of(self, variable: Any) -> str:
        """A name that is the same on all ranks: they see the variables in one order."""
        name = self._names.get(id(variable))
        if name is None:
            name = f"{self.prefix}.{len(self._names)}.{own_name(variable)}"
            self._names[id(variable)] = name
            self._named.append(variable)
        return name


_KINDS = {
    "averaged": KerasReducer._average,
    "overwriting": KerasReducer._maximum,
    "local": KerasReducer._keep,
}


def _kind_of(variable: Any, local: set[int]) -> str:
    """What becomes of a variable's gradient: a row of ``_KINDS``."""
    if id(variable) in local:
        return "local"
    return "overwriting" if _is_overwritten(variable) else "averaged"


def _is_overwritten(variable: Any) -> bool:
    """Whether Keras stores the gradient in the variable: float8 scales by such maxima, which one does not average."""
    return getattr(variable, "overwrite_with_gradient", False)


def _each(gradients: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    return [None if gradient is None else change(gradient) for gradient in gradients]


def _settled(host: HostReducer, used: Any) -> list[np.ndarray]:
    host.settle(bool(used))
    return []


def when(condition: Any, action: Callable[[], Any]) -> None:
    """Runs the action if the condition, True or a boolean tensor, holds; also within a graph."""

    def act() -> None:
        action()  # without its result, which the other branch has not

    if condition is True:
        act()
    else:
        keras.ops.cond(condition, act, lambda: None)
