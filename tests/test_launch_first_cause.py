"""Which rank the launcher blames: the first that failed by itself, on whatever host, however the hosts' clocks stand."""

from __future__ import annotations

from ringtrain.launch.clocks import HostClock
from ringtrain.launch.ranks import Rank, first_cause


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
