"""Local steps of a Keras optimizer: what its worker averages, in eager mode and in the graph of a ``tf.function``.

``reduction.KerasReducer`` has one ``AveragedVariables`` for ``mode=LocalSteps(...)``; ``ringtrain._training.averaging`` decides and
averages. Values go to its arrays and come back as inputs and outputs of functions that run on the host, so that a graph
keeps their order: the common copy takes them before the first update, and the average is written after the last one of
a period.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import numpy as np

from ringtrain._runtime.process_sets import ProcessSet
from ringtrain._training.arrays import NUMPY
from ringtrain._training.averaging.neighbours import set_of_this
from ringtrain._training.averaging.outer import AveragingPlan
from ringtrain._training.averaging.shared import Role, Shared
from ringtrain._training.averaging.worker import ComparedSettings, Worker, require_local
from ringtrain._training.drift import Settings
from ringtrain._training.mode import LocalSteps
from ringtrain._training.session import Session
from ringtrain.elastic.adapters import is_seed
from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.backends import backend
from ringtrain.keras.stepping import CALLED, Stepping
from ringtrain.keras.types import Flag, Tensor, Variable
from ringtrain.keras.variables import own_name

_BEGINS, _ENDS = 1, 2  # bits of what a step is in its period


class _Staged(Shared):
    """A variable's values on their way, as ``ringtrain._training.averaging`` takes them."""

    def __init__(self, name: str, variable: Variable, is_trained: bool):
        is_float = "float" in keras.backend.standardize_dtype(variable.dtype)
        super().__init__(NUMPY, name, Role.of(is_trained, is_float), lambda: self.array)
        self.variable = variable
        self.array = np.empty(0)

    @property
    def is_frozen(self) -> bool:
        """Whether it is no longer trained; TensorFlow's own variables do not say so."""
        return self.role is Role.PARAMETER and not self.variable.trainable

    def stage(self, values: np.ndarray) -> None:
        """Takes the values that the variable has now."""
        self.array = np.asarray(values)

    def write(self, values: np.ndarray) -> None:
        """Puts values where the variable will get them from."""
        self.array = values.reshape(self.array.shape).astype(self.array.dtype)


