"""Batches of one size whatever the number of ranks: who has what of them, and what it weighs. Pure, without a world."""

from collections.abc import Collection, Sequence
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtrain.elastic.order import BatchOrder, GrowingOrder, batches_in

COUNTS, BATCHES, SIZES = st.integers(0, 60), st.integers(1, 20), st.integers(1, 7)
COUNTS_OF_PLACES = st.lists(st.integers(1, 9), max_size=7)  # shares of a whole batch, if there are as many as ranks
COSTS = st.lists(st.integers(1, 1000), min_size=60, max_size=60) | st.just([])  # of each position; none: all alike
ALL = settings(max_examples=60)


def ranks(
    size: int,
    count: int,
    batch: int,
    drops_last: bool = False,
    progress: tuple = (0, ()),
    shares: Sequence[int] = (),
    costs: Sequence[int] = (),
) -> list[BatchOrder]:
    orders = [BatchOrder(count, batch, drops_last, *progress) for _ in range(size)]
    for place, order in enumerate(orders):
        order.deal(size, place)
        order.share(shares)
        order.cost(np.array(costs, np.int64))
    return orders


def mean(values: Sequence[int]) -> Fraction:
    return Fraction(sum(values), len(values))


@ALL
@given(COUNTS, BATCHES, SIZES, st.booleans(), COUNTS_OF_PLACES, COSTS)
def test_the_weighted_mean_of_the_shares_is_that_of_one_process(count, batch, size, drops_last, unequal, costs):
    """In each batch, over an epoch; with values of which any other choice, or weight, makes another mean."""
    orders, cut = ranks(size, count, batch, drops_last, shares=unequal, costs=costs), range(0, count, batch)
    whole = [range(first, min(first + batch, count)) for first in cut if not drops_last or first + batch <= count]
    assert {order.draws_left for order in orders} == {len(whole)} == {batches_in(count, batch, drops_last)}
    for positions in whole:
        shares = [order.draw() or [] for order in orders]
        weights = [order.weight() for order in orders]
        values = [mean([each**2 for each in share]) for share in shares]
        expected = mean([each**2 for each in positions])
        assert sum(w * value for w, value in zip(weights, values, strict=True)) == expected * sum(weights)
        assert sum(weights) == len(positions)
        assert max(weights) - min(weights) <= 1 or len(unequal) == size or costs
        for order in orders:
            order.release()
    assert [order.draw() for order in orders] == [None] * size
    assert orders[0].left == (count % batch if drops_last else 0)


@ALL
@given(st.data(), COUNTS, BATCHES)
def test_each_position_is_brought_to_one_released_window(data, count, batch):
    """Windows of several batches, ranks that die within one, or come, and draw ahead by different amounts."""
    seen: list[int] = []
    progress: tuple = (0, ())
    for _ in range(200):
        size = data.draw(SIZES)
        orders = ranks(
            size, count, batch, progress=progress, shares=data.draw(COUNTS_OF_PLACES), costs=data.draw(COSTS)
        )
        if orders[0].draws_left == 0:
            break
        for order in orders:
            for _ in range(data.draw(st.integers(0, 3))):
                order.draw_ahead()
            order.forget_ahead()
        passes = min(data.draw(st.integers(1, 3)), orders[0].draws_left)
        shares = [[order.draw() or [] for _ in range(passes)] for order in orders]
        living = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
        brought = positions_of(orders, shares, living)
        assert sum(orders[place].weight(living) for place in living) == len(brought)  # never 0, whoever is left
        seen += brought
        for order in orders:
            order.release(living)
        ((position, *again),) = {(order.next_position, *order.given_back) for order in orders}
        progress = position, tuple(again)
    assert sorted(seen) == list(range(count))


def positions_of(orders: list[BatchOrder], shares: list[list[list[int]]], living: Collection[int]) -> list[int]:
    """What the living bring: what several of them have computed is brought by one."""
    brought = {position for place in living for share in shares[place] for position in share}
    assert all(orders[place].weight(living) <= sum(map(len, shares[place])) for place in living)
    return sorted(brought)


