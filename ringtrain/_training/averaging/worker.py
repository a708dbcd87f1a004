"""One worker: counts its steps, and at the end of a period averages with the others what it has changed.

The common copy X and the outer momentum lie in host memory, as flat arrays. All ranks compute them alike from equal
numbers, so they are equal bit by bit, and so are the parameters right after a synchronisation; and only then. A
synchronisation begins with a ``negotiation``; then each tensor travels by itself, named, so that tensor fusion and error
feedback are those of any operation. When it fails, parameters become X again: the round is lost, and nothing else.

All parameters are averaged at once, or in ``fragments``: then each part has its own meetings, and what it has changed may
travel for some steps. Meetings are waited for in any case, so that all ranks know what a change weighs when it is sent.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringtrain._binding.log import logger
from ringtrain._runtime.process_sets import ranks_of
from ringtrain._training import residuals, terms
from ringtrain._training.adapter.checks import hashed
from ringtrain._training.adapter.numbering import Number
from ringtrain._training.averaging.changes import Changes
from ringtrain._training.averaging.common import CommonCopy, check_state, owned
from ringtrain._training.averaging.fragments import Fragments
from ringtrain._training.averaging.in_transit import PartInTransit
from ringtrain._training.averaging.negotiation import (
    Agreed,
    AveragingRow,
    AveragingStage,
    agreed,
    decoded,
    settings_differ,
    terms_differ,
)
from ringtrain._training.averaging.outer import AveragingPlan
from ringtrain._training.averaging.period import Period
from ringtrain._training.averaging.row_exchange import average_in_place, gathered, refuse_terms
from ringtrain._training.averaging.shared import Role, Shared
from ringtrain._training.differences import Differences, waited
from ringtrain._training.drift import Settings, Words
from ringtrain._training.session import NewWorld, Session
from ringtrain.errors import InvalidArgumentError, RingtrainError


@dataclass(frozen=True)
class ComparedSettings:
    """What a worker's steps are made with.

    Attributes:
        read: reads it, by name.
        called: what things are called in the framework.
    """

    read: Callable[[], Settings]
    called: Words


class Worker:
    """One rank among those that average.

    Args:
        session: the rank, and the process set that averages.
        period: which steps average.
        plan: how.
        kind: the word that begins its names; those of one kind are numbered in the order in which they are made.
        compared: what local steps are made with, compared where ranks average; None where that may differ.
    """

    def __init__(
        self, session: Session, period: Period, plan: AveragingPlan, kind: str, compared: ComparedSettings | None = None
    ):
        self.period = period
        self.plan = plan
        self._session = session
        self._number = Number(session, kind)
        self._compared = compared
        self._common = CommonCopy(plan.outer, period.fragments)
        self._changes = Changes(session, period, plan.outer, plan.compression, self._common)
        self._changes.prefix = self.prefix
        self._begun = False
        session.on_new_world(self._go_on)

    def __reduce__(self) -> tuple:
        """Copies and pickles of an optimizer are plain ones: a world does not travel."""
        return type(None), ()

    @property
    def prefix(self) -> str:
        """Of all names that this worker submits."""
        return self._number.prefix

    @property
    def number(self) -> int:
        """Its place among those of its kind, in the present world."""
        return self._number.value

    def enter_world(self, change: NewWorld) -> None:
        """Goes on in the present world, where it is another one than before."""
        self._session.follow(change)

    # ---- steps ----

    def compare_terms(self) -> None:
        """Raises MismatchError if ranks have set something differently; collective.

        A rank that joins others finds nobody who compares: before its first step all tell their terms again.
        """
        self._session.follow()
        if not self._session.context.takes_over:
            self._meet(AveragingStage.TERMS)

    def before_step(self, tensors: Iterable[Shared]) -> None:
        """Before a local step: takes what is to be averaged into the common copy, where that has not got it yet.

        The first time, and the first time after ``load``, ranks also compare what they start from.

        Raises:
            MismatchError: they start from different terms or values; the same on all ranks.
        """
        self._session.follow()
        self._common.adopt(tensors)
        if not self._begun:
            self._meet(AveragingStage.BEGIN)
            self._begun = True
            self._announce()

    def adopt(self, tensors: Iterable[Shared]) -> None:
        """Takes the values of tensors into the common copy, where that has not got them yet."""
        self._common.adopt(tensors)

    def keeps(self, tensor: Shared) -> bool:
        """Whether the common copy has a tensor."""
        return tensor.name in self._common.copies

    def must_begin(self, count: int) -> bool:
        """Whether ``before_step`` must be called with the tensors, of which there are so many, before the next step."""
        self._session.follow()
        return not self._begun or len(self._common.copies) < count

    def after_step(self, used: bool = True) -> bool:
        """Counts a step; where a period ends averages, and returns True then; likewise with each fragment.

        Args:
            used: whether it changed anything; not so where a gradient scaler found an infinity.
        """
        ends = self.note_step(used)
        if ends:
            self.average()
        return ends

    def note_step(self, used: bool = True) -> bool:
        """``after_step`` without averaging, which is then left to ``average``."""
        exact = self.period.warms_up
        self.period.note_step(used)
        self._session.context.count("local_steps", int(not exact))
        return not exact and self._is_due()

    def average(self) -> None:
        """Averages where a period ends; where fragments travel, merges those that must be back and sends the next one."""
        if self._fragments.streams:
            self._stream()
        else:
            self._synchronise(AveragingStage.STEP)

    def synchronize(self) -> None:
        """Averages now; all ranks call it after the same step. Where nobody has made one, what was assigned since is averaged.

        Raises:
            MismatchError: they do not, or disagree otherwise; the same on all ranks.
        """
        self._session.follow()
        self._synchronise(AveragingStage.STEP)

    def join(self) -> None:
        """Averages with the others for as long as they train, with what has changed here so far and then with nothing.

        Returns when all ranks have called it; then all have the same values.
        """
        self._session.follow()
        if self._fragments.streams:
            self._follow_streams()
        while not self._synchronise(AveragingStage.JOIN).is_last:
            pass

    def release(self, frozen: Callable[[], Container[Shared]]) -> None:
        """Between two periods: lets go of the common copies of tensors that are no longer trained, and of their momentum."""
        if self.period.steps or self._changes.flights:  # what they have changed is still to be averaged
            return
        no_longer = frozen()
        self._common.keep(lambda shared: shared not in no_longer)

    # ---- checkpoints ----

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint, at any step: counters, and the common copy and outer momentum by name.

        Where fragments travel also what is on its way, for which this waits; the others need not do anything.
        """
        state = {"counters": self.period.state(), **self._common.state()}
        return {**state, "fragments": self._state_of_fragments()} if self._fragments.streams else state

    def _state_of_fragments(self) -> dict[str, Any]:
        if not self._session.context.usable:
            self._changes.recall()
        self._changes.await_all()
        return {
            "schedule": list(self._fragments.schedule),
            "weights": self.period.weights,
            "parts": self._common.parts(),
            "flights": [flight.state() for flight in self._changes.flights],
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Goes on with what ``state`` has returned on this or another rank; None: a period begins with the next step.

        What compression has lost before is forgotten; ``load_compression_state`` comes after this.

        Raises:
            InvalidArgumentError: it was saved between two synchronisations, with other fragments; or it is something else.
        """
        check_state(state)
        self._session.follow()
        given = {} if state is None else self._fragments.of_state(state)
        self._changes.await_all(heeds=False)  # so that no name stays in flight
        if self._changes.keeps_residuals:
            residuals.forget(self._session, f"{self.prefix}.")
        self._begun = False
        self._common.load(state, given.get("parts", {}))
        self._changes.flights = [PartInTransit.of(each) for each in given.get("flights", ())]
        if state is None:
            self.period.forget()
        else:
            self.period.load(state["counters"], given.get("weights"))

    # ---- worlds ----

    def _go_on(self, _: NewWorld) -> None:
        """In another world the same period goes on, once its ranks have compared what they have."""
        self._changes.recall()
        self._changes.prefix = self.prefix
        self._begun = False

    def _members(self) -> list[int]:
        return ranks_of(self._session.context, self._session.process_set_id) or []

    def _announce(self) -> None:
        if self._session.context.rank == min(self._members()):
            logger.info("synchronisation '%s': local steps by %s", self.prefix, self._terms())

    # ---- meetings ----

    def _terms(self) -> dict[str, object]:
        outer = self.plan.outer
        return {
            "every": self.period.every,
            **self._fragments.terms(),
            "warmup": self.period.warmup,
            "outer": None if outer is None else [outer.rate, outer.momentum],
            "within": self.plan.within,
            "compression": self.plan.compression,
            "replicas": "differ" if self._compared is None else "equal",
        }

    def _meet(self, stage: AveragingStage, part: int = 0) -> Agreed:
        """Says this rank's row, and returns what all ranks know.

        Args:
            stage: why it comes.
            part: what it comes to average; where it has no more data, what it proposes if that holds for all.
        """
        own_terms = self._terms() | ({} if stage is AveragingStage.TERMS else self._common.terms())
        content, period, context = terms.encoded(own_terms), self.period, self._session.context
        weights = period.weights if stage is AveragingStage.JOIN and self._fragments.streams else []
        own_settings = None if self._compared is None or stage is not AveragingStage.STEP else self._compared.read()
        said = AveragingRow(
            rank=context.rank,
            stage=stage,
            terms=hashed(content),
            terms_bytes=len(content),
            start=self._common.digest() if stage is AveragingStage.BEGIN else 0,
            round=period.round + len(self._changes.flights),
            steps=period.steps,
            samples=period.samples_of(part),
            counted=int(period.counted),
            part=part,
            settings=0 if own_settings is None else hashed(terms.encoded(own_settings)),
            weights=len(weights),
        )
        name = f"{self.prefix}.used"  # where an optimizer of exact steps says what it has: so that one is found out
        rows = decoded(gathered(self._session, name, np.array([*said, *weights], np.int64)).tolist())
        if terms_differ(rows):
            refuse_terms(self._session, self.prefix, name, rows, content)
        if self._compared is not None and settings_differ(rows):
            told = Differences(self._session, name, self.prefix)
            waited(told.refuse_settings(own_settings or {}, "is", self._compared.called))
        return agreed(rows, self._members(), self.prefix)

    # ---- averaging ----

    @property
    def _fragments(self) -> Fragments:
        return self.period.fragments

    def _is_due(self) -> bool:
        """Whether something must be averaged, sent or merged after the step that has just been counted."""
        if not self._fragments.streams:
            return self.period.due
        return self._fragments.leaving(self.period.steps) is not None or bool(self._changes.arriving())

    def _synchronise(self, stage: AveragingStage) -> Agreed:
        """Averages all: one part after the other, and what is on its way before."""
        with self._restoring():
            self._changes.land(self._changes.flights)
            for part in range(self._fragments.parts):
                known = self._send(stage, part)
            self._changes.land(self._changes.flights)
            if self._fragments.streams:
                self._common.write_parameters()
            elif not known.samples and not known.is_last:
                self._take_assigned()
        self.period.forget()
        return known

    def _take_assigned(self) -> None:
        """After no step of anybody: what was assigned since the last average is common now, averaged where ranks differ.

        Nothing of it is a change for the outer optimizer. A moving average that has replaced the parameters is such a case, and
        the best ones of an earlier epoch.
        """
        copies = {
            name: copy for name, copy in sorted(self._common.copies.items()) if copy.shared.role is not Role.COUNTER
        }
        values = {name: owned(copy.shared.read(), copy.common.dtype) for name, copy in copies.items()}
        own = hashed(*(array.view(np.uint8).data for array in values.values()))
        if len(set(gathered(self._session, f"{self.prefix}.assigned", np.array([own], np.int64)).tolist())) > 1:
            average_in_place(self._session, f"{self.prefix}.assigned", values)
            for name, copy in copies.items():
                copy.shared.write(values[name])
        for name, copy in copies.items():
            if not np.array_equal(copy.shared.held(copy.common), copy.shared.held(values[name])):
                copy.common = values[name]

    def _stream(self) -> None:
        """After a step: merges the fragments that must be back, and sends the one whose turn it is."""
        with self._restoring():
            self._changes.land(self._changes.arriving())
            part = self._fragments.leaving(self.period.steps)
            if part is not None:
                self._send(AveragingStage.STEP, part)
                self._changes.land(self._changes.arriving())

    def _follow_streams(self) -> None:
        """Takes part in what others average until nobody has more data; waits for each part, having nothing else to do."""
        with self._restoring():
            self._changes.land(self._changes.flights)
            while not self._send(AveragingStage.JOIN, 0).is_last:
                self._changes.land(self._changes.flights)

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Where averaging fails, the tensors become the common copy again: equal on all ranks that have it."""
        try:
            yield
        except BaseException as failed:
            self._changes.give_up(waits=isinstance(failed, RingtrainError))
            self._common.write()
            self.period.forget()
            raise

    def _send(self, stage: AveragingStage, part: int) -> Agreed:
        """Agrees on a part, and sends what this rank has changed of it."""
        known = self._meet(stage, part)
        self._changes.send(known.part, known.samples, known.workers)
        return known

    # ---- what compression has lost ----

    def compression_state(self) -> dict[str, dict[str, np.ndarray]]:
        """What is kept of it, the same on all ranks; collective. What is on its way is waited for."""
        self._session.follow()
        self._changes.await_all()
        return residuals.of_all_ranks(self._session, True, f"{self.prefix}.") if self._changes.keeps_residuals else {}

    def load_compression_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Goes on with what ``compression_state`` has returned."""
        self._session.follow()
        if self._changes.keeps_residuals:
            residuals.load(self._session, True, f"{self.prefix}.", state)


def require_local(worker: Worker) -> None:
    """Raises InvalidArgumentError for a ``join()`` in exact steps, in which the others need this rank's gradients."""
    if worker.period.warms_up:
        raise InvalidArgumentError(
            f"join '{worker.prefix}': a rank must have data for all {worker.period.warmup} exact steps, but has had them "
            f"for {worker.period.total}. Lower warmup."
        )
