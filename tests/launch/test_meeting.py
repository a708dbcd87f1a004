"""Who meets whom where TCP connects the ranks: decided from who has come, has gone, has ended, and the time."""

from __future__ import annotations

import pytest

from ringtrain.launch.meeting import Meetings


def arrival(rank: int, ranks: list[int] | None = None, seconds: float = 60.0) -> dict:
    return {"addresses": f"10.0.0.{rank}:4711", "ranks": ranks or [], "seconds": seconds}


def test_the_last_one_to_come_has_all_told_by_rank() -> None:
    meetings = Meetings(3)
    assert meetings.arrive(2, arrival(2), 0.0) == [] and meetings.arrive(0, arrival(0), 1.0) == []
    [answer] = meetings.arrive(1, arrival(1), 2.0)
    assert answer.to == [0, 1, 2] and answer.introduce["ranks"] == []
    assert answer.introduce["peers"] == ["10.0.0.0:4711", "10.0.0.1:4711", "10.0.0.2:4711"]
    assert len(bytes.fromhex(answer.introduce["secret"])) == 32
    assert meetings.deadline == float("inf"), "nobody waits any longer"


def test_each_world_has_a_secret_and_an_epoch_of_its_own() -> None:
    meetings = Meetings(1)
    worlds = [meetings.arrive(0, arrival(0), 0.0)[0].introduce for _ in range(4)]
    assert len({world["secret"] for world in worlds}) == 4
    assert [world["epoch"] for world in worlds] == [1, 2, 3, 4]


def test_those_who_name_each_other_do_not_wait_for_the_rest() -> None:
    meetings = Meetings(4)
    assert meetings.arrive(0, arrival(0), 0.0) == []
    assert meetings.arrive(3, arrival(3, [1, 3]), 0.0) == []
    [answer] = meetings.arrive(1, arrival(1, [1, 3]), 0.0)
    assert answer.to == answer.introduce["ranks"] == [1, 3]
    assert answer.introduce["peers"] == ["10.0.0.1:4711", "10.0.0.3:4711"]
    assert meetings.deadline == 60.0, "rank 0 waits on"


def test_who_is_late_is_named_to_all_that_have_come() -> None:
    meetings = Meetings(4)
    meetings.arrive(0, arrival(0, seconds=9.0), 100.0)
    meetings.arrive(1, arrival(1, seconds=5.5), 101.0)
    assert meetings.deadline == 106.5, "the first who gives up ends it for all"
    assert meetings.expire(106.4) == []
    [answer] = meetings.expire(106.5)
    assert answer.to == [0, 1] and "secret" not in answer.introduce
    assert answer.introduce["failure"] == (
        "init: expected all 4 ranks to call init() within 5.5 s, but ranks 2, 3 did not. "
        "Call init() on every rank before what takes long, or raise start_timeout_seconds."
    )
    assert meetings.deadline == float("inf") and meetings.expire(1000.0) == []


@pytest.mark.parametrize("first", ["the arrival", "the end"])
def test_nobody_waits_for_a_rank_that_has_ended(first: str) -> None:
    meetings = Meetings(3)
    answers = meetings.arrive(0, arrival(0), 0.0) if first == "the arrival" else meetings.end(1)
    assert answers == []
    [answer] = meetings.end(1) if first == "the arrival" else meetings.arrive(0, arrival(0), 0.0)
    assert (answer.to, answer.ended) == ([0], (1,))
    assert answer.introduce["failure"] == (
        "init: expected all 3 ranks to call init() within 60 s, but rank 1 ended before that, with exit code 0. Let the "
        "program call init() on every rank before it ends, or start only as many ranks as do."
    )
    meetings = Meetings(3)
    meetings.arrive(0, arrival(0, [0, 2]), 0.0)
    assert meetings.end(1) == [], "it was not to come"


def test_who_has_gone_before_the_answer_has_not_come() -> None:
    meetings = Meetings(2)
    meetings.arrive(0, arrival(0), 0.0)
    meetings.withdraw(0, [])
    assert meetings.deadline == float("inf")
    assert meetings.arrive(1, arrival(1), 1.0) == []
    [answer] = meetings.arrive(0, arrival(7), 2.0)
    assert answer.introduce["peers"] == ["10.0.0.7:4711", "10.0.0.1:4711"]
    meetings.withdraw(0, [])  # of a meeting that has ended
