"""Rounds: ranks agree again and again, within a step and from step to step, on which gradients there are.

For optimizers whose gradients come one by one. A round begins with one ``Agreement`` over a code for each parameter,
and then every rank sends what any rank has. With the codes each rank tells whether more may follow in the same step,
and how often it has stepped since the last round, as a count and as its complement: the maxima of both tell every rank
whether all counts are the same. Only when they are not, the ranks tell each other who has which. Likewise with a digest
of the terms that all must have set alike, and with those of the ``drift.ComparedReplica``.
"""

import enum
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ringtrain._runtime.pending import Operation
from ringtrain._training import terms as words
from ringtrain._training.adapter.checks import hashed
from ringtrain._training.agreement import Agreement
from ringtrain._training.differences import Differences, waited
from ringtrain._training.drift import NOTHING, ComparedReplica, Told
from ringtrain._training.presence import parted
from ringtrain._training.session import Session
from ringtrain._training.trained import Parameter, digest_of
from ringtrain.errors import MismatchError, RingtrainError

_LARGEST = 255
_FLAGS = 4
# What must be the same on all ranks, in so many bytes. Each goes with its complement; where it is not known both are zeros,
# which count for nothing in a maximum.
_COMPARED = {"steps": 1, "terms": 4, "trained": 4, "settings": 4, "last settings": 4, "parameters": 8}
BYTES_BEHIND_CODES = _FLAGS + 2 * sum(_COMPARED.values())
_PLACES = accumulate((2 * size for size in _COMPARED.values()), initial=_FLAGS - BYTES_BEHIND_CODES)
_MASKS = {size: (1 << 8 * size) - 1 for size in _COMPARED.values()}
_BEGINS = dict(zip(_COMPARED, _PLACES, strict=False))  # counted from the end

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
        compares_next: whether parameters are to be compared in the next round.
        is_exact: whether the gradients of the step under way are not to be compressed.
    """

    codes: bytes
    more_may_follow: bool
    compresses_next: bool = False
    compares_next: bool = False
    is_exact: bool = False

    def is_last(self, stage: Stage) -> bool:
        """Whether the step ends with this round: then what nobody has by now will not come."""
        return stage is not Stage.PASS_ENDED and not self.more_may_follow


class Rounds:
    """The rounds of one optimizer.

    Args:
        session: the rank that it acts for.
        name: of the maximum; unique among the optimizers of the process set.
        terms: what all ranks must have set alike.
        replica: what must be the same on all ranks from step to step; None if nothing must.
        comes_alike: whether each round begins at the same place of the program on all ranks; else only one that ends a
            backward pass does.
        trained: lists the parameters that the codes are of, frozen ones too; None where that is not compared.

    Attributes:
        announced: what this rank has said in the round under way; None between rounds.
    """

    def __init__(
        self, session: Session, name: str, terms: Mapping[str, object] | None = None,
        replica: ComparedReplica | None = None, comes_alike: bool = False,
        trained: Callable[[], Sequence[Parameter]] | None = None,
    ):  # fmt: skip
        self.announced: Said | None = None
        self._replica, self._comes_alike, self._trained = replica, comes_alike, trained
        self._listed: tuple[int, bytes] = 0, b""  # of how many parameters, and what tells their list
        self._frozen: bytes | None = b""  # of the parameters that were announced last, where that is known
        self._told_trained: tuple[bytes, int] = b"", 0  # most steps have the parameters of the one before
        self._session, self._name = session, name
        self._differences = Differences(session, name, name.rpartition(".")[0])
        self._terms = words.encoded(terms or {})
        self._steps: int | None = None  # since the last round; None before the first one, and after one that failed
        self._joins = session.context.joins
        self._agreement: Agreement | None = None

    def announce(
        self, codes: bytes | bytearray, stage: Stage, compresses_next: bool = False, waits: bool = False,
        is_exact: bool = False,
    ) -> Said:  # fmt: skip
        """Begins a round: says what this rank has; ``waits`` if this thread waits for the round's operations next."""
        if self._joins != self._session.context.joins:  # the others may have stepped since
            self._joins = self._session.context.joins
            self.forget_steps()
        told = NOTHING
        if self._replica is not None:
            told = self._replica.tell(self._comes_alike or stage is Stage.PASS_ENDED)
        own, self._frozen = parted(bytes(codes))
        said = Said(own, stage is Stage.PASS_ENDED, compresses_next, told.asks, is_exact)
        content = encoded(said, self._steps, self._terms, told, self._digest_of_trained(len(own)))
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
        try:
            return decoded(agreement.agreed())
        except MismatchError as problem:
            if self._has_other_length(problem):
                yield from self._require_trained()
            raise

    def wait_for_answer(self) -> Said:
        """``answer`` for those who have nothing else to do meanwhile."""
        return waited(self.answer())

    def lists_differ(self, waits: bool = False) -> bool:
        """Whether it is known by now, or once the answer is there, that ranks have other parameters: some would wait for ever."""
        agreement = self._under_way
        if not waits and any(True for _ in agreement.pending()):
            return False
        try:
            return not are_equal("trained", agreement.agreed())
        except MismatchError as problem:
            return self._has_other_length(problem)
        except RingtrainError:
            return False

    def _has_other_length(self, problem: MismatchError) -> bool:
        """Whether ranks have announced other numbers of parameters; all that have announced any know that."""
        return self._trained is not None and ": shape " in str(problem)

    def _require_trained(self) -> Generator[Operation, None, None]:
        assert self._trained is not None
        listed = self._trained()
        own = [
            each for each, is_frozen in zip(listed, self._frozen or bytes(len(listed)), strict=True) if not is_frozen
        ]
        compared_by = "" if self._replica is None else self._replica.called.wrapper
        yield from self._differences.require_trained(own, compared_by)

    def _digest_of_trained(self, count: int) -> int | None:
        """Of so many parameters, and of those of them that are frozen, where replicas are compared; None where that is not known."""
        if self._trained is None or self._frozen is None:
            return None
        if self._listed[0] != count:
            self._listed = count, b"%d" % digest_of(self._trained())
        told = self._listed[1] + (b"" if self._replica is None else self._frozen)
        if told != self._told_trained[0]:
            self._told_trained = told, hashed(told)
        return self._told_trained[1]

    @property
    def _under_way(self) -> Agreement:
        assert self._agreement is not None, "announce() begins a round"
        return self._agreement

    def require_equal(self) -> Generator[Operation, None, None]:
        """After ``answer``, when all that was agreed on has travelled: no rank waits for what another one refuses to send.

        Raises:
            MismatchError: ranks have other terms, settings or parameters, train others, or some have stepped more often than
                others since the last round; the same on all ranks.
        """
        agreed, replica = self._under_way.agreed(), self._replica
        if not are_equal("trained", agreed):
            yield from self._require_trained()
        if not are_equal("terms", agreed):
            yield from self._differences.refuse_terms(self._terms)
        if not are_equal("steps", agreed):
            yield from self._differences.refuse_steps(self._steps)
        if replica is None:
            return
        replica.hear(decoded(agreed).compares_next)
        if not are_equal("settings", agreed):
            yield from self._differences.refuse_settings(replica.shown.settings or {}, "is", replica.called)
        if not are_equal("last settings", agreed):
            yield from self._differences.refuse_settings(
                replica.shown.last_settings or {}, "was in the last step", replica.called
            )
        if not are_equal("parameters", agreed):
            replica.compares = yield from self._differences.judge_parameters(replica)

    def note_step(self) -> None:
        """This rank has stepped."""
        if self._steps is not None:
            self._steps += 1
        if self._replica is not None:
            self._replica.note_step()

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
        if self._replica is not None:
            self._replica.forget_step()


