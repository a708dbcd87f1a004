"""Steps that fail, come to no end, or meet another optimizer's, and the sparse gradients in them.

Data are dyadic: small integers times powers of two, so that every sum is exact and results are compared bit for bit.
"""

import copy
import types
from contextlib import nullcontext

import pytest
import torch
import worlds
from dyadic_models import Net, alone, assert_equal, dyadic, inputs, sgd, wrapped
from torch_models import assert_replicas_equal, assert_same_bits, parameters

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.testing import World
from ringtrain.torch import hooks

pytestmark = pytest.mark.least_ranks(2)


# ---- steps that come to no end ----


def test_a_step_given_up_while_a_rank_knew_nothing_of_it(world):
    """Rank 0 has no gradient when the others give theirs up; the next step is everybody's."""

    def run(model, rank):
        model(inputs(rank)[0]).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        for first in (False, True):
            model, optimizer = wrapped()
            if not first:
                run(model, rank)
                optimizer.step()
                optimizer.zero_grad()
                model.load_state_dict(Net().state_dict())
            if rank != 0:
                model.heads[1](inputs(rank)[0]).sum().backward()
            optimizer.zero_grad()
            run(model, rank)
            optimizer.step()
            assert_equal(model, expected)

    world.run(on_rank)


@pytest.mark.parametrize("way", ["no_sync", "no_sync, zeroed by the module", "the first of two passes"])
def test_a_step_given_up_after_a_pass_that_sends_nothing(way):
    """It reaches what is reduced on rank 0 alone, and no other rank hears of that: all the same they give it up together."""

    def run(model, rank, weight=1.0):
        (model(inputs(rank)[0]).sum() * weight).backward()

    expected = alone(2, lambda model, rank: run(model, rank, 0.5))
    passes = 2 if way == "the first of two passes" else 1

    def on_rank(rank):
        model = Net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), backward_passes_per_step=passes)
        for _ in range(2):
            for _ in range(passes):
                model.heads[0](inputs(rank)[0]).sum().backward()
            if "zeroed" in way:
                model.zero_grad()
            with optimizer.no_sync() if "no_sync" in way else nullcontext():
                model.heads[rank](inputs(rank)[0]).sum().backward()
            optimizer.zero_grad()
        run(model, rank)
        optimizer.step()
        assert_equal(model, expected)

    with World(2, stall_abort_seconds=20) as world:
        world.run(on_rank)


