"""Gradients that are reduced on the host, as arrays: by PowerSGD, or one step late, for Keras and TensorFlow.

Their steps are graphs, which call a function here when they run; what is kept from step to step lies here, and no graph
need know of it. ``KerasReducer`` and TensorFlow's tapes have a ``HostReducer`` where one of the two was asked for. A step
comes with the gradients that any rank has, so the same ones on all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringtrain._binding import tables
from ringtrain._binding.tensor_memory import as_buffer
from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.pending import Operation
from ringtrain._training import powersgd
from ringtrain._training.arrays import NUMPY
from ringtrain._training.differences import waited
from ringtrain._training.feedback import Feedback
from ringtrain._training.late import LateGradients, StepInTransit, check_shape
from ringtrain._training.powersgd import Approximation, Beginning, Memory, PowerSGD
from ringtrain._training.presence import DENSE
from ringtrain._training.rounds import Rounds, Stage
from ringtrain._training.session import NewWorld, Session
from ringtrain.errors import InvalidArgumentError, RingtrainError

Arrays = list[np.ndarray]


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
    def terms(self) -> dict[str, object]:
        """What ranks cannot tell from the gradients that they reduce, and must have set alike."""
        return {
            "compression": "other" if self.powersgd is None else repr(self.powersgd),
            "mode": "OneStepLate" if self.late else "Synchronous",
        }

    @property
    def keeps_residuals(self) -> bool:
        """Whether the core makes up for what compression has lost of the gradients before."""
        return self.compression in tables.WITHOUT_FEEDBACK


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
        self._late = LateGradients(NUMPY)
        self._memories: dict[str, Memory] = {}
        how = settings.powersgd
        self._beginning = None if how is None else Beginning(session, how.start_after)
        session.on_new_world(self._begin_anew)

    def _begin_anew(self, _: NewWorld) -> None:
        """What has not arrived in the world before is lost."""
        self._late.flight = None
        self._rounds.clear()
        powersgd.settle(self._memories.values(), used=False)

    # ---- PowerSGD ----

    def reduce(self, names: Sequence[str], gradients: Sequence[np.ndarray]) -> Arrays:
        """The gradients of a step combined over the ranks, those that PowerSGD approximates as its products.

        Args:
            names: of the gradients.
            gradients: left as they are.

        Raises:
            RingtrainError: an operation has failed, or ranks have other settings; nothing is kept of the step then.
        """
        self._session.follow()
        with np.errstate(all="ignore"):  # what is not finite is told by the results
            return self._reduced(names, gradients)

    def _reduced(self, names: Sequence[str], gradients: Sequence[np.ndarray]) -> Arrays:
        beginning = self._beginning
        assert beginning is not None
        rounds = self._announced(names, beginning.says)
        approximated: dict[int, Approximation] = {}
        results: Arrays = []
        try:
            for place, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
                results.append(self._started(place, name, gradient, approximated))
            operation = self._submit(f"{names[0]} (left factors)", results)
            any_says = _agreed(rounds)  # first: who has other settings may have sent nothing
            operation.wait()
            if approximated:
                rights = [each.go_on() for each in approximated.values()]
                self._submit(f"{names[0]} (right factors)", rights).wait()
        except RingtrainError:
            self._give_up(rounds)
            raise
        rounds.succeed()
        beginning.note_round(any_says)
        for place, each in approximated.items():
            each.write(out := np.empty(gradients[place].shape, gradients[place].dtype))
            results[place] = out
        return results

    def settle(self, used: bool) -> None:
        """The gradients of the step were used, or not: with them goes what was lost of them."""
        self._feedback().settle(used)

    def _started(
        self, place: int, name: str, gradient: np.ndarray, approximated: dict[int, Approximation]
    ) -> np.ndarray:
        """What travels first for a gradient: itself, or a factor of an approximation, which is noted."""
        memory = self._memory_of(name, gradient)
        if memory is None:
            return np.array(gradient, order="C")
        if memory.is_exact:
            memory.keep(None, memory.factor)
            return memory.added_to(gradient).astype(gradient.dtype, copy=False).reshape(gradient.shape)
        approximation = approximated[place] = Approximation(memory, gradient)
        left: np.ndarray = approximation.left
        return left

    def _memory_of(self, name: str, gradient: np.ndarray) -> Memory | None:
        how, beginning = self.settings.powersgd, self._beginning
        shape = how.shape_of(gradient.shape) if how is not None and "float" in gradient.dtype.name else None
        if shape is None or beginning is None:
            return None
        memory = self._memories.get(name)
        if memory is None or memory.shape != shape:
            is_double = gradient.dtype == np.float64
            memory = Memory(NUMPY, shape, name.removeprefix(self._prefix), beginning, is_double)
            self._memories[name] = memory
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
        self.arrive()
        arrived = self._late.take()
        if arrived and arrived.keys() != set(names):
            raise InvalidArgumentError(
                f"apply '{self._prefix.rstrip('.')}': gradients must be those of the same variables in each step with OneStepLate, but "
                f"{', '.join(sorted(arrived.keys() ^ set(names)))} were in one of two steps alone. Let each step reach all variables, "
                "if need be with zero times what is unused."
            )
        flight = StepInTransit(self._announced(names), ends_alone=False, skips=skips)
        flight.arrays = {name: np.array(each, order="C") for name, each in zip(names, gradients, strict=True)}
        sent = list(flight.arrays.values())
        flight.operations = [(self._submit(f"{names[0]} (one step late)", sent), sent[0])]
        self._late.flight = flight
        self.applies = bool(arrived)
        return [arrived[name] for name in names] if arrived else list(gradients)

    def arrive(self) -> None:
        """Waits for the gradients of the step before, which every rank has sent.

        Raises:
            RingtrainError: the operation has failed, or ranks have other settings. All is forgotten then.
        """
        self._session.follow()
        self._late.arrive(self.settle)

    def take(self) -> dict[str, np.ndarray]:
        """The gradients that are left to be applied, by name without the prefix; none are left then."""
        self.arrive()
        return {name.removeprefix(self._prefix): array for name, array in self._late.take().items()}

    def _feedback(self) -> Feedback:
        """What compression has lost of these gradients."""
        how, memories = self.settings, list(self._memories.values())
        return Feedback(
            NUMPY, self._session, self._prefix, how.averages, how.keeps_residuals, memories, self._beginning
        )

    # ---- what is saved ----

    def delayed_state(self) -> dict[str, np.ndarray]:
        """The gradients that the next step applies, by name; the same on all ranks. Waits for them."""
        self.arrive()
        return {name.removeprefix(self._prefix): array.copy() for name, array in self._late.arrived.items()}

    def load_delayed_state(self, state: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Goes on with it; an empty one has nothing that the next step applies.

        Args:
            state: from ``delayed_state``.
            shapes: of the variables, by the names in a state.

        Raises:
            InvalidArgumentError: it has a gradient that fits no variable, or is something else.
        """
        check_kind("load_delayed_state: the state must be a mapping from names to gradients", state, Mapping)
        for name, gradient in state.items():
            check_shape("load_delayed_state", "variable", name, tuple(gradient.shape), shapes.get(name))
        self.take()
        self._late.arrived = {self._prefix + name: np.array(gradient, order="C") for name, gradient in state.items()}

    def compression_state(self) -> dict[str, dict[str, np.ndarray]]:
        """What compression has lost of these gradients, the same on all ranks; collective."""
        self.arrive()
        return self._feedback().of_all_ranks()

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
        self._session.follow()
        beginning, how = self._beginning, self.settings.powersgd
        if beginning is not None and how is not None:
            matrices = {name: shape for name, dimensions in shapes.items() if (shape := how.shape_of(dimensions))}
            powersgd.check_state(state, matrices)
            self._memories = {
                self._prefix + name: Memory(NUMPY, shape, name, beginning) for name, shape in matrices.items()
            }
        self._feedback().load(state)


def _agreed(rounds: Rounds) -> bool:
    """Whether any rank says that the next step compresses; raises MismatchError if ranks have other settings."""
    said = rounds.wait_for_answer()
    waited(rounds.require_equal())
    return said.compresses_next
