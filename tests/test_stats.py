"""stats(): the rank that comes last is found, with the operation in which it was most."""

import time

import numpy as np
import pytest

import ringtrain as rt

pytestmark = pytest.mark.timeout(60)


@pytest.mark.least_ranks(2)
def test_the_slow_rank_is_found(world):
    def on_rank(rank):
        slow = rt.size() - 1
        for name, seconds in (("a", 0.1), ("b", 0.3), ("a", 0.1)):
            rt.barrier()
            if rank == slow:
                time.sleep(seconds)
            rt.allreduce(np.ones(3), name)
        found = rt.stats()
        assert found.counters["operations"] >= 3
        if rank == slow:
            return
        assert found.waiting_seconds > 0.1
        if rank > 0:
            assert found.late == []
            return
        worst = found.late[0]
        assert worst.rank == slow and worst.times >= 3 and worst.name == "b"
        assert 0 < worst.longest <= worst.seconds

    world.run(on_rank)


def test_ranks_of_one_are_never_late(world):
    if world.size == 1:
        assert world.run(lambda rank: (rt.allreduce(np.ones(3)), rt.stats().late)[1]) == [[]]
