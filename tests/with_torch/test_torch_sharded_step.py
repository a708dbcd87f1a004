"""Overlap into the next forward pass: N ranks train as without it, every use of a parameter sees its value, shares add up."""

import copy
import gc
import io
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from dyadic_models import Net, inputs, sgd
from modes import in_mode
from torch_models import assert_same_bits, parameters

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._training.shares import BucketLayout
from ringtrain.errors import InvalidArgumentError, RingtrainError
from ringtrain.testing import World
from ringtrain.torch.modes import sharded_buckets, sharded_step
from ringtrain.torch.modes.sharded_buckets import SharedBucket
from ringtrain.torch.modes.sharded_gradients import SentGradient
from ringtrain.torch.modes.sharded_values import Arrivals, AwaitedParameters

STEPS = 5
WORLDS = [(2, None), (2, "1+1"), (3, None), (4, "2+2")]
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with all": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Several of them in small networks."""
    monkeypatch.setattr(sharded_step, "BUCKET_BYTES", 2048)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """What tests before have compiled in this process: ``step()`` would wait for all values."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        monkeypatch.setattr(dynamo, "cached_backends", {})


def mlp(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 37), torch.nn.BatchNorm1d(37), torch.nn.Tanh(), torch.nn.Linear(37, 30), torch.nn.Tanh(),
        torch.nn.Linear(30, 5),
    )  # fmt: skip


START = mlp()
PIECES = BucketLayout.pieces


def batch(rank, step, samples=8):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(samples, 12, generator=generator)


def wrapped(make, model=None, overlap=True, **arguments):
    model = copy.deepcopy(START if model is None else model)
    return model, hvd.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        mode=hvd.ShardedStep(model) if overlap else None,
        **in_mode(arguments),
    )


def train(rank, model, optimizer, numbers, clip=None):
    for step in numbers:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        if clip is not None:
            clip(model, optimizer)
        optimizer.step()


def bits_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def both_ways(world, train_rank):
    """What ranks end with, with and without the overlap."""
    return world.run(lambda rank: train_rank(rank, True)), world.run(lambda rank: train_rank(rank, False))


def assert_all_equal(results, expected):
    for each in results:
        assert_same_bits(each, expected)


# ---- the same training ----


def _trains_the_same(make, size, layout):
    def on_rank(rank, overlap):
        model, optimizer = wrapped(make, overlap=overlap)
        train(rank, model, optimizer, range(STEPS))
        return bits_of(model)

    with World(size, layout) as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, with_it[0])
    if size <= 2 or layout is None:
        assert_same_bits(with_it[0], without[0])  # the order of additions is the same
    else:
        for mine, theirs in zip(with_it[0], without[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.equal(with_it[0][0], START[0].weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_has_the_bits_that_it_has_without(name):
    _trains_the_same(OPTIMIZERS[name], 2, None)


@pytest.mark.long
@pytest.mark.parametrize("size, layout", WORLDS[1:])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_on_more_ranks_and_hosts(name, size, layout):
    _trains_the_same(OPTIMIZERS[name], size, layout)


def test_the_table_of_optimizers_is_what_is_tested():
    tested = {type(make([torch.nn.Parameter(torch.zeros(1))])) for make in OPTIMIZERS.values()}
    assert tested == set(sharded_step.ELEMENTWISE)


@pytest.mark.parametrize("fault", ["share", "values", "gradient", "order"])
def test_a_planted_fault_is_seen(fault, monkeypatch):
    """What the tests above would say if a rank updated, sent or took something else."""
    if fault == "share":  # stale values are updated
        monkeypatch.setattr(SentGradient, "read", lambda sent: None)
    elif fault == "values":  # never taken
        monkeypatch.setattr(SharedBucket, "_take", lambda bucket, every: None)
    elif fault == "gradient":  # of one parameter, zeros are sent
        dense = sharded_buckets.dense_gradient
        monkeypatch.setattr(
            sharded_buckets,
            "dense_gradient",
            lambda gradient, name, how: dense(gradient, name, how) * (not name.endswith("0.bias")),
        )
    else:  # pieces are updated with a neighbour's gradient
        monkeypatch.setattr(
            "ringtrain._training.shares.BucketLayout.pieces",
            lambda layout, member, pieces=PIECES: [
                piece._replace(at=max(piece.at - 1, 0)) for piece in pieces(layout, member)
            ],
        )
    with pytest.raises((AssertionError, RingtrainError)):
        _trains_the_same(OPTIMIZERS["SGD with all"], 2, None)


def loss_of_net(model, rank, step):
    """No rank uses the second head in the first two steps, one in the third, all in the others."""
    head = int(step > 2 or (step == 2 and rank == 1))
    return model(inputs(rank + step)[0], head).sum() / 64


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("size, layout", WORLDS)
def test_parameters_that_some_or_no_ranks_use(size, layout, sets_to_none):
    """Against one process with all batches, bit for bit on exact sums; weight decay leaves alone what nobody used."""

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.25, momentum=0.5, weight_decay=0.5)

    def on_rank(rank):
        model = Net()
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), op=hvd.Sum, mode=hvd.ShardedStep(model)
        )
        for step in range(4):
            optimizer.zero_grad(set_to_none=sets_to_none)
            loss_of_net(model, rank, step).backward()
            optimizer.step()
        return bits_of(model)

    expected = Net()
    alone = make(expected.parameters())
    for step in range(4):
        alone.zero_grad(set_to_none=sets_to_none)
        for rank in range(size):
            loss_of_net(expected, rank, step).backward()
        alone.step()
    with World(size, layout) as world:
        assert_all_equal(world.run(on_rank), parameters(expected))


@pytest.mark.parametrize("bytes_of_buckets", [2048, 1 << 20])
@pytest.mark.parametrize("size", [2, 3])
def test_layers_are_frozen_and_unfrozen_between_steps(size, bytes_of_buckets, monkeypatch):
    """Also between ``zero_grad`` and ``backward``: which gradients a bucket waits for is looked up in each pass."""
    monkeypatch.setattr(sharded_step, "BUCKET_BYTES", bytes_of_buckets)
    plan = [{0, 3}, {0}, set(), {5}, {3, 5}, set()]  # layers that are frozen in each step

    def freeze(model, frozen):
        for number, layer in enumerate(model):
            layer.requires_grad_(number not in frozen)

    def on_rank(rank, overlap):
        start = copy.deepcopy(START)
        freeze(start, plan[0])
        model, optimizer = wrapped(OPTIMIZERS["SGD with all"], start, overlap)
        for step, frozen in enumerate(plan):
            optimizer.zero_grad()
            freeze(model, frozen)
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        optimizer.flush()
        return parameters(model)

    with World(size) as world:
        found, expected = world.run(on_rank, True), world.run(on_rank, False)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


def test_passes_are_added_up_and_divided_and_no_sync_sends_nothing():
    def on_rank(rank, overlap):
        model, optimizer = wrapped(
            OPTIMIZERS["AdamW"], overlap=overlap, backward_passes_per_step=2, average_aggregated_gradients=True
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            for half in range(2):
                model(batch(rank, step + 50 * half)).square().mean().backward()
            optimizer.step()
        optimizer.backward_passes_per_step = 1
        optimizer.zero_grad()
        with optimizer.no_sync():
            before = rt.counters()["bytes"]
            model(batch(rank, 7)).square().mean().backward()
            assert rt.counters()["bytes"] == before or overlap  # values of the step before may come meanwhile
        model(batch(rank, 8)).square().mean().backward()
        optimizer.step()
        return bits_of(model)

    with World(2) as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, without[0])


def square(rank, step):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_gradient_that_fills_its_bucket_is_sent_as_it_is(passes, monkeypatch):
    """No copy of it is made, in any step; one that is missing, and one behind it, are as they would be elsewhere."""
    copies = []
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(3)))
    filled = SharedBucket._filled

    def watched(bucket, members, how):
        sent = filled(bucket, members, how)
        copies.append(bucket._flat is not None)
        return sent

    monkeypatch.setattr(SharedBucket, "_filled", watched)

    def on_rank(rank, overlap):
        own, optimizer = wrapped(OPTIMIZERS["AdamW"], model, overlap=overlap, backward_passes_per_step=passes)
        for step in range(STEPS):
            optimizer.zero_grad()
            for half in range(passes):
                used = own[:2] if step == 2 and rank == 0 else own  # the last one has no gradient on rank 0 then
                used(square(rank, step + 50 * half)).square().mean().backward()
            optimizer.step()
        return bits_of(own)

    with World(2) as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, without[0])
    assert len(copies) == 2 * 3 * STEPS and not any(copies)


def test_groups_schedules_and_a_scheduler_that_was_made_before():
    def on_rank(rank, overlap):
        model = copy.deepcopy(START)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.05}], lr=0.01
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), mode=hvd.ShardedStep(model) if overlap else None
        )
        for step in range(STEPS):
            train(rank, model, optimizer, [step])
            schedule.step()
        return bits_of(model)

    with World(2) as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, without[0])


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_sums(compression):
    def on_rank(rank, overlap):
        how = getattr(hvd.Compression, compression)
        model, optimizer = wrapped(OPTIMIZERS["SGD"], overlap=overlap, compression=how)
        train(rank, model, optimizer, range(STEPS))
        return bits_of(model)

    with World(2, "1+1") as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, with_it[0])
    for mine, theirs in zip(with_it[0], without[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


def test_a_process_set_trains_alone():
    def on_rank(rank):
        pair = hvd.add_process_set([0, 2])
        model, optimizer = wrapped(OPTIMIZERS["AdamW"], process_set=pair)
        train(rank, model, optimizer, range(3))
        return bits_of(model)

    with World(3) as world:
        zero, one, two = world.run(on_rank)
    assert_same_bits(zero, two)
    assert not torch.equal(zero[0], one[0])


def test_a_world_of_one_changes_nothing():
    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"])
        train(
            rank,
            model,
            optimizer,
            range(3),
            lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        )
        optimizer.consolidate_state_dict()
        optimizer.flush()
        return bits_of(model), len(optimizer.state_dict()["state"])

    with World(1) as world:
        ((bits, states),) = world.run(on_rank)
    assert states == len(bits)


# ---- every use waits ----


class Tied(torch.nn.Module):
    """A language model whose head is the embedding's matrix, used by a function, and whose attention uses a module's
    parameters that it does not call."""

    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(20, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.bias = torch.nn.Parameter(torch.zeros(20))

    def forward(self, tokens):
        return torch.nn.functional.linear(self.layer(self.token(tokens)), self.token.weight, self.bias)


class Convnet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3),
            torch.nn.Flatten(), torch.nn.LazyLinear(10),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


def tied_loss(model, rank, step):
    tokens = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(10 * step + rank))
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def convnet_loss(model, rank, step):
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return torch.nn.functional.cross_entropy(model(x), torch.arange(4))


@pytest.mark.parametrize("kind", ["tied", "convnet", "channels_last"])
def test_models_of_others_use_their_parameters_in_their_own_ways(kind):
    torch.manual_seed(1)
    start, loss = (Tied(), tied_loss) if kind == "tied" else (Convnet(), convnet_loss)
    loss(start, 0, 0)
    if kind == "channels_last":
        start = start.to(memory_format=torch.channels_last)

    def on_rank(rank, overlap):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"], start, overlap)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                loss(model, 0, step)
            model.train()
        return bits_of(model)

    with World(2, "1+1") as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, without[0])


USES = {
    "state_dict": lambda model: [each.clone() for each in model.state_dict().values()],
    "a copy": lambda model: [p.clone() for p in copy.deepcopy(model).parameters()],
    "data": lambda model: [p.data.clone() for p in model.parameters()],
    "NumPy": lambda model: [torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()],
    "a norm": lambda model: [torch.stack([p.norm() for p in model.parameters()])],
    "all norms": lambda model: torch._foreach_norm(list(model.parameters())),
    "a vector": lambda model: [torch.nn.utils.parameters_to_vector(model.parameters())],
    "a function": lambda model: [torch.func.functional_call(model, dict(model.named_parameters()), batch(0, 0))],
    "evaluation": lambda model: [copy.copy(model).eval()(batch(0, 0))],
    "a file": lambda model: [saved(model)],
    "a list": lambda model: [torch.tensor(model[5].bias.tolist())],
    "a number": lambda model: [torch.tensor(model[5].bias[0].item())],
    "an average": lambda model: [torch.zeros(5).lerp_(model[5].bias.detach(), 0.1)],
    "vmap": lambda model: [torch.func.vmap(lambda row, w: w @ row, in_dims=(0, None))(torch.ones(2, 30), model[5].weight)],
    "scripted": lambda model: [scripted(model)(torch.ones(2, 37))],
    "printed": lambda model: [torch.tensor(np.frombuffer(repr(model[5].bias).encode(), np.uint8).copy())],
}  # fmt: skip


SCRIPTING = threading.Lock()  # torch scripts on one thread at a time


def scripted(model):
    with SCRIPTING:
        return torch.jit.script(torch.nn.Sequential(model[3], model[5]))


def saved(model):
    file = io.BytesIO()
    torch.save(model[5], file)
    file.seek(0)
    return torch.load(file, weights_only=False).weight


@pytest.mark.parametrize("use", USES)
def test_whoever_reads_a_parameter_reads_its_new_value(use, monkeypatch):
    """The first use after a step, while no value has been taken; also through a view that was made before."""
    pending = []
    expect = Arrivals.expect
    monkeypatch.setattr(Arrivals, "expect", lambda self, *a: (expect(self, *a), pending.append(self)))

    def on_rank(rank, overlap):
        model, optimizer = wrapped(OPTIMIZERS["SGD"], overlap=overlap)
        train(rank, model, optimizer, range(2))
        assert not overlap or any(each._takes for each in pending)
        with torch.no_grad():
            return [each.detach().clone() for each in USES[use](model)]

    with World(2, "1+1") as world:
        for mine, expected in zip(*both_ways(world, on_rank), strict=True):  # a rank's statistics are its own
            assert_same_bits(mine, expected)


def test_a_module_on_another_thread_and_what_was_kept_after_flush():
    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"])
        kept = [p.data.view(-1) for p in model.parameters()]
        train(rank, model, optimizer, range(2))
        optimizer.flush()
        found = torch.cat(kept)
        assert torch.equal(found, torch.cat([p.detach().view(-1) for p in model.parameters()]))
        train(rank, model, optimizer, [2])
        results = []
        thread = threading.Thread(target=lambda: results.append(model[3](torch.ones(1, 37)).detach()))
        thread.start()
        thread.join()
        return torch.equal(results[0], model[3](torch.ones(1, 37)))

    with World(2) as world:
        assert world.run(on_rank) == [True, True]


def test_what_is_written_while_values_are_on_their_way_is_told():
    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"])
        kept = list(model.parameters())
        train(rank, model, optimizer, range(2))
        optimizer.flush()
        with torch.no_grad():
            for each in kept:
                each.clamp_(-0.5, 0.5)
        train(rank, model, optimizer, [2])
        with torch.no_grad():
            kept[0].clamp_(-0.5, 0.5)
        with pytest.raises(
            InvalidArgumentError, match=r"'optimizer.0.0.weight': .*found it written .* Call optimizer.flush\(\) before"
        ):
            train(rank, model, optimizer, [3])

    with World(2) as world:
        world.run(on_rank)


@pytest.mark.parametrize("to", [2, -1, "x"], ids=str)
def test_state_is_put_together_on_a_rank_that_there_is(to):
    def on_rank(rank):
        _, optimizer = wrapped(OPTIMIZERS["SGD"])
        with pytest.raises(InvalidArgumentError, match=f"to must be a rank .* ranks 0, 1, or None, but is {to!r}"):
            optimizer.consolidate_state_dict(to=to)

    with World(2) as world:
        world.run(on_rank)


def test_a_module_waits_for_its_own_values_alone():
    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"])
        train(rank, model, optimizer, range(1))
        arrivals = optimizer._mode._arrivals
        counts = [len(set(arrivals._takes.values()))]
        x = batch(rank, 0)
        for layer in model:
            x = layer(x)
            counts.append(len(set(arrivals._takes.values())))
        return counts

    with World(2) as world:
        for counts in world.run(on_rank):
            assert counts[0] == 4 and counts == sorted(counts, reverse=True) and counts[1] == 3 and counts[-1] == 0


def test_what_the_user_writes_into_parameters_counts():
    """Also right after a step, and through ``load_state_dict`` and ``broadcast_parameters``."""

    def on_rank(rank, overlap):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"], overlap=overlap)
        train(rank, model, optimizer, range(2))
        with torch.no_grad():
            model[5].bias.fill_(3.0)
        train(rank, model, optimizer, [2])
        model.load_state_dict({name: 0.5 * value for name, value in START.state_dict().items()})
        train(rank, model, optimizer, [3])
        model[0].weight.data = torch.full_like(model[0].weight, float(rank))
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        train(rank, model, optimizer, [4, 5])
        return bits_of(model)

    with World(2) as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, without[0])


def test_modes_of_the_user_come_and_go():
    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"])
        with torch.device("cpu"):
            train(rank, model, optimizer, range(2))
        train(rank, model, optimizer, [2])
        with torch.device("meta"):
            assert torch.empty(3).is_meta
        assert not torch.empty(3).is_meta
        torch.set_default_device("cpu")
        train(rank, model, optimizer, [3])
        torch.set_default_device(None)
        optimizer.flush()
        return torch.overrides._get_current_function_mode_stack()

    with World(2) as world:
        assert world.run(on_rank) == [[], []]


@pytest.mark.long
def test_compiled_models_are_right_and_wait_in_step(caplog):
    def on_rank(rank, overlap):
        model, optimizer = wrapped(OPTIMIZERS["SGD"], overlap=overlap)
        compiled = torch.compile(model, backend="eager")
        for step in range(4):
            optimizer.zero_grad()
            compiled(batch(rank, step)).square().mean().backward()
            optimizer.step()
        return bits_of(model)

    try:
        with World(2) as world:
            with_it, without = both_ways(world, on_rank)
    finally:
        torch._dynamo.reset()
    for mine, theirs in zip(with_it[0], without[0], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert "torch.compile is in use" in caplog.text


# ---- gradients before the step ----


@pytest.mark.parametrize("p", [2.0, pytest.param(1.0, marks=pytest.mark.long), float("inf")])
def test_clipping_by_the_norm_of_all_gradients(p):
    norms = {True: [], False: []}

    def on_rank(rank, overlap):
        def clip(model, optimizer):
            norms[overlap].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, p)))

        model, optimizer = wrapped(OPTIMIZERS["SGD with all"], overlap=overlap)
        train(rank, model, optimizer, range(STEPS), clip)
        return bits_of(model)

    with World(2, "1+1") as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, with_it[0])
    for mine, theirs in zip(with_it[0], without[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sorted(norms[True]), sorted(norms[False]), rtol=1e-4)
    assert min(norms[True]) > 0.01


@pytest.mark.parametrize("unscales", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(unscales):
    overflows = {1: 0, 3: 1}

    def on_rank(rank, overlap):
        model, optimizer = wrapped(OPTIMIZERS["fused AdamW"], overlap=overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        scales = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(batch(rank, step)).square().mean()
            scaler.scale(loss * torch.inf if overflows.get(step) == rank else loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return bits_of(model), scales

    with World(2, "1+1") as world:
        with_it, without = both_ways(world, on_rank)
    assert with_it[0][1] == with_it[1][1] == without[0][1]
    assert_all_equal([bits for bits, _ in with_it], with_it[0][0])
    for mine, theirs in zip(with_it[0][0], without[0][0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


CHANGES = {
    "factors": lambda gradients: [each.mul_(0.5) for each in gradients],
    "a factor of all": lambda gradients: torch._foreach_mul_(gradients, torch.tensor(0.5)),
    "limits": lambda gradients: [each.clamp_(-1e-3, 1e-3) for each in gradients],
    "each by its norm": lambda gradients: [each.div_(each.norm() + 0.1) for each in gradients],
    "by the greatest": lambda gradients: [each.div_(each.norm(torch.inf) + 0.1) for each in gradients],
    "all norms": lambda gradients: torch._foreach_div_(gradients, torch.stack(torch._foreach_norm(gradients)).sum()),
    "zeros in place": lambda gradients: torch._foreach_zero_(gradients[:2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_numbers_are_applied_to_gradients_as_elsewhere(change):
    def on_rank(rank, overlap):
        def apply(model, optimizer):
            with torch.no_grad():
                CHANGES[change]([parameter.grad for parameter in model.parameters()])

        model, optimizer = wrapped(OPTIMIZERS["SGD with all"], overlap=overlap)
        train(rank, model, optimizer, range(3), apply)
        norms = [parameter.grad.norm() for parameter in model.parameters()]  # as they are logged after a step
        return [*bits_of(model), *norms]

    with World(2) as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, with_it[0])
    for mine, theirs in zip(with_it[0], without[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_values_of_gradients_are_clipped_and_norms_are_asked_for_once():
    def on_rank(rank, overlap):
        def clip(model, optimizer):
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            before = rt.counters()["operations"]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            assert rt.counters()["operations"] - before == (1 if overlap else 0)

        # Not Adam: a bias before a normalisation has a gradient of rounding alone, which Adam makes steps of.
        model, optimizer = wrapped(OPTIMIZERS["SGD with all"], overlap=overlap)
        train(rank, model, optimizer, range(3), clip)
        return bits_of(model)

    with World(2) as world:
        with_it, without = both_ways(world, on_rank)
    for mine, theirs in zip(with_it[0], without[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


LOOKS = {
    "an addition": lambda model: model[0].weight.grad + 1,
    "a part": lambda model: model[0].weight.grad[0].norm(),
    "norms of rows": lambda model: model[0].weight.grad.norm(dim=0),
    "other factors for each element": lambda model: model[0].weight.grad.mul_(torch.ones(37, 12)),
    "a number": lambda model: model[0].bias.grad.tolist(),
    "factors for others": lambda model: torch.ones(37).mul_(model[0].bias.grad),
    "NumPy": lambda model: model[0].bias.grad.numpy().sum(),
    "a further backward pass": lambda model: model(batch(0, 0)).sum().backward(),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_looking_at_elements_of_a_gradient_is_refused(look, when):
    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"])
        optimizer.zero_grad()
        model(batch(rank, 0)).square().mean().backward()
        assert "0.weight', shape=(37, 12)" in repr(model[0].weight.grad)
        if when == "after":
            optimizer.step()
        with pytest.raises(
            (RingtrainError, RuntimeError), match="expected nobody to use its elements|for tensor subclasses"
        ):
            LOOKS[look](model)

    with World(2) as world:
        world.run(on_rank)


def test_a_gradient_of_one_number_is_no_factor():
    def on_rank(rank):
        scale = torch.nn.Parameter(torch.ones(()))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([scale], lr=1.0), [("s", scale)], mode=hvd.ShardedStep())
        (2 * scale).backward()
        with pytest.raises(RingtrainError, match="expected nobody to use its elements"):
            torch.ones(3).mul_(scale.grad)
        optimizer.step()
        return scale.item()

    with World(2) as world:
        assert world.run(on_rank) == [-1.0, -1.0]


def test_gradients_are_given_up_and_dropped():
    """A step that all ranks skip, one that they begin differently, and gradients that all set to None."""

    def on_rank(rank, overlap):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"], overlap=overlap)
        train(rank, model, optimizer, [0])
        optimizer.zero_grad()
        model(batch(rank, 1)).square().mean().backward()
        optimizer.zero_grad()  # given up by all
        if rank == 0:
            model(batch(rank, 2)).square().mean().backward()
        optimizer.zero_grad()  # had one on a rank alone
        model(batch(rank, 3)).square().mean().backward()
        model.zero_grad(set_to_none=False)
        optimizer.zero_grad()
        model(batch(rank, 4)).square().mean().backward()
        model[5].weight.grad = model[5].bias.grad = None
        optimizer.step()
        return bits_of(model)

    with World(2) as world:
        (mine, other), (expected, _) = both_ways(world, on_rank)
    assert_all_equal([mine, other], expected)


def test_a_step_given_up_when_one_rank_alone_has_sent_a_bucket():
    """It follows a step, behind which nobody but the module has set gradients to zero."""

    def on_rank(rank, overlap):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"], overlap=overlap)
        train(rank, model, optimizer, [0])
        model.zero_grad()
        if rank == 0:
            model(batch(rank, 1)).square().mean().backward()
        else:
            model[0].bias.square().mean().backward()
        optimizer.zero_grad()
        train(rank, model, optimizer, [2])
        return bits_of(model)

    with World(2, stall_abort_seconds=20) as world:
        (mine, other), (expected, _) = both_ways(world, on_rank)
    assert_all_equal([mine, other], expected)


# ---- state ----


def bytes_of_state(optimizer):
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.numel() > 1)


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_its_share_of_the_state(size):
    def on_rank(rank, overlap):
        torch.manual_seed(0)
        model, optimizer = wrapped(OPTIMIZERS["AdamW"], torch.nn.Linear(256, 256), overlap)
        optimizer.zero_grad()
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        return bytes_of_state(optimizer)

    with World(size) as world:
        with_it, without = both_ways(world, on_rank)
    assert sum(with_it) == without[0]
    assert max(with_it) <= 1.05 * without[0] / size


@pytest.mark.parametrize("name", ["SGD with all", "AdamW", "Adagrad", "ASGD"])
@pytest.mark.parametrize(
    "sizes", [(2, 3), *(pytest.param(sizes, marks=pytest.mark.long) for sizes in [(3, 1), (2, 2)])]
)
def test_a_checkpoint_goes_on_in_another_world(name, sizes):
    """Consolidated on one rank; loaded by ranks with shares, and by an optimizer without."""
    make = OPTIMIZERS[name]

    def begin(rank, overlap):
        model, optimizer = wrapped(make, overlap=overlap)
        train(0, model, optimizer, range(2))
        if overlap:
            optimizer.consolidate_state_dict(to=1)
            if rank != 1:
                with pytest.raises(InvalidArgumentError, match=r"expected consolidate_state_dict\(\) on all ranks"):
                    optimizer.state_dict()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict())) if rank == 1 else None

    def go_on(rank, saved, overlap):
        model, optimizer = wrapped(make, overlap=overlap)
        train(0, model, optimizer, [9])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        train(0, model, optimizer, range(2, STEPS))
        return bits_of(model)

    with World(sizes[0]) as world:
        with_it, without = both_ways(world, begin)
    for place, state in without[1][1]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(with_it[1][1]["state"][place][key], value, rtol=0, atol=0)
    with World(sizes[1]) as world:
        expected = world.run(go_on, without[1], False)[0]
        assert_all_equal(world.run(go_on, with_it[1], True), expected)
        assert_all_equal(world.run(go_on, with_it[1], False), expected)


@pytest.mark.parametrize("when", ["loaded by the root", "after steps", "before any step"])
def test_the_root_gives_its_state_to_all(when):
    def on_rank(rank, overlap):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"], overlap=overlap)
        if when != "before any step":
            train(0, model, optimizer, range(2))
        if when == "loaded by the root":
            optimizer.consolidate_state_dict() if overlap else None
            if rank == 0:
                state = optimizer.state_dict()
                state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] + 1
                state["param_groups"][0]["lr"] = 0.5
                optimizer.load_state_dict(state)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(0, model, optimizer, range(2, STEPS))
        return bits_of(model)

    with World(2) as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, without[0])


def test_an_optimizer_that_is_gone_keeps_nobody_from_joining():
    """Also by its parameters' gradients, of which each has a share."""

    def train(rank):
        model = torch.nn.Linear(4, 2)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters(), mode=hvd.ShardedStep()
        )
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return [weakref.ref(parameter) for parameter in model.parameters()]

    def on_rank(rank):
        parameters = train(rank)
        rt.barrier()
        gc.collect()
        rt.barrier()
        rt.join()
        return parameters

    with World(2) as world:
        left = world.run(on_rank)
    gc.collect()
    assert not any(parameter() for of_rank in left for parameter in of_rank)


