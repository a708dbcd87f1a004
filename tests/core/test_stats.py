"""stats(): the rank that comes last is found, with the operation in which it was most."""

import time

import numpy as np
import pytest

import ringtrain as rt

pytestmark = pytest.mark.timeout(180)


@pytest.mark.least_ranks(2)
def test_the_slow_rank_is_found(world):
    def on_rank(rank):
        slow = rt.size() - 1
        for name, seconds in (("a", 0.05), ("b", 0.8), ("a", 0.05)):
            submitted = [] if rank == slow else [rt.allreduce_async(np.ones(3), name)]
            rt.barrier()  # after which all the others' submissions are there, however busy the machine
            if rank == slow:
                time.sleep(seconds)
                submitted = [rt.allreduce_async(np.ones(3), name)]
            rt.synchronize(submitted[0])
        found = rt.stats()
        assert found.counters["operations"] >= 3
        if rank == slow:
            return
        assert found.waiting_seconds > 0.1
        if rank > 0:
            assert found.late == []
            return
        assert [each.seconds for each in found.late] == sorted((each.seconds for each in found.late), reverse=True)
        waited_for = next(
            each for each in found.late if each.rank == slow
        )  # at a barrier another may have been the last
        assert waited_for.times >= 3 and waited_for.name == "b"
        assert 0 < waited_for.longest <= waited_for.seconds

    world.run(on_rank)


def test_ranks_of_one_are_never_late(world):
    if world.size == 1:
        assert world.run(lambda rank: (rt.allreduce(np.ones(3)), rt.stats().late)[1]) == [[]]
