"""What survivors settle, and how samples are dealt and come back: pure, without a world."""

import random

import pytest

from ringtrain.elastic.order import SampleOrder
from ringtrain.elastic.settlement import Settlement, Stage, Standing, settle
from ringtrain.errors import InternalError


def standing(released: int, stage: Stage, dealt_in: int = 3, holds_state: bool = True) -> Standing:
    return Standing(holds_state, released, stage, dealt_in)


@pytest.mark.parametrize(
    "standings, follows",
    [
        ([standing(7, Stage.WHOLE)] * 2, Settlement(8, None, False)),  # all hold it
        ([standing(7, Stage.WHOLE), standing(7, Stage.BEGUN)], Settlement(7, 3, False)),
        ([standing(7, Stage.WHOLE), standing(7, Stage.IDLE)], Settlement(7, 3, False)),
        ([standing(7, Stage.WHOLE), standing(8, Stage.IDLE)], Settlement(8, None, False)),  # somebody has released it
        ([standing(7, Stage.WHOLE), standing(8, Stage.BEGUN, 4)], Settlement(8, 4, False)),
        ([standing(7, Stage.IDLE, 2), standing(7, Stage.IDLE, 3)], Settlement(7, None, False)),
        ([standing(7, Stage.IDLE), standing(0, Stage.IDLE, 0, False)], Settlement(7, None, True)),  # it joins
        ([standing(0, Stage.IDLE, 0, False)] * 3, Settlement(0, None, True)),  # the first world
    ],
)
def test_what_follows(standings, follows):
    assert settle(standings) == settle(standings[::-1]) == follows


@pytest.mark.parametrize("behind", [standing(7, Stage.BEGUN), standing(7, Stage.IDLE), standing(6, Stage.WHOLE)])
def test_what_cannot_be_is_refused(behind):
    with pytest.raises(InternalError, match="not all ranks held"):
        settle([behind, standing(8, Stage.IDLE)])


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