def test_wrapping_again_keeps_the_state():
    def on_rank(rank, overlap):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"], overlap=overlap)
        train(rank, model, optimizer, range(2))
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        train(rank, model, optimizer, range(2, STEPS))
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), mode=hvd.ShardedStep(model) if overlap else None
        )
        train(rank, model, optimizer, [STEPS])
        return bits_of(model)

    with World(2) as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, without[0])


def test_wrapping_again_frees_the_former_mode():
    """And with it the memory of its buckets, while the optimizer lives."""

    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"])
        train(rank, model, optimizer, range(2))
        former = weakref.ref(optimizer._mode)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        rt.barrier()
        gc.collect()
        return former() is None

    with World(2) as world:
        assert world.run(on_rank) == [True, True]


def test_values_arrive_before_the_world_closes():
    """A newcomer's script shuts down and then saves."""

    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"])
        train(rank, model, optimizer, range(2))
        return model

    with World(2) as world:
        models = world.run(on_rank)
    assert_same_bits(bits_of(models[0]), bits_of(models[1]))


# ---- what is refused ----


class Own(hvd.compression.Compressor):
    """A compression of the user's."""


class OwnSgd(torch.optim.SGD):
    """An optimizer of the user's."""


@pytest.mark.parametrize("arguments, words", [
    ({"op": hvd.Adasum}, "op=Adasum"), ({"groups": 2}, "groups"), ({"compression": Own}, "a compression class of your own"),
    ({"compression": hvd.Compression.powersgd()}, "Compression.powersgd"),
    ({"compression": hvd.Compression.int8}, "Compression.int8 or int4"),
])  # fmt: skip
def test_what_cannot_go_with_it_is_refused(arguments, words):
    with World(2) as world, pytest.raises(InvalidArgumentError, match=f"ShardedStep cannot be used with {words}"):
        world.run(lambda rank: wrapped(sgd, **arguments))


