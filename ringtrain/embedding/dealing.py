"""Which rank owns a row of a table, and where the row lies there. Pure."""

import dataclasses

import numpy as np

from ringtrain._runtime.arguments import check_among
from ringtrain.errors import InvalidArgumentError

KINDS = ("modulo", "blocks")
_MOST_ROWS = 2**31 - 2  # of one rank: places travel in 32 bits, and one row more may be kept


@dataclasses.dataclass(frozen=True, slots=True)
class Dealing:
    """How the rows of a table are dealt over the ranks.

    Args:
        rows: of the whole table.
        ranks: that share them; a rank here is a place in the process set.
        kind: ``"modulo"``: row ``i`` belongs to rank ``i % ranks``, so that neighbours, which are often equally hot, are
            spread; ``"blocks"``: rank ``k`` has the k-th run of ``ceil(rows / ranks)`` rows.

    Raises:
        InvalidArgumentError: no such kind, no rows, or more than 2**31 - 2 on one rank.
    """

    rows: int
    ranks: int
    kind: str = "modulo"

    def __post_init__(self) -> None:
        demand = f"embedding: dealing must be one of {', '.join(KINDS)}"
        check_among(demand, self.kind, KINDS, "Leave it out for modulo")
        if not isinstance(self.rows, int) or self.rows < 1:
            raise InvalidArgumentError(f"embedding: a table must have a row at least, but has {self.rows!r}.")
        if self.block > _MOST_ROWS:
            raise InvalidArgumentError(
                f"embedding: a rank must have at most {_MOST_ROWS} rows of a table, but would have {self.block}. "
                "Use more ranks."
            )

    @property
    def block(self) -> int:
        """The most rows that a rank has."""
        return -(-self.rows // self.ranks)

    def owners(self, ids: np.ndarray) -> np.ndarray:
        """The rank that owns each row, of the dtype of ``ids``."""
        return ids % self.ranks if self.kind == "modulo" else ids // self.block

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Where each row lies at its owner."""
        return ids // self.ranks if self.kind == "modulo" else ids % self.block

    def keys(self, ids: np.ndarray) -> np.ndarray:
        """Numbers that order rows by their owner and then by their place: ``owner * block + place``, int64."""
        return ids % self.ranks * self.block + ids // self.ranks if self.kind == "modulo" else ids

    def count(self, rank: int) -> int:
        """How many rows a rank has."""
        if self.kind == "modulo":
            return (self.rows - rank + self.ranks - 1) // self.ranks
        return max(0, min(self.block, self.rows - rank * self.block))

    def ids(self, rank: int | np.ndarray, places: np.ndarray) -> np.ndarray:
        """The rows that lie at some places of a rank, or each of its own one, int64."""
        places = places.astype(np.int64, copy=False)
        return places * self.ranks + rank if self.kind == "modulo" else places + rank * self.block

    def ids_of(self, rank: int) -> slice:
        """All rows of a rank, in the order of their places, as a slice of the whole table."""
        if self.kind == "modulo":
            return slice(rank, self.rows, self.ranks)
        return slice(rank * self.block, rank * self.block + self.count(rank))
