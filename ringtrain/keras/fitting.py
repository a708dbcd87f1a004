"""``fit`` on several ranks: each file has one writer, and epochs end alike.

Keras' callbacks know one process. Given the same path on all ranks they write one file at once, and what decides by a rank's
own loss decides for that rank. ``look_at_fits`` puts itself before ``fit``, where the list of callbacks is at hand.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ringtrain._runtime import exits
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.process_sets import ProcessSet, is_alone, members_of
from ringtrain._training.trained import Parameter, are_alike, unequal_trained
from ringtrain.elastic.followed import followed
from ringtrain.errors import InvalidArgumentError, MismatchError, UnsupportedError
from ringtrain.keras.callbacks.metrics import MetricHooks
from ringtrain.keras.drift import require_equal
from ringtrain.keras.optimizer import communicates_on, reduction_within
from ringtrain.keras.types import Callback, Logs, Model, Params
from ringtrain.keras.variables import path_of

# Callbacks that write, and the attribute with the place. Classes of a user's own write as they say.
PLACES = {
    "BackupAndRestore": "backup_dir",
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
    "TensorBoard": "log_dir",
}
DECIDING = ("EarlyStopping", "ReduceLROnPlateau")  # by the metrics of an epoch


@runtime_checkable
class ArrangesCallbacks(Protocol):
    """A state that says which callbacks a ``fit`` of its model has."""

    def arranged(self, callbacks: Sequence[Callback], callback_class: type) -> list[Callback]:
        """As ``arranged`` here, without asking the other ranks."""


def look_at_fits(model_class: Any, callback_class: type) -> None:
    """Puts ``arranged`` before the ``fit`` of a class of models, once.

    Args:
        model_class: ``keras.Model``, or that of tf_keras.
        callback_class: ``Callback`` of the same Keras.
    """
    original = model_class.fit
    parameters = inspect.signature(original)

    def fitted(*args: object, **kwargs: object) -> object:
        try:
            return original(*args, **kwargs)
        except Exception as problem:  # of the framework, that a graph or a program has failed
            if (told := exits.raised_on_host(problem)) is None:
                raise
            raise told from None

    @functools.wraps(original)
    def fit(self: Model, *args: object, **kwargs: object) -> object:
        process_set, state = communicates_on(getattr(self, "optimizer", None)), followed()

        def of_this_rank(callbacks: Sequence[Callback]) -> list[Callback]:
            if isinstance(state, ArrangesCallbacks):
                return state.arranged(callbacks, callback_class)
            assert process_set is not None
            return arranged(callbacks, callback_class, process_set, self)

        bound = parameters.bind(self, *args, **kwargs)
        given: Any = bound.arguments.get("callbacks")
        refuse_to_restore_rows(_listed(getattr(given, "callbacks", given)), self)
        goes_together = process_set is not None and not is_alone(process_set) and process_set.included()
        if not isinstance(state, ArrangesCallbacks) and (state is not None or not goes_together):
            return fitted(self, *args, **kwargs)
        if hasattr(given, "callbacks"):  # a CallbackList, which Keras takes as it is
            given.callbacks = of_this_rank(given.callbacks)
        else:
            bound.arguments["callbacks"] = of_this_rank(_listed(given))
        return fitted(*bound.args, **bound.kwargs)

    model_class.fit = fit


def arranged(
    callbacks: Sequence[Callback], callback_class: type, process_set: ProcessSet, model: Model
) -> list[Callback]:
    """The callbacks of this rank, without those whose files another rank writes. Collective.

    Args:
        callbacks: as given to ``fit``.
        callback_class: what callbacks are made of.
        process_set: the ranks that train together.
        model: to be trained.

    Raises:
        InvalidArgumentError: on all ranks: one follows its own metrics.
        MismatchError: on all ranks: one has frozen other layers.
    """
    own = {
        "places": [place_of(each) for each in callbacks],
        "too_early": decides_too_early(callbacks),
        "trained": trained_by(model),
        "begins": model.train_function is None,
    }
    members = members_of(process_set)
    everyone = dict(zip(members, allgather_object(own, "fit.callbacks", process_set), strict=True))
    for rank, theirs in everyone.items():
        refuse_too_early(theirs["too_early"], rank)
    _refuse_unequal_trained({rank: theirs["trained"] for rank, theirs in everyone.items()}, model)
    reduction = reduction_within(getattr(model, "optimizer", None))
    if reduction is not None and all(theirs["begins"] for theirs in everyone.values()):
        reduction.begin_function()
    rank = current().rank
    before = {place for lower in members[: members.index(rank)] for place in everyone[lower]["places"]} - {None}
    kept = [_that_reads(each, callback_class) if place_of(each) in before else each for each in callbacks]
    return [*(each for each in kept if each is not None), made(EpochEndHooks, callback_class)(process_set)]


def place_of(callback: Callback) -> tuple[str, str] | None:
    """What a callback of Keras is, and where it writes; None for one that does not, or is a class of the user's own."""
    kind = type(callback)
    if kind.__name__ not in PLACES or kind.__module__.partition(".")[0] not in ("keras", "tf_keras"):
        return None
    path = str(getattr(callback, PLACES[kind.__name__]))
    return kind.__name__, path if "://" in path else os.path.abspath(path)


def decides_too_early(callbacks: Sequence[Callback]) -> str:
    """The first callback that decides by metrics which a MetricAverageCallback behind it averages; "" if there is none."""
    averaging = [place for place, each in enumerate(callbacks) if isinstance(each, MetricHooks)]
    for each in callbacks[: averaging[0] if averaging else 0]:
        for kind in type(each).__mro__:
            if kind.__name__ in DECIDING:
                return kind.__name__
    return ""


