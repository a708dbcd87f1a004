"""``Synchronous(gradient_as_bucket_view=True)``: gradients that are views of flat tensors train as others do, and travel together.

test_torch_buckets_everywhere runs all other properties of training with it.
"""

import copy
from functools import partial

import pytest
import torch
import worlds
from modes import in_mode
from torch_models import (
    Branches,
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
)

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._training.bucket_plan import STEADY_STEPS
from ringtrain._training.presence import DENSE
from ringtrain._training.presence import SPARSE_64 as SPARSE
from ringtrain.errors import InvalidArgumentError
from ringtrain.torch import bucketing, exchange
from ringtrain.torch.buckets import Bucket
from ringtrain.torch.gradients import Group, OptimizedParameter

pytestmark = pytest.mark.least_ranks(2)

STEPS = STEADY_STEPS + 3


def storages(model):
    """How many memories the gradients lie in."""
    return len({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None})


def operations_of(run):
    before = rt.counters()["operations"]
    run()
    return rt.counters()["operations"] - before


@pytest.mark.parametrize(
    "arguments, operations, to_none",
    [
        ({}, 1, True),
        ({}, 1, False),
        ({"groups": 2}, 2, True),
        ({"compression": hvd.Compression.fp16}, 1, True),
        ({"backward_passes_per_step": 2}, 1, True),
        ({"backward_passes_per_step": 2}, 1, False),
    ],
    ids=str,
)
def test_same_bits_as_without(world, arguments, operations, to_none):
    """On one host, where ranks are added in one order whatever travels together."""
    start, data = network(), batches(2 * world.size, steps=STEPS)
    passes = arguments.get("backward_passes_per_step", 1)

    def train(rank, **more):
        model, optimizer = distributed(start, sgd, **arguments, **more)

        def step(batch):
            optimizer.zero_grad(set_to_none=to_none)
            for number in range(passes):
                x, y = share(batch, passes * rank + number, passes * world.size)
                mean_square(model(x), y).backward()
            optimizer.step()

        counts = [
            operations_of(lambda batch=batch: step(batch)) - 1 for batch in data
        ]  # the round's own is not counted
        return model, optimizer, counts

    def on_rank(rank):
        plain, plain_optimizer, _ = train(rank)
        model, optimizer, counts = train(rank, gradient_as_bucket_view=True)
        assert_same_bits([*parameters(model), *state(optimizer)], [*parameters(plain), *state(plain_optimizer)])
        assert_same_bits([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        assert_replicas_equal(parameters(model))
        assert counts[STEADY_STEPS:] == [operations] * (STEPS - STEADY_STEPS)
        assert (storages(model), storages(plain)) == (operations, len(parameters(model)))

    world.run(on_rank)


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["groups", "buckets"])
def test_ranks_that_have_joined_go_on_as_the_others(world, arguments):
    """Some ranks have fewer batches, and so have not seen as many alike steps when the next epoch begins."""
    start, data = network(), batches(world.size, steps=STEPS)

    def on_rank(rank):
        model, optimizer = distributed(start, partial(torch.optim.SGD, lr=0.1), **arguments)
        for batch in data[: STEPS if rank == 0 else 1]:
            optimizer.zero_grad()
            x, y = share(batch, rank, world.size)
            mean_square(model(x), y).backward()
            optimizer.step()
        hvd.join()
        counts = []
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for batch in data:
            x, y = share(batch, rank, world.size)
            counts.append(operations_of(lambda x=x, y=y: (mean_square(model(x), y).backward(), optimizer.step())) - 1)
            optimizer.zero_grad()
        assert_replicas_equal(parameters(model))
        assert counts == [len(parameters(model))] * STEADY_STEPS + [1] * (STEPS - STEADY_STEPS)

    world.run(on_rank)


def test_small_gradients_become_one_operation(world, monkeypatch):
    """Those that were alone, once steps are alike; a large one and a given group stay as they are."""
    monkeypatch.setattr(bucketing, "GROUP_BYTES", 200)
    layers = [torch.nn.Parameter(torch.ones(count)) for count in (3, 4, 50, 5, 6, 7, 8)]
    names = ["a", "b", "large", "c", "d", "e", "f"]
    submitted = {}
    submit = Group.submit

    def noted(group, members, *rest):
        submitted.setdefault(rt.rank(), []).append((group.name.partition(".0.")[2], len(members)))
        submit(group, members, *rest)

    monkeypatch.setattr(Group, "submit", noted)

    def on_rank(rank):
        own = [torch.nn.Parameter(layer.detach().clone()) for layer in layers]
        optimizer = hvd.DistributedOptimizer(sgd(own), list(zip(names, own, strict=True)), groups=[own[5:]], op=hvd.Sum)
        for _ in range(STEADY_STEPS + 1):
            submitted[rank] = []
            optimizer.zero_grad()
            sum(((index + rank) * p).sum() for index, p in enumerate(own)).backward()
            optimizer.step()
        found = sorted(submitted[rank])
        expected = [index * world.size + sum(range(world.size)) for index in range(len(own))]
        assert [p.grad.unique().tolist() for p in own] == [[value] for value in map(float, expected)]
        assert sorted(found) == [("d and 3 more", 4), ("group.0", 2), ("large", 1)]

    world.run(on_rank)


@pytest.mark.on_threads("the hosts are simulated")
@pytest.mark.parametrize("layout", ["2+1", "1+1+1"])
def test_small_gradients_have_the_bits_that_they_have_alone(monkeypatch, layout):
    """Between hosts, where the order of additions follows from an element's place in its tensor."""
    start, data = network(), batches(3, steps=STEPS)

    def train(rank):
        model, optimizer = distributed(start, sgd)
        for batch in data:
            optimizer.zero_grad()
            x, y = share(batch, rank, 3)
            mean_square(model(x), y).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()], len(optimizer._mode._exchange._bucketing.groups)

    with worlds.World(3, layout=layout) as world:
        together = world.run(train)
        monkeypatch.setattr(exchange, "growth_of_groups", lambda settings, makes_buckets: bucketing.Growth.NONE)
        alone = world.run(train)
    for (found, groups), (expected, single) in zip(together, alone, strict=True):
        assert (groups, single) == (1, len(expected))
        assert_same_bits(found, expected)


