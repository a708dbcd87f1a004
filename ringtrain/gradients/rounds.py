"""Rounds: ranks agree again and again, within a step and from step to step, on which gradients there are.

For optimizers whose gradients come one by one. A round begins with one ``Agreement`` over a code for each parameter,
and then every rank sends what any rank has. With the codes each rank tells whether more may follow in the same step,
and how often it has stepped since the last round, as a count and as its complement: the maxima of both tell every rank
whether all counts are the same. Only when they are not, the ranks tell each other who has which.
"""

import enum
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ringtrain.buffers import as_buffer
from ringtrain.checks import named_ranks
from ringtrain.errors import MismatchError
from ringtrain.gradients.agreement import Agreement
from ringtrain.gradients.session import Session
from ringtrain.pending import Operation

_LARGEST = 255
_STEP_BYTES = 2
_UNKNOWN_STEPS = bytes(_STEP_BYTES)  # counts for nothing in a maximum

_WHO_IS_MISSING = (
    "With it the ranks agree which gradients of this optimizer there are: those that submitted it have gradients for it, "
    "the missing ones came neither to the end of a backward pass that reaches its parameters nor to its step(). Run as many "
    "passes and steps on every rank; with several optimizers over one model, let each pass reach those of all of them, "
    "if need be with zero times what is unused, or put their parameters into groups of one optimizer."
)


class Stage(enum.Enum):
    """Why a rank holds a round."""

    PASS_ENDED = "more passes may follow in this step"
    CLOSING = "this rank steps next"
    DISCARDING = "this rank gives up the step's gradients"


class Said(NamedTuple):
    """What one rank, or any rank, says in a round.

    Attributes:
        codes: one of ``presence`` for each parameter.
        more_may_follow: whether more gradients may come in the same step after this round.
    """

    codes: bytes
    more_may_follow: bool

    def is_last(self, stage: Stage) -> bool:
        """Whether the step ends with this round: then what nobody has by now will not come."""
        return stage is not Stage.PASS_ENDED and not self.more_may_follow


class Rounds:
    """The rounds of one optimizer.

    Args:
        session: the rank that it acts for.
        name: of the maximum; unique among the optimizers of the process set.

    Attributes:
        announced: what this rank has said in the round under way; None between rounds.
    """

    def __init__(self, session: Session, name: str):
        self.announced: Said | None = None
        self._session, self._name = session, name
        self._steps: int | None = None  # since the last round; None before the first one, and after one that failed
        self._agreement: Agreement | None = None

    def announce(self, codes: bytes | bytearray, stage: Stage) -> Said:
        """Begins a round: says what this rank has."""
        said = Said(bytes(codes), stage is Stage.PASS_ENDED)
        content = encoded(said, self._steps)
        session = self._session
        self._agreement = Agreement(session.context, session.process_set_id, self._name, content, _WHO_IS_MISSING)
        self.announced = said
        return said

    def answer(self) -> Generator[Operation, None, Said]:
        """Yields the operation while it is under way, and returns what any rank has ``Said``.

        Raises:
            TimeoutError: it was given up; the text says what the missing ranks have not done.
        """
        agreement = self._under_way
        yield from agreement.pending()
        return decoded(agreement.agreed())

    @property
    def _under_way(self) -> Agreement:
        assert self._agreement is not None, "announce() begins a round"
        return self._agreement

    def require_equal_steps(self) -> Iterator[Operation]:
        """After ``answer``, when all that was agreed on has travelled: no rank waits for what another one refuses to send.

        Raises:
            MismatchError: some ranks have stepped more often than others since the last round; the same on all ranks.
        """
        if not counts_are_equal(self._under_way.agreed()):
            yield from self._refuse_steps()

    def note_step(self) -> None:
        """This rank has stepped."""
        if self._steps is not None:
            self._steps += 1

    def succeed(self) -> None:
        """Ends the round; the ranks are together here, and steps are counted from now on."""
        self.forget()
        self._steps = 0

    def forget(self) -> None:
        """Gives the round up; an operation under way keeps its memory until it is done."""
        self.announced = self._agreement = None

    def forget_steps(self) -> None:
        """From here on this rank cannot tell how often the others have stepped: its count says nothing until a round."""
        self._steps = None

    def _refuse_steps(self) -> Iterator[Operation]:
        """Raises the error; all ranks have seen the same maxima and so come here together."""
        context = self._session.context
        own = as_buffer(np.array([[context.rank, -1 if self._steps is None else self._steps]]))
        name = f"{self._name}.steps"
        operation = context.submit("allgather", name, [own], [None], process_set=self._session.process_set_id)
        while not operation.finished():
            yield operation
        operation.wait()
        memory, _, shape = operation.allocated()
        counts = np.frombuffer(memory, np.int64).reshape(shape).tolist()
        raise MismatchError(unequal_steps(self._name.rpartition(".")[0], map(tuple, counts)))


def encoded(said: Said, steps: int | None) -> bytes:
    """The bytes of which the maximum is taken.

    Behind the codes the steps, so that the maximum of the count and that of its complement add up to the largest byte
    only if all counts are equal.
    """
    count = _UNKNOWN_STEPS if steps is None else bytes([steps % _LARGEST, _LARGEST - steps % _LARGEST])
    return b"%b%c%b" % (said.codes, said.more_may_follow, count)


def decoded(agreed: bytes) -> Said:
    """What any rank has said."""
    return Said(agreed[: -_STEP_BYTES - 1], bool(agreed[-_STEP_BYTES - 1]))


def counts_are_equal(agreed: bytes) -> bool:
    """Whether all ranks that know how often they have stepped have stepped equally often."""
    most, complement_of_least = agreed[-_STEP_BYTES:]
    return most + complement_of_least in (0, _LARGEST)


def unequal_steps(optimizer: str, counts: Iterable[tuple[int, int]]) -> str:
    """The error's text, from pairs of a rank and its steps, which are negative where it does not know."""
    ranks_by_count: dict[int, list[int]] = {}
    for rank, count in sorted(counts):
        ranks_by_count.setdefault(count, []).append(rank)
    found = " and ".join(f"{count} on {named_ranks(ranks)}" for count, ranks in ranks_by_count.items() if count >= 0)
    return (
        f"step '{optimizer}': the number of steps since gradients were last reduced must be the same on all ranks, but "
        f"is {found}. The parameters of these ranks differ now. Call step() on every rank or on none: decide by what all "
        "ranks know, such as a reduced loss. Then start again from a checkpoint, or broadcast parameters and the "
        "optimizer's state."
    )