def encoded(
    said: Said, steps: int | None, terms: bytes = b"", told: Told = NOTHING, trained: int | None = None
) -> bytes:
    """The bytes of which the maximum is taken.

    Behind the codes what must be the same, so that the maximum of a byte and that of its complement add up to the largest
    byte only if all are equal.
    """
    count = None if steps is None else steps % _LARGEST
    values = (count, hashed(terms), trained, told.settings, told.last_settings, told.parameters)
    compared = map(_with_complement, values, _COMPARED.values())
    return b"%b%c%c%c%c%b" % (said.codes, *said[1:], b"".join(compared))


def _with_complement(value: int | None, size: int) -> bytes:
    if value is None:
        return bytes(2 * size)
    own = value & _MASKS[size]
    return (own | (own ^ _MASKS[size]) << 8 * size).to_bytes(2 * size, "little")


def decoded(agreed: bytes) -> Said:
    """What any rank has said."""
    return Said(agreed[:-BYTES_BEHIND_CODES], *map(bool, agreed[-BYTES_BEHIND_CODES:][:_FLAGS]))


def are_equal(what: str, agreed: bytes) -> bool:
    """Whether all ranks that know this row of what is compared have the same there."""
    begin, size = _BEGINS[what], _COMPARED[what]
    both = int.from_bytes(agreed[begin:][: 2 * size], "little")
    most, complement_of_least = both & _MASKS[size], both >> 8 * size
    return not both or most ^ complement_of_least == _MASKS[size]
