"""What may happen between two steps: several backward passes, parts of passes, threads, failures, another optimizer.

Data are dyadic: small integers times powers of two, so that every sum is exact and results are compared bit for bit.
"""

import copy
import threading

import pytest
import torch
import worlds
from torch.utils.checkpoint import checkpoint
from torch_models import assert_replicas_equal, assert_same_bits, parameters

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.context import current
from ringtrain.torch import window
from ringtrain.torch.accumulation import is_accumulating
from ringtrain.torch.gradients import Group

pytestmark = [pytest.mark.timeout(60), pytest.mark.least_ranks(2)]

RATE = 0.25


def dyadic(*shape):
    return (torch.arange(torch.Size(shape).numel()) % 5 - 2).reshape(shape).double() / 4


class Net(torch.nn.Module):
    """A trunk and two heads, without a function that rounds."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(3, 3, bias=False)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(3, 2, bias=False) for _ in range(2))
        for parameter in self.parameters():
            parameter.data = dyadic(*parameter.shape)

    def forward(self, x, head=0, wrap=lambda layer, value: layer(value)):
        return wrap(self.heads[head], wrap(self.trunk, wrap(self.trunk, x)))


def inputs(rank, count=1):
    """One or several micro-batches of a rank."""
    return [torch.roll(dyadic(2, 3), rank + micro, 1).requires_grad_() for micro in range(count)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def wrapped(**arguments):
    model = Net()
    return model, hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Sum, **arguments)


def alone(size, run):
    """What one process makes of the passes of all ranks."""
    model = Net()
    optimizer = sgd(model.parameters())
    for rank in range(size):
        run(model, rank)
    optimizer.step()
    return model


def assert_equal(model, expected):
    """Parameters, and gradients where there are any."""
    assert_same_bits(parameters(model), parameters(expected))
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in expected.parameters()]
    assert_replicas_equal(parameters(model))


def reductions(optimizer, run):
    """How many gradients travelled, rounds not counted."""
    before = rt.counters()["bytes"]
    run()
    rounds = len(parameters_of(optimizer)) + 1
    return (rt.counters()["bytes"] - before - rounds) // 8


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# ---- bursts ----


@pytest.mark.parametrize("first_used", [True, False], ids=["all used", "one unused"])
def test_small_gradients_leave_in_bursts(world, monkeypatch, first_used):
    """A gradient of 128 bytes takes along the two small ones before it; those after it leave with the last one."""
    monkeypatch.setattr(window, "_BURST_BYTES", 100)
    events = {}
    submit = Group.submit

    def noted(group, members, how, postscale):
        events[how.context].append(f"{group.name[-1]} left")
        submit(group, members, how, postscale)

    monkeypatch.setattr(Group, "submit", noted)

    def on_rank(rank):
        own = events[current()] = []
        layers = [torch.nn.Parameter(dyadic(count) + 1) for count in (1, 1, 16, 1, 1)]
        optimizer = hvd.DistributedOptimizer(sgd(layers), [(str(i), p) for i, p in enumerate(layers)], op=hvd.Sum)
        for i, layer in enumerate(layers):
            layer.register_post_accumulate_grad_hook(lambda _, i=i: own.append(f"{i} came"))  # after ours
        value = torch.ones((), dtype=torch.float64)
        for layer in layers[not first_used :]:
            value = value * layer.sum()
        value.backward()
        last = ["1 came", "1 left", "0 left", "0 came"] if first_used else ["1 came", "1 left"]
        assert own == ["4 came", "3 came", "4 left", "3 left", "2 left", "2 came", *last]
        others = torch.stack([layer.sum() for layer in layers[not first_used : 4]])
        assert torch.equal(layers[4].grad, others.prod().expand(1) * world.size)
        optimizer.step()

    world.run(on_rank)


# ---- one pass, in parts ----


def reentrant(layer, value):
    return checkpoint(layer, value, use_reentrant=True)


def nested(layer, value):
    return checkpoint(lambda inner: checkpoint(layer, inner, use_reentrant=True) * 2, value, use_reentrant=True)


def unnested(layer, value):
    return checkpoint(layer, value, use_reentrant=False)


@pytest.mark.parametrize("wrap", [reentrant, nested, unnested], ids=lambda each: each.__name__)
def test_checkpoints(world, wrap):
    """The trunk is used by two checkpoints; its gradient is complete only when the user's pass ends."""

    def run(model, rank):
        (x,) = inputs(rank)
        model(x, 0, wrap).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped()
        elements = reductions(optimizer, lambda: run(model, rank))
        assert elements == model.trunk.weight.numel() + model.heads[0].weight.numel()  # once each, and within backward()
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


