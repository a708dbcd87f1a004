"""How samples are dealt and come back: pure, without a world."""

import random
from collections import deque

import pytest

from ringtrain.elastic.order import SampleOrder


def test_shares_of_the_lost_come_back_first():
    order = SampleOrder(12)
    order.deal(3, 0)
    assert [order.draw(), order.draw()] == [0, 3]
    order.release({0, 2})
    assert (order.given_back, order.next_position, order.left) == ([1, 4], 6, 8)
    order.deal(2, 1)
    assert [order.draw() for _ in range(5)] == [4, 7, 9, 11, None]
    order.release()
    assert order.left == 0


def test_all_ranks_draw_equally_often_where_samples_cannot_be_divided():
    orders = [SampleOrder(5) for _ in range(3)]
    for place, order in enumerate(orders):
        order.deal(3, place)
        assert order.draws_left == 2
    assert [[order.draw() for _ in range(3)] for order in orders] == [[0, 3, None], [1, 4, None], [2, 0, None]]


@pytest.mark.parametrize("seed", range(20))
def test_each_position_is_in_one_released_window(seed):
    """Ranks die and come at random; what is in no window is given back, until an even rest is left."""
    drawn = random.Random(seed)
    count, size, progress, seen = 240, 4, (0, []), []
    while True:
        orders = [SampleOrder(count, *progress) for _ in range(size)]
        for place, order in enumerate(orders):
            order.deal(size, place)
        if orders[0].left <= 12:
            break
        samples = [[order.draw() for _ in range(2)] for order in orders]
        living = drawn.sample(range(size), drawn.randint(1, size))
        seen += [sample for place in living for sample in samples[place]]
        for order in orders:
            order.release(set(living))
        assert len({(order.next_position, tuple(order.given_back)) for order in orders}) == 1
        progress = orders[0].next_position, orders[0].given_back
        size = max(1, min(4, len(living) + drawn.randint(0, 1)))
    assert len(seen) == len(set(seen)) == count - orders[0].left
    assert set(seen).isdisjoint(orders[0].given_back)


class Drawing:
    """A rank that draws ahead, as a loader with workers does."""

    def __init__(self, order: SampleOrder):
        self.order, self.ahead = order, deque()

    def draw_ahead(self, most: int) -> None:
        while len(self.ahead) < most and (position := self.order.draw_ahead()) is not None:
            self.ahead.append(position)

    def take(self, batch: int) -> list[int]:
        self.draw_ahead(batch)
        taken = [self.ahead.popleft() for _ in range(min(batch, len(self.ahead)))]
        self.order.take(len(taken))
        return taken

    def deal(self, size: int, place: int) -> None:
        self.order.deal(size, place)
        if self.order.drawn == 0:
            self.ahead.clear()
        assert len(self.ahead) == self.order.drawn


@pytest.mark.parametrize("seed", range(40))
def test_what_is_drawn_ahead_is_in_one_window_or_dealt_again(seed):
    """Ranks draw ahead by different amounts, die and come at random; each position is in one window, but for the padding."""
    random_of = random.Random(seed)
    count, batch = random_of.randint(1, 200), random_of.randint(1, 5)
    ranks: list[Drawing] = [Drawing(SampleOrder(count)) for _ in range(4)]
    seen: set[int] = set()
    while True:
        for place, rank in enumerate(ranks):
            rank.deal(len(ranks), place)
            rank.draw_ahead(random_of.randint(0, 9))
        left = ranks[0].order.left
        windows = [rank.take(batch) for rank in ranks]
        assert len({len(window) for window in windows}) == 1
        if not windows[0]:
            break
        dies = random_of.random() < 0.3
        living = sorted(random_of.sample(range(len(ranks)), random_of.randint(1, len(ranks)))) if dies else None
        contributors = range(len(ranks)) if living is None else living
        used = [position for place in contributors for position in windows[place]]
        if batch * len(ranks) <= left:  # else some come twice, and all that are left are in it
            assert len(set(used)) == len(used) and seen.isdisjoint(used)
        seen.update(used)
        ranks = [ranks[place] for place in contributors]
        for rank in ranks:
            rank.order.release(living)
            assert living is not None or rank.order.drawn == len(rank.ahead)
        assert len({(rank.order.next_position, tuple(rank.order.given_back)) for rank in ranks}) == 1
        if random_of.random() < 0.3:  # between two steps
            ranks.append(Drawing(SampleOrder(count, ranks[0].order.next_position, ranks[0].order.given_back)))
    assert seen == set(range(count))
