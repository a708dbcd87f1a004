"""One step late: N ranks train as one process with the same rule, at the first step, at the last, and across checkpoints."""

import copy
import threading

import pytest
import torch
from dyadic_models import Net, inputs, sgd
from modes import in_mode
from torch_models import assert_same_bits, parameters

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.errors import InvalidArgumentError, MismatchError, UnsupportedError
from ringtrain.testing import World

STEPS = 5


def late(**arguments):
    model = Net()
    arguments = {"late": True, "op": hvd.Sum, **arguments}
    return model, hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **in_mode(arguments))


def head_of(rank, step):
    """No rank uses the second head in the first two steps, one in the third, all in the others."""
    return int(step > 2 or (step == 2 and rank == 1))


def loss_of(model, rank, step):
    return model(inputs(rank + step)[0], head_of(rank, step)).sum() / 64


def by_hand(size, numbers, model=None, left=None, drop=(), clip=None):
    """One process with the batches of all ranks; returns the model, and the gradients that are left to be applied."""
    model = model or Net()
    optimizer = sgd(model.parameters())
    for step in numbers:
        for parameter in model.parameters():
            parameter.grad = None
        for rank in range(size):
            loss_of(model, rank, step).backward()
        own = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        apply(model, optimizer, left, clip)
        left = None if step in drop else own
    return model, left


def apply(model, optimizer, gradients, clip=None):
    for parameter, gradient in zip(model.parameters(), gradients or [None] * 9, strict=False):
        parameter.grad = gradient
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def flushed(model, left):
    apply(model, sgd(model.parameters()), left)
    return model


def train(rank, model, optimizer, numbers):
    for step in numbers:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def bits_of(model):
    return [parameter.clone() for parameter in parameters(model)]


@pytest.mark.parametrize("layout", ["1", "1+1", "2+1"])
@pytest.mark.parametrize("flushes", [False, True])
def test_ranks_are_one_process_with_the_same_rule(layout, flushes):
    """Bit for bit, on sums that are exact; where some ranks, and none, use a parameter, too."""
    size = sum(map(int, layout.split("+")))

    def on_rank(rank):
        model, optimizer = late()
        train(rank, model, optimizer, range(STEPS))
        if flushes:
            optimizer.flush()
            optimizer.flush()  # nothing is left
        return bits_of(model)

    expected, left = by_hand(size, range(STEPS))
    expected = parameters(flushed(expected, left) if flushes else expected)
    with World(size, layout) as world:
        for result in world.run(on_rank):
            assert_same_bits(result, expected)


def test_the_first_step_applies_nothing_and_so_does_the_one_after_a_flush():
    """Not even weight decay and momentum move a parameter then."""

    def on_rank(rank):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, weight_decay=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=hvd.OneStepLate())
        before = bits_of(model)
        train(rank, model, optimizer, [3])
        assert_same_bits(parameters(model), before)
        optimizer.flush()
        after = bits_of(model)
        assert not torch.equal(after[0], before[0])
        train(rank, model, optimizer, [3])
        assert_same_bits(parameters(model), after)

    with World(2, "1+1") as world:
        world.run(on_rank)


def test_a_step_awaits_no_gradients_of_its_own():
    """A rank has ended its step before the other one begins it."""
    has_stepped = [threading.Event() for _ in range(STEPS)]

    def on_rank(rank):
        model, optimizer = late()
        for step in range(STEPS):
            if rank == 1:
                assert has_stepped[step].wait(60)
            optimizer.zero_grad()
            model(inputs(rank)[0], 0).sum().backward()
            (model.heads[1].weight.sum()).backward()
            optimizer.step()
            if rank == 0:
                has_stepped[step].set()
        optimizer.flush()
        return bits_of(model)

    with World(2, "1+1") as world:
        mine, theirs = world.run(on_rank)
    assert_same_bits(mine, theirs)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1)])
