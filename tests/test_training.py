"""N ranks train as one process does with their batches in one: parameters and optimizer state, step after step."""

import copy
import time
from contextlib import nullcontext

import pytest
import torch
import worlds
from torch_models import (
    STEPS,
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
    state,
    train,
)

import ringtrain as rt
import ringtrain.torch as hvd

pytestmark = pytest.mark.timeout(60)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "weight_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2]),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
}
TOLERANCES = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: {"rtol": 1e-10, "atol": 1e-11}}


def alone(model, make, data, **arguments):
    """What one process makes of the global batches."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    train(model, optimizer, data, **arguments)
    return model, optimizer


@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.float64) for name in OPTIMIZERS] + [(name, torch.float32) for name in ("sgd", "momentum", "adam")],
    ids=lambda each: str(each).removeprefix("torch."),
)
def test_equals_one_process(world, name, dtype):
    start, data, make = network(dtype), batches(world.size, dtype), OPTIMIZERS[name]
    expected, expected_optimizer = alone(start, make, data)

    def on_rank(rank):
        model, optimizer = distributed(start, make)
        for batch in data:
            train(model, optimizer, [share(batch, rank, world.size)])
            assert_replicas_equal([*parameters(model), *state(optimizer)])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[dtype])
        assert_all_close(state(optimizer), state(expected_optimizer), **TOLERANCES[dtype])

    world.run(on_rank)


def test_every_optimizer_of_torch_is_tested():
    """By the test above, but for two: one needs a closure, the other sparse gradients."""
    kinds = {type(make([torch.nn.Parameter(torch.zeros(1, 1))])) for make in OPTIMIZERS.values()}
    kinds |= {torch.optim.LBFGS, torch.optim.SparseAdam}
    classes = {each for each in vars(torch.optim).values() if isinstance(each, type)}
    assert {each for each in classes if issubclass(each, torch.optim.Optimizer)} - kinds == {torch.optim.Optimizer}


@pytest.mark.parametrize("size, layout, algorithm", worlds.configurations(2), ids=str)
def test_every_layout_of_hosts_and_algorithm(size, layout, algorithm):
    start, data = network(torch.float64), batches(size, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd)
        train(model, optimizer, [share(batch, rank, size) for batch in data])
        assert_replicas_equal(parameters(model))
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    with worlds.World(size, layout, algorithm=algorithm) as world:
        world.run(on_rank)


def test_dyadic_data_gives_the_same_bits(world):
    """Every sum and product is exact here, and so is an average over a power of two ranks."""
    start = torch.nn.Linear(3, 2).double()
    for parameter in start.parameters():
        parameter.data.copy_((torch.arange(parameter.numel()) % 5 - 2).reshape(parameter.shape) / 4)
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-2, 3, (STEPS, 4 * world.size, 3), generator=generator).double()
    y = torch.randint(-4, 5, (STEPS, 4 * world.size, 2), generator=generator).double()
    data = list(zip(x, y, strict=True))

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)

    def scaled_sum(output, target):
        return mean_square(output, target, reduction="sum") / 64

    cases = [(hvd.Sum, scaled_sum)]
    if world.size & (world.size - 1) == 0:
        cases.append((hvd.Average, mean_square))
    expected = [parameters(alone(start, make, data, loss=loss)[0]) for _, loss in cases]

    def on_rank(rank):
        for (op, loss), same in zip(cases, expected, strict=True):
            model, optimizer = distributed(start, make, op=op)
            train(model, optimizer, [share(batch, rank, world.size) for batch in data], loss)
            assert_same_bits(parameters(model), same)

    world.run(on_rank)


def test_sum_equals_a_learning_rate_times_the_ranks(world):
    start, data, size = network(torch.float64), batches(world.size, torch.float64), world.size
    expected, _ = alone(start, lambda p: torch.optim.SGD(p, lr=0.05 * size), data)

    def on_rank(rank):
        model, optimizer = distributed(start, lambda p: torch.optim.SGD(p, lr=0.05), op=hvd.Sum)
        train(model, optimizer, [share(batch, rank, size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_predivide_factor": 4.0},
        {"groups": 1},
        {"groups": 3},
        {"num_groups": 2},
        {"groups": 100},
        {"groups": "last two"},
        {"compression": hvd.Compression.none},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:num_groups")
def test_options_do_not_change_the_result(world, arguments):
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model = copy.deepcopy(start)
        chosen = dict(arguments)
        if chosen.get("groups") == "last two":
            chosen["groups"] = [list(model.parameters())[-2:]]
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **chosen)
        train(model, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


class Halves(hvd.Compression.none):
    """A user's compressor: sends float16, which is added as float16."""

    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, context):
        return tensor.to(context)


