"""Rounds: ranks agree again and again, within a step and from step to step, on which gradients there are.

For optimizers whose gradients come one by one. A round begins with one ``Agreement`` over a code for each parameter,
and then every rank sends what any rank has. With the codes each rank tells whether more may follow in the same step,
and how often it has stepped since the last round, as a count and as its complement: the maxima of both tell every rank
whether all counts are the same. Only when they are not, the ranks tell each other who has which. Likewise with a digest
of the terms that all must have set alike.
"""

import enum
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ringtrain.buffers import as_buffer
from ringtrain.checks import named_ranks
from ringtrain.errors import MismatchError
from ringtrain.gradients import terms as words
from ringtrain.gradients.agreement import Agreement
from ringtrain.gradients.session import Session
from ringtrain.pending import Operation

_LARGEST = 255
_STEP_BYTES = 2
_UNKNOWN_STEPS = bytes(_STEP_BYTES)  # counts for nothing in a maximum
_DIGEST_BYTES = 4
_TAIL_BYTES = 2 + _STEP_BYTES + 2 * _DIGEST_BYTES  # behind the codes

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
        compresses_next: whether the step after this one is to compress its gradients, having had enough exact ones.
    """

    codes: bytes
    more_may_follow: bool
    compresses_next: bool = False

    def is_last(self, stage: Stage) -> bool:
        """Whether the step ends with this round: then what nobody has by now will not come."""
        return stage is not Stage.PASS_ENDED and not self.more_may_follow


class Rounds:
    """The rounds of one optimizer.

    Args:
        session: the rank that it acts for.
        name: of the maximum; unique among the optimizers of the process set.
        terms: what all ranks must have set alike.

    Attributes:
        announced: what this rank has said in the round under way; None between rounds.
    """

    def __init__(self, session: Session, name: str, terms: Mapping[str, Any] | None = None):
        self.announced: Said | None = None
        self._session, self._name = session, name
        self._terms = words.encoded(terms or {})
        self._steps: int | None = None  # since the last round; None before the first one, and after one that failed
        self._agreement: Agreement | None = None

    def announce(
        self, codes: bytes | bytearray, stage: Stage, compresses_next: bool = False, waits: bool = False
    ) -> Said:
        """Begins a round: says what this rank has; ``waits`` if this thread waits for the round's operations next."""
        said = Said(bytes(codes), stage is Stage.PASS_ENDED, compresses_next)
        content = encoded(said, self._steps, self._terms)
        session = self._session
        self._agreement = Agreement(
            session.context, session.process_set_id, self._name, content, _WHO_IS_MISSING, waits
        )
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

    def wait_for_answer(self) -> Said:
        """``answer`` for those who have nothing else to do meanwhile."""
        return decoded(self._under_way.agreed())

    @property
    def _under_way(self) -> Agreement:
        assert self._agreement is not None, "announce() begins a round"
        return self._agreement

    def require_equal(self) -> Iterator[Operation]:
        """After ``answer``, when all that was agreed on has travelled: no rank waits for what another one refuses to send.

        Raises:
            MismatchError: ranks have other terms, or some have stepped more often than others since the last round; the
                same on all ranks.
        """
        said = self._under_way.agreed()
        if not terms_are_equal(said):
            yield from self._refuse_terms()
        if not counts_are_equal(said):
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
        own = np.array([[self._session.context.rank, -1 if self._steps is None else self._steps]])
        counts = (yield from self._gathered("steps", own)).tolist()
        raise MismatchError(unequal_steps(self._name.rpartition(".")[0], map(tuple, counts)))

    def _refuse_terms(self) -> Iterator[Operation]:
        """The same for terms."""
        own = np.array([[self._session.context.rank, len(self._terms)]])
        rows = (yield from self._gathered("terms.sizes", own)).tolist()
        everything = (yield from self._gathered("terms", np.frombuffer(self._terms, np.uint8))).tobytes()
        raise MismatchError(unequal_terms(self._name.rpartition(".")[0], rows, everything))

    def _gathered(self, what: str, own: np.ndarray) -> Generator[Operation, None, np.ndarray]:
        """The rows of all ranks, in rank order; yields the operation while it is under way."""
        context, process_set = self._session.context, self._session.process_set_id
        name = f"{self._name}.{what}"
        operation = context.submit("allgather", name, [as_buffer(own)], [None], process_set=process_set)
        while not operation.finished():
            yield operation
        operation.wait()
        memory, _, shape = operation.allocated()
        return np.frombuffer(memory, own.dtype).reshape(shape)


def encoded(said: Said, steps: int | None, terms: bytes = b"") -> bytes:
    """The bytes of which the maximum is taken.

    Behind the codes the steps, so that the maximum of the count and that of its complement add up to the largest byte
    only if all counts are equal; and so the digest of the terms.
    """
    count = _UNKNOWN_STEPS if steps is None else bytes([steps % _LARGEST, _LARGEST - steps % _LARGEST])
    digest = words.digest(terms).to_bytes(8, "little")[:_DIGEST_BYTES]
    complement = bytes(_LARGEST - each for each in digest)
    return b"%b%c%c%b%b%b" % (said.codes, said.more_may_follow, said.compresses_next, count, digest, complement)


def decoded(agreed: bytes) -> Said:
    """What any rank has said."""
    tail = agreed[-_TAIL_BYTES:]
    return Said(agreed[:-_TAIL_BYTES], bool(tail[0]), bool(tail[1]))


def counts_are_equal(agreed: bytes) -> bool:
    """Whether all ranks that know how often they have stepped have stepped equally often."""
    most, complement_of_least = agreed[2 - _TAIL_BYTES :][:_STEP_BYTES]
    return most + complement_of_least in (0, _LARGEST)


def terms_are_equal(agreed: bytes) -> bool:
    """Whether all ranks have the same terms."""
    digests = agreed[-2 * _DIGEST_BYTES :]
    return all(
        most + complement_of_least == _LARGEST
        for most, complement_of_least in zip(digests[:_DIGEST_BYTES], digests[_DIGEST_BYTES:], strict=True)
    )


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


def unequal_terms(optimizer: str, sizes: Iterable[tuple[int, int]], everything: bytes) -> str:
    """The error's text, from pairs of a rank and the length of its terms, and the terms of all, one behind the other."""
    theirs, first = [], 0
    for rank, size in sizes:
        theirs.append((rank, words.decoded(everything[first : first + size])))
        first += size
    term, values = words.difference(theirs) or ("", "")
    return (
        f"step '{optimizer}': {term} must be the same on all ranks, but is {values}. Make the optimizer with the same "
        "arguments on every rank."
    )
