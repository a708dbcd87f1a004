"""Agreement by a tree of hosts (``negotiation="tree"``): the same results and the same errors as by the star."""

from __future__ import annotations

import numpy as np
import pytest

import ringtrain as rt
from ringtrain.testing import World

LAYOUT = "2+2+1+2"
FANOUTS = [1, 2]  # a chain of hosts, and inner hosts with two below


@pytest.mark.parametrize("fanout", FANOUTS)
def test_operations_joins_and_sets(fanout: int) -> None:
    def train(rank: int) -> list:
        odd = rt.add_process_set([1, 3, 5])
        sums = [rt.allreduce(np.full(3, rank + step), name="x", op=rt.Sum)[0] for step in range(4)]
        rows = rt.allgather(np.full((rank, 1), rank), name="rows")
        in_set = rt.allreduce(np.ones(1), name="odd", op=rt.Sum, process_set=odd)[0] if rank % 2 else None
        if rank == 2:
            rt.join()
        else:
            sums.append(rt.allreduce(np.ones(1), name="last", op=rt.Sum)[0])
            rt.join()
        return [sums, len(rows), in_set]

    with World(7, LAYOUT, negotiation="tree", negotiation_fanout=fanout) as world:
        results = world.run(train)
    for rank, (sums, rows, in_set) in enumerate(results):
        assert sums == [21, 28, 35, 42] + ([6] if rank != 2 else [])
        assert rows == 21
        assert in_set == (3 if rank % 2 else None)


@pytest.mark.parametrize("fanout", FANOUTS)
def test_a_mismatch_has_the_same_words_on_every_rank(fanout: int) -> None:
    def differ(rank: int) -> str:
        with pytest.raises(rt.RingtrainError) as error:
            rt.allreduce(np.ones(4 if rank == 6 else 3), name="x")
        rt.barrier()
        return str(error.value)

    with World(7, LAYOUT, negotiation="tree", negotiation_fanout=fanout) as world:
        said = world.run(differ)
    assert len(set(said)) == 1 and "[3] on ranks 0-5 and [4] on rank 6" in said[0]
