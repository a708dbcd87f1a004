"""Which rank the launcher blames: the first that failed by itself, on whatever host, however the hosts' clocks stand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringtrain.launch.elastic_job import ElasticJob
from ringtrain.launch.ends import Ends
from ringtrain.launch.job import Job
from ringtrain.launch.known_ranks import (
    LOST,
    HostClock,
    Rank,
    blame_survived,
    failed_alike,
    first_cause,
    host_without_engine,
    left_before,
)
from ringtrain.launch.openmpi import LOST_DAEMON


def host_clock(ahead: float, took: float = 0.001) -> HostClock:
    """The clock of a host that is ahead of the launcher's by so many seconds."""
    clock = HostClock()
    for asked in (5.0, 10.0):
        clock.note(asked, asked + took, asked + took / 2 + ahead)
    return clock


def failing(number: int, clock: HostClock, at: float, follows: bool = False) -> Rank:
    """A rank that failed at a time of its host's clock."""
    return Rank(number, "host", outcome=1, clock=clock, failed_at=at, follows=follows)


def test_the_first_cause_is_found_however_the_clocks_of_the_hosts_stand() -> None:
    ahead, behind = host_clock(1e6), host_clock(-3.0)
    ranks = [failing(0, ahead, 1e6 + 20.5), failing(1, behind, 17.25), failing(2, ahead, 1e6 + 20.75)]
    assert first_cause(ranks).number == 1
    assert first_cause(ranks[::2]).number == 0
    assert first_cause([*ranks, failing(3, behind, 10.0, follows=True)]).number == 1
    assert first_cause([Rank(0, "host", outcome=0)]) is None


def test_the_quickest_answer_tells_a_clock_best() -> None:
    clock = host_clock(100.0, took=0.002)
    clock.note(20.0, 26.0, 121.0)  # the question arrived at once, its answer had to wait for 5 s
    assert abs(clock.here(130.0) - 30.0) <= 0.001
    assert abs(clock.there(30.0) - 130.0) <= 0.001


def test_an_old_answer_is_forgotten() -> None:
    """Clocks drift, and the launcher's host may have slept."""
    clock = host_clock(100.0)
    for asked in range(20, 200, 5):
        clock.note(asked, asked + 0.5, asked + 0.25 + 200.0)
    assert abs(clock.here(230.0) - 30.0) <= 0.25


def test_a_rank_that_open_mpi_ended_for_another_is_not_to_blame() -> None:
    """It sees the connection close before the other rank's end is reported: 14 is its MPI's word, unless it announced it."""
    clock = host_clock(0.0)
    ended = Rank(0, "host", outcome=14, clock=clock, failed_at=10.0)
    killed = Rank(1, "host", outcome=-9, clock=clock, failed_at=10.5)
    assert first_cause([ended, killed]) is killed
    assert first_cause([ended]) is ended and ended.failure == 14 and "another one is gone" in ended.describe_failure()
    ended.announced = 14
    assert first_cause([ended, killed]) is ended and "another one" not in ended.describe_failure()


def test_the_host_whose_engine_died_first_is_named() -> None:
    """The death of one daemon ends the engine, and with it the others' ranks; a crash of a rank's MPI after it is no cause."""
    ahead, here = host_clock(100.0), host_clock(0.0)
    first = Rank(0, "a", host="a", outcome=-11, clock=ahead, failed_at=110.1, engine_lost_at=110.0)
    second = Rank(1, "b", host="b", outcome=-15, was_told_to=True, clock=here, failed_at=12.0, engine_lost_at=11.0)
    told = Rank(2, "c", host="c", outcome=-15, was_told_to=True, clock=here, failed_at=11.5)
    assert first_cause([first, second, told]) is None and host_without_engine([first, second, told]) == "a"
    told.failed_at = 9.0  # it ended before: whatever ended it ended the engine too
    assert host_without_engine([first, second, told]) == ""


