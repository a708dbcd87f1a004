"""Local steps on the world of the fixture, and so on ranks that the launcher has started, too."""

import copy

import pytest
import torch
from local_steps_by_hand import by_hand
from torch_models import assert_all_close, assert_replicas_equal, batches, network, parameters, sgd, share, train

import ringtrain as rt
import ringtrain.torch as hvd

pytestmark = pytest.mark.least_ranks(2)


@pytest.mark.parametrize("within", [None, "host"])
def test_ranks_are_the_oracle_after_each_synchronisation(world, within):
    ranks = world.size
    model, data, outer = network(torch.float64), batches(ranks, torch.float64, 6), hvd.Outer(0.7, 0.9)

    def on_rank(rank):
        mine = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            sgd(mine.parameters()),
            mine.named_parameters(),
            mode=hvd.LocalSteps(every=2, outer=outer, within=within),
        )
        workers = [[each] for each in range(ranks)] if within is None else [list(range(ranks))]
        expected = by_hand(model, sgd, data, workers, 2, outer)
        for number in range(3):
            train(mine, optimizer, [share(batch, rank, ranks) for batch in data[2 * number : 2 * number + 2]])
            assert_replicas_equal(parameters(mine))
            assert_all_close(parameters(mine), expected[number], rtol=1e-10, atol=1e-11)
        return rt.counters()["synchronisations"]

    assert set(world.run(on_rank)) == {3}
