"""``DistributedOptimizer(op=Adasum)``: each rank's own step, and the recursion of ``adasum_reference`` over what it changed."""

import copy
import pickle

import numpy as np
import pytest
import torch
from adasum_reference import reference
from torch_models import (
    assert_all_close,
    assert_replicas_equal,
    assert_same_bits,
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
from ringtrain.elastic.transaction import Part
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.testing import World


def adam(arguments):
    return torch.optim.Adam(arguments, lr=0.01)


def by_hand(model, make, data, ranks):
    """What all ranks end with: one optimizer for each, whose model starts each step with what the step before left."""
    models = [copy.deepcopy(model) for _ in range(ranks)]
    optimizers = [make(each.parameters()) for each in models]
    for batch in data:
        starts = parameters(models[0])
        for rank, (each, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(each, optimizer, [share(batch, rank, ranks)])
        changed = [parameters(each) for each in models]
        for index, start in enumerate(starts):
            deltas = [(mine[index] - start).numpy() for mine in changed]
            result = start + torch.from_numpy(reference(deltas).reshape(start.shape)).to(start.dtype)
            for each in models:
                list(each.parameters())[index].data.copy_(result)
    return models[0]


@pytest.mark.parametrize("make", [sgd, adam])
def test_steps_are_combined(world, make):
    model, data = network(torch.float64), batches(world.size, torch.float64)
    expected = by_hand(model, make, data, world.size)

    def on_rank(rank):
        mine, optimizer = distributed(model, make, op=hvd.Adasum)
        train(mine, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_replicas_equal(parameters(mine))
        assert_all_close(parameters(mine), parameters(expected), rtol=1e-9, atol=1e-10)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("compression", ["fp16", "bf16", "own"])
def test_compression(world, compression):
    """The core's; and a user's own, of which each change goes through the methods."""
    seen = []

    class Halves(hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            seen.append(tensor.shape)
            return tensor * 2, None

        @staticmethod
        def decompress(tensor, context):
            return tensor / 2

    model, data = network(), batches(world.size)
    how = Halves if compression == "own" else getattr(hvd.Compression, compression)
    expected = by_hand(model, sgd, data, world.size)

    def on_rank(rank):
        mine, optimizer = distributed(model, sgd, op=hvd.Adasum, compression=how)
        train(mine, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_replicas_equal(parameters(mine))
        assert_all_close(parameters(mine), parameters(expected), rtol=1e-2, atol=1e-2)

    world.run(on_rank)
    assert bool(seen) == (compression == "own")


@pytest.mark.least_ranks(2)
def test_passes_before_a_step_are_added_up(world):
    """Also within ``no_sync``, and whatever ``backward_passes_per_step`` says; ``synchronize`` is there for scripts."""
    model, data = network(torch.float64), batches(world.size, torch.float64, steps=4)

    def on_rank(rank):
        results = []
        for arguments in ({"backward_passes_per_step": 2}, {}):
            mine, optimizer = distributed(model, sgd, op=hvd.Adasum, **arguments)
            optimizer.set_backward_passes_per_step(2)
            for first, second in zip(data[::2], data[1::2], strict=True):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    x, y = share(first, rank, world.size)
                    mean_square(mine(x), y).backward()
                x, y = share(second, rank, world.size)
                mean_square(mine(x), y).backward()
                optimizer.synchronize()
                optimizer.step()
            results.append(parameters(mine))
        assert_same_bits(*results)
        assert_replicas_equal(results[0])
        with pytest.raises(InvalidArgumentError, match="must be at least 1, but is 0"):
            optimizer.set_backward_passes_per_step(0)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_a_parameter_that_a_rank_did_not_use_takes_the_others_step(world):
    def on_rank(rank):
        used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0), op=hvd.Adasum)
        (used.sum() if rank else used.sum() * 0 + unused.sum()).backward()
        optimizer.step()
        assert unused.tolist() == [0.0] * 3
        assert_replicas_equal([used.detach(), unused.detach()])

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_strided_parameters_and_sparse_gradients(world):
    def on_rank(rank):
        weight = torch.nn.Parameter(torch.ones(4, 3).t())
        table = torch.nn.Embedding(world.size, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, table.weight], lr=1.0), op=hvd.Adasum)
        (weight.sum() + table(torch.tensor([rank])).sum()).backward()
        optimizer.step()
        assert not weight.is_contiguous()
        torch.testing.assert_close(weight.detach(), torch.zeros(3, 4), rtol=0, atol=1e-6)
        assert_replicas_equal([table.weight.detach()])
        return table.weight.detach().sum(dim=1)

    # Each rank used another row, so their changes are orthogonal, and add.
    assert world.run(on_rank)[0].tolist() == [-2.0] * world.size


@pytest.mark.least_ranks(2)
def test_a_rank_whose_scaler_finds_an_infinity_contributes_nothing(world):
    """The others' step is taken on all ranks; its own scale falls, and its gradients are where they were."""

    def on_rank(rank):
        weight = torch.nn.Parameter(torch.zeros(world.size))
        own = torch.eye(world.size)[rank]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0, momentum=0.9), op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        steps = []
        for overflows in (True, False):
            optimizer.zero_grad()
            scaler.scale((weight * own).sum()).backward()
            if overflows and rank == 0:
                weight.grad[0] = float("inf")
            if not overflows:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert (not torch.isfinite(weight.grad).all()) == (overflows and rank == 0)
            assert_replicas_equal([weight.detach()])
            steps.append(weight.detach().clone())
        first = -torch.ones(world.size)
        first[0] = 0.0
        torch.testing.assert_close(steps[0], first)
        assert steps[1][0] == -1 and (steps[1][1:] < -2).all()
        assert scaler.get_scale() == (4.0 if rank == 0 else 8.0)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_closures_schedulers_and_the_users_hooks(world):
    """A closure may run several times; hooks of the user see the parameters before the step, and combined after it."""
    common, data = network(torch.float64), batches(world.size, torch.float64, steps=1)[0]

    def on_rank(rank):
        model = copy.deepcopy(common)
        plain = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)  # puts a step() of its own on the optimizer
        optimizer = hvd.DistributedOptimizer(plain, op=hvd.Adasum)
        assert optimizer is plain and isinstance(plain, torch.optim.LBFGS)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(parameters(model)))
        x, y = share(data, rank, world.size)

        def closure():
            optimizer.zero_grad()
            loss = mean_square(model(x), y)
            loss.backward()
            return loss

        before = mean_square(model(x), y).item()
        assert optimizer.step(closure).item() == pytest.approx(before)
        schedule.step()
        assert_same_bits(seen[0], parameters(model))
        assert all(torch.isfinite(each).all() for each in seen[0])
        assert_replicas_equal(parameters(model))
        assert schedule.get_last_lr() == [0.25]

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_copies_and_pickles_are_plain(world):
    def on_rank(rank):
        _, optimizer = distributed(network(), sgd, op=hvd.Adasum)
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(other) is torch.optim.SGD

    world.run(on_rank)


