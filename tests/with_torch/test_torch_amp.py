"""Loss scaling: an overflow on one rank skips the step on all, leaves no trace, and needs no recipe of its own."""

import copy
import threading

import apex_standin
import pytest
import torch
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
    state,
)

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.torch import exchange
from ringtrain.torch.exchange import Exchange

pytestmark = pytest.mark.least_ranks(2)

BAD_STEP = 2
SCALE = 2.0**10


def adam(parameters, **arguments):
    return torch.optim.Adam(parameters, lr=0.01, **arguments)


# ---- recipes: what a script does between backward() and update() ----


def plain(optimizer, scaler, model):
    scaler.step(optimizer)


def clipped(optimizer, scaler, model):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(optimizer)


def older(optimizer, scaler, model):
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


RECIPES = [plain, clipped, older]


# ---- faults: what a rank adds to its scaled loss in the bad step ----


def overflow(weight, rank, size):
    return weight.sum() * (float("inf") if rank == size - 1 else 0.0)


def not_a_number(weight, rank, size):
    return weight.sum() * (float("nan") if rank == 0 else 0.0)


def opposite_overflows(weight, rank, size):
    return weight.sum() * (float("inf") if rank == 0 else float("-inf"))


def overflow_of_the_sum(weight, rank, size):
    """Each rank's gradient is finite."""
    return weight.sum() * 3e38


FAULTS = [overflow, not_a_number, opposite_overflows, overflow_of_the_sum]


def scaled_training(start, data, recipe, rank, size, fault=None, make=adam):
    """Trains one rank; returns its model and optimizer, and its scales after each step."""
    model, optimizer = distributed(start, make)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scales = []
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        x, y = share(batch, rank, size)
        loss = scaler.scale(mean_square(model(x), y))
        if fault is not None and step == BAD_STEP:
            loss = loss + fault(model[0].weight, rank, size)
        loss.backward()
        recipe(optimizer, scaler, model)
        scaler.update()
        scales.append(scaler.get_scale())
        assert_replicas_equal([*parameters(model), *state(optimizer)])
    return model, optimizer, scales


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: each.__name__)
def test_a_bad_step_leaves_no_trace(world, recipe, fault):
    """Parameters and Adam's state are, bit for bit, those of a run that never saw the bad batch."""
    start, data, size = network(), batches(world.size), world.size
    good = data[:BAD_STEP] + data[BAD_STEP + 1 :]

    def on_rank(rank):
        expected, expected_optimizer, scales = scaled_training(start, good, recipe, rank, size)
        assert set(scales) == {SCALE}
        model, optimizer, scales = scaled_training(start, data, recipe, rank, size, fault)
        assert scales == [SCALE] * BAD_STEP + [SCALE / 2] * (len(data) - BAD_STEP)
        assert_same_bits(parameters(model), parameters(expected))
        assert_same_bits(state(optimizer), state(expected_optimizer))

    world.run(on_rank)


def test_the_test_would_see_a_step_that_only_some_skip(world, monkeypatch):
    """Planted fault: gradients that arrive in step(), after the scaler has looked at this rank's own."""
    monkeypatch.setattr(Exchange, "_end_pass", lambda self: None)
    monkeypatch.setattr(
        exchange, "overlap_pays", lambda session, parameters: True
    )  # else a rank waits, and is not wrong
    monkeypatch.delattr(hvd.optimizer._Distributed, "_step_supports_amp_scaling")
    looked = threading.Semaphore(0)

    def on_rank(rank):
        last = world.size - 1
        in_bad_step = False

        def late_overflow(weight, rank, size):
            """The last rank's gradients leave when the other ranks have looked at theirs."""
            nonlocal in_bad_step
            in_bad_step = True
            if rank == last:
                for _ in range(last):
                    assert looked.acquire(timeout=60)
            return overflow(weight, rank, size)

        def with_a_word(optimizer, scaler, model):
            nonlocal in_bad_step
            scaler.unscale_(optimizer)
            if in_bad_step and rank != last:
                looked.release()
            in_bad_step = False
            scaler.step(optimizer)

        scaled_training(network(), batches(world.size), with_a_word, rank, world.size, late_overflow)

    with pytest.raises((AssertionError, rt.RingtrainError)):
        world.run(on_rank)


