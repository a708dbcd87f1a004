"""``LocalSteps(every=H)``: ranks or hosts that train alone for H steps, against all of them in one process."""

import copy
import io
import pickle
import threading

import pytest
import torch
from local_steps_by_hand import by_hand
from modes import in_mode
from torch_models import (
    Branches,
    assert_all_close,
    assert_same_bits,
    batches,
    mean_square,
    network,
    parameters,
    sgd,
    share,
    state,
    train,
)

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.errors import InvalidArgumentError, MismatchError, PeerLostError, RingtrainError
from ringtrain.testing import World

STEPS = 12
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def adam(arguments):
    return torch.optim.AdamW(arguments, lr=0.01)


def local(model, make=sgd, **arguments):
    model = copy.deepcopy(model)
    arguments = {"every": 4, **arguments}
    return model, hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **in_mode(arguments))


def run(model, make, data, rank, ranks, samples=None, **arguments):
    """Parameters of a rank after each synchronisation, as the user's loop sees them."""
    mine, optimizer = local(model, make, **arguments)
    seen, before = [], 0
    for step, batch in enumerate(data):
        if samples is not None:
            optimizer.count_samples(samples(rank, step))
        train(mine, optimizer, [share(batch, rank, ranks)])
        now = rt.counters()["synchronisations"]
        if now > before:
            seen.append(parameters(mine))
        before = now
    return seen


METHODS = {
    "local SGD": ("1+1+1", [[0], [1], [2]], {"every": 3}),
    "DiLoCo": ("2+1", [[0], [1], [2]], {"every": 4, "outer": hvd.Outer(0.7, 0.9)}),
    "post-local SGD": (None, [[0], [1], [2]], {"every": 2, "warmup": 4}),
    "hosts": ("2+1", [[0, 1], [2]], {"every": 3, "within": "host"}),
    "hosts, DiLoCo, warm-up": ("1+2", [[0], [1, 2]], {"every": 3, "within": "host", "outer": hvd.Outer(0.5, 0.8), "warmup": 3}),
    "sites": ("1+1|1", [[0, 1], [2]], {"every": 3, "within": "site"}),
    "one host": (None, [[0, 1, 2]], {"every": 3, "within": "host"}),
}  # fmt: skip


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_are_the_oracle(method, make):
    layout, groups, arguments = METHODS[method]
    model, data = network(torch.float64), batches(3, torch.float64, STEPS)
    weights = [len(group) for group in groups]  # a step of a rank
    settings = {name: value for name, value in arguments.items() if name != "within"}
    expected = by_hand(model, make, data, groups, samples=lambda worker, step: weights[worker], **settings)
    with World(3, layout) as world:
        found = world.run(lambda rank: run(model, make, data, rank, 3, **arguments))
    for seen in found:
        assert len(seen) == len(expected) >= 3
        for mine, theirs, first in zip(seen, expected, found[0], strict=True):
            assert_all_close(mine, theirs, **CLOSE)
            assert_same_bits(mine, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averaging_each_plain_step_is_the_exact_run(dtype):
    """With SGD without momentum: the mean of the ranks' steps is the step with the mean gradient."""
    model, data = network(dtype), batches(4, dtype)

    def on_rank(rank, arguments):
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, weight_decay=0.01)
        hvd.DistributedOptimizer(optimizer, mine.named_parameters(), **in_mode(arguments))
        train(mine, optimizer, [share(batch, rank, 4) for batch in data])
        return parameters(mine)

    with World(4) as world:
        exact, found = world.run(on_rank, {}), world.run(on_rank, {"every": 1})
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    for mine in found:
        assert_all_close(mine, exact[0], rtol=tolerance * 10, atol=tolerance)
        assert_same_bits(mine, found[0])


def test_on_dyadic_values_it_is_the_exact_run_bit_for_bit():
    def on_rank(rank, arguments):
        weight = torch.nn.Parameter(torch.arange(8.0))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.25), [("w", weight)], **in_mode(arguments))
        for step in range(4):
            optimizer.zero_grad()
            (weight * torch.arange(8.0).roll(rank + step)).sum().backward()
            optimizer.step()
        return weight.detach()

    with World(4) as world:
        exact, found = world.run(on_rank, {}), world.run(on_rank, {"every": 1})
    assert_same_bits(exact, found)
    assert not torch.equal(exact[0], torch.arange(8.0))