@pytest.mark.parametrize("make, words", [
    (lambda p: torch.optim.LBFGS(p), "an optimizer that does not"), (lambda p: torch.optim.Adafactor(p), "an optimizer that"),
    (lambda p: OwnSgd(p), "an optimizer that does not"), (lambda p: torch.optim.SGD(p, differentiable=True), "differentiable=True"),
    (lambda p: torch.optim.SGD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)]), "parameters that are not dense"),
])  # fmt: skip
def test_optimizers_that_it_would_change_are_refused(make, words):
    def on_rank(rank):
        optimizer = make(list(mlp().parameters()))
        hvd.DistributedOptimizer(optimizer, mode=hvd.ShardedStep())

    with World(2) as world, pytest.raises(RingtrainError, match=f"ShardedStep cannot be used with .*{words}"):
        world.run(on_rank)


REFUSED = {
    "a closure": (
        lambda model, optimizer: optimizer.step(lambda: 0.0),
        r"ShardedStep cannot be used with step\(closure\)",
    ),
    "a copy": (lambda model, optimizer: copy.deepcopy(optimizer), "copy of an optimizer: expected"),
    "join": (lambda model, optimizer: hvd.join(), "go on updating its share"),
    "an elastic state": (
        lambda model, optimizer: hvd.elastic.TorchState(model=model, optimizer=optimizer),
        "State: ShardedStep cannot be used with an elastic job",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_calls_that_it_does_not_know_are_refused(what):
    call, words = REFUSED[what]

    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"])
        train(rank, model, optimizer, [0])
        with pytest.raises(RingtrainError, match=words):
            call(model, optimizer)

    with World(2) as world:
        world.run(on_rank)


def test_another_setting_or_model_on_one_rank_is_an_error_on_all():
    def on_rank(rank, overlap, width):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, width[rank]))
        model, optimizer = wrapped(OPTIMIZERS["SGD"], model, overlap[rank])
        with pytest.raises(RingtrainError) as raised:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
        return str(raised.value)

    for overlap, width in [((True, False), (2, 2)), ((True, True), (2, 3))]:
        with World(2) as world:
            texts = world.run(on_rank, overlap, width)
        assert all("must be the same on all ranks" in text or "must" in text for text in texts)