@pytest.mark.parametrize(
    "compression, bound",
    [(hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2), (Halves, 5e-3)],
    ids=["fp16", "bf16", "user's"],
)
@pytest.mark.parametrize("size, layout", [(2, "1+1"), (3, "2+1"), (4, "2+2")], ids=str)
def test_compressed_gradients_are_close_and_replicas_equal(size, layout, compression, bound):
    """The core narrows the wire between hosts; not so close that nothing can have been rounded."""
    if size not in worlds.sizes():
        pytest.skip("another number of ranks")
    start, data = network(), batches(size)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, compression=compression)
        train(model, optimizer, [share(batch, rank, size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), rtol=bound, atol=bound)
        pairs = zip(parameters(model), parameters(expected), strict=True)
        assert max((mine - theirs).abs().max() for mine, theirs in pairs) > 1e-6
        assert_replicas_equal(parameters(model))
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())

    with worlds.World(size, layout) as world:
        world.run(on_rank)


def test_channels_last_gradients(world):
    torch.manual_seed(1)
    start = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2)).double()
    start = start.to(memory_format=torch.channels_last)
    x = torch.randn(STEPS, 2 * world.size, 2, 4, 4, dtype=torch.float64)
    y = torch.randn(STEPS, 2 * world.size, 2, dtype=torch.float64)
    data = [(each.to(memory_format=torch.channels_last), target) for each, target in zip(x, y, strict=True)]
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd)
        train(model, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


# ---- accumulation ----


@pytest.mark.parametrize("passes", [2, 3])
def test_accumulation_sums_micro_batches(world, passes):
    """With the loss divided by the passes, N ranks with K micro-batches equal one process with all of them."""
    start, data = network(torch.float64), batches(world.size * passes, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, backward_passes_per_step=passes)
        for batch in data:
            optimizer.zero_grad()
            for micro in range(passes):
                x, y = share(batch, rank * passes + micro, world.size * passes)
                (mean_square(model(x), y) / passes).backward()
            optimizer.step()
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_no_byte_moves_before_the_boundary(world):
    start, passes = network(), 4
    tensor_count = len(parameters(start))
    data = batches(world.size, steps=2 * passes)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, backward_passes_per_step=passes)
        for step in range(2):
            optimizer.zero_grad()
            before = rt.counters()
            for batch in data[step * passes : (step + 1) * passes - 1]:
                mean_square(*_forward(model, share(batch, rank, world.size))).backward()
            quiet = rt.counters()
            moved = ("operations", "batches", "bytes", "shared_bytes", "wire_bytes_sent", "cache_hits", "cache_misses")
            assert {name: quiet[name] - before[name] for name in moved} == dict.fromkeys(moved, 0)
            hvd.allreduce(torch.zeros(1), name="all were quiet")  # a rank that went ahead would speak to the others
            mean_square(*_forward(model, share(data[step * passes + passes - 1], rank, world.size))).backward()
            optimizer.step()
            after = rt.counters()
            assert after["operations"] - quiet["operations"] == 1 + tensor_count + 1  # ours above, and who used what

    world.run(on_rank)


def test_a_partial_window_is_reduced_by_step(world):
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, backward_passes_per_step=3)
        train(model, optimizer, [share(batch, rank, world.size) for batch in data])  # one pass a step
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


def test_zero_grad_starts_the_window_anew(world):
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected, _ = alone(start, sgd, data[1:])

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, backward_passes_per_step=2)
        mean_square(*_forward(model, share(data[0], rank, world.size))).backward()  # given up
        train(model, optimizer, [share(batch, rank, world.size) for batch in data[1:]])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


# ---- uneven and weighted batches ----


@pytest.mark.parametrize("divisor", ["active", "initial"])
@pytest.mark.parametrize("size", worlds.sizes(2))
def test_uneven_batches_end_with_join(size, divisor):
    """Rank r has r + 1 batches; the mean of a step is over the ranks that still have one, or over all that began."""
    start, data = network(torch.float64), batches(size, torch.float64, steps=size)
    expected = copy.deepcopy(start)
    expected_optimizer = sgd(expected.parameters())
    for step, batch in enumerate(data):
        expected_optimizer.zero_grad()
        present = range(step, size)
        for rank in present:
            x, y = share(batch, rank, size)
            (mean_square(expected(x), y) / (len(present) if divisor == "active" else size)).backward()
        expected_optimizer.step()

    def on_rank(rank):
        model, optimizer = distributed(start, sgd)
        train(model, optimizer, [share(batch, rank, size) for batch in data[: rank + 1]])
        assert hvd.join() == size - 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    with worlds.World(size, join_divisor=divisor) as world:
        world.run(on_rank)


