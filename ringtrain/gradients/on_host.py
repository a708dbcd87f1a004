"""Gradients that are reduced on the host, as arrays: by PowerSGD, or one step late, for Keras and TensorFlow.

Their steps are graphs, which call a function here when they run; what is kept from step to step lies here, and no graph
need know of it. ``KerasReducer`` and TensorFlow's tapes have a ``HostReducer`` where one of the two was asked for. A step
comes with the gradients that any rank has, so the same ones on all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringtrain import tables
from ringtrain.buffers import as_buffer
from ringtrain.errors import InvalidArgumentError, RingtrainError
from ringtrain.gradients import powersgd, residuals
from ringtrain.gradients.differences import waited
from ringtrain.gradients.powersgd import FACTOR, OF_ALL, RESIDUAL, STEPS, TINY, Beginning, PowerSGD
from ringtrain.gradients.presence import DENSE
from ringtrain.gradients.rounds import Rounds, Stage
from ringtrain.gradients.session import Session
from ringtrain.pending import Operation

Arrays = list[np.ndarray]
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class HostSettings:
    """How gradients are combined, the same on all ranks.

    Attributes:
        averages: whether the sum is divided by the number of ranks.
        prescale: factor on each contribution.
        postscale: factor on the result.
        compression: what the core does to narrow the wire; a row of ``tables.COMPRESSIONS``.
        powersgd: how gradients are approximated; None if they are not.
        late: whether a step applies the gradients of the step before; not with PowerSGD.
    """

    averages: bool
    prescale: float = 1.0
    postscale: float = 1.0
    compression: str = "none"
    powersgd: PowerSGD | None = None
    late: bool = False

    @property
    def terms(self) -> dict[str, Any]:
        """What ranks cannot tell from the gradients that they reduce, and must have set alike."""
        return {
            "compression": "other" if self.powersgd is None else repr(self.powersgd),
            "mode": "OneStepLate" if self.late else "Synchronous",
        }

    @property
    def keeps_residuals(self) -> bool:
        """Whether the core makes up for what compression has lost of the gradients before."""
        return self.compression in tables.WITHOUT_FEEDBACK


@dataclass
class _Flight:
    """Gradients of one step on their way.

    Attributes:
        names: of the gradients.
        arrays: in which the results arrive.
        operation: that brings them.
        skips: whether gradients that are not finite are not used.
    """

    names: Sequence[str]
    arrays: Arrays
    operation: Operation
    skips: bool


@dataclass
class _Approximation:
    """One gradient on its way as two factors.

    Attributes:
        place: among the gradients of the step.
        lost: the gradient with what was lost before (rows x columns); in the end what is lost now.
        left: the factor that is sent first (rows x rank).
        right: the factor that is sent next (columns x rank).
    """

    place: int
    lost: np.ndarray
    left: np.ndarray
    right: np.ndarray = field(default_factory=lambda: np.empty(0))


class HostReducer:
    """The gradients of one optimizer.

    Args:
        session: the rank that it acts for.
        prefix: of the gradients' names, with the dot behind it.
        settings: how gradients are combined.

    Attributes:
        settings: as given.
        applies: of ``late``: whether the last exchange has returned gradients to be applied.
    """

    def __init__(self, session: Session, prefix: str, settings: HostSettings):
        self.settings = settings
        self.applies = False
        self._session, self._prefix = session, prefix
        self._rounds: dict[str, Rounds] = {}
        self._flight: _Flight | None = None
        self._arrived: dict[str, np.ndarray] = {}  # of the step before; to be applied next
        self._memories: dict[str, powersgd.Memory[np.ndarray]] = {}
        how = settings.powersgd
        self._beginning = None if how is None else Beginning(session, how.start_after)

    def enter_world(self) -> None:
        """Goes on in the present world, if it is not the last one; what has not arrived in that one is lost."""
        if self._session.has_moved():
            self._flight = None
            self._rounds.clear()
            powersgd.settle(self._memories.values(), used=False)
            if self._beginning is not None:
                self._beginning.enter_world()

    # ---- PowerSGD ----

    def reduce(self, names: Sequence[str], gradients: Sequence[np.ndarray]) -> Arrays:
        """The gradients of a step combined over the ranks, those that PowerSGD approximates as its products.

        Args:
            names: of the gradients.
            gradients: left as they are.

        Raises:
            RingtrainError: an operation has failed, or ranks have other settings; nothing is kept of the step then.
        """
        self.enter_world()
        with np.errstate(all="ignore"):  # what is not finite is told by the results
            return self._reduced(names, gradients)

    def _reduced(self, names: Sequence[str], gradients: Sequence[np.ndarray]) -> Arrays:
        beginning = self._beginning
        assert beginning is not None
        rounds = self._announced(names, beginning.says)
        approximated: list[_Approximation] = []
        results: Arrays = []
        try:
            for place, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
                results.append(self._started(place, name, gradient, approximated))
            lefts = {each.place: each.left for each in approximated}
            sent = [lefts.get(place, each) for place, each in enumerate(results)]
            operation = self._submit(f"{names[0]} (left factors)", sent)
            any_says = _agreed(rounds)  # first: who has other settings may have sent nothing
            operation.wait()
            if approximated:
                rights = [_gone_on(each) for each in approximated]
                self._submit(f"{names[0]} (right factors)", rights).wait()
        except RingtrainError:
            self._give_up(rounds)
            raise
        rounds.succeed()
        beginning.note_round(any_says)
        for each in approximated:
            self._memories[names[each.place]].keep(each.lost, each.right)
            powersgd.multiply(each.left, np.ascontiguousarray(each.right.T), out := np.empty_like(each.lost))
            results[each.place] = out
        return [
            result.reshape(gradient.shape).astype(gradient.dtype, copy=False)
            for result, gradient in zip(results, gradients, strict=True)
        ]

    def settle(self, used: bool) -> None:
        """The gradients of the step were used, or not: with them goes what was lost of them."""
        powersgd.settle(self._memories.values(), used)
        if used and self._beginning is not None:
            self._beginning.note_use()

    def _started(self, place: int, name: str, gradient: np.ndarray, approximated: list[_Approximation]) -> np.ndarray:
        """What travels for a gradient that travels as it is; of another one the matrix, which is noted."""
        memory = self._memory_of(name, gradient)
        if memory is None:
            return np.array(gradient, order="C")
        matrix = _with_residual(gradient, memory)
        if memory.is_exact:
            memory.keep(None, memory.factor)
            return matrix.astype(gradient.dtype)
        approximated.append(_Approximation(place, matrix, matrix @ _beginning_of(memory, matrix)))
        return matrix

    def _memory_of(self, name: str, gradient: np.ndarray) -> "powersgd.Memory[np.ndarray] | None":
        how, beginning = self.settings.powersgd, self._beginning
        shape = how.shape_of(gradient.shape) if how is not None and "float" in gradient.dtype.name else None
        if shape is None or beginning is None:
            return None
        memory = self._memories.get(name)
        if memory is None or memory.shape != shape:
            memory = self._memories[name] = powersgd.Memory(shape, name.removeprefix(self._prefix), beginning)
        return memory

    def _submit(self, name: str, arrays: Arrays) -> Operation:
        how, buffers = self.settings, [as_buffer(array) for array in arrays]
        return self._session.context.submit(
            "allreduce", name, buffers, buffers,
            reduction="average" if how.averages else "sum", prescale=how.prescale, postscale=how.postscale,
            process_set=self._session.process_set_id, compression=how.compression,
        )  # fmt: skip

    # ---- rounds ----

    def _announced(self, names: Sequence[str], says: bool = False) -> Rounds:
        """Under the name of the first gradient, so that ranks that send that gradient itself are told of the difference."""
        rounds = self._rounds.get(names[0])
        if rounds is None:
            rounds = self._rounds[names[0]] = Rounds(self._session, names[0], self.settings.terms)
        rounds.announce(bytes([DENSE]) * len(names), Stage.CLOSING, says)
        return rounds

    def _give_up(self, rounds: Rounds) -> None:
        """What has gone wrong is raised on all ranks: nothing is kept of the step."""
        rounds.forget()
        rounds.forget_steps()
        powersgd.settle(self._memories.values(), used=False)

    # ---- one step late ----

    def exchange(self, names: Sequence[str], gradients: Sequence[np.ndarray], skips: bool) -> Arrays:
        """Takes the gradients of the step before, which it returns, and sends these.

        Args:
            names: of the gradients, the same in each step.
            gradients: left as they are; what is returned if there is nothing to apply, so that ``applies`` is False.
            skips: whether the caller leaves out steps with gradients that are not finite.

        Raises:
            InvalidArgumentError: the step before had other gradients.
            RingtrainError: the exchange of the step before has failed, or ranks have other settings.
        """
        self.enter_world()
        self.arrive()
        arrived, self._arrived = self._arrived, {}
        if arrived and arrived.keys() != set(names):
            raise InvalidArgumentError(
                f"apply '{self._prefix.rstrip('.')}': gradients must be those of the same variables in each step with OneStepLate, but "
                f"{', '.join(sorted(arrived.keys() ^ set(names)))} were in one of two steps alone. Let each step reach all variables, "
                "if need be with zero times what is unused."
            )
        self._announced(names)
        sent = [np.array(gradient, order="C") for gradient in gradients]
        self._flight = _Flight(names, sent, self._submit(f"{names[0]} (one step late)", sent), skips)
        self.applies = bool(arrived)
        return [arrived[name] for name in names] if arrived else list(gradients)

    def arrive(self) -> None:
        """Waits for the gradients of the step before, which every rank has sent.

        Raises:
            RingtrainError: the operation has failed, or ranks have other settings. All is forgotten then.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        rounds = self._rounds[flight.names[0]]
        try:
            _agreed(rounds)
            flight.operation.wait()
        except RingtrainError:
            self._give_up(rounds)
            self._settle_residuals(used=False)
            raise
        rounds.succeed()
        self._settle_residuals(not flight.skips or all(_is_finite(array) for array in flight.arrays))
        self._arrived = dict(zip(flight.names, flight.arrays, strict=True))

    def take(self) -> dict[str, np.ndarray]:
        """The gradients that are left to be applied, by name without the prefix; none are left then."""
        self.enter_world()
        self.arrive()
        arrived, self._arrived = self._arrived, {}
        return {name.removeprefix(self._prefix): array for name, array in arrived.items()}

    def _settle_residuals(self, used: bool) -> None:
        if self.settings.keeps_residuals:
            residuals.settle(self._session, self._prefix, used)

    # ---- what is saved ----

    def delayed_state(self) -> dict[str, np.ndarray]:
        """The gradients that the next step applies, by name; the same on all ranks. Waits for them."""
        self.enter_world()
        self.arrive()
        return {name.removeprefix(self._prefix): array.copy() for name, array in self._arrived.items()}

    def load_delayed_state(self, state: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Goes on with it; an empty one has nothing that the next step applies.

        Args:
            state: from ``delayed_state``.
            shapes: of the variables, by the names in a state.

        Raises:
            InvalidArgumentError: it has a gradient that fits no variable.
        """
        for name, gradient in state.items():
            if shapes.get(name) != tuple(gradient.shape):
                shape = f"one of shape {shapes[name]}" if name in shapes else "none"
                raise InvalidArgumentError(
                    f"load_delayed_state '{name}': expected a variable of shape {tuple(gradient.shape)} but found {shape}. Load "
                    "the state of this model."
                )
        self.take()
        self._arrived = {self._prefix + name: np.array(gradient, order="C") for name, gradient in state.items()}

    def compression_state(self) -> dict[str, dict[str, np.ndarray]]:
        """What compression has lost of these gradients, the same on all ranks; collective.

        Of PowerSGD by gradient the mean of what the ranks have lost, and the right factor; under ``steps`` how many exact
        ones there were. Else as ``residuals.of_all_ranks``.
        """
        self.enter_world()
        self.arrive()
        if self._beginning is None:
            averages = self.settings.averages
            return (
                residuals.of_all_ranks(self._session, averages, self._prefix) if self.settings.keeps_residuals else {}
            )
        steps = np.array([self._beginning.steps])
        self._combine(f"{self._prefix}powersgd.steps", steps, "max")
        state = {STEPS: {OF_ALL: steps}}
        for memory in self._memories.values():
            rows, columns, rank = memory.shape
            residual = np.zeros((rows, columns), np.float32) if memory.residual is None else memory.residual.copy()
            self._combine(f"{self._prefix}powersgd.{memory.name}", residual, "average")
            factor = np.zeros((columns, rank), np.float32) if memory.factor is None else memory.factor.copy()
            state[f"{memory.name}/0"] = {RESIDUAL: residual, FACTOR: factor}
        return state

    def load_compression_state(
        self, state: Mapping[str, Mapping[str, np.ndarray]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Goes on with what ``compression_state`` has returned.

        Args:
            state: from ``compression_state``.
            shapes: of the variables, by the names in a state.

        Raises:
            InvalidArgumentError: it is something else, or of a model with other variables, or of another rank.
        """
        self.enter_world()
        beginning, how = self._beginning, self.settings.powersgd
        if beginning is None or how is None:
            if self.settings.keeps_residuals:
                residuals.load(self._session, self.settings.averages, self._prefix, state)
            return
        matrices = {name: shape for name, dimensions in shapes.items() if (shape := how.shape_of(dimensions))}
        powersgd.check_state(state, matrices)
        beginning.steps = int(state[STEPS][OF_ALL][0])
        for name, shape in matrices.items():
            parts = state[f"{name}/0"]
            memory = self._memories[self._prefix + name] = powersgd.Memory(shape, name, beginning)
            memory.keep(np.array(parts[RESIDUAL]), np.array(parts[FACTOR]))
            memory.settle(used=True)

    def _combine(self, name: str, array: np.ndarray, reduction: str) -> None:
        buffer = [as_buffer(array)]
        self._session.context.submit(
            "allreduce", name, buffer, buffer, reduction=reduction, process_set=self._session.process_set_id, waits=True
        ).wait()


def _agreed(rounds: Rounds) -> bool:
    """Whether any rank says that the next step compresses; raises MismatchError if ranks have other settings."""
    said = rounds.wait_for_answer()
    waited(rounds.require_equal())
    return said.compresses_next


def _with_residual(gradient: np.ndarray, memory: "powersgd.Memory[np.ndarray]") -> np.ndarray:
    """A copy of a gradient as a matrix, plus what was lost before; 16 bits as float32."""
    dtype = np.float32 if gradient.dtype.name in _HALVES else gradient.dtype
    matrix = np.array(gradient, dtype, order="C").reshape(memory.shape.rows, memory.shape.columns)
    if memory.residual is not None:
        matrix += memory.residual
    return matrix


def _beginning_of(memory: "powersgd.Memory[np.ndarray]", like: np.ndarray) -> np.ndarray:
    """A right factor to begin with: the last one, columns of length 1; random ones where it says nothing."""
    columns, rank = memory.shape.columns, memory.shape.rank
    # Philox, whose numbers no version of NumPy changes, and no transformation of them, which may differ by a bit.
    drawn = np.random.Generator(np.random.Philox(key=memory.seed)).random((columns, rank)) - 0.5
    first = drawn / columns**0.5
    if memory.factor is None:
        return first.astype(like.dtype)
    factor = memory.factor.astype(np.float64)
    lengths = np.sqrt((factor * factor).sum(axis=0))
    usable = (lengths > TINY) & np.isfinite(lengths)
    return np.where(usable, factor / np.where(usable, lengths, 1.0), first).astype(like.dtype)


def _gone_on(approximation: _Approximation) -> np.ndarray:
    """The left factor is that of all ranks now: the right one to be sent; notes what is lost with it here."""
    columns = np.ascontiguousarray(approximation.left.T, np.float64)
    powersgd.orthogonalise(columns, np.sqrt)
    left = approximation.left = np.ascontiguousarray(columns.T, approximation.lost.dtype)
    approximation.right = approximation.lost.T @ left
    approximation.lost -= left @ approximation.right.T
    return approximation.right


def _is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array.astype(np.float32) if array.dtype.name in _HALVES else array).all())
