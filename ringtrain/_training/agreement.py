"""The agreement of all ranks on something about each gradient: one maximum over bytes, while the gradients travel.

Every rank submits its bytes and goes on; only a rank that cannot do without the answer waits for it. ``rounds`` and the
adapters that reduce a whole step at once make an ``Agreement`` in each step; graphs of TensorFlow make one when they
are traced.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from ringtrain._binding.tensor_memory import as_buffer
from ringtrain._runtime.context import Context
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import ProcessSet
from ringtrain._training.differences import Differences, waited
from ringtrain._training.presence import MISSING, zeros_needed
from ringtrain._training.session import Session
from ringtrain._training.trained import Parameter
from ringtrain.errors import MismatchError, TimeoutError

Gradient = TypeVar("Gradient")
_MEETING_SECONDS = 10.0


@contextmanager
def advised(advice: str) -> Iterator[None]:
    """Around what waits for other ranks: the error, if it is given up, ends with what these have not done."""
    try:
        yield
    except TimeoutError as given_up:
        raise TimeoutError(f"{given_up} {advice}") from None


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

    __slots__ = ("own", "_advice", "_content", "_context", "_name", "_operation")

    def __init__(self, context: Context, process_set: int, name: str, own: bytes, advice: str, waits: bool = False):
        self.own = own
        self._context, self._name = context, name
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
        try:  # what advised() does, in every step
            self._operation.wait()
        except TimeoutError as given_up:
            raise TimeoutError(f"{given_up} {self._advice}") from None
        return bytes(self._content)

    def meet(self, process_set: ProcessSet, trained: Callable[[], Sequence[Parameter]]) -> None:
        """The first time under this name in a world: waits for the other ranks, for ``_MEETING_SECONDS`` at most.

        So a layer that one rank has frozen is named before anybody waits for its gradients. Ranks that never come, as where one
        traces a graph alone, are told of by whoever needs them. In an elastic job ranks come to a world's first step at other times.

        Args:
            process_set: the ranks.
            trained: lists the parameters that the bytes are of.

        Raises:
            MismatchError: ranks have other numbers of parameters; the same on all of them.
        """
        context, key = self._context, (process_set.process_set_id, self._name)
        if key in context.met:
            return
        context.met.add(key)
        if context.explain is not None:
            return
        try:
            self._operation.wait(_MEETING_SECONDS)
        except TimeoutError:
            pass
        except MismatchError:
            told = Differences(Session(process_set), self._name, stem_of(self._name))
            waited(told.require_trained(trained()))
            raise

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


def stem_of(name: str) -> str:
    """What the names of gradients begin with, from that of the first one, or of what is named after it.

    Example:
        >>> stem_of("optimizer.0.0.dense/kernel.present")
        'optimizer.0'
    """
    return name.rpartition(".0.")[0] or name.removesuffix(".present")


class Remembered(Agreement):
    """An answer of a world before: nothing is submitted."""

    __slots__ = ()

    def __init__(self, agreed: bytes):
        self.own = agreed

    def pending(self) -> Iterator[Operation]:
        """Nothing."""
        return iter(())

    def meet(self, process_set: ProcessSet, trained: Callable[[], Sequence[Parameter]]) -> None:
        """Nobody else comes."""

    def agreed(self) -> bytes:
        """The answer."""
        return self.own
