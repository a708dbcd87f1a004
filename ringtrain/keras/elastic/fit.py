"""``fit`` whose steps survive: where its steps begin and end, and in which epoch a rank that joins begins.

The reduction of the gradients survives by itself (``backends``); this tells the state what ``fit`` does. With a
``BatchSampler`` an epoch is over when its samples are, however many batches that takes; ``batches`` makes data of it that
``fit`` reads batch by batch, and not ahead.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ringtrain._runtime.arguments import check_among, check_kind
from ringtrain._runtime.context import current, own
from ringtrain._runtime.operations import Max
from ringtrain._runtime.process_sets import global_process_set
from ringtrain._training.needs import check_needs
from ringtrain._training.session import NewWorld
from ringtrain._training.step_guard import require_all_ranks
from ringtrain.elastic import BatchSampler, TransparentState
from ringtrain.elastic.adapters import Variables, outline_of, register, variables_of
from ringtrain.elastic.reading import ReadElsewhere
from ringtrain.elastic.saving import is_plain
from ringtrain.elastic.sets import Rule
from ringtrain.errors import InvalidArgumentError, MismatchError, UnsupportedError
from ringtrain.keras.backends import backend
from ringtrain.keras.compilation import switch_off
from ringtrain.keras.elastic.callbacks import (
    Memories,
    Memory,
    TogetherHooks,
    is_checkpoint,
    on_first_rank,
    rate_of,
    refuse_backups,
    write_on_first_rank,
    writes_a_log,
)
from ringtrain.keras.elastic.fit_hooks import END_OF_EPOCH
from ringtrain.keras.fitting import decides_too_early, made, refuse_too_early
from ringtrain.keras.optimizer import hoist, reduction_within
from ringtrain.keras.reduction import KerasReducer
from ringtrain.keras.types import Callback, Logs, Model, Optimizer, Params
from ringtrain.keras.variables import broadcast_variables

BY_SAMPLER = -1  # number of an epoch's batches
_LENGTHS = "fit.lengths"
_OTHER_DATA = (
    "fit: with a sampler the data must be batches(sampler, load), but are others, which deal samples of their own. Pass these as x, "
    "without steps_per_epoch; or leave sampler out of Elastic."
)
_READ_AHEAD = (
    "fit: batches(sampler, load) must be read when their step begins, but are read ahead, where it is not known who will be there. "
    "Pass them to fit as they are, without prefetch or map, and without class_weight."
)


class FitState(TransparentState):
    """The state of an ``Elastic``.

    Attributes:
        batches: of each epoch; 0 until ``fit`` begins, or BY_SAMPLER from then on.
        taken: of a rank that has joined and not begun an epoch, what the callbacks of rank 0 remember, and the learning rate.
        goes_on: whether ``fit`` has begun, so that ranks that join are told this.
        ends_epoch: whether the batch that is done was the last one, which ``fit`` does not know.
    """

    batches: int
    optimizer: Optimizer

    _GIVEN = (*TransparentState._GIVEN, "_remembered", "_resumed")

    def __init__(self, may_pause: Callable[[], bool], **arguments: Any):
        self._may_pause = may_pause
        self._memories: Memories | None = None  # of the callbacks of ``fit``, while that runs
        self.taken: tuple[Memory, np.ndarray | None] | None = None
        self._resumed: tuple[Memory, np.ndarray | None] | None = None  # as a file has it
        self.goes_on = self.ends_epoch = False
        self._has_begun_batch = self._is_read_ahead = False
        super().__init__(**arguments)

    @property
    def fit_sampler(self) -> BatchSampler | None:
        """That deals the samples; None where the data do."""
        return self._sampler

    def arranged(self, callbacks: Sequence[Callback], callback_class: type) -> list[Callback]:
        """The callbacks of a ``fit`` with this state's ``Elastic``, which comes first: it lets ranks join before others see a batch.

        Raises:
            InvalidArgumentError: one follows its own metrics.
        """
        own = [each for each in callbacks if isinstance(each, ElasticHooks) and each.state is self]
        if not own:
            return list(callbacks)
        refuse_too_early(decides_too_early(callbacks), current().rank)
        refuse_backups(callbacks)
        others = [each for each in callbacks if each not in own]
        self._memories = Memories(others)
        for each in filter(is_checkpoint, others):
            write_on_first_rank(each)
        others = [on_first_rank(each, self, callback_class) if writes_a_log(each) else each for each in others]
        return [*own, *others, made(TogetherHooks, callback_class)(self, self._memories)]

    @property
    def _remembered(self) -> tuple[Memory, np.ndarray | None] | None:
        """What a rank that joins takes over beside the values; None before ``fit`` has begun."""
        if self._memories is None or not self.goes_on:
            return None
        rate = rate_of(self.optimizer)
        return self._memories.told(), None if rate is None else np.array(rate.numpy())

    @_remembered.setter
    def _remembered(self, told: tuple[Memory, np.ndarray | None] | None) -> None:
        if not self.goes_on:  # else others take it over
            self.taken = told

    def save_every(self, *args: Any, **kwargs: Any) -> None:
        """As of every state; in jobs that are not elastic, too, it has to arrange the callbacks then."""
        super().save_every(*args, **kwargs)
        self.be_followed()

    def resume(self, *args: Any, **kwargs: Any) -> bool:
        """As ``save_every``."""
        self.be_followed()
        return super().resume(*args, **kwargs)

    def take_resumed(self) -> Memory | None:
        """What callbacks are to remember from their beginning on, behind a file; what is of the midst of an epoch is ``taken``."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or self.batch > 0:
            self.taken = self.taken or resumed
            return None
        return resumed[0]

    def _in_file(self, content: dict[str, object]) -> dict[str, object]:
        remembered = self._remembered
        assert remembered is not None
        memory = {
            name: {key: value for key, value in told.items() if is_plain(value)} for name, told in remembered[0].items()
        }
        return {**super()._in_file(content), "remembered": (memory, remembered[1])}

    def _take_from_file(self, kept: dict[str, Any]) -> None:
        self._resumed = kept["remembered"]
        if self.batch == 0:
            self.batches = 0  # is agreed on anew, as the number of ranks may be another one

    def _save_between_steps(self) -> None:
        if self.batch > 0:  # else the end of the epoch has seen to it, before callbacks have begun the next one
            self.save_if_due()

    def begin_fit(self) -> None:
        """As ``enter``. Raises InvalidArgumentError if there was a ``fit`` that has come to its end."""
        self._refuse_second_loop()
        self.enter()
        if self._sampler is not None:
            self._sampler.look_only(False)

    def end_fit(self) -> None:
        """As ``finish``."""
        self._has_looped = True
        self.finish()

    def begin_batch(self) -> None:
        """As ``between_steps``, where that is allowed; on PyTorch the draw comes first, and has done it."""
        if not self._is_in_step:
            self._pause_if_allowed()
        self._has_begun_batch = True

    def end_batch(self) -> bool:
        """The step of a batch is done; returns whether its samples were drawn."""
        self._refuse_reading_ahead()
        was_drawn, self._is_in_step, self._has_begun_batch = self._is_in_step, False, False
        if was_drawn:
            self.release_alone()
        return was_drawn

    def stops_with_all(self, stops: object) -> object:
        """What ``stop_training`` is to be behind a batch: a rank that stops tells the others with its next step, and all stop.

        At the end of an epoch they agree by themselves.

        Args:
            stops: what it is.
        """
        if self._transaction is None or self.ends_epoch:
            return stops
        self._transaction.vote.wants_stop |= bool(stops)
        return self._transaction.vote.all_stop

    def wants_stop(self) -> bool:
        """Whether this rank was to stop within the epoch, and has gone on to tell the others."""
        return self._transaction is not None and self._transaction.vote.wants_stop

    def _pause_if_allowed(self) -> None:
        """Not while a sum of gradients is begun, which ranks that join would lack."""
        if self._may_pause():
            self.between_steps()

    # ---- its sampler ----

    def _follow_draws(self, sampler: BatchSampler) -> None:
        sampler.follow(self, keeps_rest=True)
        sampler.look_only(True)  # until fit has looked at a batch, to build what is not built

    def before_draw(self) -> None:
        """Lets ranks join and leave, unless ``fit`` has said that a batch begins, and draws in a thread of TensorFlow's."""
        if not self._has_begun_batch:
            self._pause_if_allowed()

    def note_draw(self) -> None:
        """A batch is drawn, of which the step must come before the next one is."""
        if self._is_in_step:
            self._is_read_ahead = True  # TensorFlow keeps the error until that batch is asked for, if ever
        self._refuse_reading_ahead()
        super().note_draw()

    def _refuse_reading_ahead(self) -> None:
        if self._is_read_ahead:
            raise InvalidArgumentError(_READ_AHEAD)