@pytest.mark.parametrize("saved_at", [1, 3])
def test_a_checkpoint_has_what_is_on_its_way(sizes, saved_at):
    """Saved by one rank alone, at any step; a world of another size goes on with the bits of one process."""

    def begin(rank):
        model, optimizer = late()
        train(rank, model, optimizer, range(saved_at))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict())) if rank == 0 else None
        train(rank, model, optimizer, [saved_at])  # it changes nothing for those that go on
        return saved, bits_of(model)

    def go_on(rank, saved):
        model, optimizer = late()
        train(rank, model, optimizer, [0])  # what is on its way here is forgotten
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(rank, model, optimizer, range(saved_at, STEPS))
        optimizer.flush()
        return bits_of(model)

    with World(sizes[0]) as world:
        results = world.run(begin)
    for _, bits in results:
        assert_same_bits(bits, parameters(by_hand(sizes[0], range(saved_at + 1))[0]))
    half, left = by_hand(sizes[0], range(saved_at))
    expected = parameters(flushed(*by_hand(sizes[1], range(saved_at, STEPS), half, left)))
    with World(sizes[1]) as world:
        for bits in world.run(go_on, copy.deepcopy(results[0][0])):
            assert_same_bits(bits, expected)


def test_others_take_what_is_on_its_way_from_the_root():
    def on_rank(rank):
        model, optimizer = late()
        train(0, model, optimizer, range(2))
        if rank == 1:
            optimizer.load_state_dict({**optimizer.state_dict(), "delayed": {}})
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(0, model, optimizer, range(2, STEPS))
        return bits_of(model)

    with World(2) as world:
        mine, theirs = world.run(on_rank)
    assert_same_bits(mine, theirs)


@pytest.mark.parametrize("asks", [False, True], ids=["plain", "synchronize"])
def test_an_overflow_on_one_rank_drops_that_batch_on_all(asks):
    """It is dropped a step later, when all know of it; the scale of the loss is each rank's own."""
    overflows = {1: 0, 3: 1}

    def on_rank(rank):
        model, optimizer = late()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        scales = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            scaler.scale(loss * torch.inf if overflows.get(step) == rank else loss).backward()
            if asks:
                scaler.unscale_(optimizer)
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizer.flush()
        return bits_of(model), scales

    expected = parameters(flushed(*by_hand(2, range(STEPS), drop=overflows)))
    with World(2, "1+1") as world:
        (bits, scales), (others_bits, others_scales) = world.run(on_rank)
    assert_same_bits(bits, expected)
    assert_same_bits(others_bits, expected)
    assert scales != others_scales


@pytest.mark.parametrize("unscales", [True, False])
def test_a_scaler_that_comes_after_synchronize_is_refused(unscales):
    """In Horovod's order it would divide what has no scale any more, and ranks would add what have different ones."""

    def on_rank(rank):
        model, optimizer = late()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, rank, 3)).backward()
        optimizer.synchronize()
        if unscales:
            scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    with World(1) as world, pytest.raises(InvalidArgumentError, match=r"Call unscale_\(\) before synchronize\(\)"):
        world.run(on_rank)


def test_without_a_scaler_what_is_not_finite_is_applied_as_ever():
    def on_rank(rank):
        model, optimizer = late()
        optimizer.zero_grad()
        (model(inputs(rank)[0], 0).sum() * (torch.nan if rank else 1)).backward()
        optimizer.step()
        optimizer.flush()
        return bool(model.trunk.weight.isnan().all())

    with World(2, "1+1") as world:
        assert world.run(on_rank) == [True, True]


def test_what_is_applied_can_be_clipped():
    """After ``synchronize()`` the gradients are those of all ranks that the step is going to apply."""

    def on_rank(rank):
        model, optimizer = late()
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        return bits_of(model)

    expected = parameters(by_hand(2, range(STEPS), clip=0.01)[0])
    with World(2) as world:
        for result in world.run(on_rank):
            torch.testing.assert_close(result, expected)


def test_passes_are_added_up_and_divided():
    def on_rank(rank):
        model, optimizer = late(backward_passes_per_step=2, average_aggregated_gradients=True, op=hvd.Average)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            loss_of(model, 1, step).backward()
            optimizer.step()
        return bits_of(model)

    halves, _ = by_hand(2, range(STEPS))
    model = Net()
    optimizer, left = sgd(model.parameters()), None
    for step in range(STEPS):
        model.zero_grad()
        ((loss_of(model, 0, step) + loss_of(model, 1, step)) / 2).backward()
        own = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        apply(model, optimizer, left)
        left = own
    with World(2) as world:
        for result in world.run(on_rank):
            assert_same_bits(result, parameters(model))
    assert not torch.equal(parameters(halves)[0], parameters(model)[0])


