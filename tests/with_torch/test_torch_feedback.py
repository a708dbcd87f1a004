"""Compression that makes up for what it has lost, below a distributed optimizer: skipped steps, and what is saved of it."""

import io
import itertools

import pytest
import torch
from modes import in_mode

import ringtrain.torch as hvd
from ringtrain._runtime import error_feedback
from ringtrain._runtime.context import current
from ringtrain.testing import World

STEPS = 6
INT4 = hvd.Compression.int4


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def model_and_optimizer(compression=INT4, **arguments):
    model = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Tanh(), torch.nn.Linear(80, 64))
    own = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=own) / 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression, **in_mode(arguments)
    )


def take_steps(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        x = batch(rank, step)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()


def bits(model: torch.nn.Module) -> bytes:
    return b"".join(each.detach().numpy().tobytes() for each in model.parameters())


def set_by_optimizer(model, optimizer):
    optimizer.zero_grad()


def set_to_none(model, optimizer):
    model.zero_grad(set_to_none=True)


def set_to_zero(model, optimizer):
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("asks", [False, True], ids=["plain", "synchronize"])
@pytest.mark.parametrize("clear", [set_by_optimizer, set_to_none, set_to_zero])
def test_a_step_that_a_scaler_skips_leaves_no_trace(clear, asks):
    """An overflow on one rank, in an early or a late layer: the run's bits are those of a run without that batch."""

    def train(rank, left_out, overflows):
        model, optimizer = model_and_optimizer()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            if step in left_out:
                continue
            clear(model, optimizer)
            x = batch(rank, step)
            loss = (model(x) - x).square().mean()
            if step in overflows and rank == overflows[step]:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if asks:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update(1024.0)
        return bits(model)

    with World(3, "2+1") as world:
        for overflows in ({0: 2}, {1: 0}, {2: 1, 3: 2}, {5: 1}):
            skipped = world.run(train, (), overflows)
            assert len(set(skipped)) == 1
            assert skipped == world.run(train, set(overflows), {})


def test_a_step_that_is_given_up_leaves_no_trace():
    def train(rank, given_up):
        model, optimizer = model_and_optimizer()
        for step in range(STEPS):
            optimizer.zero_grad()
            if step == given_up:
                (5 * model(batch(rank, step))).square().mean().backward()
                continue
            x = batch(rank, step)
            (model(x) - x).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        return bits(model)

    def train_without(rank, left_out):
        model, optimizer = model_and_optimizer()
        for step in range(STEPS):
            if step != left_out:
                x = batch(rank, step)
                optimizer.zero_grad()
                (model(x) - x).square().mean().backward()
                optimizer.step()
        return bits(model)

    with World(2, "1+1") as world:
        for step in (0, 3):
            assert world.run(train, step) == world.run(train_without, step)


def test_every_step_makes_up_for_the_one_before():
    """The mean of many gradients that are alike comes near the exact one; without feedback it does not."""

    def error(rank, compression, steps):
        weight = torch.nn.Parameter(torch.zeros(8192))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression=compression
        )
        gradient = batch(rank, 0).repeat(16, 1).flatten()[:8192]
        exact = hvd.allreduce(gradient, name=f"exact.{compression.__name__}.{steps}")
        for _ in range(steps):
            optimizer.zero_grad()
            (weight * gradient).sum().backward()
            optimizer.step()
        return ((weight.detach() / -steps - exact).norm() / exact.norm()).item()

    with World(2, "1+1") as world:
        for compression in (hvd.Compression.int8, INT4):
            once, often = (world.run(error, compression, steps)[0] for steps in (1, 50))
            assert often < once / 25
            plain = world.run(error, compression.without_feedback, 50)[0]
            assert plain == pytest.approx(once, rel=0.01)