def test_workers_weigh_as_much_as_their_samples():
    def samples(rank, step):
        return (3, 5, 0)[rank] + step % 2

    model, data = network(torch.float64), batches(3, torch.float64, STEPS)
    expected = by_hand(model, sgd, data, [[0], [1], [2]], 4, samples=samples)
    with World(3) as world:
        found = world.run(lambda rank: run(model, sgd, data, rank, 3, samples))
    for mine, theirs in zip(found[2], expected, strict=True):
        assert_all_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
def test_replicas_are_equal_after_a_synchronisation_whatever_was_fused(compression):
    model, data = network(width=600), batches(3, steps=6)

    def on_rank(rank):
        chosen = getattr(hvd.Compression, compression)
        seen = run(model, adam, data, rank, 3, every=2, outer=hvd.Outer(), compression=chosen)
        return b"".join(each.numpy().tobytes() for parameters in seen for each in parameters)

    results = set()
    for fusion in (0, 1 << 20):
        with World(3, "1+1+1", fusion_threshold_bytes=fusion) as world:
            results |= set(world.run(on_rank))
    assert len(results) == 1


def test_the_wire_carries_one_part_in_every():
    """Gradients of exact steps send every step what local ones send at each synchronisation."""
    model, data = network(width=2000), batches(2, steps=8)
    count = sum(each.nbytes for each in model.parameters())

    def on_rank(rank, arguments):
        mine = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(sgd(mine.parameters()), mine.named_parameters(), **in_mode(arguments))
        before = rt.counters()
        train(mine, optimizer, [share(batch, rank, 2) for batch in data])
        after = rt.counters()
        return {name: after[name] - before[name] for name in after}

    with World(2, "1+1") as world:
        for arguments, times in (
            ({}, 8),
            ({"every": 2}, 4),
            ({"every": 8}, 1),
            ({"every": 4, "warmup": 4}, 5),
            ({"every": 9}, 0),
        ):
            grown = world.run(on_rank, arguments)[0]
            assert grown["wire_bytes_sent"] == pytest.approx(times * count, rel=0.01, abs=200)  # meetings
            assert grown["synchronisations"] == (times - arguments.get("warmup", 0) if arguments else 0)


# ---- what travels ----


def test_running_statistics_are_averaged_and_counters_become_the_maximum():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.line = (
                torch.nn.BatchNorm1d(4, dtype=torch.float64),
                torch.nn.Linear(4, 2, dtype=torch.float64),
            )

        def forward(self, x):
            return self.line(self.norm(x))

    model, data = Net(), batches(3, torch.float64, 4)

    def on_rank(rank):
        mine = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            sgd(mine.parameters()), mine.named_parameters(), compression=hvd.Compression.int4,
            mode=hvd.LocalSteps(every=2, outer=hvd.Outer(), named_buffers=mine.named_buffers()),
        )  # fmt: skip
        if rank == 1:
            mine.norm.num_batches_tracked += 5
        twin = copy.deepcopy(mine)  # with the statistics of this rank's batches alone
        for x, y in data[:2]:
            mean_square(twin(x[rank::3]), y[rank::3])
        train(mine, optimizer, [share(batch, rank, 3) for batch in data[:2]])
        return [mine.norm.running_mean, mine.norm.running_var, twin.norm.running_mean, twin.norm.running_var,
                mine.norm.num_batches_tracked]  # fmt: skip

    with World(3) as world:
        found = world.run(on_rank)
    for mean, variance, _, _, tracked in found:
        assert_all_close([mean, variance], [sum(each[place] for each in found) / 3 for place in (2, 3)], **CLOSE)
        assert_same_bits([mean, variance], found[0][:2])
        assert tracked == 7


def test_parameters_that_a_rank_has_not_used_travel_and_frozen_ones_do_not():
    def on_rank(rank):
        model = Branches()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        for parameter in model.layers[2].parameters():
            parameter.requires_grad = False
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.5), model.named_parameters(), mode=hvd.LocalSteps(every=2)
        )
        before = rt.counters()["operations"]
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 4), [rank, 2]).sum().backward()  # layer 0 on rank 0, layer 1 on rank 1
            optimizer.step()
        after = rt.counters()["operations"]
        return (
            [layer.weight[0, 0].item() for layer in model.layers],
            after - before,
            optimizer.state_dict()["local_steps"]["common"].keys(),
        )

    with World(2) as world:
        for weights, operations, names in world.run(on_rank):
            assert weights == [0.5, 0.5, 1.0]
            assert operations == 2 + 4  # two meetings, four tensors
            assert names == {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}


