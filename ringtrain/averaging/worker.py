"""One worker: counts its steps, and at the end of a period averages with the others what it has changed.

The common copy X and the outer momentum lie in host memory, as flat arrays. All ranks compute them alike from equal
numbers, so they are equal bit by bit, and so are the parameters right after a synchronisation; and only then. A
synchronisation begins with a ``meeting``; then each tensor travels by itself, named, so that tensor fusion and error
feedback are those of any operation. When it fails, parameters become X again: the round is lost, and nothing else.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringtrain import tables
from ringtrain.averaging.meeting import Agreed, Said, Stage, agreed, terms_differ
from ringtrain.averaging.outer import Outer, advance
from ringtrain.averaging.period import Period, factor_of
from ringtrain.buffers import as_buffer
from ringtrain.errors import InvalidArgumentError, MismatchError, RingtrainError, TimeoutError
from ringtrain.gradients import residuals, terms
from ringtrain.gradients.session import Session
from ringtrain.log import logger
from ringtrain.numbering import next_number
from ringtrain.pending import Operation

_WHO_IS_MISSING = (
    "With it the ranks agree to average after local steps: the missing ones have taken fewer steps, or have ended. Call "
    "the optimizer's join() on a rank that has no more data, and synchronize() on all ranks or on none."
)


class Role(enum.Enum):
    """What becomes of a tensor at a synchronisation."""

    PARAMETER = "averaged, by way of the outer optimizer and the compression"
    STATISTIC = "averaged as it is"
    COUNTER = "the maximum"


class Shared(Protocol):
    """A tensor that workers share.

    Attributes:
        name: identity among the ranks.
        role: what becomes of it.
    """

    name: str
    role: Role

    def read(self) -> np.ndarray:
        """The values, flat; floating-point ones as float32 or float64. May be the tensor's own memory."""

    def held(self, values: np.ndarray) -> np.ndarray:
        """What ``read`` returns after ``write(values)``: rounded, where the tensor has 16 bits."""

    def write(self, values: np.ndarray) -> None:
        """Puts values that ``read`` would return into the tensor."""


@dataclass
class _Copy:
    """What all workers have in common of a tensor: X and m."""

    shared: Shared
    common: np.ndarray
    velocity: np.ndarray | None


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