class AveragedVariables:
    """The local steps of one optimizer.

    Args:
        mode: how workers average, the same on all ranks.
        compression: of what they have changed.
        process_set: the ranks that do.
        stepping: what they step with, compared where they average; None where nobody has said it.
    """

    def __init__(
        self,
        mode: LocalSteps,
        compression: str,
        process_set: ProcessSet,
        stepping: Callable[[], Stepping | None] = lambda: None,
    ):
        self.mode = mode
        self._compression = compression
        self._stepping = stepping
        self._rates: Sequence[np.ndarray] = ()  # of the step that averages
        self._process_set = process_set
        self._period = mode.period()
        self._known: dict[int, _Staged] = {}
        self._samples: Tensor | int | None = None  # of the next step
        self._made: Worker | None = None
        self._neighbours: ProcessSet | None = None

    def neighbours(self) -> ProcessSet | None:
        """The ranks whose gradients are averaged in each local step: those of this host, or None for this rank alone."""
        self._require_worker()
        return self._neighbours

    @property
    def warms_up(self) -> bool:
        """Whether the next update is an exact one."""
        return self._period.warms_up

    def asks_whether_it_warms_up(self) -> Tensor:
        """``warms_up`` when the step runs, as a boolean tensor of the graph."""
        answer = backend.on_host(lambda: [np.array(self._period.warms_up)], [], [((), "bool")])[0]
        return keras.ops.reshape(answer, ())

    def _require_worker(self) -> Worker:
        """Makes it at the optimizer's first use, on all ranks together, and compares what they have set."""
        if self._made is None:
            plan = AveragingPlan(self.mode.outer, self._compression, self.mode.within)
            compared = ComparedSettings(self._stepping_with, CALLED) if self.mode.compares else None
            worker = Worker(Session(self._process_set), self._period, plan, "optimizer", compared)
            worker.compare_terms()
            self._neighbours = set_of_this(self.mode.within) if self.mode.within is not None else None
            self._made = worker
        return self._made

    def _stepping_with(self) -> Settings:
        stepping = self._stepping()
        return {} if stepping is None else stepping.all_settings(self._rates)

    # ---- steps ----

    def know(self, variables: Iterable[Variable], is_trained: bool) -> None:
        """Adds variables that are averaged, in an order that all ranks share; random seeds stay each rank's own."""
        for variable in variables:
            if id(variable) not in self._known and not is_seed(variable):
                name = f"{len(self._known)}.{own_name(variable)}"
                self._known[id(variable)] = _Staged(name, variable, is_trained)

    def count_samples(self, samples: Tensor | int) -> None:
        """What the next step weighs: a number, or a tensor of the graph that the step is in."""
        self._samples = samples

    def around(self, used: Flag, update: Callable[[], object]) -> None:
        """Runs an update as a local step.

        Args:
            used: whether it changes anything; True, or a boolean tensor.
            update: the user's.
        """
        self._require_worker()
        samples, self._samples = self._samples, None
        self._release()
        given = self._given()

        def begin(used: np.ndarray, samples: np.ndarray) -> list[np.ndarray]:
            return self._begin_step(used, samples, len(given))

        place = backend.on_host(begin, [used, -1 if samples is None else samples], [((), "int32")])[0]
        place = keras.ops.reshape(place, ())
        _when(keras.ops.equal(place % 2, _BEGINS), lambda: self._run(self._take, writes=False))
        update()
        _when(keras.ops.greater_equal(place, _ENDS), lambda: self._run(self._average))

    def synchronize(self) -> None:
        """Averages now, outside of any graph; in exact steps all ranks are equal anyway."""
        self._require_worker()
        if self._period.warms_up:
            return
        self._run(self._take_and(self._require_worker().synchronize))

    def join(self) -> None:
        """Averages with the others until all ranks have called this."""
        require_local(self._require_worker())
        self._run(self._take_and(self._require_worker().join))

    def _release(self) -> None:
        """Variables that were frozen are averaged for the last time with what they had changed; the outer optimizer leaves them."""
        self._require_worker().release(lambda: {each for each in self._known.values() if each.is_frozen})

    def _given(self) -> list[_Staged]:
        """What the step that runs can average. Statistics that it is not given wait for ``synchronize``, as with fragments."""
        changed = [each for each in self._known.values() if not each.is_frozen or self._require_worker().keeps(each)]
        return [each for each in changed if backend.is_given(each.variable)]

    def _run(self, function: "_OfValues", writes: bool = True) -> None:
        """Runs a function of variables and their values on the host, and gives them what it returns."""
        self._release()
        staged, known = self._given(), len(self._known)
        variables = [each.variable for each in staged]
        kinds = [(tuple(each.shape), keras.backend.standardize_dtype(each.dtype)) for each in variables if writes]

        stepping = self._stepping()
        rate = None if stepping is None else stepping.rate()
        rates = [] if rate is None else [keras.ops.convert_to_tensor(rate)]

        def call(*values: np.ndarray) -> list[np.ndarray]:
            self._require_known(known)
            self._rates = values[: len(rates)]
            return function(staged, values[len(rates) :])

        results = backend.on_host(call, [*rates, *map(_value_of, variables)], kinds)
        for each, result in zip(staged, results, strict=False):
            each.variable.assign(keras.ops.reshape(result, tuple(each.variable.shape)))

    # ---- on the host ----

    def _begin_step(self, used: np.ndarray, samples: np.ndarray, given: int) -> list[np.ndarray]:
        """Counts the step; returns whether the common copy is to be taken before it, and whether a period ends with it."""
        worker = self._require_worker()
        if samples >= 0:
            self._period.count_samples(int(samples))
        self._release()
        begins = not self._period.warms_up and worker.must_begin(given)
        ends = worker.note_step(bool(used))
        return [np.array(begins * _BEGINS + ends * _ENDS, np.int32)]

    def _require_known(self, count: int) -> None:
        """Raises InvalidArgumentError in a graph that was made when fewer variables were known."""
        if count != len(self._known):
            raise InvalidArgumentError(
                f"apply '{self._require_worker().prefix}': all variables that are averaged must be known before a graph is made, but "
                f"{len(self._known) - count} came later. Call optimizer.build() with all, and average_also(), before."
            )

    def _take(self, staged: Sequence[_Staged], values: Sequence[np.ndarray]) -> list[np.ndarray]:
        for each, array in zip(staged, values, strict=True):
            each.stage(array)
        self._require_worker().before_step(staged)
        return []

    def _average(self, staged: Sequence[_Staged], values: Sequence[np.ndarray]) -> list[np.ndarray]:
        for each, array in zip(staged, values, strict=True):
            each.stage(array)
        return _changed_by(self._require_worker().average, staged)

    def _take_and(self, act: Callable[[], None]) -> "_OfValues":
        def acting(staged: Sequence[_Staged], values: Sequence[np.ndarray]) -> list[np.ndarray]:
            self._take(staged, values)
            return _changed_by(act, staged)

        return acting

    # ---- checkpoints ----

    def state(self) -> dict[str, object]:
        """What the next synchronisation needs, beside the variables."""
        return self._require_worker().state()

    def load(self, state: Mapping[str, object]) -> None:
        """Goes on with it."""
        self._require_worker().load(state)


_OfValues = Callable[[Sequence[_Staged], Sequence[np.ndarray]], list[np.ndarray]]


def _changed_by(act: Callable[[], None], staged: Sequence[_Staged]) -> list[np.ndarray]:
    """What the variables are after averaging; where that fails they are the common copy, now."""
    try:
        act()
    except BaseException:
        for each in staged:
            each.variable.assign(each.array)
        raise
    return [each.array for each in staged]


def _value_of(variable: keras.Variable) -> Tensor:
    """A variable's value, as a tensor; that of TensorFlow's own variables is a method."""
    return variable.value() if callable(variable.value) else variable.value


def _when(condition: Flag, action: Callable[[], None]) -> None:
    if not backend.is_traced():
        if bool(condition):
            action()
        return
    backend.cond(condition, action, lambda: None)
