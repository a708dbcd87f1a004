"""How gradients go backwards through an operation: which operation carries them, and what each rank takes of its result.

The carrier is the column ``adjoint`` of ``native/tables/operations.def``; the rest follows from both rows. The adapters
for frameworks perform it. The factors are Horovod's: an allreduce and an alltoall carry the exact gradient of the sum of
all ranks' losses, an operation that only moves rows but is carried by a reduction its average over the ranks, and one
that reduces but is carried by a gathering of rows ``size`` times the exact one.
"""

import enum
from typing import Any, NamedTuple

from ringtrain._binding import tables
from ringtrain._runtime.operations import Average, Sum
from ringtrain.errors import UnsupportedError


class Takes(enum.Enum):
    """What a rank takes of the carrier's result as the gradient of its input."""

    ALL = "all of it"
    OWN_ROWS = "the rows that it contributed"
    ROOTS = "all of it on the root, zeros elsewhere"


class Adjoint(NamedTuple):
    """The way of the gradients.

    Attributes:
        carrier: the operation that carries them, a row of ``tables.OPERATIONS``.
        averages: the carrier takes the average; else it reduces, if it does, as the operation did.
        scales: the carrier does not reduce, so ``factor`` comes to the gradients by hand.
        takes: what this rank takes of the result.
    """

    carrier: str
    averages: bool
    scales: bool
    takes: Takes


def adjoint_of(operation: str) -> Adjoint:
    """The adjoint of a row of ``tables.OPERATIONS`` that has one."""
    row = tables.OPERATIONS[operation]
    carrier = tables.OPERATIONS[row.adjoint]
    takes = Takes.ROOTS if row.rooted else Takes.OWN_ROWS if row.layout == "kGather" else Takes.ALL
    return Adjoint(carrier.name, carrier.reduces and not row.reduces, row.reduces and not carrier.reduces, takes)


def factor(op: int, prescale: float, postscale: float, size: Any, weighted: bool = False) -> Any:
    """What a gradient is multiplied by where the carrier does not reduce; a rank's share of the weights comes on top.

    ``size`` is a number, or where a graph asks for it when it runs a tensor; so is the result.
    """
    return prescale * postscale * (size if op == Sum or weighted else 1)


def require_linear(operation: str, op: int, advice: str) -> None:
    """Raises UnsupportedError where the gradient of a reduction is none; ``advice`` says what keeps gradients away from it."""
    if op not in (Average, Sum):
        found = tables.REDUCTION_CONSTANTS[tables.REDUCTION_BY_ID[op]]
        raise UnsupportedError(
            f"backward of {operation}: gradients need op Average or Sum, but it is {found}. "
            f"{advice} before the operation."
        )
