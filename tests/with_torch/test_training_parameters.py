"""N ranks train as one process does, also where parameters are unused, shared, frozen, added or loaded on the way."""

import copy

import pytest
import torch
from torch_models import (
    TOLERANCES,
    Branches,
    alone,
    assert_all_close,
    assert_replicas_equal,
    batches,
    distributed,
    mean_square,
    network,
    parameters,
    sgd,
    share,
    state,
    train,
)

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._training.rounds import BYTES_BEHIND_CODES

# ---- parameters that not all ranks use ----


def branches_of(rank, step, pattern):
    """The layers that a rank uses in a step."""
    return {
        "nobody uses the last": [0, 1],
        "some use the last": [0] if rank % 2 else [0, 2],
        "another one each step": [(rank + step) % 3],
        "some use none at all": [] if rank == 0 else [1],
    }[pattern]


@pytest.mark.parametrize("groups", [None, 1, 2], ids=["no groups", "one group", "two groups"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
@pytest.mark.parametrize(
    "pattern", ["nobody uses the last", "some use the last", "another one each step", "some use none at all"]
)
def test_unused_parameters(world, pattern, set_to_none, groups):
    """The oracle is one process that adds up the ranks' losses and divides by their number."""
    torch.manual_seed(2)
    start, data, size = Branches().double(), batches(world.size, torch.float64), world.size

    def losses(model, batch, step, of_ranks):
        for rank in of_ranks:
            x, y = share(batch, rank, size)
            used = branches_of(rank, step, pattern)
            if used:
                yield mean_square(model(x, used), y)

    expected, expected_optimizer = copy.deepcopy(start), None
    expected_optimizer = sgd(expected.parameters())
    for step, batch in enumerate(data):
        expected_optimizer.zero_grad(set_to_none)
        for loss in losses(expected, batch, step, range(size)):
            (loss / size).backward()
        expected_optimizer.step()

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, groups=groups)
        for step, batch in enumerate(data):
            optimizer.zero_grad(set_to_none)
            for loss in losses(model, batch, step, [rank]):
                loss.backward()
            optimizer.step()
            assert_replicas_equal(parameters(model))
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])
        assert_all_close(state(optimizer), state(expected_optimizer), **TOLERANCES[torch.float64])
        gradients = [(p.grad is None) for p in model.parameters()]
        assert gradients == [(p.grad is None) for p in expected.parameters()]

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_an_unused_parameter_sends_nothing(world):
    start = Branches()

    def on_rank(rank):
        model, optimizer = distributed(start, sgd)
        before = rt.counters()["bytes"]
        model(torch.ones(1, 4), [0]).sum().backward()
        optimizer.step()
        used, flags = 4 * (4 * 2 + 2), len(list(model.parameters())) + BYTES_BEHIND_CODES
        assert rt.counters()["bytes"] - before == used + 2 * flags  # after the backward pass, and once more in step()
        assert model.layers[1].weight.grad is None

    world.run(on_rank)


# ---- parameters that change their part ----


def test_tied_and_twice_used_parameters(world):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.last = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.second(torch.tanh(self.first(torch.tanh(self.first(x))))))

    torch.manual_seed(4)
    start, data = Tied().double(), batches(world.size, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd)
        train(model, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


def test_parameters_frozen_and_unfrozen(world):
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def schedule(model, optimizer, data):
        for step, batch in enumerate(data):
            model[0].requires_grad_(step >= 2)  # frozen when the optimizer is made
            model[4].requires_grad_(step not in (2, 3))  # frozen in between
            train(model, optimizer, [batch])
        return model

    def prepare(model):
        model[0].requires_grad_(False)
        return model, sgd(model.parameters())

    expected, expected_optimizer = prepare(copy.deepcopy(start))
    schedule(expected, expected_optimizer, data)

    def on_rank(rank):
        model, optimizer = prepare(copy.deepcopy(start))
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        schedule(model, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_param_groups_and_one_added_later(world, named):
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def run(model, wrap, data):
        optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.2}], lr=0.05, momentum=0.9)
        optimizer = wrap(optimizer, model.named_parameters() if named else None)
        train(model, optimizer, data[:2])
        optimizer.add_param_group({"params": list(model[2].parameters()) + list(model[4].parameters())})
        train(model, optimizer, data[2:])
        assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.05]
        return model

    expected = run(copy.deepcopy(start), lambda optimizer, names: optimizer, data)

    def on_rank(rank):
        model = run(copy.deepcopy(start), hvd.DistributedOptimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "at once"])
def test_two_optimizers_over_models_of_equal_names(world, in_turn):
    """As in a GAN; the gradients of both travel at the same time where both get theirs from one backward pass."""
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def run(wrap, data):
        models = [copy.deepcopy(start) for _ in range(2)]
        optimizers = [
            wrap(sgd(model.parameters(), lr=lr), model) for model, lr in zip(models, (0.1, 0.02), strict=True)
        ]
        for x, y in data:
            for chosen in [[0], [1]] if in_turn else [[0, 1]]:
                for index in chosen:
                    optimizers[index].zero_grad()
                inputs = [parameter for index in chosen for parameter in models[index].parameters()]
                mean_square(models[0](x) + models[1](x), y).backward(inputs=inputs)
                for index in chosen:
                    optimizers[index].step()
        return [tensor for model in models for tensor in parameters(model)]

    expected = run(lambda optimizer, model: optimizer, data)

    def wrap(optimizer, model):
        return hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def on_rank(rank):
        found = run(wrap, [share(batch, rank, world.size) for batch in data])
        assert_all_close(found, expected, **TOLERANCES[torch.float64])

    world.run(on_rank)


def test_state_loaded_in_the_middle(world):
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        mine = [share(batch, rank, world.size) for batch in data]
        model, optimizer = distributed(start, sgd)
        train(model, optimizer, mine[:2])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, mine[2:4])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, mine[2:])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


def test_process_set_trains_apart(world):
    """Even ranks train together, the others alone."""
    start, data, size = network(torch.float64), batches(world.size, torch.float64), world.size
    evens = list(range(0, size, 2))

    def on_rank(rank):
        together = hvd.add_process_set(evens) if len(evens) < size else hvd.global_process_set
        model, optimizer = distributed(start, sgd, process_set=together)
        train(model, optimizer, [share(batch, rank, size) for batch in data])
        members = evens if rank % 2 == 0 else [rank]
        expected = copy.deepcopy(start)
        of_members = [
            [torch.cat(parts) for parts in zip(*(share(batch, r, size) for r in members), strict=True)]
            for batch in data
        ]
        train(expected, sgd(expected.parameters()), of_members)
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)
