"""What is left of an epoch's order of samples, and how it is dealt, window by window. Pure; the same on all ranks.

Position n of what is left goes to rank n modulo the number of ranks. A window that is released takes what was dealt in
it, but for the shares of ranks that were lost before they could contribute: these come back, and are dealt first.

A rank may draw for later windows, as a loader does that has worker processes. That binds nobody: what is in no window is
given up when another dealing begins, and dealt there. So ranks may have drawn ahead by different amounts.
"""

from collections.abc import Collection, Sequence


class SampleOrder:
    """The positions 0, 1, … of an epoch.

    Args:
        count: of positions.
        next_position: the first that was never dealt.
        given_back: positions before it that are to be dealt again, ascending.

    Attributes:
        next_position, given_back: as of the last window that was released.
        size, place: ranks among which the open window is dealt, and this rank's number among them.
        taken: positions that each of them has in it.
        drawn: positions that this rank has drawn since the last window that was released; more than ``taken`` if it has
            drawn ahead.
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
    def draws_left(self) -> int:
        """Positions that each rank will still have in a window, if nothing changes."""
        return max(0, -(-self.left // self.size) - self.taken)

    def deal(self, size: int, place: int) -> None:
        """Deals to so many ranks from here on; where nothing is taken."""
        if (size, place) != (self.size, self.place):
            self.forget_ahead()
        self.size, self.place = size, place

    def forget_ahead(self) -> None:
        """Gives up what was drawn for later windows, which will be drawn again."""
        self.drawn = self.taken

    def draw(self) -> int | None:
        """The next position of this rank for the open window; None if there is none left. All ranks draw equally often."""
        position = self.draw_ahead()
        if position is not None:
            self.take(1)
        return position

    def take(self, count: int) -> None:
        """So many more of the positions that were drawn ahead are in the open window, the earliest first."""
        self.taken += count

    def draw_ahead(self) -> int | None:
        """The next position of this rank, for whatever window; None if there is none left.

        The first ones are dealt once more where the last ones cannot be divided evenly.
        """
        first = self.drawn * self.size
        if first >= self.left:
            return None
        self.drawn += 1
        return self._at((first + self.place) % self.left)

    def release(self, contributors: Collection[int] | None = None) -> None:
        """The window is released: what was dealt in it is done.

        Args:
            contributors: places whose samples are in it; None for all.
        """
        taken = min(self.taken * self.size, self.left)
        lost = [
            self._at(index)
            for index in range(taken)
            if contributors is not None and index % self.size not in contributors
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
