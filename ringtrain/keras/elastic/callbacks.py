"""Callbacks of ``fit`` in a job whose ranks come and go: what they remember, who writes, and that all ranks stop together.

A rank that joins begins an epoch in its middle, with callbacks that have seen nothing of it. So it gets what those of rank 0
remember: numbers, texts and arrays among their attributes that have changed since ``fit`` was called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from ringtrain._binding.log import logger
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.operations import Max
from ringtrain.elastic.likeness import is_made_of
from ringtrain.errors import UnsupportedError
from ringtrain.keras.fitting import compare_replicas
from ringtrain.keras.types import Callback, Logs, Model, Optimizer, Params

# What Keras sets on each rank; the sign of ``min_delta`` once that rank has a metric to look at.
_OF_KERAS = {"_model", "model", "params", "validation_data", "min_delta"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_KINDS = "fit.callbacks"
_STOPS = "fit.stops"

Memory = Mapping[str, Mapping[str, object]]  # by callback and attribute
Result = TypeVar("Result")


class Memories:
    """What the callbacks of one ``fit`` remember.

    Args:
        callbacks: as given to ``fit``, which has not begun.
    """

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = named(callbacks)
        self._fresh = {name: _plain_of(each) for name, each in self._callbacks.items()}
        self._others = {name: _others_of(each) for name, each in self._callbacks.items()}

    @property
    def kinds(self) -> list[str]:
        """Of the callbacks."""
        return list(self._callbacks)

    def told(self) -> Memory:
        """What has changed since."""
        return {name: self._changed(name) for name in self._callbacks}

    def take(self, told: Memory) -> None:
        """Takes over what those of another rank remember."""
        for name in told.keys() & self._callbacks.keys():
            vars(self._callbacks[name]).update(told[name])

    def left_out(self) -> list[str]:
        """Attributes that have changed and are not told, since they have objects of other kinds."""
        return [
            f"{name}.{attribute}"
            for name, each in self._callbacks.items()
            for attribute, value in _others_of(each).items()
            if self._others[name].get(attribute) is not value
        ]

    def _changed(self, name: str) -> dict[str, object]:
        now, fresh = _plain_of(self._callbacks[name]), self._fresh[name]
        return {key: value for key, value in now.items() if key not in fresh or not _are_equal(value, fresh[key])}


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by names that are the same on all ranks: their classes, numbered where one comes again."""
    found: dict[str, Callback] = {}
    for each in callbacks:
        kind, count = type(each).__name__, sum(type(other) is type(each) for other in found.values())
        found[kind if count == 0 else f"{kind} {count + 1}"] = each
    return found


class TogetherHooks:
    """The last of the callbacks: a rank that joins remembers what others do, and all stop together.

    Args:
        state: of the job.
        memories: of the other callbacks.
    """

    _supports_tf_logs = True  # it needs no metrics
    model: Model  # Keras sets these two
    params: Params | None

    def __init__(self, state: FitTogether, memories: Memories):
        super().__init__()
        self._state, self._memories = state, memories
        self._has_looked = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Names callbacks of one rank alone, which end with it."""
        self._state.goes_on = True
        if (memory := self._state.take_resumed()) is not None:
            self._memories.take(memory)
        if self._state.taken is not None:
            return
        everyone = self._state.survive(lambda: allgather_object(self._memories.kinds, _KINDS))
        alone = [kind for kind in everyone[0] if not all(kind in theirs for theirs in everyone)]
        if alone and current().rank == 0:
            logger.warning(
                "fit: callbacks should be the same on all ranks in an elastic job, but %s will end with rank 0. Pass it on all ranks; "
                "Keras' callbacks that write files do so on one rank at a time",
                ", ".join(alone),
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """A rank that joins is in the epoch, whose beginning the others have passed: it takes what that has left there."""
        taken, self._state.taken = self._state.taken, None
        if taken is None:
            return
        memory, rate = taken
        self._memories.take(memory)
        if rate is not None:
            rate_of(self.model.optimizer).assign(rate)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """If one rank stops within an epoch all do, behind the batch after."""
        self.model.stop_training = self._state.stops_with_all(self.model.stop_training)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """If one rank stops all do. Then they have one model, as is looked at here."""
        stops = np.array([bool(self.model.stop_training) or self._state.wants_stop()], np.uint8)
        if self._state.allreduce(stops, _STOPS, Max)[0]:
            self.model.stop_training = True
        ends = bool(self.model.stop_training) or epoch + 1 == (self.params or {}).get("epochs")
        self._state.survive(lambda: compare_replicas(self.model, always=ends))
        self._state.save_if_due()
        if not self._has_looked:
            self._has_looked = True
            self._tell_what_is_left_out()

    def _tell_what_is_left_out(self) -> None:
        left_out = self._memories.left_out()
        if left_out and current().rank == 0:
            logger.warning(
                "fit: ranks that join get numbers, texts and arrays of callbacks, but not %s, which begins anew there",
                ", ".join(left_out),
            )


class FitTogether(Protocol):
    """What the hooks need of the state."""

    epoch: int
    step: int
    taken: tuple[Memory, np.ndarray | None] | None
    goes_on: bool

    def take_resumed(self) -> Memory | None:
        """As that of ``FitState``."""

    def stops_with_all(self, stops: object) -> object:
        """As that of ``FitState``."""

    def wants_stop(self) -> bool:
        """As that of ``FitState``."""

    def save_if_due(self) -> None:
        """As that of ``FitState``."""

    def survive(self, function: Callable[[], Result]) -> Result:
        """As that of ``elastic.State``."""

    def allreduce(self, tensor: np.ndarray, name: str, op: int) -> np.ndarray:
        """As that of ``elastic.State``."""


def rate_of(optimizer: Optimizer) -> Any:
    """The variable that has the learning rate; None if a schedule has it."""
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return rate if hasattr(rate, "assign") else None


def write_on_first_rank(callback: Any) -> None:
    """Has a ``ModelCheckpoint`` write on rank 0 alone, whichever rank that comes to be; all of them remember the best."""
    set_model = callback.set_model
    callback.set_model = lambda model: set_model(WritesOnFirstRank(model))


def is_checkpoint(callback: Callback) -> bool:
    """Whether it is one of Keras' callbacks that save the model."""
    return _is_one_of(callback, ("ModelCheckpoint",))