@pytest.mark.parametrize("layouts", [("1+1", "1+1"), ("2+1", "1+1+1"), ("1+1+1", "2+1"), ("2+2", "1+1")])
def test_what_is_kept_can_be_saved_and_goes_on_in_another_world(layouts):
    """The mean over the hosts of what they keep, and what is kept of the sums, are the same before and after."""

    def begin(rank):
        model, optimizer = model_and_optimizer()
        take_steps(rank, model, optimizer, range(3))
        return optimizer.compression_state()

    def go_on(rank, state):
        model, optimizer = model_and_optimizer()
        optimizer.load_compression_state(state)
        again = optimizer.compression_state()
        x = batch(rank, 0)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        return again, optimizer.compression_state(), bits(model)

    def size_of(layout):
        return sum(map(int, layout.split("+")))

    with World(size_of(layouts[0]), layouts[0]) as world:
        states = world.run(begin)
    assert states[0].keys() == {"0.weight/0", "2.weight/0"}
    for one, other in itertools.pairwise(states):
        assert all(torch.equal(one[name][part], other[name][part]) for name in one for part in ("sent", "finished"))
    assert all(each["sent"].norm() > 0 and each["finished"].norm() > 0 for each in states[0].values())
    with World(size_of(layouts[1]), layouts[1]) as world:
        results = world.run(go_on, states[0])
    for again, later, after in results:
        assert after == results[0][2]
        for name, each in states[0].items():
            torch.testing.assert_close(again[name], each, rtol=1e-6, atol=0)
            assert not any(torch.equal(later[name][part], each[part]) for part in each)


@pytest.mark.parametrize("layouts", [("1+1", "1+1"), ("2+1", "1+1+1"), ("2+2", "1+1")])
def test_a_world_that_goes_on_with_it_loses_nothing(layouts):
    """Before the change and after it: what was delivered, and what is kept, is all that was to be delivered."""
    count = 5000

    def gradient(rank, step):
        return torch.randn(count, generator=torch.Generator().manual_seed(10 * step + rank))

    def steps(rank, state, numbers):
        weight = torch.nn.Parameter(torch.zeros(count))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression=INT4)
        optimizer.load_compression_state(state)
        exact = torch.zeros(count, dtype=torch.float64)
        for step in numbers:
            optimizer.zero_grad()
            (weight * gradient(rank, step)).sum().backward()
            optimizer.step()
            exact += hvd.allreduce(gradient(rank, step).double(), name=f"exact.{step}")
        return -weight.detach().double(), exact, optimizer.compression_state()

    delivered, exact, state = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64), {}
    for layout, numbers in zip(layouts, (range(20), range(20, 40)), strict=True):
        with World(sum(map(int, layout.split("+"))), layout) as world:
            some, wanted, state = world.run(steps, state, numbers)[0]
        delivered, exact = delivered + some, exact + wanted
        kept = sum(state["w/0"][part].double() for part in ("sent", "finished"))
        assert (delivered + kept - exact).norm() < 1e-6 * exact.norm() < 1e-4 * (delivered - exact).norm()


def test_only_compression_with_feedback_keeps_anything():
    def on_rank(rank, compression):
        model, optimizer = model_and_optimizer(compression)
        (model(batch(rank, 0)) ** 2).mean().backward()
        optimizer.step()
        return optimizer.compression_state(), error_feedback.sizes(current(), 0, "optimizer.")

    with World(2, "1+1") as world:
        for compression in (hvd.Compression.none, hvd.Compression.fp16, INT4.without_feedback):
            assert world.run(on_rank, compression) == [({}, {})] * 2
    with World(2) as world:  # one host: nothing is compressed
        assert world.run(on_rank, INT4) == [({}, {})] * 2


# ---- another state ----


WAYS = {
    "int8": {"compression": hvd.Compression.int8},
    "int4, one step late": {"compression": INT4, "late": True},
    "int4 of local steps": {"compression": INT4, "every": 1},
    "PowerSGD": {"compression": hvd.Compression.powersgd(rank=1, start_after=1)},
}