@pytest.mark.parametrize("mean", ["of samples", "of ranks"])
def test_batches_of_different_sizes(world, mean):
    """Sums divided by the number of samples on all ranks equal one process; a mean of means does not."""
    start, size = network(torch.float64), world.size
    data = batches(size, torch.float64)
    bounds = [len(data[0][0]) * rank * rank // (size * size) for rank in range(size + 1)]
    bounds[1:-1] = [max(bound, rank) for rank, bound in enumerate(bounds[1:-1], start=1)]
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, op=hvd.Sum if mean == "of samples" else hvd.Average)
        for x, y in data:
            optimizer.zero_grad()
            mine = slice(bounds[rank], bounds[rank + 1])
            if mean == "of samples":
                total = hvd.allreduce(torch.tensor(y[mine].numel()), name="samples", op=hvd.Sum)
                loss = mean_square(model(x[mine]), y[mine], reduction="sum") / total
            else:
                loss = mean_square(model(x[mine]), y[mine])
            loss.backward()
            optimizer.step()
        difference = max((a - b).abs().max() for a, b in zip(parameters(model), parameters(expected), strict=True))
        assert (difference < 1e-10) == (mean == "of samples" or size == 1)

    world.run(on_rank)


@pytest.mark.parametrize("size, layout, algorithm", worlds.configurations(4), ids=str)
def test_bits_hang_on_nothing_but_tensor_and_world(size, layout, algorithm):
    """Not on fusion, the cache, groups, or which rank is late."""
    start, data = network(), batches(size)
    found = []
    for chosen, groups in [({}, None), ({"fusion_threshold_bytes": 0}, None), ({"cache_capacity": 0}, 2)]:

        def on_rank(rank, groups=groups):
            model, optimizer = distributed(start, sgd, groups=groups)
            if groups is None and rank == size - 1:
                model[2].weight.register_hook(lambda gradient: time.sleep(0.002))
            train(model, optimizer, [share(batch, rank, size) for batch in data])
            return parameters(model)

        with worlds.World(size, layout, algorithm=algorithm, **chosen) as world:
            found += world.run(on_rank)
    for each in found[1:]:
        assert_same_bits(each, found[0])


# ---- parameters that not all ranks use ----


class Branches(torch.nn.Module):
    """Three layers, of which a forward pass uses those it is told to."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, used):
        return sum((self.layers[index](x) for index in used), start=torch.zeros(len(x), 2, dtype=x.dtype))


def branches_of(rank, step, pattern):
    """The layers that a rank uses in a step."""
    return {
        "nobody uses the last": [0, 1],
        "some use the last": [0] if rank % 2 else [0, 2],
        "another one each step": [(rank + step) % 3],
        "some use none at all": [] if rank == 0 else [1],
    }[pattern]


@pytest.mark.parametrize("groups", [None, 1, 2], ids=["no groups", "one group", "two groups"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
@pytest.mark.parametrize(
    "pattern", ["nobody uses the last", "some use the last", "another one each step", "some use none at all"]
)
def test_unused_parameters(world, pattern, set_to_none, groups):
    """The oracle is one process that adds up the ranks' losses and divides by their number."""
    torch.manual_seed(2)
    start, data, size = Branches().double(), batches(world.size, torch.float64), world.size

    def losses(model, batch, step, of_ranks):
        for rank in of_ranks:
            x, y = share(batch, rank, size)
            used = branches_of(rank, step, pattern)
            if used:
                yield mean_square(model(x, used), y)

    expected, expected_optimizer = copy.deepcopy(start), None
    expected_optimizer = sgd(expected.parameters())
    for step, batch in enumerate(data):
        expected_optimizer.zero_grad(set_to_none)
        for loss in losses(expected, batch, step, range(size)):
            (loss / size).backward()
        expected_optimizer.step()

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, groups=groups)
        for step, batch in enumerate(data):
            optimizer.zero_grad(set_to_none)
            for loss in losses(model, batch, step, [rank]):
                loss.backward()
            optimizer.step()
            assert_replicas_equal(parameters(model))
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])
        assert_all_close(state(optimizer), state(expected_optimizer), **TOLERANCES[torch.float64])
        gradients = [(p.grad is None) for p in model.parameters()]
        assert gradients == [(p.grad is None) for p in expected.parameters()]

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_an_unused_parameter_sends_nothing(world):
    start = Branches()

    def on_rank(rank):
        model, optimizer = distributed(start, sgd)
        before = rt.counters()["bytes"]
        model(torch.ones(1, 4), [0]).sum().backward()
        optimizer.step()
        used, flags = 4 * (4 * 2 + 2), len(list(model.parameters())) + 1
        assert rt.counters()["bytes"] - before == used + 2 * flags  # after the backward pass, and once more in step()
        assert model.layers[1].weight.grad is None

    world.run(on_rank)