class ElasticHooks:
    """Has ``fit`` go on when ranks die and when others come: no step is lost, and nothing is computed again.

    Example:
        >>> elastic = hvd.elastic.Elastic(model)
        >>> model.fit(x, y, epochs=90, initial_epoch=elastic.epoch, callbacks=[elastic])

        >>> sampler = hvd.elastic.BatchSampler(len(x), batch_size=32)
        >>> elastic = hvd.elastic.Elastic(model, sampler=sampler)
        >>> data = hvd.elastic.batches(sampler, lambda indices: (x[indices], y[indices]))
        >>> model.fit(data, epochs=90, initial_epoch=elastic.epoch, callbacks=[elastic])

    At first all ranks get the model and the optimizer of rank 0. A rank that joins gets them between two batches, and takes
    the rest of the epoch's batches with the others. With a ``sampler`` each sample of an epoch is in one step. Without, an epoch
    has the number of batches that it had at first, whatever the number of ranks: the data must have so many on each rank.

    Args:
        model: built, and compiled with a ``DistributedOptimizer``.
        sampler: a ``BatchSampler``, of which ``fit`` gets ``batches(sampler, load)``; needed with ``--batch constant``.
        process_sets: as for ``elastic.State``.
        objects: more that ranks take over, as for ``elastic.State``; ``epoch=7`` to go on from a checkpoint.

    ``resume(folder)`` goes on from the newest file that ``save_every(folder, steps=, minutes=, epochs=, keep=3)`` has written, as of
    ``elastic.State``; both come before ``fit``, and before ``epoch`` is asked for.

    Attributes:
        state: the ``elastic.State`` behind it, with ``epoch``, ``batch``, ``step`` and ``on_change``.
        epoch: that ``fit`` is to begin with. All ranks ask for it, behind ``resume``: at its first use they take over what rank 0 has.

    Raises:
        InvalidArgumentError: a model that is not built, or has no distributed optimizer; no sampler with ``--batch constant``.
            In ``fit``: a number of batches that is not known, or is not reached; other data than the sampler's;
            ``steps_per_execution`` with a sampler; another ``initial_epoch``; a second ``fit``.
        TypeError: a sampler of another kind; ``epoch``, ``batch`` or ``step`` is no whole number.
        MismatchError: in ``fit``, on all ranks: they would take different numbers of batches or epochs.
        UnsupportedError: local steps (``every``), ``delay``, PowerSGD, a process set, or a model of tf_keras. In ``fit``: a
            BackupAndRestore.
    """

    _supports_tf_logs = True  # Keras need not fetch the metrics of each batch for it

    model: Model  # Keras sets these two
    params: Params | None

    def __init__(
        self, model: Model, *, sampler: BatchSampler | None = None, process_sets: Rule | None = None, **objects: object
    ):
        super().__init__()
        self._reduction = _checked(model)
        if sampler is not None:
            _check_sampler(sampler)
        hoist(model.optimizer)
        switch_off(model, global_process_set)
        given = {"model": model, "optimizer": model.optimizer, "batches": 0, **objects}
        if sampler is not None:
            given["sampler"] = sampler
        accumulation = self._reduction.accumulation
        self.state = FitState(lambda: not accumulation.is_begun(), process_sets=process_sets, **given)
        if getattr(model, "train_function", None) is not None:
            model.make_train_function(force=True)  # a graph that was traced before would end with its world
        self._before = 0  # batches of this epoch that were done when this rank came

    @property
    def epoch(self) -> int:
        """That ``fit`` is to begin with. At its first use this rank takes the state over, so it is for all ranks to use."""
        self.state.enter()
        return self.state.epoch

    def save_every(
        self,
        folder: "str | os.PathLike[str]",
        *,
        steps: int | None = None,
        minutes: float | None = None,
        epochs: int | None = None,
        keep: int = 3,
    ) -> None:
        """``save_every`` of the state: model, optimizer, sampler, the objects, and what callbacks remember."""
        self.state.save_every(folder, steps=steps, minutes=minutes, epochs=epochs, keep=keep)

    def resume(self, folder: "str | os.PathLike[str]") -> bool:
        """``resume`` of the state, to be called before ``epoch`` is asked for."""
        return self.state.resume(folder)

    # ---- what fit tells ----

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Agrees with the others on how many batches an epoch has; a rank that joins has been told."""
        self.state.begin_fit()
        if self.state.fit_sampler is not None:
            self._check_data()
        if self.state.batches == 0:
            self.state.batches = self._agreed_batches()
        several = getattr(self.model, "steps_per_execution", 1) or 1
        by_sampler = self.state.batches == BY_SAMPLER
        if by_sampler and (several != 1 or getattr(self.model, "autotune_steps_per_execution", False)):
            raise InvalidArgumentError(
                "fit: with a sampler steps_per_execution must be 1, since the samples of a step are dealt when the one before is "
                "done, but is another number. Leave it out of compile."
            )
        if getattr(self.model, "autotune_steps_per_execution", False) or self.state.batches % int(several):
            raise InvalidArgumentError(
                f"fit: with elastic.Elastic steps_per_execution must divide the {self.state.batches} batches of an epoch, "
                "or a rank that joins would take others than those that are left, but it does not. Change one of them."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Looks whether it is the one in which the others are."""
        demand = f"fit: initial_epoch must be that of the state, {self.state.epoch}"
        check_among(demand, epoch, [self.state.epoch], "Pass initial_epoch=elastic.epoch")
        self._before = self.state.batch
        self.state.set_epoch()

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Between two steps ranks join and leave; but not while a sum of gradients is begun, which they would lack."""
        self.state.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Counts, and ends the epoch where ``fit`` would go on; one call may stand for several batches."""
        state = self.state
        state.step += self._before + batch + 1 - state.batch
        state.batch = self._before + batch + 1
        state.ends_epoch = self._is_last(batch)
        if state.ends_epoch and not self.model.stop_training:
            self.model.stop_training = END_OF_EPOCH

    def _is_last(self, batch: int) -> bool:
        """Whether the epoch is over with this batch, and ``fit`` does not know it."""
        state, sampler = self.state, self.state.fit_sampler
        was_drawn = state.end_batch()
        if sampler is None:
            return state.batch >= state.batches and batch + 1 != (self.params or {}).get("steps")
        _require_data_of_sampler(was_drawn)
        return sampler.batches_left == 0

    def _check_data(self) -> None:
        _require_data_of_sampler((self.params or {}).get("steps") is None)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Goes on with the next epoch."""
        state = self.state
        if self.model.stop_training is END_OF_EPOCH:
            self.model.stop_training = False
        if state.batch < state.batches and not self.model.stop_training:
            raise InvalidArgumentError(
                f"fit: each epoch must have {state.batches} batches on all ranks, but the data of this one have ended after "
                f"{state.batch}. Repeat them, and pass steps_per_epoch={state.batches}."
            )
        state.epoch += 1
        state.batch = 0
        state.set_epoch()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Returns when all ranks have the last step."""
        self.state.end_fit()

    def _agreed_batches(self) -> int:
        by_sampler = self.state.fit_sampler is not None
        own = [int((self.params or {}).get(name) or 0) for name in ("steps", "epochs")]
        extremes = self.state.allreduce(np.array([*own, *(-each for each in own)], np.int64), _LENGTHS, Max).tolist()
        if own[0] == 0 and extremes[0] == 0 and not by_sampler:
            raise InvalidArgumentError(
                "fit: with elastic.Elastic the number of batches of an epoch must be known, but the data do not say it. Pass "
                "steps_per_epoch."
            )
        for name, most, least in zip(("batches of an epoch", "epochs"), extremes[:2], extremes[2:], strict=True):
            if most != -least:
                raise MismatchError(
                    f"fit: the number of {name} must be the same on all ranks, but is between {-least} and {most}. Pass "
                    "steps_per_epoch and epochs, the same on every rank."
                )
        return BY_SAMPLER if by_sampler else own[0]