def test_what_a_compression_loses_is_made_up_for():
    """All that was applied and what is kept is the sum of all gradients, with a checkpoint on the way."""
    count = 5000

    def gradient(rank, step):
        return torch.randn(count, generator=torch.Generator().manual_seed(10 * step + rank))

    def on_rank(rank):
        weight = torch.nn.Parameter(torch.zeros(count))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, [("w", weight)], compression=hvd.Compression.int4, mode=hvd.OneStepLate()
        )
        for step in range(20):
            optimizer.zero_grad()
            (weight * gradient(rank, step)).sum().backward()
            optimizer.step()
            if step == 10:
                optimizer.state_dict()
        optimizer.flush()
        return -weight.detach().double(), optimizer.compression_state()

    exact = sum(gradient(rank, step).double() / 2 for rank in range(2) for step in range(20))
    with World(2, "1+1") as world:
        (applied, state), (other, _) = world.run(on_rank)
    kept = sum(state["w/0"][part].double() for part in ("sent", "finished"))
    assert torch.equal(applied, other)
    assert (applied + kept - exact).norm() < 1e-6 * exact.norm() < 1e-4 * (applied - exact).norm()


# ---- what is refused ----


def test_another_mode_on_one_rank_is_one_error_on_all():
    def on_rank(rank):
        model, optimizer = late(late=rank != 1)
        try:
            train(rank, model, optimizer, [3, 4, 5])
        except MismatchError as problem:
            return str(problem)

    with World(3) as world:
        texts = world.run(on_rank)
    assert (
        len(set(texts)) == 1
        and "mode must be the same on all ranks, but is OneStepLate on ranks 0, 2 and Synchronous on rank 1."
        in texts[0]
    )


def test_views_of_buckets_on_one_rank_are_another_mode():
    def on_rank(rank):
        model = torch.nn.Linear(2, 1)
        mode = hvd.Synchronous(gradient_as_bucket_view=rank == 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mode=mode)
        with pytest.raises(MismatchError) as caught:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return str(caught.value)

    with World(2) as world:
        one, other = world.run(on_rank)
    assert one == other
    assert "is Synchronous on rank 0 and Synchronous with gradient_as_bucket_view on rank 1." in one


def test_a_gradient_that_one_rank_refuses_is_an_error_on_all():
    def on_rank(rank):
        weight = torch.nn.Parameter(torch.zeros(4, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], mode=hvd.OneStepLate())
        try:
            for _ in range(2):
                rows = torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=rank == 1)
                rows.sum().backward()
                optimizer.step()
        except rt.errors.RingtrainError as problem:
            return type(problem), str(problem)

    with World(2) as world:
        (kind, mine), (others_kind, theirs) = world.run(on_rank)
    assert others_kind is UnsupportedError and issubclass(kind, rt.errors.RingtrainError)
    assert "as OneStepLate sends" in theirs and "as OneStepLate sends" in mine


def test_a_closure_is_refused():
    with (
        World(1) as world,
        pytest.raises(InvalidArgumentError, match=r"OneStepLate cannot be used with step\(closure\)"),
    ):
        world.run(lambda rank: late()[1].step(lambda: 0.0))


class Own(hvd.compression.Compressor):
    """A compression of the user's."""


@pytest.mark.parametrize("arguments, words", [
    ({"op": hvd.Adasum}, "op=Adasum"), ({"groups": 2}, "groups"), ({"compression": Own}, "a compression class of your own"),
    ({"compression": hvd.Compression.powersgd()}, "Compression.powersgd"),
])  # fmt: skip
def test_what_cannot_go_with_it_is_refused(arguments, words):
    with World(1) as world, pytest.raises(InvalidArgumentError, match=f"OneStepLate cannot be used with {words}"):
        world.run(lambda rank: late(**arguments))


def test_a_state_of_another_model_is_refused():
    def on_rank(rank):
        _, optimizer = late()
        optimizer.load_state_dict({**optimizer.state_dict(), "delayed": {"trunk.weight": torch.zeros(2)}})

    with World(2) as world, pytest.raises(InvalidArgumentError, match=r"shape \(2,\) but found one of shape \(3, 3\)"):
        world.run(on_rank)


def test_copies_and_optimizers_that_are_wrapped_again_step_at_once():
    def on_rank(rank):
        model, optimizer = late()
        train(rank, model, optimizer, [3])
        assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
        optimizer.flush()
        before = bits_of(model)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        train(rank, model, optimizer, [3])
        assert not torch.equal(bits_of(model)[0], before[0])

    with World(2) as world:
        world.run(on_rank)