def test_shares_are_those_that_were_asked_for():
    """Of a whole batch exactly, of a smaller one about so, with one position at least; equal ones again among others."""
    first, second, third = orders = ranks(3, 30, 12, shares=[2, 3, 7])
    assert [order.draw() for order in orders] == [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9, 10, 11]]
    assert [len(order.draw() or []) for order in orders] == [2, 3, 7] and first.shares_left() == 1
    for order in orders:
        order.release({0, 2})
    assert {(order.next_position, *order.given_back) for order in orders} == {(24, 2, 3, 4, 14, 15, 16)}
    assert [len(order.draw() or []) for order in orders] == [2, 3, 7]
    third.release({2})
    third.deal(2, 1)
    assert third.left == 5 and len(third.draw() or []) == 2 and second.taken == 1


@ALL
@given(SIZES, st.integers(0, 50), st.data())
def test_shares_cost_about_alike(size, further, data):
    """Each end of a share is as near to its part of the cost as a position can be."""
    count = size + further
    costs = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    orders = ranks(size, count, count, costs=costs)
    shares = [order.draw() or [] for order in orders]
    assert [order.work for order in orders] == [sum(costs[position] for position in share) for share in shares]
    if count >= 3 * size:  # else the one position that each has at least may cost more
        assert all(abs(order.work - sum(costs) / size) <= max(costs) for order in orders)


def test_costs_are_shared_by_speed():
    """Of twelve positions the first ones cost as much as all others."""
    orders = ranks(3, 12, 12, shares=[3, 3, 6], costs=[10, 10, *[2] * 10])
    assert [order.draw() for order in orders] == [[0], [1], list(range(2, 12))]
    assert [order.work for order in orders] == [10, 10, 20]
    assert [order.weight() for order in orders] == [1, 1, 10]


def test_a_place_without_a_share_takes_the_part_of_a_lost_one():
    """Of a batch of two, four ranks: places 2 and 3 compute what 0 and 1 do."""
    orders = ranks(4, 2, 8)
    assert [order.draw() for order in orders] == [[0], [1], [0], [1]]
    assert [order.weight() for order in orders] == [1, 1, 0, 0]
    assert [order.weight({1, 2, 3}) for order in orders[1:]] == [1, 1, 0]
    assert [order.weight({2, 3}) for order in orders[2:]] == [1, 1]
    orders[2].release({2, 3})
    assert (orders[2].left, orders[2].given_back) == (0, [])
    orders[3].release({3})
    assert (orders[3].left, orders[3].given_back) == (1, [0])


def test_what_a_lost_rank_had_comes_first_in_the_next_batch():
    (first, *_, last) = ranks(3, 20, 8)
    assert (first.draw(), last.draw()) == ([0, 3, 6], [2, 5])
    assert (first.weight({0, 2}), last.weight({0, 2}), first.shares_left(), last.shares_left()) == (3, 2, 5, 3)
    last.release({0, 2})
    assert (last.given_back, last.next_position) == ([1, 4, 7], 8)
    last.deal(2, 1)
    assert [last.draw(), last.draw(), last.draw()] == [[4, 8, 10, 12], [14, 16, 18], None]


@ALL
@given(st.data(), COUNTS, BATCHES)
def test_batches_that_grow_with_the_ranks_have_each_position_once(data, count, batch):
    """Each rank has its batch in a whole one; ranks come and go between windows, and die within one."""
    seen: list[int] = []
    progress: tuple = (0, ())
    for _ in range(200):
        size = data.draw(SIZES)
        orders = [GrowingOrder(count, batch, False, *progress) for _ in range(size)]
        for place, order in enumerate(orders):
            order.deal(size, place)
        if orders[0].draws_left == 0:
            break
        shares = [order.draw() or [] for order in orders]
        is_whole = orders[0].left >= size * batch
        assert not is_whole or {len(share) for share in shares} == {batch}
        living = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
        brought = [shares[place][: orders[place].weight(living)] for place in living]
        seen += [position for share in brought for position in share]
        for order in orders:
            order.release(living)
        (progress,) = {(order.next_position, tuple(order.given_back)) for order in orders}
    assert sorted(seen) == list(range(count))