def test_a_part_of_a_pass_taken_for_the_whole_is_found(world, monkeypatch):
    """Planted fault: hooks do not ask whether their pass runs within another one."""
    monkeypatch.setattr(window, "is_nested", lambda: False)

    def on_rank(rank):
        model, optimizer = wrapped()
        with pytest.raises(ValueError, match="found another one"):
            model(inputs(rank)[0], 0, reentrant).sum().backward()
        optimizer.zero_grad()

    world.run(on_rank)


def test_compiled_model(world):
    def run(model, rank):
        model(inputs(rank)[0].detach()).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped()
        compiled = torch.compile(model, backend="aot_eager")
        elements = reductions(optimizer, lambda: run(compiled, rank))
        assert elements == model.trunk.weight.numel() + model.heads[0].weight.numel()
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


@pytest.mark.skipif(not worlds.LAUNCHED, reason="torch switches it on for all threads of a process")
def test_compiled_autograd(world):
    """It tells nobody when a backward pass has ended, so gradients may arrive only in step()."""
    from torch._dynamo import compiled_autograd

    def run(model, rank):
        for x in inputs(rank, 2):
            model(x.detach()).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped(backward_passes_per_step=2)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            run(model, rank)
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


def test_double_backward(world):
    """A penalty on the gradient, as in WGAN-GP: the inner pass accumulates nothing, the outer one reduces once."""

    def run(model, rank):
        (x,) = inputs(rank)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope**2).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped()
        run(model, rank)
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


def test_gradients_computed_by_another_thread(world):
    def run(model, rank):
        thread = threading.Thread(target=lambda: model(inputs(rank)[0]).sum().backward())
        thread.start()
        thread.join()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped()
        run(model, rank)
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


def test_gradients_that_no_backward_pass_made(world):
    """A script may put gradients there itself; step() finds them."""

    def on_rank(rank):
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(sgd([parameter]), [("p", parameter)], op=hvd.Sum)
        for _ in range(2):
            parameter.grad = torch.full((2,), float(rank))
            optimizer.step()
        assert_same_bits([parameter.detach()], [torch.full((2,), -2 * RATE * sum(range(world.size)))])

    world.run(on_rank)


def test_a_second_step_uses_the_same_gradient(world):
    """It was reduced once; a sum would otherwise grow with every step."""

    def run(model, rank):
        model(inputs(rank)[0]).sum().backward()

    expected = alone(world.size, run)
    sgd(expected.parameters()).step()

    def on_rank(rank):
        model, optimizer = wrapped()
        run(model, rank)
        optimizer.step()
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


# ---- several passes ----


def test_losses_over_different_parameters(world):
    """Two passes in a window of one, whose parameters do not meet; one rank has a gradient in one of them only."""

    def run(model, rank):
        (x,) = inputs(rank)
        for head in model.heads[: 1 if rank == 1 else 2]:
            head(x).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped()
        run(model, rank)
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


def test_losses_that_share_a_trunk(world):
    """Horovod's scripts count each loss as a pass: the heads have one less than the trunk when the window ends."""

    def run(model, rank):
        (x,) = inputs(rank)
        outputs = model.trunk(x)
        for head in model.heads:
            head(outputs).sum().backward(retain_graph=True)

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped(backward_passes_per_step=2)
        run(model, rank)
        with optimizer.skip_synchronize():  # the last pass has completed all of them
            optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


