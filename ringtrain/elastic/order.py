"""What is left of an epoch's order of samples, and how it is dealt, window by window. Pure; the same on all ranks.

Position n of what is left goes to rank n modulo the number of ranks (``SampleOrder``), or so within each batch
(``batches``). A window that is released takes what was dealt in it, but for the shares of ranks that were lost before they
could contribute: these come back, and are dealt first.

A rank may draw for later windows, as a loader does that has worker processes. That binds nobody: what is in no window is
given up when another dealing begins, and dealt there. So ranks may have drawn ahead by different amounts.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence


class Order(ABC):
    """The positions 0, 1, … of an epoch, which ranks draw in equal numbers of draws; what a draw has, a subclass says.

    Args:
        count: of positions.
        next_position: the first that was never dealt.
        given_back: positions before it that are to be dealt again, ascending.

    Attributes:
        next_position, given_back: as of the last window that was released.
        size, place: ranks among which the open window is dealt, and this rank's number among them.
        taken: draws that each of them has in it.
        drawn: draws of this rank since the last window that was released; more than ``taken`` if it has drawn ahead.
    """

    def __init__(self, count: int, next_position: int = 0, given_back: Sequence[int] = ()):
        self.next_position = next_position
        self.given_back = list(given_back)
        self.size, self.place, self.taken, self.drawn = 1, 0, 0, 0
        self._count = count

    @property
    def left(self) -> int:
        """Positions that no released window has taken."""
        return len(self.given_back) + self._count - self.next_position

    @property
    @abstractmethod
    def draws_left(self) -> int:
        """Draws that each rank will still have in a window, if nothing changes."""

    @abstractmethod
    def _dealt_in(self, draws: int) -> int:
        """Positions that so many draws have on all ranks together: the first ones of those that are left."""

    @abstractmethod
    def _is_in(self, index: int, contributors: Collection[int]) -> bool:
        """Whether one of what was left has been brought by these places."""

    def deal(self, size: int, place: int) -> None:
        """Deals to so many ranks from here on; where nothing is taken."""
        if (size, place) != (self.size, self.place):
            self.forget_ahead()
        self.size, self.place = size, place

    def forget_ahead(self) -> None:
        """Gives up what was drawn for later windows, which will be drawn again."""
        self.drawn = self.taken

    def take(self, count: int) -> int:
        """So many more of the draws that were made ahead are in the open window, the earliest first; how many positions they have."""
        self.taken += count
        return count

    def release(self, contributors: Collection[int] | None = None) -> None:
        """The window is released: what was dealt in it is done.

        Args:
            contributors: places whose samples are in it; None for all.
        """
        taken = self._dealt_in(self.taken)
        lost = [
            self._at(index)
            for index in range(taken)
            if contributors is not None and not self._is_in(index, contributors)
        ]
        again = min(taken, len(self.given_back))
        self.given_back = sorted([*lost, *self.given_back[again:]])
        self.next_position += taken - again
        self.drawn -= self.taken
        self.taken = 0
        if lost:  # what is left begins with them now
            self.forget_ahead()

    def _at(self, index: int) -> int:
        again = len(self.given_back)
        return self.given_back[index] if index < again else self.next_position + index - again


class SampleOrder(Order):
    """A draw is one position. All ranks have equally many, so that a few come twice at the end of an epoch."""

    @property
    def draws_left(self) -> int:
        """Positions that each rank will still have in a window, if nothing changes."""
        return max(0, -(-self.left // self.size) - self.taken)

    def draw(self) -> int | None:
        """The next position of this rank for the open window; None if there is none left. All ranks draw equally often."""
        position = self.draw_ahead()
        if position is not None:
            self.take(1)
        return position

    def draw_ahead(self) -> int | None:
        """The next position of this rank, for whatever window; None if there is none left.

        The first ones are dealt once more where the last ones cannot be divided evenly.
        """
        first = self.drawn * self.size
        if first >= self.left:
            return None
        self.drawn += 1
        return self._at((first + self.place) % self.left)

    def _dealt_in(self, draws: int) -> int:
        return min(draws * self.size, self.left)

    def _is_in(self, index: int, contributors: Collection[int]) -> bool:
        return index % self.size in contributors