def test_a_backward_pass_that_fails(world):
    """It fails on one rank after some gradients have left; zero_grad() ends the step on all."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("no gradient today")

    def run(model, rank):
        model(inputs(rank)[0]).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped()
        (x,) = inputs(rank)
        if rank == 0:
            with pytest.raises(ArithmeticError):
                model.heads[0](Fails.apply(model.trunk(x))).sum().backward()
        else:
            run(model, rank)
        optimizer.zero_grad()
        run(model, rank)
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


# ---- two optimizers ----


@pytest.mark.parametrize("case", ["a parameter of each is unused", "one rank uses one alone"])
def test_two_optimizers_of_one_model(world, case):
    """Their rounds end in one pass, on some ranks in the other order; a rank must not wait for one before the other."""
    all_used = case == "one rank uses one alone"

    def run(model, rank, step):
        (x,) = inputs(rank)
        heads = list(model.heads)[: 1 if rank == step and all_used else 2]
        losses = [head(x).sum() for head in heads[:: 1 if rank % 2 else -1]]  # the engine begins with the last one
        sum(losses).backward()

    def optimizers_of(model):
        unused = [[] if all_used else [torch.nn.Parameter(torch.zeros(1))] for _ in model.heads]
        triples = zip(model.heads, unused, (0.5, 0.25), strict=True)
        return [torch.optim.SGD([head.weight, *others], lr=rate) for head, others, rate in triples]

    expected = Net()
    expected_optimizers = optimizers_of(expected)
    for step in range(3):
        for optimizer in expected_optimizers:
            optimizer.zero_grad()
        for rank in range(world.size):
            run(expected, rank, step)
        for optimizer in expected_optimizers:
            optimizer.step()

    def on_rank(rank):
        model = Net()
        optimizers = [hvd.DistributedOptimizer(each, op=hvd.Sum) for each in optimizers_of(model)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            run(model, rank, step)
            for optimizer in optimizers:
                optimizer.step()
        assert_same_bits(parameters(model), parameters(expected))
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


@pytest.mark.on_threads("waits for a stall, which is the same on ranks that are processes")
def test_passes_that_reach_other_optimizers_on_other_ranks_are_explained():
    """Each optimizer also has a parameter that nobody uses: then every rank must say so, and only a pass makes it."""

    def on_rank(rank):
        model = Net()
        optimizers = [
            hvd.DistributedOptimizer(sgd([head.weight, torch.nn.Parameter(torch.zeros(1))])) for head in model.heads
        ]
        mine = 0 if rank == 0 else 1
        with pytest.raises(rt.errors.TimeoutError) as caught:
            model.heads[mine](inputs(rank)[0]).sum().backward()
        missing = "ranks 1, 2" if rank == 0 else "rank 0"
        assert f"allreduce '{optimizers[mine]._mode.prefix}.used'" in str(caught.value)
        assert f"missing {missing}." in str(caught.value) and "several optimizers over one model" in str(caught.value)

    with worlds.World(3, stall_warning_seconds=0.2, stall_abort_seconds=1) as world:
        world.run(on_rank)


def test_a_parameter_belongs_to_the_optimizer_that_was_made_last(world):
    """Making a new one while the old one is still there is common, and right; using both is refused."""

    def run(model, rank):
        model(inputs(rank)[0]).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, old = wrapped()
        new = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Sum)
        run(model, rank)
        new.step()
        assert_equal(model, expected)
        with pytest.raises(ValueError, match="expected to reduce 'optimizer.0.trunk.weight' but 'optimizer.1' does"):
            old.step()

    world.run(on_rank)


class _Owner:
    """As much of an optimizer as others look at; ``appear`` is called when they do."""

    prefix, rank = "owner", types.SimpleNamespace(usable=True)

    def __init__(self, appear=lambda: None):
        self._appear = appear

    @property
    def context(self):
        self._appear()
        return self.rank


def test_optimizers_are_found_while_ranks_on_other_threads_make_theirs():
    newcomers = []

    def appear():
        newcomers.append(_Owner())
        hooks.enlist(newcomers[-1])

    own, other = _Owner(), _Owner(appear)
    hooks.enlist(own)
    hooks.enlist(other)
    assert of_this_test(hooks.others(own)) == [other] and len(newcomers) == 1
    for each in (other, *newcomers):
        hooks.dismiss(each)
    assert of_this_test(hooks.others(own)) == []


def of_this_test(owners):
    """Without optimizers of worlds that other tests have closed, which live until they are collected."""
    return [owner for owner in owners if isinstance(owner, _Owner)]


# ---- sparse gradients ----


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(world, as_dense):
    """Rows that several ranks or samples share, ranks that used none, and a dense parameter in the same group."""

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(8, 2, sparse=True)
            self.last = torch.nn.Linear(2, 1, bias=False)
            for parameter in self.parameters():
                parameter.data = dyadic(*parameter.shape)

        def forward(self, words):
            return self.last(self.table(words) if len(words) else torch.ones(1, 2, dtype=torch.float64))

    words = [[], [1, 1, 2], [2, 7], [0], [5, 5], [], [3]]

    def run(model, rank):
        model(torch.tensor(words[rank], dtype=torch.int64)).sum().backward()

    expected = Words()
    for rank in range(world.size):
        run(expected, rank)
    sgd(expected.parameters()).step()

    def on_rank(rank):
        model = Words()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), op=hvd.Sum, groups=1, sparse_as_dense=as_dense
        )
        run(model, rank)
        optimizer.step()
        assert model.table.weight.grad.is_sparse
        assert_same_bits(parameters(model), parameters(expected))
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_sparse_on_one_rank_and_dense_on_another(world):
    def on_rank(rank):
        table = torch.nn.Embedding(4, 2, sparse=rank == 0)
        optimizer = hvd.DistributedOptimizer(sgd(table.parameters()), table.named_parameters())
        with pytest.raises(rt.RingtrainError, match="optimizer.0.weight.*on rank 0") as caught:
            table(torch.tensor([1])).sum().backward()
        assert hvd.allgather_object(str(caught.value)) == [str(caught.value)] * world.size
        optimizer.zero_grad()

    world.run(on_rank)


def test_copies_made_within_a_step(world):
    """A copy has parameters of its own, no hooks and no step in progress."""

    def on_rank(rank):
        model, optimizer = wrapped(backward_passes_per_step=2)
        model(inputs(rank)[0]).sum().backward()
        copied = copy.deepcopy(optimizer)
        before = rt.counters()["operations"]
        copied.step()
        assert rt.counters()["operations"] == before
        optimizer.step()

    world.run(on_rank)