def batches(sampler: BatchSampler, load: Callable[[np.ndarray], object], workers: int = 0) -> Iterable:
    """Data for ``fit`` whose samples a sampler deals: a ``tf.data.Dataset``, or a ``DataLoader`` on PyTorch.

    Example:
        >>> data = hvd.elastic.batches(sampler, lambda indices: (x[indices], y[indices]), workers=4)

    Each batch is drawn when its step begins, so that ``fit`` never has batches of samples that others read by then; with
    ``workers`` it is made ahead, and dropped if ranks come or go.

    Args:
        sampler: that of ``Elastic``. It has no end: ``Elastic`` ends the epochs.
        load: takes this rank's indices, an int64 array of one at least, and returns a tuple ``(inputs, targets)`` or
            ``(inputs, targets, weights)`` of arrays, or of tuples and dictionaries of arrays, whose first dimension is as long,
            and whose dtypes and further dimensions are always the same. In threads with ``workers``.
        workers: threads that make batches ahead.

    Raises:
        TypeError: a sampler of another kind.
        whatever ``load`` raises: it is called once for the shapes.
    """
    _check_sampler(sampler)
    context = own()

    def reader() -> Iterator[object]:
        return ReadElsewhere(lambda: sampler.loading(load, workers), context)

    return backend.dataset(reader, load(sampler.look()))


