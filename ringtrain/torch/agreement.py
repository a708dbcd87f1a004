"""Agreement of all ranks on which gradients there are: one maximum over a code for each parameter.

``window`` announces this rank's codes in each round, and reads the answer if it cannot do without.
"""

from collections.abc import Iterator

import torch

from ringtrain.context import Context, Operation
from ringtrain.errors import TimeoutError
from ringtrain.torch.tensors import buffer_of

# What a rank says about a parameter. The greatest counts, so the order matters.
SETTLED, MISSING, DENSE, SPARSE = range(4)

_WHO_IS_MISSING = (
    "With it the ranks agree which gradients of this optimizer there are: those that submitted it have gradients for it, "
    "the missing ones came neither to the end of a backward pass that reaches its parameters nor to its step(). Run as many "
    "passes and steps on every rank; with several optimizers over one model, let each pass reach those of all of them, "
    "if need be with zero times what is unused, or put their parameters into groups of one optimizer."
)


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
        """Yields the operation while it is under way, and returns the codes of all ranks, the last for more to come.

        Raises:
            TimeoutError: it was given up; the text says what the missing ranks have not done.
        """
        while not self._operation.done():
            yield self._operation
        try:
            self._operation.wait()
        except TimeoutError as given_up:
            raise TimeoutError(f"{given_up} {_WHO_IS_MISSING}") from None
        return self._codes

    def forget(self) -> None:
        """Ends the round; an operation under way keeps its memory until it is done."""
        self.announced = self._operation = None