def test_a_parameter_that_is_frozen_or_freed_within_a_period():
    """What it changed before it was frozen is averaged still; one that is freed begins with what all ranks have."""

    def on_rank(rank):
        one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        other.requires_grad = False
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([one, other], 1.0), [("one", one), ("other", other)], mode=hvd.LocalSteps(every=3)
        )

        def step():
            optimizer.zero_grad()
            sum((rank + 1) * each.sum() for each in (one, other) if each.requires_grad).backward()
            optimizer.step()

        step()
        one.requires_grad, other.requires_grad = False, True
        one.grad = None
        step()
        step()
        found = [one.tolist(), other.tolist()]
        one.data.fill_(rank)  # frozen: the user's own affair
        for _ in range(3):
            step()
        return *found, one.tolist(), other.tolist()

    with World(2) as world:
        for rank, found in enumerate(world.run(on_rank)):
            assert found == ([-1.5] * 2, [-3.0] * 2, [float(rank)] * 2, [-7.5] * 2)


@pytest.mark.parametrize("ends", ["a step", "synchronize"])
def test_the_outer_optimizer_leaves_what_was_frozen_between_two_periods(ends):
    """Its momentum went on moving it for a period."""

    def on_rank(rank):
        frozen, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([frozen, other], 1.0),
            [("frozen", frozen), ("other", other)],
            mode=hvd.LocalSteps(every=2, outer=hvd.Outer(0.5, 0.5)),
        )

        def period():
            for _ in range(2 if ends == "a step" else 1):
                optimizer.zero_grad()
                sum((rank + 1) * each.sum() for each in (frozen, other) if each.requires_grad).backward()
                optimizer.step()
            if ends != "a step":
                optimizer.synchronize()

        period()
        frozen.requires_grad = False
        frozen.grad = None
        at_first = frozen.tolist(), other.tolist()
        period()
        period()
        return at_first, (frozen.tolist(), other.tolist())

    with World(2) as world:
        (before, after), others = world.run(on_rank)
        assert (before, after) == others
        assert before[0] == after[0] != [0.0, 0.0] and before[1] != after[1]


def test_new_parameter_groups_join_in():
    def on_rank(rank):
        one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one], 1.0), [("one", one)], mode=hvd.LocalSteps(every=2))
        for step in range(4):
            if step == 1:
                optimizer.add_param_group({"params": [other], "lr": 0.5})
            optimizer.zero_grad()
            ((rank + 1) * (one.sum() + other.sum())).backward()
            optimizer.step()
        return one.tolist(), other.tolist()

    with World(2) as world:
        assert world.run(on_rank) == [([-6.0] * 2, [-2.25] * 2)] * 2


def test_sixteen_bit_parameters_add_up_changes_in_float32():
    """Changes below what bfloat16 can tell from 1 are not lost in the common copy."""

    def on_rank(rank):
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], 2.0**-8), [("w", weight)], mode=hvd.LocalSteps(every=1)
        )
        for _ in range(4):
            optimizer.zero_grad()
            (weight.sum() * (1.0 if rank == 0 else 0.0)).backward()
            optimizer.step()
        return weight.tolist()

    with World(2) as world:
        assert world.run(on_rank) == [[1 - 2.0**-7] * 4] * 2


# ---- scalers, closures, and other ways to step ----


@pytest.mark.parametrize("within", [None, "host"])
def test_a_scaler_that_skips_on_one_rank_keeps_the_ranks_together(within):
    """The step counts and changes nothing there."""
    model, data = network(), batches(3, steps=8)

    def on_rank(rank):
        mine, optimizer = local(model, every=4, within=within)
        scaler, scales, moved = torch.amp.GradScaler("cpu", init_scale=1024.0), [], []
        for step, batch in enumerate(data):
            x, y = share(batch, rank, 3)
            optimizer.zero_grad()
            loss = mean_square(mine(x), y) * (torch.inf if (rank, step) == (0, 2) else 1.0)
            scaler.scale(loss).backward()
            before = parameters(mine)
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(not all(torch.equal(*pair) for pair in zip(before, parameters(mine), strict=True)))
        counted = optimizer.state_dict()["local_steps"]["counters"]
        return parameters(mine), scales[-1], moved, counted["total"]

    with World(3, "2+1", stall_abort_seconds=20) as world:
        found = world.run(on_rank)
    skipping = (0,) if within is None else (0, 1)  # ranks with that gradient
    for rank, (mine, scale, moved, total) in enumerate(found):
        assert_same_bits(mine, found[0][0])
        assert total == 8 and scale == (512.0 if rank in skipping else 1024.0)
        assert moved[2] == (rank not in skipping) and all(moved[:2] + moved[3:])


