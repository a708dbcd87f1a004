"""Local steps of a Keras optimizer: what its worker averages, in eager mode and in the graph of a ``tf.function``.

``reduction.KerasReducer`` has one ``AveragedVariables`` for ``mode=LocalSteps(...)``; ``ringtrain.averaging`` decides and
averages. Values go to its arrays and come back as inputs and outputs of functions that run on the host, so that a graph
keeps their order: the common copy takes them before the first update, and the average is written after the last one of
a period.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ringtrain._training.mode import LocalSteps
from ringtrain.averaging.neighbours import set_of_this_host
from ringtrain.averaging.shared import Role
from ringtrain.averaging.worker import ComparedSettings, Plan, Worker, require_local
from ringtrain.elastic.adapters import is_seed
from ringtrain.errors import InvalidArgumentError
from ringtrain.gradients.session import Session
from ringtrain.keras.backends import backend
from ringtrain.keras.variables import own_name
from ringtrain.process_sets import ProcessSet

_BEGINS, _ENDS = 1, 2  # bits of what a step is in its period
_HALVES = ("float16", "bfloat16")


class _Staged:
    """A variable's values on their way, as ``ringtrain.averaging`` takes them."""

    def __init__(self, name: str, variable: Any, is_trained: bool):
        self.name = name
        self.variable = variable
        dtype = keras.backend.standardize_dtype(variable.dtype)
        is_float = "float" in dtype
        self.role = Role.PARAMETER if is_trained else Role.STATISTIC if is_float else Role.COUNTER
        self.array = np.empty(0)

    def stage(self, values: np.ndarray) -> None:
        """Takes the values that the variable has now."""
        self.array = np.asarray(values)

    def read(self) -> np.ndarray:
        """The values, flat; 16 bits as float32."""
        flat = np.ascontiguousarray(self.array).reshape(-1)
        return flat.astype(np.float32) if flat.dtype.name in _HALVES else flat

    def held(self, values: np.ndarray) -> np.ndarray:
        """What the variable holds after ``write(values)``."""
        return values.astype(self.array.dtype).astype(np.float32) if self.array.dtype.name in _HALVES else values

    def write(self, values: np.ndarray) -> None:
        """Puts values where the variable will get them from."""
        self.array = values.reshape(self.array.shape).astype(self.array.dtype)


class AveragedVariables:
    """The local steps of one optimizer.

    Args:
        mode: how workers average, the same on all ranks.
        compression: of what they have changed.
        process_set: the ranks that do.
        compared: what they step with, compared where they average; None where that may differ.
    """

    def __init__(
        self, mode: LocalSteps, compression: str, process_set: ProcessSet, compared: ComparedSettings | None = None
    ):
        self.mode = mode
        self._compression = compression
        self._compared = compared
        self._process_set = process_set
        self._period = mode.period()
        self._known: dict[int, _Staged] = {}
        self._samples: Any = None  # of the next step
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

    def asks_whether_it_warms_up(self) -> Any:
        """``warms_up`` when the step runs, as a boolean tensor of the graph."""
        answer = backend.on_host(lambda: [np.array(self._period.warms_up)], [], ["bool"])[0]
        return keras.ops.reshape(answer, ())

    def _require_worker(self) -> Worker:
        """Makes it at the optimizer's first use, on all ranks together, and compares what they have set."""
        if self._made is None:
            plan = Plan(self.mode.outer, self._compression, self.mode.within_host)
            worker = Worker(Session(self._process_set), self._period, plan, "optimizer", self._compared)
            worker.compare_terms()
            self._neighbours = set_of_this_host() if self.mode.within_host is not None else None
            self._made = worker
        return self._made

    # ---- steps ----

    def know(self, variables: Iterable[Any], is_trained: bool) -> None:
        """Adds variables that are averaged, in an order that all ranks share; random seeds stay each rank's own."""
        for variable in variables:
            if id(variable) not in self._known and not is_seed(variable):
                name = f"{len(self._known)}.{own_name(variable)}"
                self._known[id(variable)] = _Staged(name, variable, is_trained)

    def count_samples(self, samples: Any) -> None:
        """What the next step weighs: a number, or a tensor of the graph that the step is in."""
        self._samples = samples

    def around(self, used: Any, update: Callable[[], None]) -> None:
        """Runs an update as a local step.

        Args:
            used: whether it changes anything; True, or a boolean tensor.
            update: the user's.
        """
        self._require_worker()
        samples, self._samples = self._samples, None
        place = backend.on_host(self._begin_step, [used, -1 if samples is None else samples], ["int32"])[0]
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

    def _run(self, function: Callable[..., list[np.ndarray]], writes: bool = True) -> None:
        """Runs a function of the variables' values on the host, and gives them what it returns."""
        staged = list(self._known.values())
        dtypes = [keras.backend.standardize_dtype(each.variable.dtype) for each in staged] if writes else []
        results = backend.on_host(function, [_value_of(each.variable) for each in staged], dtypes)
        for each, result in zip(staged, results, strict=False):
            each.variable.assign(keras.ops.reshape(result, tuple(each.variable.shape)))

    # ---- on the host ----

    def _begin_step(self, used: Any, samples: Any) -> list[np.ndarray]:
        """Counts the step; returns whether the common copy is to be taken before it, and whether a period ends with it."""
        worker = self._require_worker()
        if samples >= 0:
            self._period.count_samples(int(samples))
        begins = not self._period.warms_up and worker.must_begin(len(self._known))
        ends = worker.note_step(bool(used))
        return [np.array(begins * _BEGINS + ends * _ENDS, np.int32)]

    def _stage(self, values: Sequence[np.ndarray]) -> Worker:
        worker = self._require_worker()
        if len(values) != len(self._known):
            raise InvalidArgumentError(
                f"apply '{worker.prefix}': all variables that are averaged must be known before a graph is made, but "
                f"{len(self._known) - len(values)} came later. Call optimizer.build() with all, and average_also(), before."
            )
        for each, array in zip(self._known.values(), values, strict=True):
            each.stage(array)
        return worker

    def _take(self, *values: np.ndarray) -> list[np.ndarray]:
        self._stage(values).before_step(self._known.values())
        return []

    def _average(self, *values: np.ndarray) -> list[np.ndarray]:
        return self._changed_by(self._stage(values).average)

    def _take_and(self, act: Callable[[], None]) -> Callable[..., list[np.ndarray]]:
        def acting(*values: np.ndarray) -> list[np.ndarray]:
            self._take(*values)
            return self._changed_by(act)

        return acting

    def _changed_by(self, act: Callable[[], None]) -> list[np.ndarray]:
        """What the variables are after averaging; where that fails they are the common copy, now."""
        try:
            act()
        except BaseException:
            for each in self._known.values():
                each.variable.assign(each.array)
            raise
        return [each.array for each in self._known.values()]

    # ---- checkpoints ----

    def state(self) -> dict[str, Any]:
        """What the next synchronisation needs, beside the variables."""
        return self._require_worker().state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on with it."""
        self._require_worker().load(state)


def _value_of(variable: Any) -> Any:
    """A variable's value, as a tensor; that of TensorFlow's own variables is a method."""
    return variable.value() if callable(variable.value) else variable.value


def _when(condition: Any, action: Callable[[], None]) -> None:
    if not backend.is_traced():
        if bool(condition):
            action()
        return
    keras.ops.cond(condition, action, lambda: None)