def test_what_is_refused(world):
    def on_rank(rank):
        model, optimizer = distributed(network(), sgd, op=hvd.Adasum)
        with pytest.raises(InvalidArgumentError, match="skip_synchronize: op must be Average or Sum, but is Adasum"):
            with optimizer.skip_synchronize():
                optimizer.step()
        for arguments, text in [
            ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor needs op=Average, but op is Adasum"),
            ({"average_aggregated_gradients": True}, "op=Adasum cannot be used with average_aggregated_gradients"),
            ({"backward_passes_per_step": 0}, "backward_passes_per_step must be at least 1"),
        ]:
            with pytest.raises(InvalidArgumentError, match=text):
                distributed(model, sgd, op=hvd.Adasum, **arguments)

    world.run(on_rank)


def test_attributes_that_scripts_read(world):
    def on_rank(rank):
        model, optimizer = distributed(network(), sgd, op=hvd.Adasum, backward_passes_per_step=2)
        assert (optimizer.op, optimizer.process_set) == (hvd.Adasum, hvd.global_process_set)
        assert set(optimizer._parameter_names) == set(model.parameters())
        assert optimizer.backward_passes_per_step == 2
        optimizer.set_backward_passes_per_step(3)
        assert optimizer.backward_passes_per_step == 3
        assert not hasattr(copy.deepcopy(optimizer), "op")

    world.run(on_rank)