def test_a_step_that_a_scaler_skips_weighs_nothing():
    def on_rank(rank):
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], 1.0), [("w", weight)], mode=hvd.LocalSteps(every=3)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale((rank + 1) * weight.sum() * (torch.inf if (rank, step) == (1, 1) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return weight.tolist()

    with World(2) as world:  # three steps of 1, and two of 2
        assert world.run(on_rank) == [[pytest.approx(-(3 * 3 + 2 * 4) / 5)] * 2] * 2


def test_closures_and_accumulated_passes():
    model, data = network(torch.float64), batches(2, torch.float64, 4)

    def with_closure(rank):
        mine, optimizer = local(model, every=2)
        for batch in data:
            x, y = share(batch, rank, 2)

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = mean_square(mine(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return parameters(mine)

    def in_passes(rank, within):
        mine, optimizer = local(model, every=2, backward_passes_per_step=2, within=within)
        for batch in data:
            x, y = share(batch, rank, 2)
            optimizer.zero_grad()
            for half in (0, 1):
                (mean_square(mine(x[half::2]), y[half::2]) / 2).backward()
            optimizer.step()
        return parameters(mine)

    expected = by_hand(model, sgd, data, [[0], [1]], 2)[-1]
    with World(2, "1+1") as world:
        for found in (*world.run(with_closure), *world.run(in_passes, None), *world.run(in_passes, "host")):
            assert_all_close(found, expected, **CLOSE)
    together = by_hand(model, sgd, data, [[0, 1]], 2)[-1]
    with World(2) as world:
        for found in world.run(in_passes, "host"):
            assert_all_close(found, together, **CLOSE)


def test_hooks_of_the_user_see_the_average():
    def on_rank(rank):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], 1.0)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(weight.item()))
        hvd.DistributedOptimizer(optimizer, [("w", weight)], mode=hvd.LocalSteps(every=2))
        for _ in range(2):
            optimizer.zero_grad()
            ((rank + 1) * weight).sum().backward()
            optimizer.step()
        return seen

    with World(2) as world:
        assert world.run(on_rank) == [[-1.0, -3.0], [-2.0, -3.0]]


def test_synchronize_before_evaluation_makes_replicas_equal():
    model, data = network(), batches(2, steps=3)

    def on_rank(rank):
        mine, optimizer = local(model, every=100)
        optimizer.synchronize()
        assert_same_bits(parameters(mine), parameters(model))
        train(mine, optimizer, [share(batch, rank, 2) for batch in data])
        apart = parameters(mine)
        optimizer.synchronize()
        together = parameters(mine)
        optimizer.synchronize()  # nothing has changed
        assert_same_bits(parameters(mine), together)
        return apart, together

    with World(2) as world:
        (first, together), (second, others) = world.run(on_rank)
    assert_same_bits(together, others)
    assert_all_close(together, [(a + b) / 2 for a, b in zip(first, second, strict=True)], rtol=1e-5, atol=1e-6)


def test_ranks_with_fewer_batches_join():
    model, data = network(torch.float64), batches(3, torch.float64, 7)

    def on_rank(rank):
        mine, optimizer = local(model, every=3)
        train(mine, optimizer, [share(batch, rank, 3) for batch in data[: 7 - 3 * rank]])
        optimizer.join()
        return parameters(mine)

    with World(3, stall_abort_seconds=20) as world:
        found = world.run(on_rank)
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])
    assert not torch.allclose(found[0][0], by_hand(model, sgd, data[:6], [[0], [1], [2]], 3)[0][0])


# ---- checkpoints ----