def test_the_engines_word_on_a_lost_daemon_counts_more_than_the_clocks() -> None:
    """The killed daemon's host was busy, and noticed its death 5 ms after the end of the engine that this death had caused."""
    clock = host_clock(0.0)
    ended = Rank(0, "a", host="a", outcome=-11, clock=clock, failed_at=10.0, engine_lost_at=10.0)
    killed = Rank(1, "b", host="b", outcome=-11, clock=clock, failed_at=10.005, engine_lost_at=10.005)
    assert host_without_engine([ended, killed]) == "a"
    words = b"  Remote daemon: [prterun-a-329@0,1] on node b"
    named = LOST_DAEMON.match(words)[1].decode()
    assert host_without_engine([ended, killed], {named}) == "b"
    killed.engine_lost_at, killed.was_told_to = None, True  # told to end before it noticed at all
    assert host_without_engine([ended, killed], {named}) == "b"


@pytest.mark.parametrize("outcome, engine_lost_at", [(-15, 10.0), (14, None), (14, 10.0)])
def test_a_host_that_is_lost_is_named_though_the_engine_ends_before_its_agent_is_missed(
    outcome: int, engine_lost_at: float | None
) -> None:
    clock = host_clock(0.0)
    ended = Rank(0, "a", host="a", outcome=outcome, clock=clock, failed_at=10.0, engine_lost_at=engine_lost_at)
    lost = Rank(1, "b", host="b", outcome=LOST, was_told_to=True, clock=clock, failed_at=10.5)
    said: list[str] = []
    engine = SimpleNamespace(name="Open MPI", code=255)
    ends = Ends(
        SimpleNamespace(),
        SimpleNamespace(say=lambda text, *_, **__: said.append(text)),
        SimpleNamespace(),
        engine,
        {0: ended, 1: lost},
    )
    ends.lost_hosts.append("b")
    assert ends.conclude() == 1
    assert said == [
        "host b: the connection was lost, so the job has ended. The machine may be down, or the network between."
    ]


def test_ranks_that_one_signal_has_killed_at_once_are_alike() -> None:
    clock = host_clock(0.0)
    killed = [Rank(number, "host", outcome=-9, clock=clock, failed_at=10.0 + number / 5) for number in range(4)]
    assert failed_alike(killed, killed[0]) == killed[1:3]  # the last one 0.6 s later
    killed[1].was_told_to, killed[2].outcome = True, -15
    assert failed_alike(killed, killed[0]) == []


def test_a_rank_that_began_to_leave_before_the_others_failed_is_to_blame() -> None:
    """With a code that only the end of its process tells."""
    clock = host_clock(0.0)
    told = failing(0, clock, 10.5, follows=True)
    left = Rank(1, "host", outcome=7, clock=clock, left_at=10.0, failed_at=10.0)
    assert first_cause([told, left]) is left and left.failure == 7


def test_a_rank_that_left_before_the_others_failed_of_it_is_named() -> None:
    """With exit code 0, but neither as one leaves, which is after the others, nor because its world had failed."""
    clock = host_clock(0.0)
    left = Rank(1, "host", outcome=0, clock=clock, ended_at=10.0)
    victim = failing(0, clock, 10.2, follows=True)
    knew = Rank(2, "host", outcome=0, clock=clock, left_at=10.1, ended_at=10.1)
    follower = Rank(3, "host", outcome=0, announced=1, follows=True, clock=clock, ended_at=10.1)
    later = Rank(4, "host", outcome=0, clock=clock, ended_at=10.3)
    assert left_before([left, victim, knew, follower, later], victim) == [left]
    assert left_before([left, failing(5, clock, 10.2)], failing(5, clock, 10.2)) == []


def test_without_mpi_the_others_may_fail_before_its_end_is_reported() -> None:
    """Its connections close while it ends."""
    clock = host_clock(0.0)
    victim = failing(0, clock, 10.0, follows=True)
    left = Rank(1, "host", outcome=0, clock=clock, ended_at=10.1)
    later = Rank(2, "host", outcome=0, clock=clock, ended_at=11.0)
    assert left_before([left, later, victim], victim) == []
    victim.has_mpi = False
    assert left_before([left, later, victim], victim) == [left]


