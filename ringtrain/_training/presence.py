"""Which gradients of a step there are, on this rank and on any: what ranks say about them, and what follows. Pure.

Ranks may run different branches of a model, so a gradient may come on some ranks only. One process with the batches of
all ranks would count zeros for the others, and would leave alone what nobody used. So in every adapter:

| this rank has it | another rank has it | the gradient that this rank is left with |
|---|---|---|
| yes | yes or no | reduced; a rank without one counts zeros |
| no | yes | reduced; this rank counts zeros |
| no | no | None, so that weight decay and momentum leave the parameter alone |

No rank can see alone what the others have. Each says a code for each gradient, and the greatest over the ranks counts.
"""

from collections.abc import Sequence

# What a rank says about a gradient; the order decides what a rank that lacks it has zeros of. SETTLED: nothing will come,
# or it is reduced already. SPARSE: rows with indices of so many bits.
SETTLED, MISSING, SPARSE_32, SPARSE_64, DENSE = range(5)
FROZEN = 8  # beside one of these, of a parameter that this rank does not train, whatever lies in its gradient
_CODES = bytes(code % FROZEN for code in range(256))
_IS_FROZEN = bytes(code >= FROZEN for code in range(256))


def is_there(code: int) -> bool:
    """Whether the code is that of a gradient that is to be reduced."""
    return code > MISSING


def parted(codes: bytes) -> tuple[bytes, bytes | None]:
    """Codes without FROZEN; and of each whether that was beside it, or nothing if it was beside none.

    None in place of that within a step, where what is frozen may be settled already.
    """
    frozen = codes.translate(_IS_FROZEN)
    if True not in frozen:
        return codes, None if SETTLED in codes else b""
    return codes.translate(_CODES), None if SETTLED in codes else frozen


def zeros_needed(own: Sequence[int], agreed: Sequence[int]) -> list[int]:
    """Places of the gradients that another rank has and this one lacks."""
    return [place for place, code in enumerate(agreed) if is_there(code) and not is_there(own[place])]


def nobodys(agreed: Sequence[int]) -> list[int]:
    """Places of the gradients that no rank has: they stay None, and nothing is sent for them."""
    return [place for place, code in enumerate(agreed) if not is_there(code)]


def after_round(own: bytes | bytearray, agreed: bytes, is_last: bool) -> bytearray:
    """The codes with which a rank goes on when a round has reduced what was agreed on.

    Args:
        own: what this rank has in the step, reduced parts as SETTLED.
        agreed: what any rank has.
        is_last: whether what nobody has by now will not come in this step.
    """
    stays_open = bytes([MISSING]) if not is_last else b""
    return bytearray(
        MISSING if code in stays_open and mine != SETTLED else SETTLED for mine, code in zip(own, agreed, strict=True)
    )