def resumed(rank, ranks, model, data, stops, make=adam, own=True, saves=lambda optimizer: None, **arguments):
    mine, optimizer = local(model, make, outer=hvd.Outer(), **arguments)
    for step, batch in enumerate(data):
        if step in stops:
            saves(optimizer)
            file = io.BytesIO()
            torch.save({"model": mine.state_dict(), "optimizer": optimizer.state_dict()}, file)
            content = file.getvalue() if own else rt.broadcast_object(file.getvalue(), 0)
            saved = torch.load(io.BytesIO(content), weights_only=True)
            mine, optimizer = local(network(torch.float64), make, outer=hvd.Outer(), **arguments)
            mine.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        train(mine, optimizer, [share(batch, rank, ranks)])
    optimizer.synchronize()
    return parameters(mine)


@pytest.mark.parametrize("arguments", [{}, {"warmup": 5}, {"within": "host"}], ids=["plain", "warm-up", "hosts"])
def test_a_run_that_each_rank_continues_has_the_same_bits(arguments):
    """Saved at a synchronisation, within a period, and within the exact steps."""
    model, data = network(torch.float64), batches(2, torch.float64, STEPS)
    with World(2) as world:
        whole = world.run(resumed, 2, model, data, ()) if not arguments else world.run(
            lambda rank: resumed(rank, 2, model, data, (), **arguments))  # fmt: skip
        for stops in ({4}, {2, 7, 11}):
            for mine, theirs in zip(
                world.run(lambda rank, at=stops: resumed(rank, 2, model, data, at, **arguments)), whole, strict=True
            ):
                assert_same_bits(mine, theirs)


def test_all_ranks_may_continue_from_one_file():
    model, data = network(torch.float64), batches(2, torch.float64, STEPS)
    with World(2) as world:
        for stop in (4, 6):
            first, second = world.run(lambda rank, at=stop: resumed(rank, 2, model, data, {at}, own=False))
            assert_same_bits(first, second)


def test_the_state_that_one_rank_has_loaded_can_be_broadcast():
    """As scripts do it: rank 0 loads, parameters and the optimizer's state are broadcast; the run is that of all ranks."""
    model, data = network(torch.float64), batches(2, torch.float64, STEPS)

    def on_rank(rank, broadcasts):
        mine, optimizer = local(model, outer=hvd.Outer())
        train(mine, optimizer, [share(batch, rank, 2) for batch in data[:6]])
        optimizer.synchronize()
        saved = copy.deepcopy((mine.state_dict(), optimizer.state_dict()))
        if broadcasts:
            mine, optimizer = local(network(torch.float64), outer=hvd.Outer())
            if rank == 0:
                mine.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            hvd.broadcast_parameters(mine.state_dict(), 0)
            hvd.broadcast_optimizer_state(optimizer, 0)
        else:  # the inner optimizer's moments become rank 0's in the other run
            hvd.broadcast_optimizer_state(optimizer, 0)
        train(mine, optimizer, [share(batch, rank, 2) for batch in data[6:]])
        optimizer.synchronize()
        return parameters(mine), state(optimizer)

    with World(2, stall_abort_seconds=20) as world:
        for mine, theirs in zip(world.run(on_rank, True), world.run(on_rank, False), strict=True):
            assert_same_bits(mine[0], theirs[0])
            assert_same_bits(mine[1], theirs[1])


def test_checkpoints_go_to_and_from_optimizers_without_local_steps():
    model, data = network(), batches(2, steps=4)

    def on_rank(rank):
        mine, optimizer = local(model, every=3)
        train(mine, optimizer, [share(batch, rank, 2) for batch in data])
        optimizer.synchronize()
        exact = hvd.DistributedOptimizer(sgd(mine.parameters()), mine.named_parameters())
        exact.load_state_dict(optimizer.state_dict())
        hvd.broadcast_optimizer_state(exact, 0)
        train(mine, exact, [share(batch, rank, 2) for batch in data])
        mine, optimizer = local(mine, every=3)
        optimizer.load_state_dict(exact.state_dict())
        train(mine, optimizer, [share(batch, rank, 2) for batch in data[:3]])
        return parameters(mine)

    with World(2) as world:
        first, second = world.run(on_rank)
    assert_same_bits(first, second)


