"""Gradients of a rank's rows that wait for an update: their sums by place, of one backward pass or of several. Pure."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """What has come.

    Attributes:
        places: of the rows that have a gradient, int64, ascending and each once.
        values: (places, width).
        passes: that are added up here.
        finite: whether all ranks' gradients were, in every pass.
    """

    places: np.ndarray
    values: np.ndarray
    passes: int = 1
    finite: bool = True

    def divided(self, divisor: float) -> "Waiting":
        """The gradients over a number, in their dtype."""
        if divisor == 1:
            return self
        return dataclasses.replace(self, values=self.values / self.values.dtype.type(divisor))

    def up_to(self, count: int) -> "Waiting":
        """Those of the first rows alone."""
        number = int(np.searchsorted(self.places, count))
        return dataclasses.replace(self, places=self.places[:number], values=self.values[:number])

    def dense(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """A line for each of so many rows: its gradient, (count, width), and whether it has one, (count, 1)."""
        values = np.zeros((count, self.values.shape[1]), self.values.dtype)
        has = np.zeros((count, 1), np.uint8)
        values[self.places], has[self.places] = self.values, 1
        return values, has

    @property
    def square(self) -> float:
        """The sum of all squares; infinite if a gradient of any rank was not finite."""
        return float(np.square(self.values, dtype=np.float64).sum()) if self.finite else float("inf")


def nothing(width: int, dtype: np.dtype) -> Waiting:
    """What waits before anything has come."""
    return Waiting(np.zeros(0, np.int64), np.zeros((0, width), dtype), passes=0)


def together(earlier: Waiting, later: Waiting) -> Waiting:
    """Both, added up for each place, the earlier one first."""
    if not earlier.passes:
        return later
    places = np.union1d(earlier.places, later.places)
    values = np.zeros((len(places), later.values.shape[1]), later.values.dtype)
    for each in (earlier, later):
        values[np.searchsorted(places, each.places)] += each.values
    return Waiting(places, values, earlier.passes + later.passes, earlier.finite and later.finite)