@pytest.mark.parametrize("zero", ["optimizer", "model", "model, in place"])
def test_a_skipped_step_leaves_nothing_behind(world, zero):
    """No gradient travels, and zero_grad is legal, whoever does it."""
    start, data = network(), batches(world.size)

    def on_rank(rank):
        model, optimizer = distributed(start, adam)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step, batch in enumerate(data):
            x, y = share(batch, rank, world.size)
            loss = scaler.scale(mean_square(model(x), y))
            loss = loss + overflow(model[0].weight, rank, world.size) if step != BAD_STEP else loss
            loss.backward()
            before = rt.counters()["operations"]
            scaler.step(optimizer)
            scaler.update()
            if zero == "optimizer":
                optimizer.zero_grad()
            else:
                model.zero_grad(set_to_none=zero == "model")
            assert rt.counters()["operations"] == before
            stepped = [int(each["step"]) for each in optimizer.state.values()]
            assert stepped == ([1] * len(parameters(model)) if step >= BAD_STEP else [])

    world.run(on_rank)


@pytest.mark.parametrize("step_of", ["optimizer", "scaler"])
def test_a_rank_without_any_gradient(world, step_of):
    """It runs no backward pass, learns the others' gradients in step(), and skips what they skip."""
    start, data, size = network(torch.float64), batches(world.size, torch.float64), world.size

    def idle(rank, step):
        return step > 0 and rank == step % size  # a scaler must have scaled once before it can step

    expected = copy.deepcopy(start)
    expected_optimizer = adam(expected.parameters())
    for step, batch in enumerate(data):
        expected_optimizer.zero_grad()
        for rank in range(size):
            if not idle(rank, step):
                x, y = share(batch, rank, size)
                (mean_square(expected(x), y) / size).backward()
        expected_optimizer.step()

    def on_rank(rank):
        model, optimizer = distributed(start, adam)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=step_of == "scaler")
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            if not idle(rank, step):
                x, y = share(batch, rank, size)
                scaler.scale(mean_square(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert_all_close(parameters(model), parameters(expected), rtol=1e-10, atol=1e-11)
        assert_replicas_equal([*parameters(model), *state(optimizer)])

    world.run(on_rank)


def test_an_optimizer_that_unscales_by_itself(world):
    """Fused optimizers take the scale as an argument, and skip the step inside."""
    start, data, size = network(), batches(world.size), world.size

    def fused(parameters):
        return adam(parameters, fused=True)

    def on_rank(rank):
        good = data[:BAD_STEP] + data[BAD_STEP + 1 :]
        expected, expected_optimizer, _ = scaled_training(start, good, plain, rank, size, make=fused)
        assert expected_optimizer._step_supports_amp_scaling
        model, optimizer, scales = scaled_training(start, data, plain, rank, size, overflow, make=fused)
        assert scales[-1] == SCALE / 2
        assert_same_bits(parameters(model), parameters(expected))
        assert_same_bits(state(optimizer), state(expected_optimizer))

    world.run(on_rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_autocast(world, dtype):
    start, data, size = network(), batches(world.size), world.size

    def run(model, optimizer, data):
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype == torch.float16)
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                output = model(x)
                assert output.dtype == dtype
                loss = mean_square(output.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return model

    expected = copy.deepcopy(start)
    run(expected, torch.optim.SGD(expected.parameters(), lr=0.1), data)

    def on_rank(rank):
        model, optimizer = distributed(start, lambda p: torch.optim.SGD(p, lr=0.1))
        run(model, optimizer, [share(batch, rank, size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), rtol=0, atol=0.02)
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_accumulation_under_a_scaler(world):
    """The scaler is asked once a step; a step with an overflow in any of its passes is skipped everywhere."""
    start, passes = network(), 2
    data = batches(world.size, steps=3 * passes)

    def on_rank(rank):
        model, optimizer = distributed(start, adam, backward_passes_per_step=passes)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(passes):
                x, y = share(data[step * passes + micro], rank, world.size)
                loss = scaler.scale(mean_square(model(x), y))
                if step == 1 and micro == 0:
                    loss = loss + overflow(model[0].weight, rank, world.size)
                loss.backward()
            clipped(optimizer, scaler, model)
            scaler.update()
        assert scaler.get_scale() == SCALE / 2
        assert {int(each["step"]) for each in optimizer.state.values()} == {2}
        assert_replicas_equal([*parameters(model), *state(optimizer)])

    world.run(on_rank)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: each.__name__)
def test_a_step_cut_short_under_a_scaler(world, recipe):
    """What a rank would unscale before it is reduced is refused; with synchronize() it is right."""

    def on_rank(rank):
        model, optimizer = distributed(network(), adam, backward_passes_per_step=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        x, y = share(batches(world.size)[0], rank, world.size)
        (scaler.scale(mean_square(model(x), y)) + overflow(model[0].weight, rank, world.size)).backward()
        if recipe is clipped:
            with pytest.raises(ValueError, match="call synchronize\\(\\) before you unscale or clip"):
                recipe(optimizer, scaler, model)
            return
        recipe(optimizer, scaler, model)
        scaler.update()
        assert scaler.get_scale() == SCALE / 2 and not optimizer.state
        optimizer.zero_grad()

    world.run(on_rank)


# ---- NVIDIA Apex ----


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def with_apex(start, level, order, wrap):
    """Model and optimizer, prepared by Apex and wrapped in some order."""
    model = copy.deepcopy(start)
    optimizer = momentum(model.parameters())
    if order == "wrap first":
        return apex_standin.initialize(model, wrap(model, optimizer), level)
    model, optimizer = apex_standin.initialize(model, optimizer, level)
    if order == "amp first, masters made":
        with apex_standin.scale_loss(torch.zeros(1), optimizer):
            pass
    return model, wrap(model, optimizer)


def wrap(model, optimizer):
    return hvd.DistributedOptimizer(optimizer, model.named_parameters())


def as_float32(model):
    return [parameter.float() for parameter in parameters(model)]


APEX = pytest.mark.parametrize(
    "level, order",
    [(level, order) for level in ("O1", "O2") for order in ("wrap first", "amp first", "amp first, masters made")],
)


@pytest.mark.one_by_one
@APEX
def test_apex(world, level, order):
    """The pattern of Horovod's documentation: every gradient travels once, and all ranks skip what one must."""
    start, data, size = network(), batches(world.size), world.size

    def train_alone():
        model, optimizer = with_apex(start, level, order, lambda model, optimizer: optimizer)
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            with apex_standin.scale_loss(mean_square(model(x), y), optimizer) as scaled:
                (scaled * (float("inf") if step == BAD_STEP else 1.0)).backward()
            optimizer.step()
        return model

    expected = train_alone()

    def on_rank(rank):
        model, optimizer = with_apex(start, level, order, wrap)
        once = len(parameters(model)) + 1
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            x, y = share(batch, rank, size)
            before = rt.counters()["operations"]
            with apex_standin.scale_loss(mean_square(model(x), y), optimizer) as scaled:
                if step == BAD_STEP:
                    scaled = scaled + overflow(next(model.parameters()), rank, size)
                scaled.backward()
                optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert rt.counters()["operations"] == before + once
            assert optimizer._amp_stash.scale == (2.0**8 if step < BAD_STEP else 2.0**7)
        assert_replicas_equal(parameters(model))
        assert_all_close(as_float32(model), as_float32(expected), rtol=0, atol=5e-3 if level == "O2" else 1e-5)

    world.run(on_rank)


@pytest.mark.one_by_one
@APEX
def test_apex_with_the_step_inside_the_block(world, level, order):
    """Legal, and reduces once, though Apex unscales only at the end of the block."""
    start, data = network(), batches(world.size)

    def on_rank(rank):
        model, optimizer = with_apex(start, level, order, wrap)
        for batch in data:
            optimizer.zero_grad()
            x, y = share(batch, rank, world.size)
            before = rt.counters()["operations"]
            with apex_standin.scale_loss(mean_square(model(x), y), optimizer) as scaled:
                scaled.backward()
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            assert rt.counters()["operations"] == before + len(parameters(model)) + 1
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_apex_with_accumulation(world):
    """``delay_unscale`` adds scaled gradients up; the last micro-batch of the step reduces and unscales them."""
    start, passes = network(), 2
    data = batches(world.size * passes, steps=2)

    def on_rank(rank):
        model, optimizer = distributed(start, lambda p: torch.optim.SGD(p, lr=0.05), backward_passes_per_step=passes)
        model, optimizer = apex_standin.initialize(model, optimizer, "O2")
        for batch in data:
            optimizer.zero_grad()
            for micro in range(passes):
                x, y = share(batch, rank * passes + micro, world.size * passes)
                loss, last = mean_square(model(x), y) / passes, micro == passes - 1
                with apex_standin.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
                    scaled.backward()
                    if last:
                        optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        assert_replicas_equal(parameters(model))
        expected = copy.deepcopy(start)
        plain_optimizer = torch.optim.SGD(expected.parameters(), lr=0.05)
        for x, y in data:
            plain_optimizer.zero_grad()
            mean_square(expected(x), y).backward()
            plain_optimizer.step()
        assert_all_close(as_float32(model), parameters(expected), rtol=0, atol=5e-3)

    world.run(on_rank)