def test_a_victim_says_of_which_rank_it_failed() -> None:
    victim = failing(0, host_clock(0.0), 10.2, follows=True)
    victim.because = "rank 1 on host 'a': it is stopped."
    assert victim.describe_failure().endswith("exit code 1, because of another rank: rank 1 on host 'a': it is stopped")


def test_of_victims_those_that_waited_in_vain_come_before_those_that_they_left() -> None:
    """Each kind follows from the one before it, even if it is seen first: who times out closes its connections."""
    clock = host_clock(0.0)
    text = "rank 1 on host 'b': the connection to it must last until shutdown(), but was lost: "
    kinds = [
        "Connection timed out on the connection with 10.0.0.2:4711 (rank 1). Small packets pass between host 'a' and it",
        "connection reset by 10.0.0.1:4711 (rank 0)",
        "connection closed by 10.0.0.1:4711 (rank 0)",
    ]
    ranks = [failing(number, clock, 10.3 - number / 10, follows=True) for number in range(3)]
    for rank, kind in zip(ranks, kinds, strict=True):
        rank.because = f"{text}{kind}. It has ended, or the network to its host is cut."
    assert [first_cause(ranks[left:]).number for left in range(3)] == [0, 1, 2]
    assert [first_cause(order).number for order in (ranks[::-1], ranks[1::-1])] == [0, 0]
    assert first_cause([*ranks, failing(3, clock, 11.0)]).number == 3, "one that failed by itself"
    ranks[2].because = "rank 1 on host 'b': expected a sign of life every second but heard none for 5 s"
    assert first_cause(ranks).number == 2, "the first of those that waited"


def survived(rank: Rank) -> Rank:
    """A rank of an elastic job whose failure another world has followed."""
    rank.is_survived = True
    return rank


def test_what_an_elastic_job_has_survived_is_not_its_cause() -> None:
    clock = host_clock(0.0)
    ranks = [survived(failing(0, clock, 10.0)), failing(1, clock, 20.0), Rank(2, "host", outcome=0)]
    blame_survived(ranks)
    assert first_cause(ranks).number == 1
    blame_survived(ranks[::2])
    assert first_cause(ranks[::2]) is None  # as when there were too many worlds


def test_what_others_came_of_is_the_cause_though_a_world_has_followed() -> None:
    """A script whose steps survive nothing fails in the next world; then the last death before is to blame."""
    clock = host_clock(0.0)
    ranks = [
        survived(failing(0, clock, 10.0)),
        survived(failing(1, clock, 15.0)),
        failing(2, clock, 16.0, follows=True),
    ]
    blame_survived(ranks)
    assert first_cause(ranks).number == 1


@pytest.mark.parametrize("announced", [None, 3])
def test_a_rank_that_the_launcher_has_evicted_has_not_failed_by_that(announced: int | None) -> None:
    """Its agent has killed it at once, without having asked for its end; the reason is said, and is not the kernel's."""
    rank = Rank(0, "a", host="a", clock=host_clock(0.0), announced=announced)
    job = SimpleNamespace(
        engine=SimpleNamespace(evict=lambda _agent, _uid: 0, hear=lambda _facts, _agent: None),
        allocation=SimpleNamespace(installation=SimpleNamespace(has_mpi=False)),
        ranks={0: rank},
        _note_outcome=lambda rank, outcome, _at: setattr(rank, "outcome", outcome),
    )
    agent = SimpleNamespace(host=SimpleNamespace(name="a"), clock=rank.clock)
    ElasticJob._evict(job, agent, "uid of rank 0")
    Job._take(job, {"rank": 0, "ended": -9, "at": 1.0, "was_told_to": False, "engine_lost_at": None}, b"", agent)
    assert rank.outcome == -9 and rank.failure == (announced or 0)