def test_a_gradient_that_one_rank_refuses_is_an_error_on_all():
    def on_rank(rank):
        weight = torch.nn.Parameter(torch.zeros(4, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], mode=hvd.ShardedStep())
        try:
            torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=rank == 1).sum().backward()
            optimizer.step()
        except RingtrainError as problem:
            return str(problem)

    with World(2) as world:
        for text in world.run(on_rank):
            assert "as ShardedStep sends it" in text


def test_sparse_gradients_travel_as_dense_ones_where_asked():
    def on_rank(rank, overlap):
        weight = torch.nn.Parameter(torch.ones(4, 2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            [("w", weight)],
            mode=hvd.ShardedStep() if overlap else None,
            sparse_as_dense=True,
        )
        torch.nn.functional.embedding(torch.tensor([1 + rank]), weight, sparse=True).sum().backward()
        optimizer.step()
        return [weight.detach().clone()]

    with World(2) as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, without[0])


def test_a_lazy_module_is_made_while_values_are_under_way():
    """A parameter without a shape has no memory that anybody waits for."""

    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"], torch.nn.Linear(4, 4), True)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        lazy = torch.nn.LazyLinear(2)
        assert lazy(model(torch.ones(1, 4))).shape == (1, 2)
        optimizer.flush()

    with World(2) as world:
        world.run(on_rank)