# ---- parameters that change their part ----


def test_tied_and_twice_used_parameters(world):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.last = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.second(torch.tanh(self.first(torch.tanh(self.first(x))))))

    torch.manual_seed(4)
    start, data = Tied().double(), batches(world.size, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd)
        train(model, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


def test_parameters_frozen_and_unfrozen(world):
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def schedule(model, optimizer, data):
        for step, batch in enumerate(data):
            model[0].requires_grad_(step >= 2)  # frozen when the optimizer is made
            model[4].requires_grad_(step not in (2, 3))  # frozen in between
            train(model, optimizer, [batch])
        return model

    def prepare(model):
        model[0].requires_grad_(False)
        return model, sgd(model.parameters())

    expected, expected_optimizer = prepare(copy.deepcopy(start))
    schedule(expected, expected_optimizer, data)

    def on_rank(rank):
        model, optimizer = prepare(copy.deepcopy(start))
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        schedule(model, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_param_groups_and_one_added_later(world, named):
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def run(model, wrap, data):
        optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.2}], lr=0.05, momentum=0.9)
        optimizer = wrap(optimizer, model.named_parameters() if named else None)
        train(model, optimizer, data[:2])
        optimizer.add_param_group({"params": list(model[2].parameters()) + list(model[4].parameters())})
        train(model, optimizer, data[2:])
        assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.05]
        return model

    expected = run(copy.deepcopy(start), lambda optimizer, names: optimizer, data)

    def on_rank(rank):
        model = run(copy.deepcopy(start), hvd.DistributedOptimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "at once"])
def test_two_optimizers_over_models_of_equal_names(world, in_turn):
    """As in a GAN; the gradients of both travel at the same time where both get theirs from one backward pass."""
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def run(wrap, data):
        models = [copy.deepcopy(start) for _ in range(2)]
        optimizers = [
            wrap(sgd(model.parameters(), lr=lr), model) for model, lr in zip(models, (0.1, 0.02), strict=True)
        ]
        for x, y in data:
            for chosen in [[0], [1]] if in_turn else [[0, 1]]:
                for index in chosen:
                    optimizers[index].zero_grad()
                inputs = [parameter for index in chosen for parameter in models[index].parameters()]
                mean_square(models[0](x) + models[1](x), y).backward(inputs=inputs)
                for index in chosen:
                    optimizers[index].step()
        return [tensor for model in models for tensor in parameters(model)]

    expected = run(lambda optimizer, model: optimizer, data)

    def wrap(optimizer, model):
        return hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def on_rank(rank):
        found = run(wrap, [share(batch, rank, world.size) for batch in data])
        assert_all_close(found, expected, **TOLERANCES[torch.float64])

    world.run(on_rank)


def test_state_loaded_in_the_middle(world):
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected, _ = alone(start, sgd, data)

    def on_rank(rank):
        mine = [share(batch, rank, world.size) for batch in data]
        model, optimizer = distributed(start, sgd)
        train(model, optimizer, mine[:2])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, mine[2:4])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, mine[2:])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


def test_process_set_trains_apart(world):
    """Even ranks train together, the others alone."""
    start, data, size = network(torch.float64), batches(world.size, torch.float64), world.size
    evens = list(range(0, size, 2))

    def on_rank(rank):
        together = hvd.add_process_set(evens) if len(evens) < size else hvd.global_process_set
        model, optimizer = distributed(start, sgd, process_set=together)
        train(model, optimizer, [share(batch, rank, size) for batch in data])
        members = evens if rank % 2 == 0 else [rank]
        expected = copy.deepcopy(start)
        of_members = [
            [torch.cat(parts) for parts in zip(*(share(batch, r, size) for r in members), strict=True)]
            for batch in data
        ]
        train(expected, sgd(expected.parameters()), of_members)
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


# ---- recipes ----