def test_what_compression_has_lost_can_be_saved():
    start = network(width=600)

    def on_rank(rank):
        model, optimizer = local(start, compression=hvd.Compression.int4, every=1)
        train(model, optimizer, [share(batch, rank, 2) for batch in batches(2, steps=2)])
        kept = optimizer.compression_state()
        _, other = local(start, compression=hvd.Compression.int4, every=1)
        other.load_compression_state(kept)
        return kept, other.compression_state()

    with World(2, "1+1") as world:
        for kept, again in world.run(on_rank):
            assert kept.keys() == again.keys() == {"2.weight/0"}
            assert kept["2.weight/0"]["sent"].norm() > 0
            torch.testing.assert_close(kept["2.weight/0"], again["2.weight/0"], rtol=1e-6, atol=0)


# ---- ranks that disagree ----


EXACT: dict = {"every": None}


@pytest.mark.parametrize("of_ranks, text", [
    (({"every": 2}, {"every": 3}), "every must be the same on all ranks, but is 2 on rank 0 and 3 on rank 1"),
    (({"outer": hvd.Outer()}, {}), r"outer must be the same on all ranks, but is \[0.7, 0.9\] on rank 0 and None on rank 1"),
    (({}, {"compression": hvd.Compression.int4}), "compression must be the same on all ranks, but is none on rank 0"),
    (({"within": "host"}, {}), "within must be the same on all ranks, but is host on rank 0 and None on rank 1"),
    (({}, {"warmup": 3}), "warmup must be the same on all ranks, but is 0 on rank 0 and 3 on rank 1"),
    ((EXACT, {}), "optimizer.0"),
    ((EXACT, {"within": "host"}), "optimizer.0"),
    ((EXACT, {"warmup": 3}), "optimizer.0"),
])  # fmt: skip
def test_other_arguments_on_a_rank_are_one_error_on_all(of_ranks, text):
    """When the optimizer is made. Where one rank takes exact steps the core finds two operations of one name."""
    model, data = network(), batches(2, steps=2)

    def on_rank(rank):
        with pytest.raises(MismatchError) as told:
            mine, optimizer = local(model, **of_ranks[rank])
            train(mine, optimizer, [share(batch, rank, 2) for batch in data])
        return str(told.value)

    with World(2, stall_abort_seconds=20) as world:
        first, second = world.run(on_rank)
    assert first == second
    with pytest.raises(MismatchError, match=text):
        raise MismatchError(first)


def test_ranks_that_step_with_other_settings_are_told_where_they_average():
    """In exact steps at the beginning, by their rounds; then by the meeting. Who means it says so."""
    start, data = network(), batches(2, steps=3)

    def on_rank(rank, warmup, **arguments):
        mine, optimizer = local(start, every=3, warmup=warmup, **arguments)
        optimizer.param_groups[0]["lr"] = 0.5 ** (1 + rank)
        train(mine, optimizer, [share(batch, rank, 2) for batch in data])

    def caught(rank, warmup):
        with pytest.raises(
            MismatchError, match="lr must be the same on all ranks, but is 0.5 on rank 0 and 0.25 on"
        ) as told:
            on_rank(rank, warmup)
        return str(told.value)

    with World(2, stall_abort_seconds=20) as world:
        for warmup in (0, 2):
            first, second = world.run(caught, warmup)
            assert first == second
        world.run(lambda rank: on_rank(rank, 0, replicas="differ"))


@pytest.mark.parametrize("difference, text", [
    ("values", "digest of parameters and outer momentum at the beginning must be the same on all ranks"),
    ("shape", r"tensor '0.bias' must be the same on all ranks, but is float32 of 8 on rank 0 and float32 of 9 on rank 1"),
    ("frozen", "tensor '0.bias' must be the same on all ranks, but is float32 of 8 on rank 0 and absent on rank 1"),
    ("steps", "number of steps since the last synchronisation must be the same on all ranks, but is 1 on rank 0 and 2 on rank 1"),
    ("loaded", "what ranks wait for must be the same on all ranks, but is to average on rank 0 and to begin on rank 1"),
])  # fmt: skip
def test_other_models_or_steps_on_a_rank_are_one_error_on_all(difference, text):
    start = network()

    def on_rank(rank):
        model = copy.deepcopy(start)
        if rank == 1 and difference == "values":
            model[2].bias.data += 1
        if rank == 1 and difference == "shape":
            model[0] = torch.nn.Linear(4, 9)
            model[2] = torch.nn.Linear(9, 8)
        if rank == 1 and difference == "frozen":
            model[0].bias.requires_grad = False
        mine, optimizer = local(model, every=3)
        data = batches(2, steps=3)
        train(mine, optimizer, [share(data[0], rank, 2)])
        if rank == 1 and difference == "steps":
            train(mine, optimizer, [share(data[1], rank, 2)])
        if rank == 1 and difference == "loaded":
            optimizer.load_state_dict(optimizer.state_dict())
            train(mine, optimizer, [share(data[1], rank, 2)])
        optimizer.synchronize()

    def caught(rank):
        with pytest.raises(MismatchError) as told:
            on_rank(rank)
        return str(told.value)

    with World(2, stall_abort_seconds=20) as world:
        first, second = world.run(caught)
    assert first == second
    with pytest.raises(MismatchError, match=text):
        raise MismatchError(first)


