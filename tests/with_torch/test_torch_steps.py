"""Steps as Horovod's scripts write them: closures within ``skip_synchronize()``, passes after ``synchronize()``.

And ranks that step more or less often than others. The oracle is one process with the batches of all ranks.
"""

import copy

import pytest
import torch
from dyadic_models import Net, dyadic, inputs, sgd, wrapped
from modes import in_mode
from torch_models import (
    assert_all_close,
    assert_replicas_equal,
    assert_same_bits,
    batches,
    distributed,
    mean_square,
    network,
    parameters,
    share,
)
from torch_models import sgd as sgd_with_momentum

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._training.rounds import BYTES_BEHIND_CODES

pytestmark = pytest.mark.least_ranks(2)

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


# ---- closures within skip_synchronize() ----


def synchronizes(optimizer, model, x, y):
    """As Lightning's strategies for Horovod do: zero, forward, backward, synchronize."""

    def closure():
        optimizer.zero_grad()
        loss = mean_square(model(x), y)
        loss.backward()
        optimizer.synchronize()
        return loss

    return closure


def synchronizes_and_clips(optimizer, model, x, y):
    inner = synchronizes(optimizer, model, x, y)

    def closure():
        loss = inner()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        return loss

    return closure


def relies_on_backward(optimizer, model, x, y):
    """``backward()`` returns with the averages, so nothing is left for ``synchronize()``."""

    def closure():
        optimizer.zero_grad()
        loss = mean_square(model(x), y)
        loss.backward()
        return loss.item()

    return closure


def computes_nothing(optimizer, model, x, y):
    loss = synchronizes(optimizer, model, x, y)()
    return lambda: loss


def returns_none(optimizer, model, x, y):
    inner = synchronizes(optimizer, model, x, y)
    return lambda: inner() and None


def returns_more(optimizer, model, x, y):
    inner = synchronizes(optimizer, model, x, y)
    return lambda: {"loss": inner()}


CLIP = 0.05
CLOSURES = [synchronizes, synchronizes_and_clips, relies_on_backward, computes_nothing, returns_none, returns_more]


@pytest.mark.parametrize("make_closure", CLOSURES)
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_a_closure_within_skip_synchronize(world, make_closure, keyword):
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected = copy.deepcopy(start)
    expected_optimizer = sgd_with_momentum(expected.parameters())
    for x, y in data:
        expected_optimizer.zero_grad()
        mean_square(expected(x), y).backward()
        if make_closure is synchronizes_and_clips:
            torch.nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
        expected_optimizer.step()

    def on_rank(rank):
        model, optimizer = distributed(start, sgd_with_momentum)
        with optimizer.skip_synchronize():  # for the whole run, as Lightning does
            for batch in data:
                closure = make_closure(optimizer, model, *share(batch, rank, world.size))
                loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
                if loss is not None and not isinstance(loss, dict):
                    assert len(set(hvd.allgather_object(float(loss)))) == 1, "the loss of all ranks"
        assert_all_close(parameters(model), parameters(expected), **CLOSE)
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_within_skip_synchronize(world, line_search):
    """It evaluates several times a step, and decides by the loss: all ranks must see the same."""
    start, data = network(torch.float64), batches(world.size, torch.float64, steps=3)

    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, line_search_fn=line_search)

    expected = copy.deepcopy(start)
    expected_optimizer = make(expected.parameters())

    def evaluate(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = mean_square(model(x), y)
        loss.backward()
        return loss

    for batch in data:
        expected_optimizer.step(lambda batch=batch: evaluate(expected, expected_optimizer, *batch))

    def on_rank(rank):
        model, optimizer = distributed(start, make)
        with optimizer.skip_synchronize():
            for batch in data:
                optimizer.step(synchronizes(optimizer, model, *share(batch, rank, world.size)))
        assert_all_close(parameters(model), parameters(expected), rtol=1e-6, atol=1e-8)
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_a_closure_that_leaves_gradients_unreduced(world):
    """It is asked after the closure, and says so on every rank; the next step works."""

    def on_rank(rank):
        model, optimizer = wrapped(backward_passes_per_step=2)

        def closure():
            model(inputs(rank)[0]).sum().backward()

        with optimizer.skip_synchronize(), pytest.raises(ValueError, match="at the end of the closure"):
            optimizer.step(closure)
        optimizer.zero_grad()
        model(inputs(rank)[0]).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


@pytest.mark.parametrize("skipping", [False, True])
def test_gradients_that_a_closure_never_sets_to_zero(world, skipping):
    """The next closure's pass adds to what was averaged, as it adds in one process."""
    start, data = network(torch.float64), batches(world.size, torch.float64, steps=3)
    expected = copy.deepcopy(start)
    expected_optimizer = sgd_with_momentum(expected.parameters())
    for x, y in data:
        expected_optimizer.step(lambda x=x, y=y: mean_square(expected(x), y).backward())

    def on_rank(rank):
        model, optimizer = distributed(start, sgd_with_momentum)
        for batch in data:
            x, y = share(batch, rank, world.size)

            def closure(x=x, y=y):
                mean_square(model(x), y).backward()

            if skipping:
                with optimizer.skip_synchronize():
                    optimizer.step(closure)
            else:
                optimizer.step(closure)
        assert_all_close(parameters(model), parameters(expected), **CLOSE)

    world.run(on_rank)


def test_a_scaler_within_skip_synchronize(world):
    """Horovod's recipe for AMP, with a batch that overflows on one rank: all skip that step, and nobody is refused."""
    start, data = network(), batches(world.size)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd_with_momentum)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step, batch in enumerate(data):
            x, y = share(batch, rank, world.size)
            optimizer.zero_grad()
            loss = mean_square(model(x), y) * (float("inf") if step == 1 and rank == 0 else 1.0)
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**7
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


