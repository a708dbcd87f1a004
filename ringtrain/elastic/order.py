"""What is left of an epoch's order of samples, and how it is dealt, window by window. Pure; the same on all ranks.

The core decides, as in the simulation of elastic jobs (``native/elastic/samples.h``, which has the rules). Position n of
what is left goes to rank n modulo the number of ranks (``SampleOrder``), or so within each batch (``BatchOrder``,
``GrowingOrder``). A window that is released takes what was dealt in it, but for the shares of ranks that were lost before
they could contribute: these come back, and are dealt first.

A rank may draw for later windows, as a loader does that has worker processes. That binds nobody: what is in no window is
given up when another dealing begins, and dealt there. So ranks may have drawn ahead by different amounts.
"""

from collections.abc import Collection, Sequence

import numpy as np

from ringtrain._binding._native import CData, counted, ffi, lib, made, require
from ringtrain._training import step_guard
from ringtrain.errors import InvalidArgumentError

_POSITIONS, _BATCHES, _GROWING_BATCHES = range(3)  # `Cut`
_ALL = -1


def batches_in(count: int, batch: int, drops_last: bool) -> int:
    """Batches of so many positions; a smaller one at the end is one, too, unless it is dropped."""
    return count // batch if drops_last else -(-count // batch)


def refuse_second_pass(sampler: str, epoch: int, has_none_left: bool) -> None:
    """Raises InvalidArgumentError where a script reads an epoch's samples again, of which none are left."""
    if has_none_left:
        raise InvalidArgumentError(
            f"{sampler}: expected one pass over the samples of epoch {epoch} but found another one, for which none are left. "
            "Have State.epochs count each pass as an epoch, and read other data with another sampler."
        )


def refuse_in_loop_without(sampler: str) -> None:
    """Raises InvalidArgumentError where steps survive that have no sampler, but one is read that no state has."""
    running = step_guard.under_way()
    if running is not None and not running.deals:
        raise InvalidArgumentError(
            f"{sampler}: the State or Guard of this loop must have the sampler that is read, since samples of a rank that is lost "
            "are in no step else, but has none. Pass it as sampler=."
        )


class Order:
    """The positions 0, 1, … of an epoch, which ranks draw in equal numbers of draws; what a draw has, a subclass says."""

    def __init__(
        self, cut: int, count: int, batch: int, drops_last: bool, next_position: int, given_back: Sequence[int]
    ):
        native = lib.rt_samples_open(cut, count, batch, drops_last, next_position, list(given_back), len(given_back))
        self._native = made(native, lib.rt_samples_free)
        self._positions = ffi.new("int64_t **")

    def _look(self) -> CData:
        state = ffi.new("rt_samples_state *")
        lib.rt_samples_look(self._native, state)
        return state

    @property
    def next_position(self) -> int:
        """The first that was never dealt, as of the last window that was released."""
        return self._look().next

    @property
    def given_back(self) -> list[int]:
        """Positions before it that are to be dealt again, ascending."""
        state = self._look()
        return ffi.unpack(state.given_back, state.given_back_count) if state.given_back_count else []

    @property
    def size(self) -> int:
        """Ranks among which the open window is dealt."""
        return self._look().size

    @property
    def place(self) -> int:
        """This rank's number among them."""
        return self._look().place

    @property
    def taken(self) -> int:
        """Draws that each of them has in the open window."""
        return self._look().taken

    @property
    def drawn(self) -> int:
        """Draws of this rank since the last window that was released; more than ``taken`` if it has drawn ahead."""
        return self._look().drawn

    @property
    def left(self) -> int:
        """Positions that no released window has taken."""
        return self._look().left

    @property
    def draws_left(self) -> int:
        """Draws that each rank will still have in a window, if nothing changes."""
        return self._look().draws_left

    def deal(self, size: int, place: int) -> None:
        """Deals to so many ranks from here on, of which this is the one at that place; where nothing is taken."""
        lib.rt_samples_deal(self._native, size, place)

    def share(self, counts: Sequence[int]) -> None:
        """Of batches, where nothing is taken: how many positions of a whole one each place has from here on; none for equal shares."""
        require(lib.rt_samples_share(self._native, [each - 1 for each in counts], len(counts)))

    def cost(self, costs: np.ndarray) -> None:
        """Of batches, where nothing is taken: what each position of the order costs, int64 above 0; none if all cost alike."""
        require(lib.rt_samples_cost(self._native, ffi.from_buffer("int64_t[]", costs), len(costs)))

    @property
    def work(self) -> int:
        """What this rank's positions of the open window cost; their number if all cost alike."""
        return counted(lib.rt_samples_work(self._native))

    def forget_ahead(self) -> None:
        """Gives up what was drawn for later windows, which will be drawn again."""
        lib.rt_samples_forget_ahead(self._native)

    def take(self, count: int) -> int:
        """So many more of the draws made ahead are in the open window, the earliest first; returns how many positions they have here."""
        return counted(lib.rt_samples_take(self._native, count))

    def release(self, contributors: Collection[int] | None = None) -> None:
        """The window is released: what was dealt in it is done.

        Args:
            contributors: places whose samples are in it; None for all.
        """
        require(lib.rt_samples_release(self._native, *_places(contributors)))

    def _draw_ahead(self) -> list[int]:
        count = counted(lib.rt_samples_draw_ahead(self._native, self._positions))
        return ffi.unpack(self._positions[0], count) if count else []


