"""Several passes before a step, and gradients set to zero by the module: the loop of PyTorch's DCGAN example.

One network is stepped after two passes, over true and over made samples; the other's pass goes through both.
"""

import copy

import pytest
import torch
from modes import in_mode
from torch_models import assert_all_close, assert_replicas_equal, batches, network, parameters, share

import ringtrain.torch as hvd

pytestmark = pytest.mark.least_ranks(2)

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
judged = torch.nn.functional.binary_cross_entropy_with_logits


class Pair(torch.nn.Module):
    """A generator and a discriminator, over the inputs of ``torch_models.batches``."""

    def __init__(self):
        super().__init__()
        self.made = network(torch.float64, 6)
        self.judge = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def adam(trained, **arguments):
    return torch.optim.Adam(trained, lr=0.02, betas=(0.5, 0.999))


def momentum(trained):
    return torch.optim.SGD(trained, lr=0.02, momentum=0.9)


def train(pair, judge_optimizer, made_optimizer, data, set_to_none=True):
    """As in PyTorch's examples/dcgan/main.py: no ``zero_grad`` between the two passes, and the module's own before them."""
    for noise, true in data:
        pair.judge.zero_grad(set_to_none=set_to_none)
        output = pair.judge(true)
        judged(output, torch.ones_like(output)).backward()
        fake = pair.made(noise)
        output = pair.judge(fake.detach())
        judged(output, torch.zeros_like(output)).backward()
        judge_optimizer.step()
        pair.made.zero_grad(set_to_none=set_to_none)
        output = pair.judge(fake)
        judged(output, torch.ones_like(output)).backward()
        made_optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize(
    "make, arguments",
    [
        (adam, {}),
        (momentum, {"gradient_as_bucket_view": True}),
        (momentum, {"gradient_predivide_factor": 2.0}),
        (adam, {"late": True}),
    ],
    ids=["plain", "bucket views", "predivided", "delayed"],
)
def test_dcgan_trains_as_one_process_does(world, make, arguments, set_to_none):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        start = Pair()
    data = batches(world.size, torch.float64)
    expected = copy.deepcopy(start)
    if "late" not in arguments:
        train(expected, make(expected.judge.parameters()), make(expected.made.parameters()), data, set_to_none)

    def on_rank(rank):
        pair = copy.deepcopy(start)
        optimizers = [
            hvd.DistributedOptimizer(make(part.parameters()), part.named_parameters(name), **in_mode(arguments))
            for name, part in (("judge", pair.judge), ("made", pair.made))
        ]
        train(pair, *optimizers, [share(batch, rank, world.size) for batch in data], set_to_none)
        if "late" not in arguments:
            assert_all_close(parameters(pair), parameters(expected), **CLOSE)
        assert_replicas_equal(parameters(pair))

    world.run(on_rank)


def test_what_passes_cost_is_said_once(world, caplog):
    """And not where ``backward_passes_per_step`` has announced them."""
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def loop(model, optimizer, passes):
        for x, y in passes:
            optimizer.zero_grad()
            for _ in range(2):
                torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    def on_rank(rank):
        own = [share(batch, rank, world.size) for batch in data]
        for passes in (1, 2):
            model = copy.deepcopy(start)
            optimizer = hvd.DistributedOptimizer(
                momentum(model.parameters()), model.named_parameters(), backward_passes_per_step=passes
            )
            loop(model, optimizer, own)

    ranks_here = len(world.run(on_rank))
    told = [record for record in caplog.records if "travels again" in record.getMessage()]
    assert len(told) == ranks_here


@pytest.mark.parametrize("groups", [None, 1, 2], ids=["alone", "one group", "two groups"])
def test_ranks_with_unlike_passes(world, groups):
    """One rank's second pass reaches what another's does not: all that any has added to travels again."""
    (x, y), *_ = batches(world.size, torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(5)  # ranks that are processes draw alike
        start = torch.nn.ModuleList(torch.nn.Linear(4, 2).double() for _ in range(3))

    def run(model, rank, size):
        own_x, own_y = share((x, y), rank, size)
        torch.nn.functional.mse_loss(model[0](own_x) + model[1](own_x), own_y).backward()
        torch.nn.functional.mse_loss(model[rank % 3](own_x), own_y).backward()

    expected = copy.deepcopy(start)
    for rank in range(world.size):
        run(expected, rank, world.size)
    gradients = [None if p.grad is None else p.grad / world.size for p in expected.parameters()]

    def on_rank(rank):
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters(), groups=groups)
        run(model, rank, world.size)
        optimizer.step()
        found = [p.grad for p in model.parameters()]
        assert [each is None for each in found] == [each is None for each in gradients]
        assert_all_close(
            [each for each in found if each is not None], [each for each in gradients if each is not None], **CLOSE
        )
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_a_step_that_one_rank_has_opened_again_is_given_up_by_all(world):
    """One rank's second pass reaches what is settled, another's what is not: then zero_grad() holds no round, on any."""
    (x, y), *_ = batches(world.size, torch.float64)

    def on_rank(rank):
        model = torch.nn.ModuleList(torch.nn.Linear(4, 2).double() for _ in range(3))
        optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        own_x, own_y = share((x, y), rank, world.size)
        for layers in ((0, 1), (2 if rank == 0 else 1,)):
            torch.nn.functional.mse_loss(sum(model[layer](own_x) for layer in layers), own_y).backward()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model[0](own_x), own_y).backward()
        optimizer.step()
        assert_replicas_equal(parameters(model))

    world.run(on_rank)