# ---- passes after synchronize() ----


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("passes", [1, 2], ids=["one pass a step", "two passes a step"])
def test_a_pass_after_synchronize(world, passes, clips):
    """Lightning's strategy does this at each micro-batch. What is averaged already stays; what is added is averaged."""
    start, data = network(torch.float64), batches(world.size * 2, torch.float64)
    half = len(data[0][0]) // 2
    expected = copy.deepcopy(start)
    expected_optimizer = sgd_with_momentum(expected.parameters())
    for x, y in data:
        expected_optimizer.zero_grad()
        for part in (slice(None, half), slice(half, None)):
            mean_square(expected(x[part]), y[part]).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
        expected_optimizer.step()

    def on_rank(rank):
        model, optimizer = distributed(start, sgd_with_momentum, backward_passes_per_step=passes)
        for x, y in data:
            optimizer.zero_grad()
            for part in (slice(None, half), slice(half, None)):
                mean_square(model(x[part][rank :: world.size]), y[part][rank :: world.size]).backward()
                optimizer.synchronize()
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert_all_close(parameters(model), parameters(expected), **CLOSE)
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_only_what_a_later_pass_reaches_travels_again(world):
    """Rank 0 runs no second pass, and the others one through a head: what that did not reach stays where it is."""
    size = world.size

    def on_rank(rank):
        model = Net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        (x,) = inputs(rank)
        model(x).sum().backward()
        optimizer.synchronize()
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.trunk.weight.grad.mul_(0.5)  # as clipping would; it is not sent again
        before_operations = rt.counters()["operations"]
        if rank != 0:
            model.heads[0](x.detach()).sum().backward()
        optimizer.synchronize()
        assert rt.counters()["operations"] == before_operations + 3  # two agreements and one gradient
        optimizer.synchronize()  # once more adds nothing
        with optimizer.skip_synchronize():
            optimizer.step()
        one = Net().heads[0]
        for other in range(1, size):
            one(inputs(other)[0].detach()).sum().backward()
        torch.testing.assert_close(model.heads[0].weight.grad, before[1] + one.weight.grad / size, **CLOSE)
        assert_same_bits([model.trunk.weight.grad], [before[0] * 0.5])
        assert model.heads[1].weight.grad is None
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


@pytest.mark.parametrize(
    "arguments, setting",
    [
        ({"op": hvd.Sum}, "op=Sum"),
        ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, "average_aggregated_gradients"),
    ],
)
def test_what_cannot_be_reduced_again_is_refused(world, arguments, setting):
    """A sum would count what is reduced once for each rank, as Horovod's does."""

    def on_rank(rank):
        model = Net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **in_mode(arguments))
        model(inputs(rank)[0]).sum().backward()
        optimizer.synchronize()
        optimizer.synchronize()
        with pytest.raises(ValueError, match=f"after synchronize.* With {setting}"):
            model(inputs(rank)[0]).sum().backward()
        optimizer.zero_grad()

    world.run(on_rank)


# ---- ranks that step more or less often than others ----