def test_a_failed_synchronisation_leaves_the_common_copy():
    model, data = network(), batches(2, steps=8)

    def on_rank(rank):
        mine, optimizer = local(model, every=2)
        train(mine, optimizer, [share(batch, rank, 2) for batch in data[:2]])
        before = parameters(mine)
        train(mine, optimizer, [share(data[2], rank, 2)])
        if rank:
            optimizer._mode._worker.plan = None  # planted: this rank fails before it says anything
        with pytest.raises((RingtrainError, AttributeError)):
            if rank:
                rt.allreduce(torch.zeros(1), name="optimizer.0.used")  # the others' meeting fails
            optimizer.synchronize()
        return before, parameters(mine)

    with World(2, stall_abort_seconds=20) as world:
        found = world.run(on_rank)
    assert_same_bits(found[0][0], found[0][1])
    assert_same_bits(found[0][0], found[1][0])


def test_a_rank_that_dies_leaves_the_others_at_the_same_common_copy():
    model, data = network(), batches(3, steps=4)
    averaged = threading.Barrier(3)  # who dies while others still wait for their average takes it from them
    left = {}

    def on_rank(rank):
        mine, optimizer = local(model, every=2)
        train(mine, optimizer, [share(batch, rank, 3) for batch in data[:2]])
        together = parameters(mine)
        train(mine, optimizer, [share(data[2], rank, 3)])
        averaged.wait(timeout=60)
        if rank == 1:
            raise KeyError("planted")
        with pytest.raises(PeerLostError, match="planted"):
            train(mine, optimizer, [share(data[3], rank, 3)])
        left[rank] = together, parameters(mine)

    with World(3, "2+1", stall_abort_seconds=20) as world, pytest.raises(KeyError, match="planted"):
        world.run(on_rank)
    for together, after in left.values():
        assert_same_bits(after, together)
        assert_same_bits(after, left[0][0])
    assert left.keys() == {0, 2}


# ---- arguments, worlds, and copies ----


@pytest.mark.parametrize("arguments, text", [
    ({"every": 0}, "local steps: every must be at least 1, but is 0"),
    ({"every": "often"}, "local steps: every must be an integer, but is 'often'"),
    ({"warmup": -1}, "local steps: warmup must be at least 0"),
    ({"outer": 0.7}, "local steps: outer must be None or an Outer, but is 0.7"),
    ({"within": "sum"}, "within must be None, 'host' or 'site', but is 'sum'"),
    ({"op": hvd.Sum}, "LocalSteps cannot be used with op=Sum"),
    ({"op": hvd.Adasum}, "LocalSteps cannot be used with op=Adasum"),
    ({"average_aggregated_gradients": True}, "LocalSteps cannot be used with average_aggregated_gradients"),
])  # fmt: skip
def test_arguments_that_cannot_be(arguments, text):
    def on_rank(rank):
        optimizer = sgd(network().parameters())
        with pytest.raises(InvalidArgumentError, match=text):
            hvd.DistributedOptimizer(optimizer, **in_mode({"every": 4, **arguments}))
        assert type(optimizer) is torch.optim.SGD

    with World(1) as world:
        world.run(on_rank)


def test_scripts_that_synchronize_gradients_are_told():
    start = network()

    def on_rank(rank):
        model, optimizer = local(start)
        train(model, optimizer, [share(batches(1)[0], 0, 1)])
        with pytest.raises(InvalidArgumentError, match=r"skip_synchronize: mode must not be LocalSteps"):
            with optimizer.skip_synchronize():
                optimizer.step()

    with World(2) as world:
        world.run(on_rank)


