"""N ranks train as one process does with their batches in one: parameters and optimizer state, step after step."""

import copy
import time

import pytest
import torch
import worlds
from modes import in_mode
from torch_models import (
    STEPS,
    TOLERANCES,
    alone,
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

import ringtrain.torch as hvd

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
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2]),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
}
for name, kind in {"adafactor": "Adafactor", "muon": "Muon"}.items():  # which the oldest torch has not
    if not hasattr(torch.optim, kind):
        del OPTIMIZERS[name]


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
    makers = OPTIMIZERS.values()
    kinds = {type(make([torch.nn.Parameter(torch.zeros(1, 1))])) for make in makers}
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
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **in_mode(chosen))
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
    [(hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2), (hvd.Compression.int8, 2e-2), (Halves, 5e-3)],
    ids=["fp16", "bf16", "int8", "user's"],
)
@pytest.mark.parametrize(
    "size, layout", [each for each in [(2, "1+1"), (3, "2+1"), (4, "2+2")] if each[0] in worlds.sizes()], ids=str
)
def test_compressed_gradients_are_close_and_replicas_equal(size, layout, compression, bound):
    """The core narrows the wire between hosts; not so close that nothing can have been rounded."""
    start, data = network(width=1024 if compression is hvd.Compression.int8 else 8), batches(size)
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


@pytest.mark.one_by_one
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