def test_what_some_ranks_or_none_use(world):
    """A bucket of which a part comes on some ranks counts zeros; one of which a part comes nowhere travels in parts."""
    torch.manual_seed(1)
    start, x = Branches(), torch.ones(2, 4)
    steady, changing = [[0, 1, 2]] * STEADY_STEPS, [[0, 1, 2], [0], [1, 2], [0, 1, 2]]

    def train(rank, **arguments):
        model, optimizer = distributed(start, sgd, **arguments)
        gone = []
        for step, used in enumerate([*steady, *changing, "own"] + [[0, 1]] * (STEADY_STEPS + 1)):
            optimizer.zero_grad()
            model(x * (rank + step), [rank % 3] if used == "own" else used).square().sum().backward()
            optimizer.step()
            gone.append([p.grad is None for p in model.parameters()])
        return model, gone

    def on_rank(rank):
        (plain, expected), (model, gone) = train(rank), train(rank, gradient_as_bucket_view=True)
        assert gone == expected
        assert_same_bits(parameters(model), parameters(plain))
        assert storages(model) == 1, "made anew without what is no longer used"

    world.run(on_rank)


def test_dtypes_sparse_and_frozen_parameters(world):
    """Each dtype has a bucket; sparse gradients have none; a frozen parameter leaves its bucket, and an added one joins."""
    torch.manual_seed(1)
    start = torch.nn.ModuleList(
        [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3).double(), torch.nn.Embedding(5, 3, sparse=True)]
    )
    late = torch.nn.Linear(3, 3)

    def train(rank, **arguments):
        model, added = copy.deepcopy(start), copy.deepcopy(late)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            [*model.named_parameters(), *added.named_parameters("late")],
            **in_mode(arguments),
        )
        found = []
        for step in range(4 * STEPS):
            if step == STEPS:
                model[0].bias.requires_grad_(False)
            if step == 2 * STEPS:
                model[0].bias.requires_grad_(True)
                optimizer.add_param_group({"params": list(added.parameters())})
            optimizer.zero_grad()
            x = torch.full((2, 3), 1.0 + rank + step)
            y = added(model[0](x)) + model[2](torch.tensor([rank % 5, step % 5]))
            (y.sum() + model[1](x.double()).sum()).backward()
            optimizer.step()
            if step % STEPS == STEPS - 1:
                found.append(storages(torch.nn.ModuleList([model[:2], added])))
        return [*parameters(model), *parameters(added)], found

    def on_rank(rank):
        (expected, _), (trained, found) = train(rank), train(rank, gradient_as_bucket_view=True)
        assert_same_bits(trained, expected)
        # Two buckets; then the weight of the first layer is alone; at last there is one of four. `late` had gradients
        # all along.
        assert found == [2 + 2, 2 + 2, 2, 2]

    world.run(on_rank)


