"""Shares by speed: what is decided of what ranks have measured."""

import numpy as np
import pytest

from ringtrain.elastic import balance
from ringtrain.elastic.sample_shares import share_rules
from ringtrain.errors import InvalidArgumentError


@pytest.mark.parametrize(
    "speeds, batch, expected",
    [
        ([1, 2, 4], 256, [36, 73, 147]),
        ([5, 5], 7, [4, 3]),
        ([1, 1000], 4, [1, 3]),  # one sample at least
        ([1, 1, 1000], 3, [1, 1, 1]),
        ([3, 0, 1], 12, [6, 4, 2]),  # who has measured nothing counts as the mean
        ([0, 0, 0], 8, [3, 3, 2]),
        ([1, 2, 4], 2, [1, 1, 0]),  # smaller than the ranks: as an unbalanced one
    ],
    ids=str,
)
def test_shares_are_by_speed(speeds, batch, expected):
    assert balance.shares(speeds, batch) == expected


@pytest.mark.parametrize(
    "speeds, batch, most, multiple_of, expected",
    [
        ([1, 2, 4], 256, [0, 0, 100], 1, [52, 104, 100]),  # what one leaves goes to the others, by their speeds
        ([1, 2, 4], 256, [0, 90, 100], 1, [66, 90, 100]),
        ([1, 2, 4], 256, [66, 90, 100], 1, [66, 90, 100]),
        ([0, 0], 10, [3, 0], 1, [3, 7]),  # before anything is measured, too
        ([1, 2, 4], 256, [], 8, [32, 72, 152]),
        ([1, 2, 4], 256, [0, 0, 100], 8, [56, 104, 96]),
        ([1, 1, 1], 16, [], 8, [6, 5, 5]),  # fewer multiples than ranks
        ([1, 9], 16, [8, 0], 8, [8, 8]),
    ],
    ids=str,
)
def test_shares_keep_within_bounds(speeds, batch, most, multiple_of, expected):
    assert balance.shares(speeds, batch, most, multiple_of) == expected


def test_bounds_that_no_shares_keep():
    with pytest.raises(InvalidArgumentError, match=r"must hold a batch of 8 samples, but most= allows 3 \+ 4"):
        balance.shares([1, 1], 8, [3, 4])
    with pytest.raises(InvalidArgumentError, match="in multiples of 8, one at least, but most= allows any [+] 7"):
        balance.shares([1, 1], 32, [0, 7], 8)
    with pytest.raises(InvalidArgumentError, match="multiple_of=3, but has 8 samples"):
        balance.shares([1, 1], 8, [], 3)


def test_shares_that_fit_take_the_place_of_those_that_do_not_though_nothing_is_faster():
    assert balance.better([0, 0], 10, [5, 5], [3, 0]) == [3, 7]
    assert balance.better([0, 0], 10, [3, 7], [3, 0]) is None
    assert balance.better([1, 1], 12, [7, 5], [], 2) == [6, 6]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_no_other_shares_are_done_sooner(ranks):
    """Of all that differ by one sample moved from one rank to another."""
    for seed in range(20):
        speeds = [1.0 + (seed * 7919 + 31 * place**3) % 17 for place in range(ranks)]
        found = balance.shares(speeds, 64)
        assert sum(found) == 64 and min(found) >= 1
        for giver in range(ranks):
            for taker in range(ranks):
                if giver != taker and found[giver] > 1:
                    moved = list(found)
                    moved[giver] -= 1
                    moved[taker] += 1
                    assert balance.seconds_of(found, speeds) <= balance.seconds_of(moved, speeds) * (1 + 1e-12)


def test_small_differences_change_nothing():
    assert balance.better([100.0, 101.0], 64, [32, 32]) is None
    assert balance.better([100.0, 200.0], 60, [30, 30]) == [20, 40]
    assert balance.better([100.0, 200.0], 60, [20, 40]) is None
    assert balance.better([0.0, 0.0], 60, [30, 30]) is None


def test_shares_settle_where_a_part_of_a_step_is_the_same_for_any_share():
    """Seconds of a step are a + b * samples, so that measured speeds depend on the shares."""
    fixed, each, present = [0.05, 0.02, 0.01], [0.004, 0.002, 0.001], [86, 85, 85]
    for _ in range(10):
        seconds = [a + b * n for a, b, n in zip(fixed, each, present, strict=True)]
        present = balance.better([n / t for n, t in zip(present, seconds, strict=True)], 256, present) or present
    seconds = [a + b * n for a, b, n in zip(fixed, each, present, strict=True)]
    assert max(seconds) / min(seconds) < 1.1


class Windows:
    """A rank with windows of 12 samples."""

    def __init__(self):
        self.now = 0.0
        self.pace = balance.Pace(lambda: self.now)

    def told(self, *seconds):
        """What it tells after windows of so many seconds of its own, and others' thousands between them."""
        for own in seconds:
            self.pace.end_exchange()
            self.now += own
            self.pace.begin_exchange()
            self.now += 1000.0
            self.pace.note_window(12)
        return self.pace.tell()


def test_a_pace_leaves_waiting_out_and_moves_slowly():
    rank = Windows()
    assert [rank.told(), rank.told(1.0, 1.0), rank.told(1.2, 1.2), rank.told()] == pytest.approx(
        [0.0, 12.0, 11.5, 11.5]
    )


def test_the_first_windows_of_a_world_are_not_measured():
    rank = Windows()
    rank.pace.enter_world()
    assert [rank.told(90.0, 5.0), rank.told(1.0), rank.told(1.0)] == [0.0, 12.0, 12.0]


def test_a_pause_is_no_speed_and_a_slower_rank_is_believed_the_second_time():
    rank = Windows()
    told = [rank.told(seconds) for seconds in (1.0, 50.0, 1.0, 2.0, 2.0, 1.0, 1.0)]
    assert told == pytest.approx([12.0, 12.0, 12.0, 12.0, 6.0, 6.0, 12.0])


@pytest.mark.parametrize(
    "rules, words",
    [
        ({"most": 4.5}, "most must be a whole number, but is 4.5"),
        ({"multiple_of": "8"}, "multiple_of must be a whole number"),
        (
            {"cost": ["a", "b", "c"]},
            "cost must be numbers above 0 for each of 3 samples, but they are a list of others",
        ),
        ({"cost": [1, 2]}, r"but they have the shape \(2,\)"),
        ({"cost": [1, 0, np.nan]}, "but they are other ones in 2 places, first 0 of sample 1"),
        ({"cost": [1, 2, 3], "most": 4}, "shares by cost= must be of any number"),
    ],
)
def test_rules_that_are_none(rules, words):
    with pytest.raises((TypeError, InvalidArgumentError), match=words):
        share_rules("Sampler", 3, rules.get("most"), rules.get("multiple_of", 1), rules.get("cost"))


def test_costs_are_relative():
    assert share_rules("Sampler", 3, None, 1, [1e308, 1e308, 1e308]).costs.tolist() == [1000] * 3
    assert share_rules("Sampler", 3, None, 1, lambda index: 1.0 + index).costs.tolist() == [500, 1000, 1500]


def test_what_people_read():
    speeds = [1.0, 2.0, 4.0]
    assert balance.described(balance.shares(speeds, 256), speeds) == (
        "shares 36 : 73 : 147 of 256; +134 % over equal shares"
    )
