"""The native library's tables as Python values: dtypes, operations and more.

Each row exists once, in ``native/tables/*.def``; this module reads the text that the library was compiled with.
"""

from typing import NamedTuple

from ringtrain._binding import _native

_BFLOAT, _FIRST_OF_8_BITS = 4, 10  # DLPack's codes


class DType(NamedTuple):
    """An element type. ``dlpack_code`` and ``dlpack_bits`` are its name in DLPack."""

    id: int
    name: str
    bytes: int
    dlpack_code: int
    dlpack_bits: int

    @property
    def is_foreign(self) -> bool:
        """Whether NumPy has no such type of its own: bfloat16, and the floats of 8 bits, which ``ml_dtypes`` adds."""
        return self.dlpack_code == _BFLOAT or self.is_moved_only

    @property
    def is_moved_only(self) -> bool:
        """Whether operations that reduce refuse it."""
        return self.dlpack_code >= _FIRST_OF_8_BITS

    @property
    def carrier(self) -> str:
        """NumPy's type that holds such elements: the type itself, or whole numbers of its size."""
        return f"uint{8 * self.bytes}" if self.is_foreign else self.name


class OperationCode(NamedTuple):
    """A collective operation.

    ``layout`` says which rows a member contributes and receives, ``kNone`` for an operation without data. ``adjoint`` is
    the operation that carries gradients backwards, "" where there is none.
    """

    id: int
    name: str
    reduces: bool
    rooted: bool
    layout: str
    fuses: bool
    adjoint: str


class Attribute(NamedTuple):
    """An attribute of a request: a field of the C struct ``rt_request``.

    ``kind`` is that of its values; ``scope`` says for which operations it counts: ``kReduces`` or ``kRooted``.
    """

    name: str
    kind: str
    initial: float
    scope: str


class Counter(NamedTuple):
    """A counter of a context."""

    id: int
    name: str
    sentence: str


class Option(NamedTuple):
    """An option of a context.

    ``lowest`` holds the choices of a ``kChoice``; ``agrees`` is "1" where all ranks must have the same value; ``horovod``
    is Horovod's variable or "".
    """

    name: str
    type: str
    initial: str
    lowest: str
    highest: str
    agrees: str
    horovod: str
    sentence: str

    @property
    def variable(self) -> str:
        """The environment variable of this option."""
        return "RINGTRAIN_" + self.name.upper()


def _dtype(row: list[str]) -> DType:
    return DType(int(row[0]), row[1], int(row[2]), int(row[3]), int(row[4]))


def _operation(row: list[str]) -> OperationCode:
    identity, name, reduces, rooted, layout, fuses, adjoint = row
    return OperationCode(
        id=int(identity),
        name=name,
        reduces=reduces == "1",
        rooted=rooted == "1",
        layout=layout,
        fuses=fuses == "1",
        adjoint=adjoint,
    )


DTYPES: dict[str, DType] = {row[1]: _dtype(row) for row in _native.table("dtypes")}
OPERATIONS: dict[str, OperationCode] = {row[1]: _operation(row) for row in _native.table("operations")}
ATTRIBUTES: dict[str, Attribute] = {
    row[0]: Attribute(row[0], row[1], float(row[2]), row[3]) for row in _native.table("attributes")
}
COMPRESSIONS: dict[str, int] = {row[1]: int(row[0]) for row in _native.table("compressions")}
# By a row that makes up for what it has lost: the same one that does not.
WITHOUT_FEEDBACK = {
    name.removesuffix(" without feedback"): name for name in COMPRESSIONS if name.endswith(" without feedback")
}
REDUCTIONS: dict[str, int] = {row[1]: int(row[0]) for row in _native.table("reductions")}
STATUS: dict[str, int] = {row[1]: int(row[0]) for row in _native.table("status")}
COUNTERS: list[Counter] = [Counter(int(row[0]), row[1], row[2]) for row in _native.table("counters")]
OPTIONS: list[Option] = [Option(*row) for row in _native.table("options")]

OPTION_BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}
DTYPE_BY_ID: dict[int, DType] = {dtype.id: dtype for dtype in DTYPES.values()}
REDUCTION_BY_ID: dict[int, str] = {identity: name for name, identity in REDUCTIONS.items()}
# As users write them: "PerItem" of "peritem".
REDUCTION_CONSTANTS: dict[str, str] = {row[1]: row[2].removeprefix("k") for row in _native.table("reductions")}