def test_join_within_the_exact_steps_is_refused():
    def on_rank(rank):
        _, optimizer = local(network(), warmup=3)
        with pytest.raises(
            InvalidArgumentError, match="a rank must have data for all 3 exact steps, but has had them for 0"
        ):
            optimizer.join()

    with World(2) as world:
        world.run(on_rank)


def test_a_world_of_one():
    """Plain averaging changes nothing; an outer optimizer steps there as well."""
    model, data = network(), batches(1, steps=4)

    def on_rank(rank):
        mine, optimizer = local(model, every=2)
        train(mine, optimizer, data)
        optimizer.synchronize()
        optimizer.count_samples(3)
        optimizer.join()
        assert "local_steps" not in optimizer.state_dict()
        plain = copy.deepcopy(model)
        train(plain, sgd(plain.parameters()), data)
        assert_same_bits(parameters(mine), parameters(plain))
        other, optimizer = local(model, every=2, outer=hvd.Outer(0.5, 0.5))
        train(other, optimizer, data)
        return parameters(other)

    with World(1) as world:
        found = world.run(on_rank)[0]
    assert_all_close(found, by_hand(model, sgd, data, [[0]], 2, hvd.Outer(0.5, 0.5))[-1], rtol=1e-5, atol=1e-6)


def test_ranks_outside_of_the_process_set_train_alone():
    model, data = network(), batches(3, steps=4)

    def on_rank(rank):
        pair = rt.add_process_set([0, 2])
        mine, optimizer = local(model, every=4, process_set=pair)
        train(mine, optimizer, [share(batch, rank, 3) for batch in data])
        optimizer.synchronize()
        return parameters(mine)

    with World(3) as world:
        first, second, third = world.run(on_rank)
    assert_same_bits(first, third)
    assert not torch.equal(first[0], second[0])


def test_copies_are_plain_and_wrapping_again_changes_the_kind():
    model, data = network(), batches(2, steps=4)

    def on_rank(rank):
        mine, optimizer = local(model, every=2)
        train(mine, optimizer, [share(batch, rank, 2) for batch in data])
        for plain in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(plain) is torch.optim.SGD
        hvd.DistributedOptimizer(optimizer, mine.named_parameters())
        with pytest.raises(InvalidArgumentError, match=r"join: the optimizer must have mode=LocalSteps"):
            optimizer.join()
        hvd.broadcast_optimizer_state(optimizer, 0)  # each rank had a momentum of its own
        train(mine, optimizer, [share(data[0], rank, 2)])
        exact = parameters(mine)
        hvd.DistributedOptimizer(optimizer, mine.named_parameters(), mode=hvd.LocalSteps(every=3))
        train(mine, optimizer, [share(data[1], rank, 2)])
        apart = parameters(mine)
        train(mine, optimizer, [share(batch, rank, 2) for batch in data[2:]])
        return exact, apart, parameters(mine)

    with World(2) as world:
        first, second = world.run(on_rank)
    assert_same_bits(first[2], second[2])
    assert not torch.equal(first[1][0], second[1][0])


def test_an_optimizer_goes_on_in_another_world():
    model, data = network(), batches(2, steps=6)
    kept = [local_for(model) for _ in range(2)]

    def on_rank(rank, part):
        mine, optimizer = kept[rank]
        if part == 0:
            hvd.DistributedOptimizer(
                optimizer, mine.named_parameters(), mode=hvd.LocalSteps(every=4, outer=hvd.Outer())
            )
        train(mine, optimizer, [share(batch, rank, 2) for batch in data[3 * part : 3 * part + 3]])
        return parameters(mine)

    for part in range(2):
        with World(2) as world:
            found = world.run(on_rank, part)
    assert not torch.equal(found[0][0], found[1][0])  # six steps: the period has ended after the fourth
    expected = by_hand(model, sgd, data[:4], [[0], [1]], 4, hvd.Outer())[0]
    assert_all_close([torch.from_numpy(each) for each in kept[0][1]._mode._worker.state()["common"].values()],
                     [each.flatten() for each in expected], rtol=1e-5, atol=1e-6)  # fmt: skip


def local_for(model):
    mine = copy.deepcopy(model)
    return mine, sgd(mine.parameters())