def refused(function) -> str:
    with pytest.raises(rt.errors.MismatchError) as caught:
        function()
    texts = hvd.allgather_object(str(caught.value))
    assert texts == [texts[0]] * len(texts)
    return texts[0]


@pytest.mark.parametrize("missed", [1, 3], ids=["the second step", "the fourth step"])
def test_a_rank_that_skips_a_step(world, missed):
    def on_rank(rank):
        model, optimizer = wrapped()

        def train(step):
            optimizer.zero_grad()
            model(inputs(rank)[0]).sum().backward()
            if not (step == missed and rank == 1):
                optimizer.step()

        for step in range(missed + 1):
            train(step)
        text = refused(lambda: train(missed + 1))
        others = "ranks" if world.size > 2 else "rank"
        stepped = ", ".join(str(each) for each in range(world.size) if each != 1)
        assert text.startswith(
            "step 'optimizer.0': the number of steps since gradients were last reduced must be the same"
        )
        assert f"is 1 on {others} {stepped} and 0 on rank 1." in text
        model.load_state_dict(Net().state_dict())  # who goes on from one state trains right
        for step in range(-2, 0):
            train(step)
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_a_skipped_step_is_told_where_a_rank_has_no_gradients(world):
    """The others have sent theirs when they hear of it, and must not wait for a rank that gives up before."""

    def on_rank(rank):
        model, optimizer = wrapped()
        model(inputs(rank)[0]).sum().backward()
        if rank == 0:
            optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            return refused(optimizer.step)
        return refused(lambda: model(inputs(rank)[0]).sum().backward())

    assert "is 1 on rank 0 and 0 on rank" in world.run(on_rank)[0]


def test_a_skipped_step_of_one_optimizer_among_two(world):
    def on_rank(rank):
        models = [torch.nn.Linear(3, 2).double() for _ in range(2)]
        optimizers = [
            hvd.DistributedOptimizer(sgd(each.parameters()), mode=hvd.Synchronous(replicas="differ")) for each in models
        ]
        for step in range(3):
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                if step == 2 and number == 1:
                    return refused(lambda: model(inputs(rank)[0]).sum().backward())
                model(inputs(rank)[0]).sum().backward()
                if not (rank == 0 and step == 1 and number == 1):
                    optimizer.step()

    assert world.run(on_rank)[0].startswith("step 'optimizer.1'")


def closures(rank, model, optimizer):
    optimizer.step(lambda: model(inputs(rank)[0]).sum().backward())


def accumulation(rank, model, optimizer):
    with optimizer.no_sync():
        model(inputs(rank)[0]).sum().backward()
    model(inputs(rank)[0]).sum().backward()
    optimizer.step()


def dropped_batches(rank, model, optimizer):
    for _ in range(2):
        model(inputs(rank)[0]).sum().backward()
        optimizer.zero_grad()


def many_steps(rank, model, optimizer):
    model(inputs(rank)[0]).sum().backward()
    for _ in range(300):  # more than a byte counts, with a round each
        optimizer.step()


def steps_without_passes(rank, model, optimizer):
    if rank == 0:
        model(inputs(rank)[0]).sum().backward()
    optimizer.step()


def loads_a_state(rank, model, optimizer):
    if rank == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    model(inputs(rank)[0]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "use", [closures, accumulation, dropped_batches, many_steps, steps_without_passes, loads_a_state]
)
def test_what_all_ranks_do_alike_is_not_refused(world, use):
    def on_rank(rank):
        model = Net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for _ in range(3):
            use(rank, model, optimizer)
            model(inputs(rank)[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


@pytest.mark.on_threads("ends ranks early, which is the same on ranks that are processes")
def test_ranks_with_fewer_batches_that_join_are_not_refused(world):
    """Epochs of other lengths on each rank, one of them empty."""

    def on_rank(rank):
        model = Net()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for epoch in range(3):
            for _ in range((rank + epoch) % world.size * 2):
                optimizer.zero_grad()
                model(inputs(rank)[0]).sum().backward()
                optimizer.step()
            last = hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_counting_steps_sends_nothing_more(world):
    """Two bytes with the maximum that a round begins with, beside flags and a digest; no message."""

    def on_rank(rank):
        model = torch.nn.Linear(3, 2, bias=False)
        model.weight.data = dyadic(2, 3).float()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        before = rt.counters()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        after = rt.counters()
        assert after["operations"] - before["operations"] == 2
        assert after["bytes"] - before["bytes"] == 6 * 4 + 1 + BYTES_BEHIND_CODES

    world.run(on_rank)