def writes_a_log(callback: Callback) -> bool:
    """Whether it is one of Keras' callbacks that write as long as ``fit`` runs."""
    return _is_one_of(callback, ("CSVLogger", "TensorBoard", "OrbaxCheckpoint"))


def refuse_backups(callbacks: Sequence[Callback]) -> None:
    """Raises UnsupportedError for a BackupAndRestore."""
    if any(_is_one_of(each, ("BackupAndRestore",)) for each in callbacks):
        raise UnsupportedError(
            "fit 'BackupAndRestore': an elastic job must go on from one file on all ranks, in the midst of an epoch too, but this "
            "callback has each rank restore what it finds. Leave it out, and use save_every and resume of Elastic."
        )


def _is_one_of(callback: Callback, names: Sequence[str]) -> bool:
    return any(kind.__name__ in names and kind.__module__.startswith("keras.") for kind in type(callback).__mro__)


class OnFirstRankHooks:
    """Has a callback run on rank 0 alone, whichever rank that comes to be; another one goes on with the files of the last.

    Args:
        callback: which writes.
        state: of the job.
    """

    _supports_tf_logs = True

    def __init__(self, callback: Any, state: FitTogether):
        super().__init__()
        self._callback, self._state = callback, state
        self._runs = False

    def set_params(self, params: Params | None) -> None:
        """Hands them on."""
        self._callback.set_params(params)

    def set_model(self, model: Model) -> None:
        """Keeps it until the callback runs, since some write at once."""
        self._whole = model

    def begin(self, hook: str) -> bool:
        """Whether the callback runs, or does from this hook on."""
        if self._runs or current().rank != 0:
            return self._runs
        self._runs = True
        self._callback.set_model(self._whole)
        if hook != "on_train_begin" or self._state.taken is not None:  # another rank has begun its files
            self._callback.append = True  # of a CSVLogger
        if hook != "on_train_begin":
            self._callback.on_train_begin()
            self._callback._global_train_batch = self._state.step  # of a TensorBoard
            if hook != "on_epoch_begin":
                self._callback.on_epoch_begin(self._state.epoch)
        return True


def on_first_rank(callback: Callback, state: FitTogether, callback_class: type) -> Callback:
    """A callback in the place of one that writes; it has the hooks that that one has.

    Args:
        callback: of Keras.
        state: of the job.
        callback_class: what callbacks are made of.
    """
    names = [name for name in dir(callback_class) if name.startswith("on_")]
    own = {name for name in names if getattr(type(callback), name) is not getattr(callback_class, name)}
    hooks = {name: _relayed(name) for name in (*sorted(own), "on_train_begin")}
    return type("OnFirstRankHooks", (OnFirstRankHooks, callback_class), hooks)(callback, state)


def _relayed(name: str) -> Callable[..., None]:
    def hook(self: OnFirstRankHooks, *args: object, **kwargs: object) -> None:
        if self.begin(name):
            getattr(self._callback, name)(*args, **kwargs)

    return hook


class WritesOnFirstRank:
    """A model that is saved on rank 0 alone.

    Args:
        model: whose all else is.
    """

    def __init__(self, model: Model):
        self.__dict__["_whole"] = model

    def __getattr__(self, name: str) -> object:
        if name in ("save", "save_weights", "export") and current().rank != 0:
            return lambda *args, **kwargs: None
        return getattr(self._whole, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._whole, name, value)


def _plain_of(callback: Callback) -> dict[str, object]:
    return {
        name: copy.deepcopy(each) for name, each in vars(callback).items() if name not in _OF_KERAS and _is_plain(each)
    }


def _others_of(callback: Callback) -> dict[str, object]:
    if type(callback).__module__.startswith("keras."):  # whose further attributes follow from these
        return {}
    return {
        name: each
        for name, each in vars(callback).items()
        if name not in _OF_KERAS and not _is_plain(each) and not callable(each)
    }


def _is_plain(value: object) -> bool:
    return is_made_of(_is_value, value)


def _is_value(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)
