"""One worker: counts its steps, and at the end of a period averages with the others what it has changed.

The common copy X and the outer momentum lie in host memory, as flat arrays. All ranks compute them alike from equal
numbers, so they are equal bit by bit, and so are the parameters right after a synchronisation; and only then. A
synchronisation begins with a ``meeting``; then each tensor travels by itself, named, so that tensor fusion and error
feedback are those of any operation. When it fails, parameters become X again: the round is lost, and nothing else.

All parameters are averaged at once, or in ``fragments``: then each part has its own meetings, and what it has changed may
travel for some steps. Meetings are waited for in any case, so that all ranks know what a change weighs when it is sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringtrain import tables
from ringtrain.averaging.exchange import gathered, refuse_terms
from ringtrain.averaging.flights import Flight, Leg
from ringtrain.averaging.fragments import Fragments, merged
from ringtrain.averaging.meeting import Agreed, Said, Stage, agreed, decoded, settings_differ, terms_differ
from ringtrain.averaging.outer import Outer, advance
from ringtrain.averaging.period import Period, factor_of
from ringtrain.averaging.shared import Copy, Role, Shared
from ringtrain.buffers import as_buffer
from ringtrain.checks import hashed
from ringtrain.errors import InvalidArgumentError, RingtrainError
from ringtrain.gradients import residuals, terms
from ringtrain.gradients.differences import Differences, waited
from ringtrain.gradients.drift import Settings, Words
from ringtrain.gradients.session import Session
from ringtrain.log import logger
from ringtrain.numbering import next_number


@dataclass(frozen=True)
class Plan:
    """How workers average, the same on all ranks.

    Attributes:
        outer: None for plain averaging.
        compression: of what parameters have changed; a row of ``tables.COMPRESSIONS``.
        within_host: ``"exact"`` or None, for the terms.
    """

    outer: Outer | None = None
    compression: str = "none"
    within_host: str | None = None


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
        self, session: Session, period: Period, plan: Plan, kind: str, compared: ComparedSettings | None = None
    ):
        self.period = period
        self.plan = plan
        self._session = session
        self._kind = kind
        self._compared = compared
        self._copies: dict[str, Copy] = {}
        self._flights: list[Flight] = []
        self._loaded: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
        self._loaded_parts: dict[str, int] = {}
        self._begun = False
        self._enter_world()

    def __reduce__(self) -> tuple:
        """Copies and pickles of an optimizer are plain ones: a world does not travel."""
        return type(None), ()

    @property
    def prefix(self) -> str:
        """Of all names that this worker submits."""
        return self._prefix

    @property
    def session(self) -> Session:
        """The rank, and the process set that averages."""
        return self._session

    # ---- steps ----

    def compare_terms(self) -> None:
        """Raises MismatchError if ranks have set something differently; collective."""
        self._follow_world()
        self._meet(Stage.TERMS)

    def before_step(self, tensors: Iterable[Shared]) -> None:
        """Before a local step: takes what is to be averaged into the common copy, where that has not got it yet.

        The first time, and the first time after ``load``, ranks also compare what they start from.

        Raises:
            MismatchError: they start from different terms or values; the same on all ranks.
        """
        self._follow_world()
        self.adopt(tensors)
        if not self._begun:
            self._meet(Stage.BEGIN)
            self._begun = True
            self._announce()

    def adopt(self, tensors: Iterable[Shared]) -> None:
        """Takes the values of tensors into the common copy, where that has not got them yet."""
        for tensor in tensors:
            if tensor.name not in self._copies:
                self._copies[tensor.name] = self._copy_of(tensor)

    def must_begin(self, count: int) -> bool:
        """Whether ``before_step`` must be called with the tensors, of which there are so many, before the next step."""
        self._follow_world()
        return not self._begun or len(self._copies) < count

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
            self._synchronise(Stage.STEP)

    def synchronize(self) -> None:
        """Averages now; all ranks call it after the same step. Where nobody has made one, what was assigned since is averaged.

        Raises:
            MismatchError: they do not, or disagree otherwise; the same on all ranks.
        """
        self._follow_world()
        self._synchronise(Stage.STEP)

    def join(self) -> None:
        """Averages with the others for as long as they train, with what has changed here so far and then with nothing.

        Returns when all ranks have called it; then all have the same values.
        """
        self._follow_world()
        if self._fragments.streams:
            self._follow_streams()
        while not self._synchronise(Stage.JOIN).is_last:
            pass

    def release(self, is_trained: Any) -> None:
        """Right after a synchronisation of all: lets go of the common copies of tensors that are no longer trained."""
        if self.period.steps:  # what was averaged is a fragment
            return
        self._copies = {name: copy for name, copy in self._copies.items() if is_trained(copy.shared)}

    # ---- checkpoints ----

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint, at any step: counters, and the common copy and outer momentum by name.

        Where fragments travel also what is on its way, for which this waits; the others need not do anything.
        """
        copies = {name: (copy.common.copy(), None if copy.velocity is None else copy.velocity.copy())
                  for name, copy in self._copies.items()}  # fmt: skip
        copies = {**self._loaded, **copies}
        state = {
            "counters": self.period.state(),
            "common": {name: common for name, (common, _) in copies.items()},
            "momentum": {name: velocity for name, (_, velocity) in copies.items() if velocity is not None},
        }
        return {**state, "fragments": self._state_of_fragments()} if self._fragments.streams else state

    def _state_of_fragments(self) -> dict[str, Any]:
        if not self._session.context.usable:
            self._recall()
        self._await_all()
        return {
            "schedule": list(self._schedule()),
            "weights": self.period.weights,
            "parts": self._loaded_parts | {name: copy.part for name, copy in self._copies.items()},
            "flights": [flight.state() for flight in self._flights],
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Goes on with what ``state`` has returned on this or another rank; None: a period begins with the next step.

        What compression has lost before is forgotten; ``load_compression_state`` comes after this.

        Raises:
            InvalidArgumentError: it was saved between two synchronisations, with other fragments.
        """
        self._follow_world()
        given = {} if state is None else self._of_this_schedule(state)
        self._await_all(heeds=False)  # so that no name stays in flight
        if self.keeps_residuals:
            residuals.forget(self._session, f"{self._prefix}.")
        self._copies, self._flights, self._begun = {}, [], False
        self._loaded_parts = {name: int(part) for name, part in given.get("parts", {}).items()}
        if state is None:
            self._loaded = {}
            self.period.forget()
            return
        self.period.load(state["counters"], given.get("weights"))
        momentum = state["momentum"]
        self._loaded = {name: (common, momentum.get(name)) for name, common in state["common"].items()}
        self._flights = [Flight.of(each) for each in given.get("flights", ())]

    def _schedule(self) -> tuple[int, int, int]:
        return self._fragments.every, self._fragments.count, self._fragments.overlap

    def _of_this_schedule(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a state has of fragments: nothing, right after a synchronisation of others than this worker has."""
        given: Mapping[str, Any] = state.get("fragments", {})
        own = self._schedule() if self._fragments.streams else None
        theirs = tuple(given["schedule"]) if given else None
        if own == theirs:
            return given
        if int(state["counters"]["steps"]):
            raise InvalidArgumentError(
                "load_state_dict: every, fragments and overlap must be those with which a state was saved between two "
                f"synchronisations, {_schedule_in_words(theirs)}, but are {_schedule_in_words(own)}. Save after synchronize() "
                "to change them."
            )
        return {}

    # ---- worlds ----

    def _follow_world(self) -> None:
        """In another world than at the last look the same period goes on, once its ranks have compared what they have."""
        if self._session.has_moved():
            self._recall()
            self._enter_world()
            self._begun = False

    def _enter_world(self) -> None:
        number = next_number(self._session.context, self._session.process_set_id, self._kind)
        self._prefix = f"{self._kind}.{number}"

    def _members(self) -> list[int]:
        return self._session.context.process_set_ranks(self._session.process_set_id) or []

    def _announce(self) -> None:
        if self._session.context.rank == min(self._members()):
            logger.info("synchronisation '%s': local steps by %s", self._prefix, self._terms())

    # ---- the common copy ----

    def _copy_of(self, tensor: Shared) -> Copy:
        values = tensor.read()
        common, velocity = self._loaded.pop(tensor.name, (values, None))
        if tensor.role is not Role.PARAMETER or self.plan.outer is None or not self.plan.outer.momentum:
            velocity = None
        elif velocity is None:
            velocity = np.zeros_like(values)
        for saved in (common, velocity):
            if saved is not None and saved.size != values.size:
                raise InvalidArgumentError(
                    f"load_state_dict: the common copy of '{tensor.name}' must have {values.size} elements, but has "
                    f"{saved.size}. Load the state of this model."
                )
        velocity = None if velocity is None else _owned(velocity, values.dtype)
        return Copy(tensor, _owned(common, values.dtype), velocity, self._part_of(tensor, values.size))

    def _part_of(self, tensor: Shared, size: int) -> int:
        """Its fragment: the one of the checkpoint, or that which is the smallest when the tensor comes."""
        if tensor.role is not Role.PARAMETER:
            return self._fragments.of_buffers
        loads = [0] * self._fragments.count
        for copy in self._copies.values():
            if copy.shared.role is Role.PARAMETER:
                loads[copy.part] += copy.common.size
        part = self._loaded_parts.pop(tensor.name, None)
        return self._fragments.least_loaded(loads) if part is None or part >= len(loads) else part

    def restore(self) -> None:
        """Puts the common copy into the tensors: what has changed since the last synchronisation is lost."""
        for copy in self._copies.values():
            copy.shared.write(copy.common)
        self.period.forget()

    # ---- meetings ----

    def _terms(self) -> dict[str, Any]:
        outer = self.plan.outer
        return {
            "every": self.period.every,
            "fragments": self._fragments.count,
            "overlap": self._fragments.overlap,
            "merge": self._fragments.merge,
            "warmup": self.period.warmup,
            "outer": None if outer is None else [outer.rate, outer.momentum],
            "within_host": self.plan.within_host,
            "compression": self.plan.compression,
            "replicas": "differ" if self._compared is None else "equal",
        }

    def _tensor_terms(self) -> dict[str, Any]:
        def where(copy: Copy) -> str:
            return f" in fragment {copy.part}" if self._fragments.count > 1 else ""

        return {
            f"tensor '{name}'": f"{copy.common.dtype} of {copy.common.size}{where(copy)}"
            for name, copy in self._copies.items()
        }

    def _start(self) -> int:
        """A digest of X and m."""
        compared = [copy for _, copy in sorted(self._copies.items()) if copy.shared.role is Role.PARAMETER]
        arrays = [array for copy in compared for array in (copy.common, copy.velocity) if array is not None]
        return hashed(*(array.view(np.uint8).data for array in arrays))

    def _meet(self, stage: Stage, part: int = 0) -> Agreed:
        """Says this rank's row, and returns what all ranks know.

        Args:
            stage: why it comes.
            part: what it comes to average; where it has no more data, what it proposes if that holds for all.
        """
        own_terms = self._terms() | ({} if stage is Stage.TERMS else self._tensor_terms())
        content, period, context = terms.encoded(own_terms), self.period, self._session.context
        weights = period.weights if stage is Stage.JOIN and self._fragments.streams else []
        own_settings = None if self._compared is None or stage is not Stage.STEP else self._compared.read()
        said = Said(
            rank=context.rank,
            stage=stage,
            terms=hashed(content),
            terms_bytes=len(content),
            start=self._start() if stage is Stage.BEGIN else 0,
            round=period.round + len(self._flights),
            steps=period.steps,
            samples=period.samples_of(part),
            counted=int(period.counted),
            part=part,
            settings=0 if own_settings is None else hashed(terms.encoded(own_settings)),
            weights=len(weights),
        )
        name = f"{self._prefix}.used"  # where an optimizer of exact steps says what it has: so that one is found out
        rows = decoded(gathered(self._session, name, np.array([*said, *weights], np.int64)).tolist())
        if terms_differ(rows):
            refuse_terms(self._session, self._prefix, name, rows, content)
        if self._compared is not None and settings_differ(rows):
            told = Differences(self._session, name, self._prefix)
            waited(told.refuse_settings(own_settings or {}, "is", self._compared.called))
        return agreed(rows, self._members(), self._prefix)

    # ---- averaging ----

    @property
    def _fragments(self) -> Fragments:
        return self.period.fragments

    def _is_due(self) -> bool:
        """Whether something must be averaged, sent or merged after the step that has just been counted."""
        if not self._fragments.streams:
            return self.period.due
        return self._fragments.leaving(self.period.steps) is not None or bool(self._arriving())

    def _synchronise(self, stage: Stage) -> Agreed:
        """Averages all: one part after the other, and what is on its way before."""
        with self._restoring():
            self._land(self._flights)
            for part in range(self._fragments.parts):
                known = self._send(stage, part)
            self._land(self._flights)
            if self._fragments.streams:
                self._write_common()
            elif not known.samples and not known.is_last:
                self._take_assigned()
        self.period.forget()
        return known

    def _take_assigned(self) -> None:
        """After no step of anybody: what was assigned since the last average is common now, averaged where ranks differ.

        Nothing of it is a change for the outer optimizer. A moving average that has replaced the parameters is such a case, and
        the best ones of an earlier epoch.
        """
        copies = {name: copy for name, copy in sorted(self._copies.items()) if copy.shared.role is not Role.COUNTER}
        values = {name: _owned(copy.shared.read(), copy.common.dtype) for name, copy in copies.items()}
        own = hashed(*(array.view(np.uint8).data for array in values.values()))
        if len(set(gathered(self._session, f"{self._prefix}.assigned", np.array([own], np.int64)).tolist())) > 1:
            self._average_plainly(values)
            for name, copy in copies.items():
                copy.shared.write(values[name])
        for name, copy in copies.items():
            if not np.array_equal(copy.shared.held(copy.common), copy.shared.held(values[name])):
                copy.common = values[name]

    def _average_plainly(self, values: Mapping[str, np.ndarray]) -> None:
        """Puts the average over the ranks into arrays."""
        session, pending = self._session, []
        for name, array in values.items():
            buffer = [as_buffer(array)]
            operation = session.context.submit(
                "allreduce",
                f"{self._prefix}.assigned.{name}",
                buffer,
                buffer,
                process_set=session.process_set_id,
                reduction="average",
            )
            pending.append(operation)
        for operation in pending:
            operation.wait()

    def _stream(self) -> None:
        """After a step: merges the fragments that must be back, and sends the one whose turn it is."""
        with self._restoring():
            self._land(self._arriving())
            part = self._fragments.leaving(self.period.steps)
            if part is not None:
                self._send(Stage.STEP, part)
                self._land(self._arriving())

    def _follow_streams(self) -> None:
        """Takes part in what others average until nobody has more data; waits for each part, having nothing else to do."""
        with self._restoring():
            self._land(self._flights)
            while not self._send(Stage.JOIN, 0).is_last:
                self._land(self._flights)

    def _arriving(self) -> list[Flight]:
        return [flight for flight in self._flights if flight.left + self._fragments.overlap <= self.period.steps]

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Where averaging fails, the tensors become the common copy again: equal on all ranks that have it."""
        try:
            yield
        except BaseException as failed:
            self._give_up(waits=isinstance(failed, RingtrainError))
            self.restore()
            raise

    def _give_up(self, waits: bool) -> None:
        """Ends what is on its way: parts that arrive belong to the common copy, as on ranks that had waited for them."""
        flights, self._flights = self._flights, []
        for flight in flights:
            self._await(flight, waits)
            if waits and flight.problem is None:
                self._advance(flight)
            else:
                self._settle(flight.part, used=False)

    def _recall(self) -> None:
        """The world has ended: what was on its way has not come, and is sent again with what is changed from now on."""
        for flight in self._flights:
            self.period.recall(flight.part, flight.samples)
        self._flights = []

    def _send(self, stage: Stage, part: int) -> Agreed:
        """Agrees on a part, and sends what this rank has changed of it."""
        known = self._meet(stage, part)
        flight = Flight(known.part, self.period.steps, self.period.send(known.part))
        self._flights.append(flight)
        if known.samples:
            factor = factor_of(flight.samples, known.samples, known.workers)
            for name, copy in self._copies.items():
                if copy.part == flight.part:
                    self._depart(flight, name, copy, factor)
        return known

    def _depart(self, flight: Flight, name: str, copy: Copy, factor: float) -> None:
        change, arguments = self._sent(copy, factor)
        buffer = [as_buffer(change)]
        context, process_set = self._session.context, self._session.process_set_id
        try:
            operation = context.submit(
                "allreduce",
                f"{self._prefix_of(flight.part)}{name}",
                buffer,
                buffer,
                process_set=process_set,
                **arguments,
            )
        except RingtrainError as refused:  # the others' operation fails with its text
            flight.problem = flight.problem or refused
            return
        flight.legs.append(Leg(name, change, self._kept(copy), operation))

    def _kept(self, copy: Copy) -> np.ndarray | None:
        """The values that are sent, where they are needed to merge."""
        travels = self._fragments.overlap and copy.shared.role is Role.PARAMETER
        return copy.shared.read().copy() if travels and self._fragments.merge == "additive" else None

    def _prefix_of(self, part: int) -> str:
        """Of the names of what a part sends."""
        return f"{self._prefix}.{part}." if self._fragments.streams else f"{self._prefix}."

    def _await(self, flight: Flight, waits: bool = True) -> None:
        """Waits for it, so that no name stays in flight; what has come is going to be used."""
        if flight.await_all(waits):
            self._settle(flight.part, used=True)

    def _await_all(self, heeds: bool = True) -> None:
        for flight in self._flights:
            self._await(flight)
            if heeds and flight.problem is not None:
                raise flight.problem

    def _land(self, flights: Iterable[Flight]) -> None:
        """Waits for parts, and takes them into the common copy and the tensors."""
        flights = list(flights)
        for flight in flights:  # all of them, so that no name stays in flight
            self._await(flight)
        for flight in flights:
            if flight.problem is not None:
                raise flight.problem
            self._advance(flight)
            for leg in flight.legs:
                if leg.name in self._copies:
                    self._merge(flight, leg, self._copies[leg.name])
            self._flights.remove(flight)

    def _advance(self, flight: Flight) -> None:
        """The common copy of a part that has come."""
        for leg in flight.legs:
            copy = self._copies.get(leg.name)
            if copy is None:
                continue
            if copy.shared.role is Role.PARAMETER:
                advance(copy.common, leg.change, self.plan.outer, copy.velocity)
            else:
                copy.common = leg.change
        self.period.count_round()
        self._session.context.count("synchronisations")

    def _merge(self, flight: Flight, leg: Leg, copy: Copy) -> None:
        """A tensor of a part that has come."""
        shared, merge = copy.shared, self._fragments.merge
        if shared.role is not Role.PARAMETER or (merge == "additive" and flight.left == self.period.steps):
            shared.write(copy.common)
        else:
            values = shared.read()
            shared.write(merged(values, values if leg.sent is None else leg.sent, copy.common, merge))

    def _write_common(self) -> None:
        for copy in self._copies.values():
            if copy.shared.role is Role.PARAMETER:
                copy.shared.write(copy.common)

    def _sent(self, copy: Copy, factor: float) -> tuple[np.ndarray, dict[str, Any]]:
        values = copy.shared.read()
        if copy.shared.role is Role.COUNTER:
            return values.copy(), {"reduction": "max"}
        if not factor:  # whatever lies there
            return np.zeros_like(copy.common), self._how(copy)
        if copy.shared.role is Role.PARAMETER:
            sent = np.subtract(copy.shared.held(copy.common), values)  # from what this worker has begun with
        else:  # the values: a forward pass may have changed them before there was a common copy
            sent = values.copy()
        if factor != 1.0:
            np.multiply(sent, sent.dtype.type(factor), out=sent)
        return sent, self._how(copy)

    def _how(self, copy: Copy) -> dict[str, Any]:
        compressed = copy.shared.role is Role.PARAMETER
        return {"reduction": "average", "compression": self.plan.compression if compressed else "none"}

    # ---- what compression has lost ----

    @property
    def keeps_residuals(self) -> bool:
        """Whether the core makes up for what compression has lost of the changes before."""
        return self.plan.compression in tables.WITHOUT_FEEDBACK

    def _settle(self, part: int, used: bool) -> None:
        if self.keeps_residuals:
            residuals.settle(self._session, self._prefix_of(part), used)

    def compression_state(self) -> dict[str, dict[str, np.ndarray]]:
        """What is kept of it, the same on all ranks; collective. What is on its way is waited for."""
        self._follow_world()
        self._await_all()
        return residuals.of_all_ranks(self._session, True, f"{self._prefix}.") if self.keeps_residuals else {}

    def load_compression_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Goes on with what ``compression_state`` has returned."""
        self._follow_world()
        if self.keeps_residuals:
            residuals.load(self._session, True, f"{self._prefix}.", state)


def _owned(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A flat copy."""
    return np.array(values, dtype).reshape(-1)


def _schedule_in_words(schedule: tuple[int, ...] | None) -> str:
    if schedule is None:
        return "all parameters at once"
    every, count, overlap = schedule
    return f"every={every}, fragments={count}, overlap={overlap}"


def require_local(worker: Worker) -> None:
    """Raises InvalidArgumentError for a ``join()`` in exact steps, in which the others need this rank's gradients."""
    if worker.period.warms_up:
        raise InvalidArgumentError(
            f"join '{worker.prefix}': a rank must have data for all {worker.period.warmup} exact steps, but has had them "
            f"for {worker.period.total}. Lower warmup."
        )