@pytest.mark.parametrize("sizes", [(2, 4), (2, 1), (1, 2), pytest.param((4, 2), marks=pytest.mark.long)])
def test_torchs_own_checkpoints_are_loaded_by_any_number_of_ranks(sizes, tmp_path):
    """``torch.distributed.checkpoint`` with torch's names of the state, which are those of the parameters."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as by_name

    def state_of(model, optimizer):
        optimizer.consolidate_state_dict(to=None)
        model_state, optimizer_state = by_name.get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def begin(rank):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"])
        train(0, model, optimizer, range(2))
        state = state_of(model, optimizer)
        if rank == 0:
            checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
        train(0, model, optimizer, range(2, STEPS))
        return bits_of(model)

    def go_on(rank):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"])
        train(0, model, optimizer, [9])
        state = state_of(model, optimizer)
        checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
        by_name.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(0, model, optimizer, range(2, STEPS))
        return bits_of(model)

    with World(sizes[0]) as world:
        expected = world.run(begin)[0]
    with World(sizes[1]) as world:
        assert_all_equal(world.run(go_on), expected)


def test_parameters_are_added_between_steps():
    """In buckets of their own; the state that shares have by then stays."""

    def on_rank(rank, overlap):
        model = copy.deepcopy(START)
        first = [p for layer in model[:4] for p in layer.parameters()]
        optimizer = torch.optim.AdamW(first, lr=0.01)
        mode = hvd.ShardedStep(model) if overlap else None
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=mode)
        train(rank, model, optimizer, range(2))
        optimizer.add_param_group({"params": list(model[5].parameters()), "lr": 0.1})
        train(rank, model, optimizer, range(2, STEPS))
        if overlap:
            optimizer.consolidate_state_dict()
        states = optimizer.state_dict()["state"] if rank == 0 else {}
        return [*bits_of(model), *(states[place]["exp_avg_sq"].clone() for place in sorted(states))]

    with World(2) as world:
        (mine, other), (expected, _) = both_ways(world, on_rank)
    assert_same_bits(mine, expected)
    assert_same_bits(other, mine[: len(other)])


class Keeping(torch.nn.Module):
    """Keeps a parameter of another module in a list, as is done to have it registered once, and one that no module has."""

    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(20, 16)
        self.cell = torch.nn.LSTM(16, 16, batch_first=True)
        self.head = [self.token.weight]

    def forward(self, tokens):
        embedded = torch.nn.functional.embedding(tokens, self.head[0])
        return torch.nn.functional.linear(self.cell(embedded)[0], self.head[0])


def test_parameters_that_modules_keep_elsewhere_are_waited_for():
    torch.manual_seed(1)
    start = Keeping()

    def on_rank(rank, overlap):
        model = copy.deepcopy(start)
        free = torch.nn.Parameter(torch.ones(20))
        named = [*model.named_parameters(), ("free", free)]
        optimizer = OPTIMIZERS["AdamW"]([p for _, p in named])
        optimizer = hvd.DistributedOptimizer(optimizer, named, mode=hvd.ShardedStep(model) if overlap else None)
        for step in range(STEPS):
            optimizer.zero_grad()
            tokens = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(10 * step + rank))
            (model(tokens) * free).square().mean().backward()
            optimizer.step()
        return [*bits_of(model), free.detach().clone()]

    with World(2, "1+1") as world:
        with_it, without = both_ways(world, on_rank)
    assert_all_equal(with_it, without[0])


def test_a_graph_of_the_step_before_says_that_its_parameters_have_changed():
    """As after a step of one process: new values would give it other gradients."""

    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"])
        kept = model(batch(rank, 7)).square().mean()
        train(rank, model, optimizer, [0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
        optimizer.zero_grad()
        return True

    with World(2) as world:
        assert world.run(on_rank) == [True, True]


@pytest.mark.parametrize("by_forward", [True, False])
def test_modules_have_their_own_dicts_once_values_are_there(by_forward):
    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["SGD"])
        own = [module._parameters for module in model.modules()]
        train(rank, model, optimizer, range(2))
        waits = [type(module._parameters) for module in model.modules()]
        assert AwaitedParameters in waits
        if by_forward:
            model(batch(rank, 0))
        else:
            optimizer.flush()
        assert all(module._parameters is before for module, before in zip(model.modules(), own, strict=True))

    with World(2) as world:
        world.run(on_rank)


def test_without_a_model_step_waits():
    def on_rank(rank):
        model = copy.deepcopy(START)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["AdamW"](model.parameters()), mode=hvd.ShardedStep())
        kept = list(model.parameters())
        train(rank, model, optimizer, range(STEPS))
        return [each.detach().clone() for each in kept]

    def without(rank):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"], overlap=False)
        train(rank, model, optimizer, range(STEPS))
        return bits_of(model)

    with World(2) as world:
        assert_all_equal(world.run(on_rank), world.run(without)[0])
