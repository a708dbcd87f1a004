"""Agreement of all ranks on which gradients there are: one maximum over a code for each parameter.

``window`` announces this rank's codes in each round, and reads the answer if it cannot do without.
"""

from collections.abc import Iterator

import torch

from ringtrain.context import Context, Operation
from ringtrain.torch.tensors import buffer_of

# What a rank says about a parameter. The greatest counts, so the order matters.
SETTLED, MISSING, DENSE, SPARSE = range(4)


class Agreement:
    """The maximum that a round begins with.

    Attributes:
        announced: this rank's codes in the round under way; None between rounds.
    """

    def __init__(self, context: Context, process_set: int, name: str):
        self.announced: bytes | None = None
        self._context, self._process_set, self._name = context, process_set, name
        self._codes = bytearray()
        self._operation: Operation | None = None

    def announce(self, codes: bytes, more_may_follow: bool) -> None:
        """Submits codes, and whether this rank may have more gradients for the same step after this round."""
        self._codes = bytearray([*codes, more_may_follow])
        self.announced = bytes(self._codes)
        buffer = buffer_of(torch.frombuffer(self._codes, dtype=torch.uint8))
        self._operation = self._context.submit(
            "allreduce", self._name, [buffer], [buffer], reduction="max", process_set=self._process_set
        )

    def answer(self) -> Iterator[Operation]:
        """Yields the operation while it is under way, and returns the codes of all ranks, the last for more to come."""
        while not self._operation.done():
            yield self._operation
        self._operation.wait()
        return self._codes

    def forget(self) -> None:
        """Ends the round; an operation under way keeps its memory until it is done."""
        self.announced = self._operation = None