class _Values(Variables):
    """How states know Keras' models, optimizers and variables."""

    def fits(self, value: object) -> bool:
        """Whatever has variables; seeds of random layers follow from those of rank 0, but differ from rank to rank."""
        return hasattr(value, "variables") or (hasattr(value, "assign") and hasattr(value, "numpy"))

    def outline(self, values: Sequence[object]) -> dict[str, str]:
        """Shapes and dtypes of the variables, and what their tables are."""
        variables = variables_of(values)
        tables = {place: getattr(variable, "sharded_table", None) for place, variable in enumerate(variables)}
        rows = {f"table of variable {place}": each.outline for place, each in tables.items() if each is not None}
        return outline_of(variables) | rows

    def take_over(self, values: Sequence[object]) -> None:
        """Raises MismatchError if ranks have different variables."""
        broadcast_variables(variables_of(values), root_rank=0)

    def enter_world(self, values: Sequence[object]) -> None:
        """Has optimizers go on under their names, with what they have begun to add up."""
        for value in values:
            if (reduction := reduction_within(value)) is not None:
                reduction.enter_world(NewWorld.GOES_ON)


register(_Values())


def _require_data_of_sampler(are_its: bool) -> None:
    if not are_its:
        raise InvalidArgumentError(_OTHER_DATA)


def _check_sampler(sampler: object) -> None:
    demand = "elastic: the sampler must be a BatchSampler"
    check_kind(demand, sampler, BatchSampler, "Use hvd.elastic.BatchSampler", TypeError)


def _checked(model: Model) -> KerasReducer:
    if any(kind.__module__.startswith("tf_keras") for kind in type(model).__mro__):
        raise UnsupportedError(
            "elastic.Elastic: the model must be one of Keras 3, but is one of tf_keras. Use KerasState and elastic.run."
        )
    reduction = reduction_within(getattr(model, "optimizer", None))
    if not getattr(model, "built", False) or reduction is None:
        raise InvalidArgumentError(
            "elastic.Elastic: the model must be built, and compiled with a DistributedOptimizer of Keras 3, but is not. Call "
            "model.build(input_shape) and model.compile(hvd.DistributedOptimizer(...)) before."
        )
    settings = reduction.settings
    columns = [
        *backend.columns,
        *settings.mode.columns,
        *(["Compression.powersgd"] if settings.powersgd is not None else []),
    ]
    check_needs(columns, {"elastic.State": True, "survives on the host": True}, "elastic.Elastic")
    require_all_ranks("DistributedOptimizer", reduction.settings.process_set, "KerasState")
    return reduction