@pytest.mark.parametrize("recipe", ["as alone", "Horovod's"])
def test_clipping_recipe(world, recipe):
    """Clips the average, once, with a norm that is the same on all ranks, whether or not the script synchronizes."""
    start, data, bound = network(torch.float64), batches(world.size, torch.float64), 0.1

    def clipped_alone(data):
        model = copy.deepcopy(start)
        optimizer, norms = sgd(model.parameters()), []
        for x, y in data:
            optimizer.zero_grad()
            mean_square(model(x), y).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), bound))
            optimizer.step()
        assert min(norms) > bound, "a bound that never clips tests nothing"
        return model, norms

    expected, expected_norms = clipped_alone(data)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd)
        norms, operations = [], []
        for batch in data:
            optimizer.zero_grad()
            before = rt.counters()["operations"]
            mean_square(*_forward(model, share(batch, rank, world.size))).backward()
            if recipe == "Horovod's":
                optimizer.synchronize()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), bound))
            with optimizer.skip_synchronize() if recipe == "Horovod's" else nullcontext():
                optimizer.step()
            operations.append(rt.counters()["operations"] - before)
        assert_all_close(norms, expected_norms, **TOLERANCES[torch.float64])
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])
        once = len(list(model.parameters())) + 1 if world.size > 1 else 0
        assert operations == [once] * STEPS

    world.run(on_rank)


@pytest.mark.parametrize(
    "make", [sgd, lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe")], ids=["sgd", "lbfgs"]
)
def test_closure(world, make):
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def run(model, optimizer, data):
        losses = []
        for x, y in data:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = mean_square(model(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
        return losses

    expected = copy.deepcopy(start)
    expected_losses = run(expected, make(expected.parameters()), data)

    def on_rank(rank):
        model, optimizer = distributed(start, make)
        losses = run(model, optimizer, [share(batch, rank, world.size) for batch in data])
        assert_all_close(losses, expected_losses, rtol=1e-7, atol=1e-9)
        assert_all_close(parameters(model), parameters(expected), rtol=1e-6, atol=1e-7)
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_closure_with_parameters_that_some_ranks_use(world):
    """The gradients must be complete when the closure returns, also those that this rank had no part in."""
    start = Branches().double()

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, op=hvd.Sum)

        def closure():
            optimizer.zero_grad()
            model(torch.ones(1, 4, dtype=torch.float64), [rank % 3]).sum().backward()

        assert optimizer.step(closure) is None
        used_by = [len(range(layer, world.size, 3)) for layer in range(3)]
        for layer, count in zip(model.layers, used_by, strict=True):
            assert (layer.weight.grad is None) if count == 0 else layer.weight.grad.eq(count).all()

    world.run(on_rank)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_learning_rate_schedule(world, scheduler_first):
    start, data = network(torch.float64), batches(world.size, torch.float64)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def run(model, optimizer, scheduler, data):
        for batch in data:
            train(model, optimizer, [batch])
            scheduler.step()
        return optimizer.param_groups[0]["lr"]

    expected = copy.deepcopy(start)
    expected_optimizer = sgd(expected.parameters())
    expected_rate = run(expected, expected_optimizer, schedule(expected_optimizer), data)

    def on_rank(rank):
        model = copy.deepcopy(start)
        optimizer = sgd(model.parameters())
        scheduler = schedule(optimizer) if scheduler_first else None
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        rate = run(
            model, optimizer, scheduler or schedule(optimizer), [share(batch, rank, world.size) for batch in data]
        )
        assert rate == expected_rate
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])

    world.run(on_rank)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def test_sparse_gradients(world, optimizer, as_dense):
    """Ranks look up different words, some of them several times, and one rank none at all in a step."""
    torch.manual_seed(6)
    start, size = torch.nn.Embedding(10, 3, sparse=True).double(), world.size

    def words(rank, step):
        return torch.tensor([rank, 9, 9] if rank != step else [], dtype=torch.int64)

    def make(parameters):
        return optimizer(parameters, lr=0.5)

    expected = copy.deepcopy(start)
    expected_optimizer = make(expected.parameters())
    for step in range(STEPS):
        expected_optimizer.zero_grad()
        for rank in range(size):
            (expected(words(rank, step)).pow(2).sum() / size).backward()
        expected_optimizer.step()

    def on_rank(rank):
        model, optimizer = distributed(start, make, sparse_as_dense=as_dense)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(words(rank, step)).pow(2).sum().backward()
            optimizer.step()
            assert model.weight.grad.is_sparse
        assert_all_close(parameters(model), parameters(expected), **TOLERANCES[torch.float64])
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def _forward(model, batch):
    x, y = batch
    return model(x), y
