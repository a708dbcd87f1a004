"""One step late, in every framework: what a step sends is on its way until the next one, which decides whether it is used.

``torch.modes.one_step_late`` sends gradients one by one, ``on_host`` those of a step of Keras or TensorFlow at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringtrain._runtime.pending import Operation
from ringtrain._training.arrays import Arrays
from ringtrain._training.differences import waited
from ringtrain._training.rounds import Rounds
from ringtrain.errors import InvalidArgumentError, RingtrainError


@dataclass
class StepInTransit:
    """The gradients of one step, on their way.

    Attributes:
        rounds: in which ranks say that they have sent them.
        ends_alone: whether the operations end whatever the ranks have set, and so are awaited in any case.
        skips: whether gradients that are not finite are not used.
        operations: each with an array of it.
        arrays: in which results arrive, by what they belong to.
        problem: what this rank had to refuse; its peers' operation fails with the same text.
    """

    rounds: Rounds
    ends_alone: bool = True
    skips: bool = False
    operations: list[tuple[Operation, Any]] = field(default_factory=list)
    arrays: dict[Any, Any] = field(default_factory=dict)
    problem: RingtrainError | None = None

    def finish(self, arrays: Arrays[Any]) -> None:
        """Waits for all operations, so that no name stays in flight; notes the first error."""
        for operation, array in self.operations:
            try:
                arrays.finish(operation, array)
            except RingtrainError as failed:
                self.problem = self.problem or failed
        self.operations = []


def check_shape(owner: str, kind: str, name: str, given: tuple[int, ...], own: tuple[int, ...] | None) -> None:
    """Raises InvalidArgumentError where a gradient that is loaded fits no parameter or variable; ``own`` is None for none."""
    if own != given:
        found = "none" if own is None else f"one of shape {own}"
        raise InvalidArgumentError(
            f"{owner} '{name}': expected a {kind} of shape {given} but found {found}. Load the state of this model."
        )


class LateGradients:
    """The gradients of one optimizer between two steps.

    Args:
        arrays: of the framework.

    Attributes:
        flight: what is on its way; None if nothing is.
        arrived: of the step before, to be applied next; by what they belong to.
    """

    def __init__(self, arrays: Arrays[Any]):
        self.flight: StepInTransit | None = None
        self.arrived: dict[Any, Any] = {}
        self._arrays = arrays

    def arrive(self, settle: Callable[[bool], None]) -> bool:
        """Waits for the gradients of the step before, which every rank has sent; returns whether they may be used.

        Args:
            settle: is told that, too.

        Raises:
            RingtrainError: an operation has failed, or ranks have other settings. All is forgotten then.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            return True
        try:
            if flight.ends_alone and not flight.rounds.lists_differ(waits=True):
                flight.finish(self._arrays)
            flight.rounds.wait_for_answer()
            waited(flight.rounds.require_equal())
            flight.finish(self._arrays)
            if flight.problem is not None:
                raise flight.problem
        except RingtrainError:
            settle(False)
            flight.rounds.forget()
            flight.rounds.forget_steps()
            raise
        flight.rounds.succeed()
        used = not flight.skips or all(map(self._arrays.is_finite, flight.arrays.values()))
        settle(used)
        self.arrived = flight.arrays
        return used

    def take(self) -> dict[Any, Any]:
        """What is to be applied; nothing is left then."""
        arrived, self.arrived = self.arrived, {}
        return arrived
