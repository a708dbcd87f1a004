"""``fit`` whose steps survive: where its steps begin and end, and in which epoch a rank that joins begins.

The reduction of the gradients survives by itself (``backends``); this tells the state what ``fit`` does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringtrain.elastic import TransparentState
from ringtrain.elastic.adapters import outline_of, register, variables_of
from ringtrain.elastic.sets import Rule
from ringtrain.errors import InvalidArgumentError, MismatchError, UnsupportedError
from ringtrain.keras.compilation import switch_off
from ringtrain.keras.elastic.hooks import END_OF_EPOCH
from ringtrain.keras.optimizer import hoist, reduction_of
from ringtrain.keras.reduction import KerasReducer
from ringtrain.keras.variables import broadcast_variables
from ringtrain.operations import Max
from ringtrain.process_sets import global_process_set

_LENGTHS = "fit.lengths"


class FitState(TransparentState):
    """The state of an ``Elastic``.

    Attributes:
        batches: of each epoch; 0 until ``fit`` begins.
    """

    batches: int

    def begin_fit(self) -> None:
        """As ``enter``. Raises InvalidArgumentError if there was a ``fit`` that has come to its end."""
        self._refuse_second_loop()
        self.enter()

    def end_fit(self) -> None:
        """As ``finish``."""
        self._has_looped = True
        self.finish()


class ElasticHooks:
    """Has ``fit`` go on when ranks die and when others come: no step is lost, and nothing is computed again.

    At first all ranks get the model and the optimizer of rank 0. A rank that joins gets them between two batches, and takes
    the rest of the epoch's batches with the others. An epoch has the number of batches that it had at first, whatever the
    number of ranks: the data must have so many on each rank.

    Args:
        model: built, and compiled with a ``DistributedOptimizer``.
        process_sets: as for ``elastic.State``.
        objects: more that ranks take over, as for ``elastic.State``; ``epoch=7`` to go on from a checkpoint.

    Attributes:
        state: the ``elastic.State`` behind it, with ``epoch``, ``batch``, ``step`` and ``on_change``.

    Raises:
        InvalidArgumentError: a model that is not built, or has no distributed optimizer. In ``fit``: a number of batches that
            is not known, or is not reached; another ``initial_epoch``; a second ``fit``.
        MismatchError: in ``fit``, on all ranks: they would take different numbers of batches or epochs.
        UnsupportedError: local steps (``every``), ``delay``, PowerSGD, a process set, or a model of tf_keras.

    Example:
        >>> elastic = hvd.elastic.Elastic(model)
        >>> model.fit(x, y, epochs=90, initial_epoch=elastic.epoch, callbacks=[elastic])
    """

    _supports_tf_logs = True  # Keras need not fetch the metrics of each batch for it

    model: Any  # Keras sets these two
    params: dict[str, Any] | None

    def __init__(self, model: Any, *, process_sets: Rule | None = None, **objects: Any):
        super().__init__()
        self._reduction = _checked(model)
        hoist(model.optimizer)
        switch_off(model, global_process_set)
        given = {"model": model, "optimizer": model.optimizer, "batches": 0, **objects}
        self.state = FitState(process_sets=process_sets, **given)
        if getattr(model, "train_function", None) is not None:
            model.make_train_function(force=True)  # a graph that was traced before would end with its world
        self._before = 0  # batches of this epoch that were done when this rank came

    @property
    def epoch(self) -> int:
        """That ``fit`` is to begin with. At its first use this rank takes the state over, so it is for all ranks to use."""
        self.state.enter()
        return self.state.epoch

    # ---- what fit tells ----

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Agrees with the others on how many batches an epoch has; a rank that joins has been told."""
        self.state.begin_fit()
        if self.state.batches == 0:
            self.state.batches = self._agreed_batches()
        several = getattr(self.model, "steps_per_execution", 1) or 1
        if getattr(self.model, "autotune_steps_per_execution", False) or self.state.batches % int(several):
            raise InvalidArgumentError(
                f"fit: with elastic.Elastic steps_per_execution must divide the {self.state.batches} batches of an epoch, "
                "or a rank that joins would take others than those that are left, but it does not. Change one of them."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks whether it is the one in which the others are."""
        if epoch != self.state.epoch:
            raise InvalidArgumentError(
                f"fit: initial_epoch must be that of the state, {self.state.epoch}, but is {epoch}. Pass "
                "initial_epoch=elastic.epoch."
            )
        self._before = self.state.batch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Between two steps ranks join and leave; but not while a sum of gradients is begun, which they would lack."""
        if not self._reduction.accumulation.is_begun():
            self.state.between_steps()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts, and ends the epoch where ``fit`` would go on; one call may stand for several batches."""
        state = self.state
        state.step += self._before + batch + 1 - state.batch
        state.batch = self._before + batch + 1
        of_this_rank = (self.params or {}).get("steps")
        if state.batch >= state.batches and batch + 1 != of_this_rank and not self.model.stop_training:
            self.model.stop_training = END_OF_EPOCH

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Goes on with the next one."""
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

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Returns when all ranks have the last step."""
        self.state.end_fit()

    def _agreed_batches(self) -> int:
        own = [int((self.params or {}).get(name) or 0) for name in ("steps", "epochs")]
        extremes = self.state.allreduce(np.array([*own, *(-each for each in own)], np.int64), _LENGTHS, Max).tolist()
        if own[0] == 0 and extremes[0] == 0:
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
        return own[0]


class _Values:
    """How states know Keras' models, optimizers and variables."""

    def fits(self, value: Any) -> bool:
        """Whatever has variables; seeds of random layers follow from those of rank 0, but differ from rank to rank."""
        return hasattr(value, "variables") or (hasattr(value, "assign") and hasattr(value, "numpy"))

    def outline(self, values: Sequence[Any]) -> dict[str, str]:
        """Shapes and dtypes of the variables."""
        return outline_of(variables_of(values))

    def take_over(self, values: Sequence[Any]) -> None:
        """Raises MismatchError if ranks have different variables."""
        broadcast_variables(variables_of(values), root_rank=0)

    def enter_world(self, values: Sequence[Any]) -> None:
        """Has optimizers go on under their names, with what they have begun to add up."""
        for value in values:
            if (reduction := _reduction_of(value)) is not None:
                reduction.go_on_in_world()


register(_Values())


def _reduction_of(optimizer: Any) -> KerasReducer | None:
    """That of the distributed optimizer, which may be within a LossScaleOptimizer."""
    return reduction_of(optimizer) or reduction_of(getattr(optimizer, "inner_optimizer", None))


def _checked(model: Any) -> KerasReducer:
    if any(kind.__module__.startswith("tf_keras") for kind in type(model).__mro__):
        raise UnsupportedError(
            "elastic.Elastic: the model must be one of Keras 3, but is one of tf_keras. Use KerasState and elastic.run."
        )
    reduction = _reduction_of(getattr(model, "optimizer", None))
    if not getattr(model, "built", False) or reduction is None:
        raise InvalidArgumentError(
            "elastic.Elastic: the model must be built, and compiled with a DistributedOptimizer of Keras 3, but is not. Call "
            "model.build(input_shape) and model.compile(hvd.DistributedOptimizer(...)) before."
        )
    if reduction.settings.local is not None:
        raise UnsupportedError(
            "elastic.Elastic: every must not be set, but is: ranks that join have no period. Leave it out of "
            "DistributedOptimizer."
        )
    if reduction.settings.on_host is not None:
        raise UnsupportedError(
            "elastic.Elastic: delay must be 0 and compression none, fp16, bf16, int8 or int4, but gradients come one step late, or "
            "as PowerSGD's factors, which cannot be sent again in another world. Leave it out of DistributedOptimizer."
        )
    if reduction.settings.process_set is not global_process_set:
        raise UnsupportedError(
            "elastic.Elastic: the optimizer must train on all ranks, since one that joins gets the one model that all have, but "
            "has a process set of its own. Leave it out, or use KerasState and elastic.run."
        )
    return reduction