class SampleOrder(Order):
    """A draw is one position. All ranks have equally many, so that a few come twice at the end of an epoch.

    Args:
        count: of positions.
        next_position: the first that was never dealt.
        given_back: positions before it that are to be dealt again, ascending.
    """

    def __init__(self, count: int, next_position: int = 0, given_back: Sequence[int] = ()):
        super().__init__(_POSITIONS, count, 1, False, next_position, given_back)

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
        positions = self._draw_ahead()
        return positions[0] if positions else None


class BatchOrder(Order):
    """A draw is this rank's share of a batch.

    Args:
        count, next_position, given_back: as for ``SampleOrder``.
        batch: positions that a batch has on all ranks together.
        drops_last: whether what is too little for a batch is left out, at the end of an epoch.

    Attributes:
        drops_last: as given.
    """

    _CUT = _BATCHES

    def __init__(
        self, count: int, batch: int, drops_last: bool = False, next_position: int = 0, given_back: Sequence[int] = ()
    ):
        super().__init__(self._CUT, count, batch, drops_last, next_position, given_back)
        self.drops_last = drops_last

    @property
    def batch(self) -> int:
        """Positions that a whole batch has on all ranks together."""
        return self._look().batch

    def shares_left(self) -> int:
        """Positions that this rank draws in the batches that are still to come in a window, if nothing changes. Looks at each batch."""
        return counted(lib.rt_samples_shares_left(self._native))

    def draw(self) -> list[int] | None:
        """This rank's positions of the next batch, for the open window; None if there is none left."""
        positions = self.draw_ahead()
        if positions is not None:
            self.take(1)
        return positions

    def draw_ahead(self) -> list[int] | None:
        """This rank's positions of the next batch, for whatever window, one at least; None if there is none left."""
        return self._draw_ahead() or None

    def weight(self, contributors: Collection[int] | None = None) -> int:
        """Positions that this rank brings to the open window.

        Args:
            contributors: places that take part, this one among them; None for all.
        """
        return counted(lib.rt_samples_weight(self._native, *_places(contributors)))


class GrowingOrder(BatchOrder):
    """Batches of so many positions for each rank: they grow with the number of ranks, and are shared in the same way.

    Args:
        count, drops_last, next_position, given_back: as for ``BatchOrder``.
        batch: positions of one rank in a whole batch.
    """

    _CUT = _GROWING_BATCHES


def _places(contributors: Collection[int] | None) -> tuple[CData, int]:
    return (ffi.NULL, _ALL) if contributors is None else (list(contributors), len(contributors))
