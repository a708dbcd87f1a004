"""All ranks go on with the states of one: after epochs with unequal numbers of steps, and after a checkpoint on one rank."""

import copy

import pytest
import torch
from torch_models import assert_all_close, assert_replicas_equal, mean_square, network, parameters

import ringtrain.torch as hvd
from ringtrain._training import drift
from ringtrain.errors import InvalidArgumentError
from ringtrain.testing import World

pytestmark = pytest.mark.least_ranks(2)
EPOCHS = 3


class Counter:
    """Something else with a state."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Extra(torch.nn.Module):
    """A module whose state is more than tensors."""

    def __init__(self):
        super().__init__()
        self.layer, self.words = torch.nn.Linear(4, 2), "none"

    def get_extra_state(self):
        return {"words": self.words}

    def set_extra_state(self, state):
        self.words = state["words"]

    def forward(self, x):
        return self.layer(x)


def made(start):
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.75)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    return model, optimizer, schedule, ema, Counter()


def steps_of(rank, epoch):
    """Of a rank in an epoch: another one has most in each."""
    return 2 + (rank + epoch) % 3


def batch(rank, epoch, step):
    generator = torch.Generator().manual_seed(100 * rank + 10 * epoch + step)
    return torch.randn(4, 4, generator=generator).double(), torch.randn(4, 2, generator=generator).double()


def test_uneven_epochs_equal_one_process(world, monkeypatch):
    """Which takes in each step the batches of the ranks that still have one; parameters are compared in each round."""
    monkeypatch.setattr(drift, "PERIOD", 0.0)
    monkeypatch.setattr(drift, "SHARE", float("inf"))
    start = network(torch.float64)
    alone, optimizer, schedule, ema, counter = made(start)
    for epoch in range(EPOCHS):
        for step in range(4):
            having = [rank for rank in range(world.size) if step < steps_of(rank, epoch)]
            if having:
                optimizer.zero_grad()
                batches = [batch(rank, epoch, step) for rank in having]
                (sum(mean_square(alone(x), y) for x, y in batches) / len(having)).backward()
                optimizer.step(), schedule.step(), ema.update_parameters(alone)
                counter.steps += 1
    rate = optimizer.param_groups[0]["lr"]

    def on_rank(rank):
        model, optimizer, schedule, average, count = made(start)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for epoch in range(EPOCHS):
            for step in range(steps_of(rank, epoch)):
                x, y = batch(rank, epoch, step)
                optimizer.zero_grad()
                mean_square(model(x), y).backward()
                optimizer.step(), schedule.step(), average.update_parameters(model)
                count.steps += 1
            hvd.resume_together(model, optimizer, schedule, average, count)
        assert_replicas_equal(parameters(model))
        assert_all_close(parameters(model), parameters(alone), rtol=1e-10, atol=1e-11)
        assert_all_close(parameters(average), parameters(ema), rtol=1e-10, atol=1e-11)
        assert count.steps == counter.steps and average.n_averaged == ema.n_averaged
        return optimizer.param_groups[0]["lr"], schedule.get_last_lr()[0]

    assert set(world.run(on_rank)) == {(rate, rate)}


def test_a_checkpoint_that_one_rank_has_loaded(world):
    def on_rank(rank):
        model, counter = Extra(), Counter()
        with torch.no_grad():
            model.layer.weight.fill_(rank)
        model.words, counter.steps = f"of rank {rank}", rank
        assert hvd.resume_together(model, counter, root_rank=1) == 1
        assert model.words == "of rank 1" and counter.steps == 1 and (model.layer.weight == 1).all()

    world.run(on_rank)


def test_what_has_no_state_is_refused():
    with pytest.raises(InvalidArgumentError, match="part 1 must have state_dict and load_state_dict, but is a int"):
        hvd.resume_together(torch.nn.Linear(1, 1), 3)


def test_a_process_set_needs_a_root():
    with World(2) as world:

        def on_rank(rank):
            members = hvd.add_process_set([0, 1])
            with pytest.raises(InvalidArgumentError, match="process_set must go with a root_rank"):
                hvd.resume_together(torch.nn.Linear(1, 1), process_set=members)

        world.run(on_rank)
