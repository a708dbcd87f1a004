"""N ranks train as one process does in steps of several passes, with clipping, closures, schedules and sparse gradients."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch_models import (
    STEPS,
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
    train,
)

import ringtrain as rt
import ringtrain.torch as hvd

# ---- accumulation ----


def _forward(model, batch):
    x, y = batch
    return model(x), y


@pytest.mark.parametrize("passes", [2, 3])
def test_accumulation_sums_micro_batches(world, passes):
    """With the loss divided by the passes, N ranks with K micro-batches equal one process with all of them."""
    start, data = network(torch.float64), batches(world.size * passes, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, backward_passes_per_step=passes)
        for batch in data:
            optimizer.zero_grad()
            for micro in range(passes):
                x, y = share(batch, rank * passes + micro, world.size * passes)
                (mean_square(model(x), y) / passes).backward()
            optimizer.step()
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


@pytest.mark.one_by_one
@pytest.mark.least_ranks(2)
def test_no_byte_moves_before_the_boundary(world):
    start, passes = network(), 4
    tensor_count = len(parameters(start))
    data = batches(world.size, steps=2 * passes)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, backward_passes_per_step=passes)
        for step in range(2):
            optimizer.zero_grad()
            before = rt.counters()
            for batch in data[step * passes : (step + 1) * passes - 1]:
                mean_square(*_forward(model, share(batch, rank, world.size))).backward()
            quiet = rt.counters()
            moved = ("operations", "batches", "bytes", "shared_bytes", "wire_bytes_sent", "cache_hits", "cache_misses")
            assert {name: quiet[name] - before[name] for name in moved} == dict.fromkeys(moved, 0)
            hvd.allreduce(torch.zeros(1), name="all were quiet")  # a rank that went ahead would speak to the others
            mean_square(*_forward(model, share(data[step * passes + passes - 1], rank, world.size))).backward()
            optimizer.step()
            after = rt.counters()
            assert after["operations"] - quiet["operations"] == 1 + tensor_count + 1  # ours above, and who used what

    world.run(on_rank)


def test_a_partial_step_is_reduced_by_step(world):
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, backward_passes_per_step=3)
        train(model, optimizer, [share(batch, rank, world.size) for batch in data])  # one pass a step
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


def test_zero_grad_starts_the_step_again(world):
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected, _ = alone(start, sgd, data[1:])

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, backward_passes_per_step=2)
        mean_square(*_forward(model, share(data[0], rank, world.size))).backward()  # given up
        train(model, optimizer, [share(batch, rank, world.size) for batch in data[1:]])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


# ---- recipes ----


@pytest.mark.one_by_one
@pytest.mark.parametrize("recipe", ["as alone", "Horovod's"])
def test_clipping_recipe(world, recipe):
    """Clips the average, once, with a norm that is the same on all ranks, whether or not the script synchronizes."""
    start, data, bound = network(torch.float64), batches(world.size, torch.float64), 0.1

    def clipped_alone(data):
        model = copy.deepcopy(start)
        optimizer, norms = sgd(model.parameters()), []
        for x, y in data:
            optimizer.zero_grad()
            mean_square(model(x), y).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), bound))
            optimizer.step()
        assert min(norms) > bound, "a bound that never clips tests nothing"
        return model, norms

    expected, expected_norms = clipped_alone(data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd)
        norms, operations = [], []
        for batch in data:
            optimizer.zero_grad()
            before = rt.counters()["operations"]
            mean_square(*_forward(model, share(batch, rank, world.size))).backward()
            if recipe == "Horovod's":
                optimizer.synchronize()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), bound))
            with optimizer.skip_synchronize() if recipe == "Horovod's" else nullcontext():
                optimizer.step()
            operations.append(rt.counters()["operations"] - before)
        assert_all_close(norms, expected_norms, **TOLERANCES[torch.float64])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])
        once = len(list(model.parameters())) + 1 if world.size > 1 else 0
        assert operations == [once] * STEPS

    world.run(on_rank)


@pytest.mark.parametrize(
    "make", [sgd, lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe")], ids=["sgd", "lbfgs"]
)
def test_closure(world, make):
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def run(model, optimizer, data):
        losses = []
        for x, y in data:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = mean_square(model(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
        return losses

    expected = copy.deepcopy(start)
    expected_losses = run(expected, make(expected.parameters()), data)

    def on_rank(rank):
        model, optimizer = distributed(start, make)
        losses = run(model, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(losses, expected_losses, rtol=1e-7, atol=1e-9)
        assert_all_close(parameters(model), parameters(expected), rtol=1e-6, atol=1e-7)
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_closure_with_parameters_that_some_ranks_use(world):
    """The gradients must be complete when the closure returns, also those that this rank had no part in."""
    start = Branches().double()

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, op=hvd.Sum)

        def closure():
            optimizer.zero_grad()
            model(torch.ones(1, 4, dtype=torch.float64), [rank % 3]).sum().backward()

        assert optimizer.step(closure) is None
        used_by = [len(range(layer, world.size, 3)) for layer in range(3)]
        for layer, count in zip(model.layers, used_by, strict=True):
            assert (layer.weight.grad is None) if count == 0 else layer.weight.grad.eq(count).all()

    world.run(on_rank)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_learning_rate_schedule(world, scheduler_first):
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def run(model, optimizer, scheduler, data):
        for batch in data:
            train(model, optimizer, [batch])
            scheduler.step()
        return optimizer.param_groups[0]["lr"]

    expected = copy.deepcopy(start)
    expected_optimizer = sgd(expected.parameters())
    expected_rate = run(expected, expected_optimizer, schedule(expected_optimizer), data)

    def on_rank(rank):
        model = copy.deepcopy(start)
        optimizer = sgd(model.parameters())
        scheduler = schedule(optimizer) if scheduler_first else None
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        rate = run(
            model, optimizer, scheduler or schedule(optimizer), [share(batch, rank, world.size) for batch in data]
        )
        assert rate == expected_rate
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def test_sparse_gradients(world, optimizer, as_dense):
    """Ranks look up different words, some of them several times, and one rank none at all in a step."""
    torch.manual_seed(6)
    start, size = torch.nn.Embedding(10, 3, sparse=True).double(), world.size

    def words(rank, step):
        return torch.tensor([rank, 9, 9] if rank != step else [], dtype=torch.int64)

    def make(parameters):
        return optimizer(parameters, lr=0.5)

    expected = copy.deepcopy(start)
    expected_optimizer = make(expected.parameters())
    for step in range(STEPS):
        expected_optimizer.zero_grad()
        for rank in range(size):
            (expected(words(rank, step)).pow(2).sum() / size).backward()
        expected_optimizer.step()

    def on_rank(rank):
        model, optimizer = distributed(start, make, sparse_as_dense=as_dense)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(words(rank, step)).pow(2).sum().backward()
            optimizer.step()
            assert model.weight.grad.is_sparse
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])
        assert_replicas_equal(parameters(model))

    world.run(on_rank)
