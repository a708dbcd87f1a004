"""The agreement of all ranks on something about each gradient: one maximum over bytes, while the gradients travel.

Every rank submits its bytes and goes on; only a rank that cannot do without the answer waits for it. ``rounds`` and the
adapters that reduce a whole step at once make an ``Agreement`` in each step; graphs of TensorFlow make one when they
are traced.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from ringtrain._binding.buffers import as_buffer
from ringtrain._runtime.context import Context
from ringtrain._runtime.pending import Operation
from ringtrain._training.presence import MISSING, zeros_needed
from ringtrain.errors import TimeoutError

Gradient = TypeVar("Gradient")


class Agreement:
    """One maximum, submitted when it is made.

    Args:
        context: of this rank.
        process_set: id of the process set.
        name: identity among the ranks.
        own: this rank's bytes, as many on all ranks.
        advice: what the missing ranks have not done, and what to do, for the error when the maximum is given up.
        waits: whether this thread waits for it next, or for what was submitted before it.

    Attributes:
        own: this rank's bytes.
    """

    __slots__ = ("own", "_advice", "_content", "_operation")

    def __init__(self, context: Context, process_set: int, name: str, own: bytes, advice: str, waits: bool = False):
        self.own = own
        self._advice = advice
        self._content = bytearray(own)
        buffer = as_buffer(np.frombuffer(self._content, np.uint8))
        self._operation = context.submit(
            "allreduce", name, [buffer], [buffer], reduction="max", process_set=process_set, waits=waits
        )

    def pending(self) -> Iterator[Operation]:
        """Yields the operation while it is under way."""
        while not self._operation.finished():
            yield self._operation

    def agreed(self) -> bytes:
        """The greatest byte of any rank at each place; waits until all ranks have said theirs.

        Raises:
            MismatchError: ranks have different numbers of gradients.
            TimeoutError: it was given up; the text ends with the advice.
        """
        try:
            self._operation.wait()
        except TimeoutError as given_up:
            raise TimeoutError(f"{given_up} {self._advice}") from None
        return bytes(self._content)

    def complete(
        self, gradients: Sequence[Gradient | None], codes: bytes, zeros: Callable[[int, int], Gradient]
    ) -> list[Gradient | None]:
        """The gradients, with zeros for those that only other ranks have; waits only where this rank lacks one.

        Args:
            gradients: of this rank.
            codes: of these gradients; ``own``, unless other gradients are completed by an answer that was remembered.
            zeros: makes them for a place and the code that was agreed on.
        """
        completed = list(gradients)
        if MISSING in codes:
            agreed = self.agreed()
            for place in zeros_needed(codes, agreed):
                completed[place] = zeros(place, agreed[place])
        return completed


class Remembered(Agreement):
    """An answer of a world before: nothing is submitted."""

    __slots__ = ()

    def __init__(self, agreed: bytes):
        self.own = agreed

    def pending(self) -> Iterator[Operation]:
        """Nothing."""
        return iter(())

    def agreed(self) -> bytes:
        """The answer."""
        return self.own
