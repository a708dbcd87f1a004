"""One step of an optimizer: what this rank has of each gradient, and what all ranks have settled.

``exchange`` changes it as hooks run and rounds end. A step ends with ``step()``, or when its gradients are given up;
after ``synchronize()`` it may be reopened by a further pass.
"""

from ringtrain._training.presence import MISSING, SETTLED, after_round, is_there


class Step:
    """The current step.

    Attributes:
        codes: what this rank has of each gradient: MISSING until a hook completes it, SETTLED when all ranks know what
            becomes of it in this step: it is reduced, or nothing will come.
        closed: whether every gradient is settled on all ranks.
        asked: whether the user has called ``synchronize()`` in it.
        reopened: whether it follows ``synchronize()``: what was reduced may have been clipped since.
        unended: whether no step has come since ``zero_grad()``, or at all; the same on all ranks.
        witness: place of a gradient that was reduced; None if there is none.
    """

    def __init__(self) -> None:
        self.codes = bytearray()
        self.closed = self.asked = self.reopened = False
        self.unended = True
        self.witness: int | None = None
        self._open_count = 0
        self._ready_count = 0

    @property
    def has_all(self) -> bool:
        """Whether this rank has every gradient. Where some are settled, another rank may have opened these again."""
        return self._ready_count == self._open_count == len(self.codes)

    @property
    def is_open(self) -> bool:
        """Whether nothing is settled in it."""
        return self._open_count == len(self.codes)

    @property
    def has_begun(self) -> bool:
        """Whether a hook has completed something of which no round has taken the result."""
        return self._ready_count > 0

    def complete(self, index: int, code: int) -> bool:
        """A hook has completed a gradient; returns ``has_all``."""
        self.codes[index] = code
        self._ready_count += 1
        return self.has_all

    def is_open_elsewhere(self, agreed: bytes) -> bool:
        """Whether another rank has opened again what is settled here, since a pass has added to it there."""
        return not self.is_open and any(mine == SETTLED != code for mine, code in zip(self.codes, agreed, strict=True))

    def settle(self, agreed: bytes, is_last: bool) -> None:
        """A round has reduced what was agreed on; ``is_last`` if what nobody has by now will not come."""
        for index, code in enumerate(agreed):
            if is_there(code) and self.codes[index] != SETTLED:
                self.witness = index
        self.codes = after_round(self.codes, agreed, is_last)
        self._open_count = self.codes.count(MISSING)
        self._ready_count = 0
        self.closed = self._open_count == 0

    def settled(self) -> list[int]:
        """Places of the gradients that are settled."""
        return [index for index, code in enumerate(self.codes) if code == SETTLED]

    def begin(self, count: int, reopened: bool = False) -> None:
        """Opens what is settled again, and further places up to ``count``; what hooks have completed meanwhile stays."""
        reset = bytes(MISSING if code == SETTLED else code for code in self.codes)
        self.codes = bytearray(reset.ljust(count, bytes([MISSING])))
        self._open_count = count
        self.witness = None
        self.reopened = reopened
        self.asked = self.closed = False

    def forget(self) -> None:
        """Opens everything, without what was begun."""
        self.codes = bytearray()
        self._ready_count = 0

    def note_asked(self) -> None:
        """The user has called ``synchronize()``, which has returned."""
        self.asked = True

    def note_end(self) -> None:
        """All ranks have seen the end of this step, or begin another one."""
        self.unended = False

    def note_discarded(self) -> None:
        """The user has set the gradients to zero."""
        self.unended = True