class Worker:
    """One rank among those that average.

    Args:
        session: the rank, and the process set that averages.
        period: which steps average.
        plan: how.
        kind: the word that begins its names; those of one kind are numbered in the order in which they are made.
    """

    def __init__(self, session: Session, period: Period, plan: Plan, kind: str):
        self.period = period
        self.plan = plan
        self._session = session
        self._kind = kind
        self._copies: dict[str, _Copy] = {}
        self._loaded: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
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
        """Counts a step; at the end of a period averages, and returns True then.

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
        return not exact and self.period.due

    def average(self) -> None:
        """Averages at the end of a period."""
        self._synchronise(Stage.STEP)

    def synchronize(self) -> None:
        """Averages now; all ranks call it after the same step.

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
        while not self._synchronise(Stage.JOIN).is_last:
            pass

    def release(self, is_trained: Any) -> None:
        """Right after a synchronisation: lets go of the common copies of tensors that are no longer trained."""
        self._copies = {name: copy for name, copy in self._copies.items() if is_trained(copy.shared)}

    # ---- checkpoints ----

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint, at any step: counters, and the common copy and outer momentum by name."""
        copies = {name: (copy.common.copy(), None if copy.velocity is None else copy.velocity.copy())
                  for name, copy in self._copies.items()}  # fmt: skip
        copies = {**self._loaded, **copies}
        return {
            "counters": self.period.state(),
            "common": {name: common for name, (common, _) in copies.items()},
            "momentum": {name: velocity for name, (_, velocity) in copies.items() if velocity is not None},
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Goes on with what ``state`` has returned on this or another rank; None: a period begins with the next step."""
        self._copies, self._begun = {}, False
        if state is None:
            self._loaded = {}
            self.period.forget()
            return
        self.period.load(state["counters"])
        momentum = state["momentum"]
        self._loaded = {name: (common, momentum.get(name)) for name, common in state["common"].items()}

    # ---- worlds ----

    def _follow_world(self) -> None:
        """In another world than at the last look the same period goes on, once its ranks have compared what they have."""
        if self._session.has_moved():
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

    def _copy_of(self, tensor: Shared) -> _Copy:
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
        return _Copy(tensor, _owned(common, values.dtype), None if velocity is None else _owned(velocity, values.dtype))

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
            "warmup": self.period.warmup,
            "outer": None if outer is None else [outer.rate, outer.momentum],
            "within_host": self.plan.within_host,
            "compression": self.plan.compression,
        }

    def _tensor_terms(self) -> dict[str, Any]:
        return {f"tensor '{name}'": f"{copy.common.dtype} of {copy.common.size}" for name, copy in self._copies.items()}

    def _start(self) -> int:
        """A digest of X and m."""
        compared = [copy for _, copy in sorted(self._copies.items()) if copy.shared.role is Role.PARAMETER]
        arrays = [array for copy in compared for array in (copy.common, copy.velocity) if array is not None]
        return terms.digest(*(array.view(np.uint8).data for array in arrays))

    def _meet(self, stage: Stage) -> Agreed:
        """Says this rank's row, and returns what all ranks know."""
        own_terms = self._terms() | ({} if stage is Stage.TERMS else self._tensor_terms())
        content, period, context = terms.encoded(own_terms), self.period, self._session.context
        said = Said(
            rank=context.rank,
            stage=stage,
            terms=terms.digest(content),
            terms_bytes=len(content),
            start=self._start() if stage is Stage.BEGIN else 0,
            round=period.round,
            steps=period.steps,
            samples=period.samples,
            counted=int(period.counted),
        )
        name = f"{self._prefix}.used"  # where an optimizer of exact steps says what it has: so that one is found out
        rows = [Said(*row) for row in self._gathered(name, np.array([said], np.int64)).tolist()]
        if terms_differ(rows):
            self._refuse_terms(name, rows, content)
        return agreed(rows, self._members(), self._prefix)

    def _refuse_terms(self, name: str, rows: list[Said], content: bytes) -> None:
        everything = self._gathered(f"{name}.terms", np.frombuffer(content, np.uint8)).tobytes()
        ends = np.cumsum([row.terms_bytes for row in rows])
        theirs = [
            (row.rank, terms.decoded(everything[end - row.terms_bytes : end]))
            for row, end in zip(rows, ends, strict=True)
        ]
        term, values = terms.difference(theirs) or ("", "")
        raise MismatchError(
            f"synchronisation '{self._prefix}': {term} must be the same on all ranks, but is {values}. Make the same model "
            "and optimizer, with the same arguments, on every rank."
        )

    def _gathered(self, name: str, own: np.ndarray) -> np.ndarray:
        """The rows of all ranks, in rank order."""
        operation = self._session.context.submit(
            "allgather", name, [as_buffer(own)], [None], process_set=self._session.process_set_id, waits=True
        )
        try:
            operation.wait()
        except TimeoutError as given_up:
            raise TimeoutError(f"{given_up} {_WHO_IS_MISSING}") from None
        memory, _, shape = operation.allocated()
        return np.frombuffer(memory, own.dtype).reshape(shape)

    # ---- averaging ----

    def _synchronise(self, stage: Stage) -> Agreed:
        with self._restoring():
            known = self._meet(stage)
            if known.samples:
                self._average(factor_of(self.period.samples, known.samples, known.workers))
        self.period.begin()
        self._session.context.count("synchronisations")
        return known

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Where averaging fails, the tensors become the common copy again: equal on all ranks that have it."""
        try:
            yield
        except BaseException:
            self._settle(used=False)
            self.restore()
            raise

    def _average(self, factor: float) -> None:
        """Has the ranks' changes averaged and, when all have come, updates the common copy and the tensors."""
        problem: RingtrainError | None = None
        under_way: list[tuple[_Copy, np.ndarray, Operation]] = []
        for copy in self._copies.values():
            try:
                under_way.append((copy, *self._submitted(copy, factor)))
            except RingtrainError as refused:  # the others' operation fails with its text
                problem = problem or refused
        for _, _, operation in under_way:  # all of them, so that no name stays in flight
            try:
                operation.wait()
            except RingtrainError as failed:
                problem = problem or failed
        if problem is not None:
            raise problem
        for copy, arrived, _ in under_way:
            self._take(copy, arrived)
        self._settle(used=True)

    def _submitted(self, copy: _Copy, factor: float) -> tuple[np.ndarray, Operation]:
        """What is sent of a tensor, which is where the result arrives, and its operation."""
        sent, arguments = self._sent(copy, factor)
        buffer = [as_buffer(sent)]
        context, process_set = self._session.context, self._session.process_set_id
        name = f"{self._prefix}.{copy.shared.name}"
        return sent, context.submit("allreduce", name, buffer, buffer, process_set=process_set, **arguments)

    def _sent(self, copy: _Copy, factor: float) -> tuple[np.ndarray, dict[str, Any]]:
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

    def _how(self, copy: _Copy) -> dict[str, Any]:
        compressed = copy.shared.role is Role.PARAMETER
        return {"reduction": "average", "compression": self.plan.compression if compressed else "none"}

    def _take(self, copy: _Copy, arrived: np.ndarray) -> None:
        if copy.shared.role is Role.PARAMETER:
            advance(copy.common, arrived, self.plan.outer, copy.velocity)
        else:
            copy.common = arrived
        copy.shared.write(copy.common)

    # ---- what compression has lost ----

    @property
    def keeps_residuals(self) -> bool:
        """Whether the core makes up for what compression has lost of the changes before."""
        return self.plan.compression in tables.WITHOUT_FEEDBACK

    def _settle(self, used: bool) -> None:
        if self.keeps_residuals:
            residuals.settle(self._session, f"{self._prefix}.", used)

    def compression_state(self) -> dict[str, dict[str, np.ndarray]]:
        """What is kept of it, the same on all ranks; collective."""
        self._follow_world()
        return residuals.of_all_ranks(self._session, True, f"{self._prefix}.") if self.keeps_residuals else {}

    def load_compression_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Goes on with what ``compression_state`` has returned."""
        self._follow_world()
        if self.keeps_residuals:
            residuals.load(self._session, True, f"{self._prefix}.", state)


def _owned(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A flat copy."""
    return np.array(values, dtype).reshape(-1)


def require_local(worker: Worker) -> None:
    """Raises InvalidArgumentError for a ``join()`` in exact steps, in which the others need this rank's gradients."""
    if worker.period.warms_up:
        raise InvalidArgumentError(
            f"join '{worker.prefix}': a rank must have data for all {worker.period.warmup} exact steps, but has had them "
            f"for {worker.period.total}. Lower warmup."
        )
