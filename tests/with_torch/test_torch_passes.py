"""The backward passes of a step, whole, in parts or several: what travels when, and that the result is that of one process.

Data are dyadic: small integers times powers of two, so that every sum is exact and results are compared bit for bit.
"""

import threading

import pytest
import torch
import worlds
from dyadic_models import RATE, Net, alone, assert_equal, dyadic, inputs, reductions, sgd, wrapped
from torch.utils.checkpoint import checkpoint
from torch_models import assert_same_bits

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._runtime.context import Context, current
from ringtrain.testing import World
from ringtrain.torch import backward, bucketing, exchange
from ringtrain.torch.exchange import Exchange
from ringtrain.torch.gradients import Group
from ringtrain.torch.no_sync import is_accumulating

pytestmark = pytest.mark.least_ranks(2)


# ---- bursts ----


@pytest.mark.parametrize("first_used", [True, False], ids=["all used", "one unused"])
def test_small_gradients_leave_in_bursts(world, monkeypatch, first_used):
    """A gradient of 128 bytes takes along the two small ones before it; those after it leave with the last one."""
    monkeypatch.setattr(Context, "burst_bytes", lambda context: 100)
    monkeypatch.setattr(exchange, "overlap_pays", lambda session, parameters: True)
    events = {}
    submit = Group.submit

    def noted(group, members, how, *rest):
        events[how.session.context].append(f"{group.name[-1]} left")
        submit(group, members, how, *rest)

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


# ---- hooks that only note ----


class Product(torch.nn.Module):
    """The product of the sums of some of its layers: each gradient is the product of the other sums."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.full((count,), 1.0).double() for count in (1, 1, 16, 1, 1))

    def forward(self, used, factor):
        value = torch.tensor(float(factor), dtype=torch.float64)
        for index in used:
            value = value * self.layers[index].sum() / self.layers[index].numel()
        return value


ALL = [0, 1, 2, 3, 4]
USED = {
    "always alike": lambda rank, step: ALL,
    "in other orders": lambda rank, step: ALL[step % 3 :] + ALL[: step % 3] if step > 3 else ALL,
    "on each rank in its own order": lambda rank, step: ALL if (rank + step) % 2 else ALL[::-1],
    "fewer, then more": lambda rank, step: ALL[: 2 + step % 4],
    "fewer on one rank": lambda rank, step: ALL[: 5 - (rank == 0 and step in (4, 6))],
    "twice": lambda rank, step: ALL if step % 2 else ALL + ALL,
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("used", USED.values(), ids=USED)
def test_gradients_may_come_at_other_times_than_before(world, monkeypatch, used, overlap, passes):
    """Where hooks wait for what left in the step before, sums are those of all that has come in this one."""
    monkeypatch.setattr(Context, "burst_bytes", lambda context: 100)
    monkeypatch.setattr(bucketing, "GROUP_BYTES", 100)
    monkeypatch.setattr(exchange, "overlap_pays", lambda session, parameters: overlap)

    def gradients(model, rank, step):
        for number in range(passes):
            model(used(rank, step), rank + 1 + number).backward()

    def on_rank(rank):
        model, one = Product(), Product()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), op=hvd.Sum, backward_passes_per_step=passes
        )
        for step in range(10):
            optimizer.zero_grad()
            gradients(model, rank, step)
            if passes == 2:  # else backward() returns with the gradients of all ranks
                optimizer.synchronize()
            one.zero_grad()
            for other in range(world.size):
                gradients(one, other, step)
            found, expected = ([p.grad for p in each.parameters()] for each in (model, one))
            assert [p is None for p in found] == [p is None for p in expected]
            assert_same_bits([p for p in found if p is not None], [p for p in expected if p is not None])
            optimizer.synchronize()
            step_without_change(model, optimizer)

    world.run(on_rank)


def step_without_change(model, optimizer):
    """Ends a step whose gradients are reduced."""
    for parameter in model.parameters():
        parameter.grad = None
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("overlap, expected", [(True, [2] * 5), (False, [1] * 5)], ids=["overlap", "no overlap"])
def test_hooks_look_when_something_leaves(world, monkeypatch, overlap, expected):
    """The first pass is looked at after each gradient; later ones when a burst leaves, or at their ends."""
    monkeypatch.setattr(Context, "burst_bytes", lambda context: 100)
    monkeypatch.setattr(bucketing, "GROUP_BYTES", 100)
    monkeypatch.setattr(exchange, "overlap_pays", lambda session, parameters: overlap)
    looks = {}
    look = Exchange.look

    def counted(self, part):
        looks[self.context] += 1
        look(self, part)

    monkeypatch.setattr(Exchange, "look", counted)

    def on_rank(rank):
        model = Product()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Sum)
        found = []
        for _ in range(6):
            looks[current()] = 0
            optimizer.zero_grad()
            model(ALL, 1).backward()
            optimizer.step()
            found.append(looks[current()])
        assert found == [5, *expected]

    world.run(on_rank)


def test_what_a_failed_pass_has_brought_is_given_up(world):
    """Its hooks have noted gradients that nobody has looked at; the step after it has none of them."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            raise ArithmeticError("planted")

    def on_rank(rank):
        model = Product()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Sum)
        for step in range(8):
            if step in (3, 6):
                value = Fails.apply(model([0, 1], 1.0)) * model([2, 3, 4], rank + 1.0)
                with pytest.raises(ArithmeticError, match="planted"):
                    value.backward()
            optimizer.zero_grad()
            model(ALL, rank + 1).backward()
            optimizer.synchronize()
            assert model.layers[0].grad.item() == sum(range(1, world.size + 1))
            step_without_change(model, optimizer)

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
        assert (
            elements == model.trunk.weight.numel() + model.heads[0].weight.numel()
        )  # once each, and within backward()
        optimizer.step()
        assert_equal(model, expected)

    world.run(on_rank)


def test_a_part_of_a_pass_taken_for_the_whole_is_found(world, monkeypatch):
    """Planted fault: hooks do not ask whether their pass runs within another one."""
    monkeypatch.setattr(backward, "is_nested", lambda: False)

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


if worlds.LAUNCHED:  # torch switches it on for all threads of a process

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
    """Two passes in a step of one, whose parameters do not meet; one rank has a gradient in one of them only."""

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
    """Horovod's scripts count each loss as a pass: the heads have one less than the trunk when the step ends."""

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
    """Parameters of one loss reach the end of the step before those of the other."""

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
def test_average_over_the_step(world, passes):
    """N ranks with K micro-batches and mean losses equal one process with all in one batch: bit for bit for powers of two."""
    rounding = 0 if world.size & (world.size - 1) == 0 else 1e-6
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
        assert_equal(model, expected, rounding)

    world.run(on_rank)


@pytest.mark.parametrize("mode", [hvd.Synchronous, hvd.ShardedStep, hvd.OneStepLate], ids=str)
def test_average_over_the_step_of_one_rank(mode):
    def on_rank(rank):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(
            sgd([parameter]), backward_passes_per_step=4, average_aggregated_gradients=True, mode=mode()
        )
        for _ in range(4):
            (parameter * 8.0).sum().backward()
        optimizer.step()
        optimizer.flush()
        return parameter.item()

    plain = torch.nn.Parameter(torch.zeros(1))
    plain.grad = torch.full((1,), 8.0)
    sgd([plain]).step()
    for size in (1, 2):
        with World(size) as world:
            assert world.run(on_rank) == [plain.item()] * size


def test_a_step_cut_short(world):
    """synchronize() flushes it; its samples weigh what others do, and the next step is a whole one."""

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
