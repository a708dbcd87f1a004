"""Batches of one size whatever the number of ranks: what each has of them, and what that weighs. Pure; the same on all ranks.

What is left of an epoch is cut into batches, as one process cuts it. Within a batch of N positions the rank at place p of
n has p, p + n, p + 2n, … So shares differ by one at most, and those of whole batches are the same in each. Weighed by its
number of positions each rank's mean makes the mean of the batch.

Where a batch has fewer positions than there are ranks, places N and above compute what place p modulo N does, since
every rank must take part, and weigh nothing. If a place is lost within the step, the lowest of those that have computed
the same takes its part.
"""

from collections.abc import Collection, Sequence

from ringtrain.elastic.order import Order


def batches_in(count: int, batch: int, drops_last: bool) -> int:
    """Batches of so many positions; a smaller one at the end is one, too, unless it is dropped."""
    return count // batch if drops_last else -(-count // batch)


class BatchOrder(Order):
    """A draw is this rank's share of a batch.

    Args:
        count, next_position, given_back: as for ``Order``.
        batch: positions that a batch has on all ranks together.
        drops_last: whether what is too little for a batch is left out, at the end of an epoch.
    """

    def __init__(
        self, count: int, batch: int, drops_last: bool = False, next_position: int = 0, given_back: Sequence[int] = ()
    ):
        super().__init__(count, next_position, given_back)
        self.batch, self.drops_last = batch, drops_last

    @property
    def draws_left(self) -> int:
        """Batches that are still to come in a window, if nothing changes."""
        return max(0, batches_in(self.left, self.batch, self.drops_last) - self.taken)

    @property
    def shares_left(self) -> int:
        """Positions that this rank draws in them."""
        return sum(len(self._share(self.taken + number)) for number in range(self.draws_left))

    def take(self, count: int) -> int:
        """So many more of the draws that were made ahead are in the open window; how many positions of this rank they have."""
        first = self.taken
        super().take(count)
        return sum(len(self._share(number)) for number in range(first, self.taken))

    def draw(self) -> list[int] | None:
        """This rank's positions of the next batch, for the open window; None if there is none left."""
        positions = self.draw_ahead()
        if positions is not None:
            self.take(1)
        return positions

    def draw_ahead(self) -> list[int] | None:
        """This rank's positions of the next batch, for whatever window, one at least; None if there is none left."""
        if self.drawn >= batches_in(self.left, self.batch, self.drops_last):
            return None
        self.drawn += 1
        first = (self.drawn - 1) * self.batch
        return [self._at(first + place) for place in self._share(self.drawn - 1)]

    def weight(self, contributors: Collection[int] | None = None) -> int:
        """Positions that this rank brings to the open window.

        Args:
            contributors: places that take part, this one among them; None for all.
        """
        return sum(self._weight_in(number, contributors) for number in range(self.taken))

    def _weight_in(self, number: int, contributors: Collection[int] | None) -> int:
        count = self._count_in(number)
        if count >= self.size:
            return len(self._share(number))
        there = range(self.size) if contributors is None else contributors
        return int(self.place == min(place for place in there if place % count == self.place % count))

    def _share(self, number: int) -> range:
        """Places in a batch of those that this rank computes."""
        count = self._count_in(number)
        return range(self.place % count if count < self.size else self.place, count, self.size)

    def _count_in(self, number: int) -> int:
        return min(self.batch, self.left - number * self.batch)

    def _dealt_in(self, draws: int) -> int:
        return min(draws * self.batch, self.left)

    def _is_in(self, index: int, contributors: Collection[int]) -> bool:
        number, place = divmod(index, self.batch)
        among = min(self.size, self._count_in(number))
        return any(each % among == place % among for each in contributors)


class GrowingOrder(BatchOrder):
    """Batches of so many positions for each rank: they grow with the number of ranks, and are shared in the same way.

    Args:
        count, drops_last, next_position, given_back: as for ``BatchOrder``.
        of_rank: positions of one rank in a whole batch.
    """

    def __init__(
        self, count: int, of_rank: int, drops_last: bool = False, next_position: int = 0, given_back: Sequence[int] = ()
    ):
        super().__init__(count, of_rank, drops_last, next_position, given_back)
        self._of_rank = of_rank

    def deal(self, size: int, place: int) -> None:
        """Deals to so many ranks from here on; where nothing is taken."""
        super().deal(size, place)
        self.batch = self._of_rank * size