def test_clipping_and_an_overflow_of_one_rank(world):
    """A scaler and clipping change views as they change any gradient."""
    start, data = network(), batches(world.size, steps=STEPS)

    def train(rank, **arguments):
        model, optimizer = distributed(start, sgd, **arguments)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0), []
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            x, y = share(batch, rank, world.size)
            loss = mean_square(model(x), y) * (float("inf") if (step, rank) == (STEPS - 2, 1) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return parameters(model), scales

    def on_rank(rank):
        (expected, expected_scales), (trained, scales) = train(rank), train(rank, gradient_as_bucket_view=True)
        assert scales == expected_scales and scales[-1] == 4.0
        assert_same_bits(trained, expected)

    world.run(on_rank)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_that_does_not_fit_its_place(world):
    """One with a graph would lose it: all ranks hear of it, and train on afterwards."""
    start, data = network(), batches(world.size, steps=STEPS)

    def on_rank(rank):
        model, optimizer = distributed(start, sgd, gradient_as_bucket_view=True)
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            x, y = share(batch, rank, world.size)
            loss = mean_square(model(x), y)
            if step == STEPS - 2:
                with pytest.raises(InvalidArgumentError, match="as in the steps before, but found.*a graph of its own"):
                    loss.backward(create_graph=rank == 0)
                optimizer.zero_grad()
            else:
                loss.backward()
                optimizer.step()
        assert_replicas_equal(parameters(model))

    world.run(on_rank)


def test_a_compressor_of_the_users_own_is_refused(world):
    class Own(hvd.Compression.none):
        pass

    def on_rank(rank):
        with pytest.raises(
            InvalidArgumentError, match="gradient_as_bucket_view cannot be used with a compression class of your own"
        ):
            distributed(network(), sgd, compression=Own, gradient_as_bucket_view=True)

    world.run(on_rank)


# ---- which share a bucket ----


def groups_of(*shapes, dtype=torch.float32):
    """A group for each list of shapes."""
    groups, index = [], 0
    for number, of_group in enumerate(shapes):
        group = Group(f"group {number}", [])
        for shape in of_group:
            group.members.append(
                OptimizedParameter(torch.zeros(shape, dtype=dtype), f"parameter {index}", index, group)
            )
            index += 1
        groups.append(group)
    return groups


def sharing(groups, kinds):
    """The members' numbers by group, and whether it has a bucket."""
    found = bucketing.in_buckets(groups, bytes(kinds), "optimizer")
    return [([member.index for member in group.members], group.bucket is not None) for group in found]


def test_lone_parameters_fill_buckets_from_the_last_on(monkeypatch):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 40)
    groups = groups_of(*([shape] for shape in (4, 4, 4, 100, 4, 4)))
    assert sharing(groups, [DENSE] * 6) == [([3], False), ([5, 4, 2], True), ([1, 0], True)]


def test_what_has_a_bucket_is_dense_and_of_one_dtype():
    given = groups_of([3, 3], [3, 3], [5], [5])
    given[1].members[0].parameter = torch.zeros(3, dtype=torch.float64)
    assert sharing(given, [DENSE] * 6) == [([0, 1], True), ([2, 3], False), ([5, 4], True)]
    assert sharing(given, [DENSE, SPARSE, DENSE, DENSE, 0, DENSE]) == [
        ([0, 1], False),
        ([2, 3], False),
        ([4], False),
        ([5], False),
    ]


def test_places_in_a_bucket():
    bucket = Bucket([torch.zeros(3, 1), torch.zeros(()), torch.zeros(0), torch.zeros(2, 8)])
    offsets = [view.data_ptr() - bucket.flat.data_ptr() for view in bucket.views if view.numel()]
    assert offsets == [0, 64, 128] and bucket.flat.nbytes == 192
    versions = [view._version for view in bucket.views]
    bucket.take_in([torch.ones(3, 1), torch.tensor(2.0), torch.zeros(0), bucket.views[3]], ["a", "b", "c", "d"])
    assert [view._version for view in bucket.views] == [versions[0] + 1, versions[1] + 1, versions[2] + 1, versions[3]]
    assert bucket.flat.sum() == 5