def test_a_step_that_cannot_be_combined_is_undone():
    def on_rank(rank):
        weight = torch.nn.Parameter(torch.ones(2 + rank))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
        weight.sum().backward()
        with pytest.raises(MismatchError, match="shape must be the same on all ranks"):
            optimizer.step()
        assert weight.tolist() == [1.0] * (2 + rank)

    with World(2) as two:
        two.run(on_rank)


@pytest.mark.least_ranks(2)
def test_operations(world):
    """The forms of allreduce; a backward pass through one is refused, since Adasum is not linear."""
    generator = np.random.default_rng(5)
    given = [torch.from_numpy(generator.standard_normal(33)) for _ in range(world.size)]
    expected = torch.from_numpy(reference([tensor.numpy() for tensor in given]))

    def on_rank(rank):
        mine = given[rank]
        found = [
            hvd.allreduce(mine, op=hvd.Adasum, name="a"),
            hvd.allreduce_(mine.clone(), op=hvd.Adasum, name="b"),
            hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Adasum, name="c")),
            hvd.synchronize(hvd.allreduce_async_(mine.clone(), op=hvd.Adasum, name="d")),
            *hvd.grouped_allreduce([mine, mine], op=hvd.Adasum, name="e"),
            *hvd.synchronize(hvd.grouped_allreduce_async_([mine.clone()], op=hvd.Adasum, name="f")),
        ]
        assert_same_bits(found, [found[0]] * len(found))
        torch.testing.assert_close(found[0], expected)
        mine = mine.clone().requires_grad_()
        with pytest.raises(NotImplementedError, match="backward of allreduce 'g': gradients need op Average or Sum"):
            hvd.allreduce(mine, op=hvd.Adasum, name="g").sum().backward()
        with pytest.raises(NotImplementedError, match="op must be Average or Sum, but is Adasum, which takes dense"):
            hvd.allreduce(torch.ones(2).to_sparse(), op=hvd.Adasum, name="h")
        assert rt.Adasum == hvd.Adasum == 2

    world.run(on_rank)


def test_changes_are_kept_for_a_step_that_is_done_again(world):
    """As in an elastic job whose world ends before all ranks hold the results: what is sent once more is the same."""
    model, data = network(), batches(world.size)

    class Twice:
        """Drops what was held first."""

        def __init__(self, model):
            self.model, self.parts = model, []

        def run(self, attempt, part_of, take_back):
            changes = parameters(self.model)
            for _ in range(2):
                held = yield from attempt()
                assert_same_bits(parameters(self.model), changes)  # equal ones would have themselves for their Adasum
            self.parts.append(part_of(held))
            return held

    def on_rank(rank):
        ends = []
        for is_done_again in (False, True):
            mine, optimizer = distributed(model, sgd, op=hvd.Adasum)
            transaction = Twice(mine)
            if world.size > 1 and is_done_again:
                optimizer._mode.guarded.keep_inputs_for(transaction)
            train(mine, optimizer, [share(batch, rank, world.size) for batch in data])
            ends.append(parameters(mine))
        assert_same_bits(*ends)
        assert transaction.parts == [Part.STEP] * (len(data) if world.size > 1 else 0)

    world.run(on_rank)
