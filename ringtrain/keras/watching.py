"""Compares what the ranks of one Keras optimizer have: its settings and learning rate at each step, now and then the variables."""

import functools
from collections.abc import Callable, Sequence

from ringtrain._runtime.arguments import check_among
from ringtrain._training.session import Session
from ringtrain._training.watch import Comparison, Watch
from ringtrain.errors import UnsupportedError
from ringtrain.keras.backends import backend
from ringtrain.keras.kinds import VariableKinds
from ringtrain.keras.naming import GradientNames
from ringtrain.keras.reduction_settings import Settings
from ringtrain.keras.stepping import Stepping
from ringtrain.keras.types import Gradient, Optimizer, Variable
from ringtrain.keras.variables import path_of


class StepWatch:
    """Has ranks find that they step alike, where they must.

    Attributes:
        stepping: the optimizer's own settings and learning rate; None before it is known.
    """

    def __init__(self, settings: Settings, names: GradientNames, kinds: VariableKinds):
        self.stepping: Stepping | None = None
        self._settings = settings
        self._names = names
        self._kinds = kinds

    def step_with(self, optimizer: Optimizer) -> None:
        """Says whose gradients these are."""
        self.stepping = Stepping(optimizer, self._settings.passes())

    @property
    def watch(self) -> Watch | None:
        """Compares what the ranks have; None where they may differ, or have nobody to differ from."""
        settings = self._settings
        compares = settings.mode.compares and settings.local is None and not settings.alone
        return self._watch if compares else None

    @functools.cached_property
    def _watch(self) -> Watch:
        return backend.watch(Session(self._settings.process_set), self._names.prefix, self._names.variables)

    def watched(
        self, variables: Sequence[Variable], combine: Callable[[], list[Gradient | None]]
    ) -> list[Gradient | None]:
        """What ``combine`` returns, once ranks have found that they step alike, where they must."""
        compared = self._comparison(variables)
        return combine() if compared is None else backend.watched(compared, self._settings.process_set, combine)

    def compare_now(self, variables: Sequence[Variable], always: bool) -> None:
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

    def stops_with_all(self, stops: bool, is_last: bool) -> bool:
        """What ``stop_training`` is to be behind a batch.

        A rank that stops alone takes one step more, in which the others hear of it, and then all stop. Where all stop they do so
        at once, as one process. Collective for ranks that stop; nothing is told where steps compare nothing, and in programs of
        JAX, which may wait for a row before they send a gradient.

        Args:
            stops: what it is.
            is_last: whether the batch is the last one of its epoch, behind which ranks compare it anyhow.
        """
        watch = self.watch
        if watch is None or not backend.rows_come_late or self._settings.backward_passes_per_step > 1:
            return stops
        return watch.stops or (stops and (is_last or watch.stop()))

    def begin_fit(self) -> None:
        """Forgets who has stopped before."""
        if self.watch is not None:
            self.watch.stops = False

    def require_no_norm_of_all(self) -> None:
        """Refuses to clip by a norm that each rank has another one of, since gradients of its own are within."""
        norm = None if self.stepping is None else self.stepping.settings().get("global_clipnorm")
        demand = (
            f"apply '{self._names.prefix}': global_clipnorm must be None with variables whose gradients stay on their rank, as each "
            "would clip the gradients of all by a norm of its own, and train apart"
        )
        check_among(demand, norm or None, [None], "Use clipnorm or clipvalue", UnsupportedError)

    def _comparison(self, variables: Sequence[Variable]) -> Comparison | None:
        watch, stepping = self.watch, self.stepping
        if watch is None or stepping is None:
            return None
        parameters = [(path_of(each), each) for each in self._kinds.averaged(variables)]
        return backend.comparison(watch, stepping.settings(), stepping.rate(), parameters)
