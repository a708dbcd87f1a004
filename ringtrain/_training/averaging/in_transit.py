"""What is on its way: the change of a part of the tensors, from the step that sends it to the one that merges it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringtrain._runtime.pending import Operation
from ringtrain.errors import RingtrainError


@dataclass
class Leg:
    """A tensor's change on its way.

    Attributes:
        name: of the tensor.
        change: what is sent, and where the average arrives.
        sent: the values that were sent, where training goes on meanwhile and they are needed to merge.
        operation: None once the average is there.
    """

    name: str
    change: np.ndarray
    sent: np.ndarray | None
    operation: Operation | None


@dataclass
class PartInTransit:
    """A part whose change travels.

    Attributes:
        part: its number.
        left: local steps since the last whole synchronisation, when it was sent.
        samples: what was sent weighs so much.
        legs: its tensors.
        problem: why it fails.
    """

    part: int
    left: int
    samples: int
    legs: list[Leg] = field(default_factory=list)
    problem: RingtrainError | None = None

    def await_all(self, waits: bool = True) -> bool:
        """Returns when all of it has come or failed, so that no name stays in flight; True if it has come just now."""
        travels = any(leg.operation is not None for leg in self.legs)
        for leg in self.legs:
            try:
                if leg.operation is not None and waits:
                    leg.operation.wait()
                leg.operation = None
            except RingtrainError as failed:
                self.problem = self.problem or failed
        return travels and waits and self.problem is None

    def state(self) -> dict[str, Any]:
        """For a checkpoint, once it has come."""
        return {
            "part": self.part,
            "left": self.left,
            "samples": self.samples,
            "change": {leg.name: leg.change.copy() for leg in self.legs},
            "sent": {leg.name: leg.sent.copy() for leg in self.legs if leg.sent is not None},
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "PartInTransit":
        """The one whose ``state`` this was."""
        sent = state["sent"]
        legs = [
            Leg(name, np.array(change), np.array(sent[name]) if name in sent else None, None)
            for name, change in state["change"].items()
        ]
        return cls(int(state["part"]), int(state["left"]), int(state["samples"]), legs)