def test_micro_batches_of_several_passes(world):
    """Parameters of one loss reach the end of the window before those of the other."""

    def run(model, rank):
        for x in inputs(rank, 3):
            for head in model.heads:
                head(x).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped(backward_passes_per_step=3)
        run(model, rank)
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


def test_retained_graph(world):
    def run(model, rank):
        loss = model(inputs(rank)[0]).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped(backward_passes_per_step=2)
        run(model, rank)
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


MOVED = ("operations", "batches", "bytes", "shared_bytes", "wire_bytes_sent", "cache_hits", "cache_misses")


@pytest.mark.parametrize("way", ["no_sync", "passes"])
def test_not_one_byte_before_the_boundary(world, way):
    """Each micro-batch uses another head on each rank: what any of them used is reduced at the end, and only then."""
    count = 3

    def head_of(rank, micro):
        return int(micro == 1 and rank == 1)

    def run(model, rank):
        for micro, x in enumerate(inputs(rank, count)):
            model(x, head_of(rank, micro)).sum().backward()

    expected = alone(world.size, run)

    def on_rank(rank):
        model, optimizer = wrapped(backward_passes_per_step=count if way == "passes" else 1)

        def micro_batch(micro):
            model(inputs(rank, count)[micro], head_of(rank, micro)).sum().backward()

        before = rt.counters()
        for micro in range(count - 1):
            if way == "passes":
                micro_batch(micro)
            else:
                with optimizer.no_sync():
                    assert is_accumulating()
                    micro_batch(micro)
        assert {name: rt.counters()[name] - before[name] for name in MOVED} == dict.fromkeys(MOVED, 0)
        hvd.barrier()  # a rank that goes ahead speaks to the others
        elements = reductions(optimizer, lambda: micro_batch(count - 1))
        assert elements == sum(parameter.numel() for parameter in model.parameters())  # head 1 too, which one rank used
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_average_over_the_window(world, passes):
    """N ranks with K micro-batches and mean losses equal one process with all in one batch; N and K powers of two."""
    if world.size & (world.size - 1):
        pytest.skip("an average over this number of ranks is rounded")
    expected = Net()
    everything = [x for rank in range(world.size) for x in inputs(rank, passes)]
    expected(torch.cat(everything)).mean().backward()
    sgd(expected.parameters()).step()

    def on_rank(rank):
        model = Net()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), backward_passes_per_step=passes, average_aggregated_gradients=True
        )
        for x in inputs(rank, passes):
            model(x).mean().backward()
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


def test_a_window_cut_short(world):
    """synchronize() flushes it; its samples weigh what others do, and the next window is a whole one."""

    def on_rank(rank):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(
            sgd([parameter]), [("p", parameter)], backward_passes_per_step=4, op=hvd.Sum,
            average_aggregated_gradients=True,
        )  # fmt: skip
        for count in (3, 4):
            for _ in range(count):
                parameter.sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert parameter.grad.item() == world.size * count / 4
            optimizer.zero_grad()

    world.run(on_rank)


# ---- windows that come to no end ----


def test_a_window_given_up_while_a_rank_knew_nothing_of_it(world):
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


def test_a_backward_pass_that_fails(world):
    """It fails on one rank after some gradients have left; zero_grad() ends the window on all."""

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


@pytest.mark.skipif(worlds.LAUNCHED, reason="waits for a stall, which is the same on ranks that are processes")
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
        assert f"allreduce '{optimizers[mine]._gradient_reduction.prefix}.used'" in str(caught.value)
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


def test_copies_made_within_a_window(world):
    """A copy has its own parameters, and neither hooks nor a window."""

    def on_rank(rank):
        model, optimizer = wrapped(backward_passes_per_step=2)
        model(inputs(rank)[0]).sum().backward()
        copied = copy.deepcopy(optimizer)
        before = rt.counters()["operations"]
        copied.step()
        assert rt.counters()["operations"] == before
        optimizer.step()

    world.run(on_rank)