def refuse_too_early(kind: str, rank: int) -> None:
    """Raises InvalidArgumentError where ``decides_too_early`` has found a callback."""
    if kind:
        raise InvalidArgumentError(
            f"fit '{kind}': expected MetricAverageCallback before it in callbacks, but found it behind on rank "
            f"{rank}: each rank would decide by its own metrics. Put MetricAverageCallback first."
        )


def refuse_to_restore_rows(callbacks: Sequence[Callback], model: Any) -> None:
    """Raises UnsupportedError where a callback puts the weights of another epoch beside rows of the last one."""
    restoring = next((each for each in callbacks if getattr(each, "restore_best_weights", False)), None)
    table = next((layer for layer in model._flatten_layers() if hasattr(layer, "save_table")), None)
    if restoring is not None and table is not None:
        raise UnsupportedError(
            f"fit '{type(restoring).__name__}': restore_best_weights must be False with the ShardedEmbedding '{table.name}', whose rows "
            "are no weights of the model and would stay those of the last epoch. Save them with save_table() at the end of an epoch."
        )


class _Trained(NamedTuple):
    """What a rank's optimizer trains together with the other ranks.

    Attributes:
        model: shapes of all variables: where ranks have other models, the broadcast says so.
        parameters: that are trained.
    """

    model: list[str]
    parameters: list[Parameter]


def trained_by(model: Model) -> _Trained | None:
    """What is trained of a model; None where it is not known yet, or may differ."""
    reduction = reduction_within(getattr(model, "optimizer", None))
    if reduction is None or not reduction.settings.mode.compares or not model.built:
        return None
    shared = reduction.kinds.averaged(model.trainable_variables)
    parameters = [Parameter(path_of(each), str(list(each.shape))) for each in shared]
    return _Trained(sorted(str(list(each.shape)) for each in model.variables), parameters)


def _refuse_unequal_trained(of_ranks: Mapping[int, _Trained | None], model: Model) -> None:
    known = [(rank, theirs) for rank, theirs in of_ranks.items() if theirs is not None]
    if any(theirs.model != known[0][1].model for _, theirs in known):
        return
    lists = [(rank, theirs.parameters) for rank, theirs in known]
    if not are_alike(lists):
        reduction = reduction_within(model.optimizer)
        raise MismatchError(unequal_trained("fit" if reduction is None else reduction.prefix, lists))


class RestoringHooks:
    """Restores what another rank has backed up, and writes nothing.

    Args:
        callback: a BackupAndRestore.
    """

    def __init__(self, callback: Any):
        super().__init__()
        self._callback = callback
        callback.delete_checkpoint = False

    def set_model(self, model: Model) -> None:
        """Hands the model on."""
        self._callback.set_model(model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Reads, as on every rank."""
        self._callback.on_train_begin(logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Lets go of what it has read."""
        self._callback.on_train_end(logs)


class EpochEndHooks:
    """Behind all other callbacks: ranks stop together, and at the end of an epoch have one model.

    Args:
        process_set: the ranks that train together.

    Raises:
        MismatchError: at the end of an epoch, on all ranks.
    """

    _supports_tf_logs = True  # it needs no metrics
    model: Model  # Keras sets these two
    params: Params | None

    def __init__(self, process_set: ProcessSet):
        super().__init__()
        self._process_set = process_set

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Nobody stops yet."""
        if (reduction := reduction_within(self.model.optimizer)) is not None:
            reduction.watching.begin_fit()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """If one rank stops within an epoch all do, behind the batch after."""
        reduction, batches = reduction_within(self.model.optimizer), (self.params or {}).get("steps")
        if reduction is not None and batches is not None:
            stops, is_last = bool(self.model.stop_training), batch + 1 >= batches
            self.model.stop_training = reduction.watching.stops_with_all(stops, is_last)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Compares; variables at the end of the last epoch, and of others where it takes little of the time."""
        stops = bool(self.model.stop_training)
        _require_equal_stops(stops, epoch, self._process_set)
        compare_replicas(self.model, always=stops or epoch + 1 == (self.params or {}).get("epochs"))


def _require_equal_stops(stops: bool, epoch: int, process_set: ProcessSet) -> None:
    """A rank that goes on would wait for those that do not."""
    demand = f"fit 'stop_training': it must be the same on all ranks at the end of epoch {epoch + 1}"
    advice = "Put MetricAverageCallback before what decides by a metric, such as EarlyStopping"
    require_equal({"stop_training": stops}, "fit.stops", process_set, demand, advice)


def compare_replicas(model: Model, always: bool) -> None:
    """``KerasReducer.compare_now`` for a model with a distributed optimizer."""
    reduction = reduction_within(model.optimizer)
    if reduction is not None:
        reduction.watching.compare_now(model.trainable_variables, always)


def _that_reads(callback: Callback, callback_class: type) -> Callback | None:
    """What is left of a callback whose files another rank writes; None if nothing is."""
    return made(RestoringHooks, callback_class)(callback) if type(callback).__name__ == "BackupAndRestore" else None


def made(hooks: type, callback_class: type) -> Callable[..., Callback]:
    """A class of callbacks with these hooks."""
    return type(hooks.__name__, (hooks, callback_class), {})


def _listed(callbacks: Callback | list[Callback] | tuple[Callback, ...] | None) -> list[Callback]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