@pytest.mark.parametrize("everywhere", [True, False], ids=["loaded on all ranks", "loaded on one and broadcast"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_state_forgets_what_was_lost_before_it_and_what_was_saved_comes_back(way, everywhere):
    """Nothing of the steps before the load comes into those after it."""

    def on_rank(rank):
        weight = torch.nn.Parameter(torch.zeros(128, 64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], **in_mode(WAYS[way]))
        fresh = optimizer.state_dict()
        for step in range(3):
            optimizer.zero_grad()
            random = torch.Generator().manual_seed(10 * step + rank)
            (weight * torch.randn(weight.shape, generator=random)).sum().backward()
            optimizer.step()
        kept = optimizer.compression_state()
        if everywhere or rank == 0:
            optimizer.load_state_dict(fresh)
        if not everywhere:
            hvd.broadcast_optimizer_state(optimizer, 0)
        forgotten = optimizer.compression_state()
        optimizer.load_compression_state(kept)
        return [
            sum(state["w/0"][part].norm().item() for part in ("sent", "finished", "residual") if part in state["w/0"])
            for state in (kept, forgotten, optimizer.compression_state())
        ]

    with World(2, "1+1", stall_abort_seconds=20) as world:
        for kept, forgotten, again in world.run(on_rank):
            assert kept > 0.1 and forgotten == 0 and again == pytest.approx(kept, rel=1e-5)


# ---- runs that resume ----

RESUMED = {
    "int8": {"compression": hvd.Compression.int8},
    "int4": {"compression": INT4},
    "int4, groups": {"compression": INT4, "groups": 2},
    "int8, one step late": {"compression": hvd.Compression.int8, "late": True},
    "powersgd": {"compression": hvd.Compression.powersgd(rank=2, start_after=2)},
    "exact so far": {"compression": hvd.Compression.powersgd(rank=2, start_after=STEPS + 2)},
}


@pytest.mark.parametrize("layout", ["2", "1+1", "2+1"])
@pytest.mark.parametrize("mode", RESUMED)
def test_ranks_that_save_their_state_go_on_with_the_same_bits(mode, layout):
    """Each its own file, in another world, and back to a state before; nothing else is called."""

    def steps(rank, model, optimizer, numbers):
        take_steps(rank, model, optimizer, numbers)
        return bits(model)

    def whole(rank):
        model, optimizer = model_and_optimizer(**RESUMED[mode])
        first = steps(rank, model, optimizer, range(STEPS))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        return first, file.getvalue(), steps(rank, model, optimizer, range(STEPS, 2 * STEPS))

    def resumed(rank, saved):
        model, optimizer = model_and_optimizer(**RESUMED[mode])
        ends = []
        for _ in range(2):
            kept = torch.load(io.BytesIO(saved[rank][1]))
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            assert bits(model) == saved[rank][0]
            ends.append(steps(rank, model, optimizer, range(STEPS, 2 * STEPS)))
        return ends

    size = sum(map(int, layout.split("+")))
    with World(size, layout) as world:
        saved = world.run(whole)
    with World(size, layout) as world:
        ends = world.run(resumed, saved)
    assert ends == [[end, end] for *_, end in saved]


def test_a_state_of_another_rank_or_world_is_said(caplog):
    def save(rank):
        model, optimizer = model_and_optimizer()
        take_steps(rank, model, optimizer, range(3))
        return optimizer.state_dict()

    def load(rank, state):
        _, optimizer = model_and_optimizer()
        optimizer.load_state_dict(state)

    with World(2, "1+1") as world:
        state, _ = world.run(save)
        world.run(load, state)
    assert [record.getMessage().partition(". ")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "load_state_dict 'optimizer.1': what compression has lost was saved by rank 0 of 2 on 2 hosts and is forgotten by "
        "rank 1 of 2 on 2 hosts"
    ]
    plain = torch.optim.SGD(torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Linear(80, 64)).parameters(), lr=0.1)
    plain.load_state_dict(state)  # one that is not distributed takes it, too


def test_a_state_is_saved_after_the_world_has_ended():
    def train(rank):
        model, optimizer = model_and_optimizer()
        (model(batch(rank, 0))).square().mean().backward()
        optimizer.step()
        return optimizer

    with World(2, "1+1") as world:
        optimizer, _ = world.run(train)
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
