"""The start of a run: parameters, optimizer state and buffers of one rank, exactly, on all; and buffers later on."""

import copy
import pickle

import pytest
import torch
from torch_models import assert_replicas_equal, assert_same_bits, batches, network, parameters, sgd, state, train

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.torch import no_sync


class Everything(torch.nn.Module):
    """Parameters and buffers of several dtypes, layouts and sizes."""

    def __init__(self, seed):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, 3, 4, 4), float(seed)).to(memory_format=torch.channels_last))
        self.narrow = torch.nn.Parameter(torch.full((5,), seed, dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.full((3, 2), float(seed)).t(), requires_grad=False)
        self.register_buffer("mask", torch.tensor([bool(seed % 2), True, False]))
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("empty", torch.empty(0, 3))


FORMS = {
    "state_dict": lambda module: module.state_dict(),
    "named generator": lambda module: module.named_parameters(),
    "named list": lambda module: list(module.named_parameters()),
    "tensors": lambda module: list(module.parameters()),
    "generator": lambda module: module.parameters(),
}


@pytest.mark.parametrize("form", FORMS)
def test_broadcast_parameters(world, form):
    root = world.size - 1

    def on_rank(rank):
        module, expected = Everything(rank), Everything(root)
        strides = module.weight.stride()
        hvd.broadcast_parameters(FORMS[form](module), root_rank=root)
        assert_same_bits(parameters(module), parameters(expected))
        assert module.weight.stride() == strides and module.weight.is_leaf
        if form == "state_dict":
            assert_same_bits(list(module.buffers()), list(expected.buffers()))
        module.weight.sum().backward()

    world.run(on_rank)


def test_broadcast_parameters_of_a_process_set(world):
    def on_rank(rank):
        evens = hvd.add_process_set(range(0, world.size, 2)) if world.size > 1 else hvd.global_process_set
        tensor = torch.tensor([float(rank)])
        if rank % 2 == 0:
            hvd.broadcast_parameters([tensor], 0, process_set=evens)
        assert tensor.item() == (0 if rank % 2 == 0 else rank)

    world.run(on_rank)


@pytest.mark.parametrize(
    "params, text",
    [
        ({"a": torch.ones(1), "extra": 3}, "extra': tensor: expected a torch.Tensor but found int"),
        (
            [("a", torch.ones(1)), ("a", torch.ones(1))],
            "broadcast_parameters: names must be unique, but 'a' comes twice",
        ),
    ],
    ids=["not a tensor", "twice"],
)
def test_broadcast_parameters_refuses(world, params, text):
    def on_rank(rank):
        with pytest.raises(ValueError, match=text):
            hvd.broadcast_parameters(params, root_rank=0)
        hvd.broadcast_parameters([torch.ones(1)], root_rank=0)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_tensors_that_only_some_ranks_have_are_named(world):
    def on_rank(rank):
        words = "broadcast_parameters: the tensors must have the same names .*'b' is missing on rank 0"
        with pytest.raises(rt.errors.MismatchError, match=words):
            hvd.broadcast_parameters({"a": torch.ones(1), **({"b": torch.ones(1)} if rank else {})}, root_rank=0)
        names = ("a", "b") if rank else ("b", "a")
        hvd.broadcast_parameters({name: torch.ones(1) for name in names}, root_rank=0)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_shapes_that_differ(world):
    def on_rank(rank):
        with pytest.raises(rt.RingtrainError, match="broadcast_parameters.w"):
            hvd.broadcast_parameters({"w": torch.ones(2 + (rank == 0))}, root_rank=0)
        hvd.broadcast_parameters({"w": torch.ones(2)}, root_rank=0)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_a_tensor_that_one_rank_refuses(world):
    def on_rank(rank):
        with pytest.raises(rt.RingtrainError, match="broadcast 'broadcast_parameters.w'.*to_dense"):
            hvd.broadcast_parameters({"w": torch.ones(2).to_sparse() if rank == 1 else torch.ones(2)}, root_rank=0)
        hvd.broadcast_parameters({"w": torch.ones(2)}, root_rank=0)

    world.run(on_rank)


OPTIMIZERS = {
    "momentum": sgd,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw with a tensor as rate": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01), capturable=False, foreach=False
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state(world, name, wrapped):
    """Rank 0 resumes a run, the others start; afterwards all go on as rank 0 would have alone."""
    start, data, make = network(torch.float64), batches(1, torch.float64), OPTIMIZERS[name]

    def steps(model, optimizer, some):
        for x, y in some:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    resumed = copy.deepcopy(start)
    resumed_optimizer = make(resumed.parameters())
    resumed_optimizer.param_groups[0]["lr"] = resumed_optimizer.param_groups[0]["lr"] / 2
    steps(resumed, resumed_optimizer, data[:2])
    saved = copy.deepcopy((resumed.state_dict(), resumed_optimizer.state_dict()))
    saved_state = copy.deepcopy(state(resumed_optimizer))
    steps(resumed, resumed_optimizer, data[2:])

    def on_rank(rank):
        model = copy.deepcopy(start)
        optimizer = make(model.parameters())
        if rank == 0:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert_replicas_equal([*parameters(model), *state(optimizer)])
        assert_same_bits(state(optimizer), saved_state)
        steps(model, optimizer, data[2:])
        torch.testing.assert_close(parameters(model), parameters(resumed), rtol=1e-9, atol=1e-10)

    world.run(on_rank)


EVERY_CLASS = [
    kind for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]  # fmt: skip


@pytest.mark.least_ranks(2)
def test_every_class_of_torch(world):
    """Only rank 0 has stepped; afterwards all take the same step to the same bits."""
    assert len(EVERY_CLASS) >= 13

    def step(optimizer, parameter):
        gradient = torch.linspace(-1, 2, parameter.numel()).reshape(parameter.shape)
        parameter.grad = gradient.to_sparse(1) if type(optimizer) is torch.optim.SparseAdam else gradient
        optimizer.step(lambda: torch.tensor(1.0))

    def on_rank(rank):
        for kind in EVERY_CLASS:
            parameter = torch.nn.Parameter(torch.full((4, 3), 1.0 + rank))
            optimizer = kind([parameter], lr=0.1)
            if rank == 0:
                step(optimizer, parameter)
                step(optimizer, parameter)
            hvd.broadcast_parameters([parameter], root_rank=0)
            before = parameter.detach().clone()
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert torch.equal(parameter, before), f"{kind.__name__} took a step"
            step(optimizer, parameter)
            assert_replicas_equal([parameter.detach(), *state(optimizer)])

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_optimizer_state_of_a_process_set(world):
    def on_rank(rank):
        part = hvd.add_process_set([0, world.size - 1])
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = sgd([parameter], lr=0.1 + rank)
        if part.included():
            hvd.broadcast_optimizer_state(optimizer, root_rank=world.size - 1, process_set=part)
        assert optimizer.param_groups[0]["lr"] == 0.1 + (world.size - 1 if part.included() else rank)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("root_has_state", [False, True])
def test_empty_state(world, root_has_state):
    """No step is taken to make state: parameters stay. State that the root lacks goes."""
    start = network()

    def on_rank(rank):
        model = copy.deepcopy(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if (rank == 0) == root_has_state:
            train(model, optimizer, batches(1))
        before = parameters(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert len(state(optimizer)) == (3 * len(before) if root_has_state else 0)
        assert_same_bits(parameters(model), before)

    world.run(on_rank)


def test_state_keeps_its_dtype(world):
    """float32 state of a bfloat16 parameter, which load_state_dict would cast."""

    def on_rank(rank):
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        if rank == 0:
            optimizer.state[parameter] = {
                "master": torch.full((3,), 1.001),
                "note": "text",
                "nested": [torch.arange(2)],
            }
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        entries = optimizer.state[parameter]
        assert entries["master"].dtype == torch.float32 and entries["master"][0] == torch.tensor(1.001)
        assert entries["note"] == "text" and entries["nested"][0].tolist() == [0, 1]

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_optimizers_that_differ(world):
    def on_rank(rank):
        optimizer = sgd([torch.nn.Parameter(torch.zeros(1)) for _ in range(1 + (rank == 1))])
        with pytest.raises(rt.RingtrainError, match=r"found \[1\] on rank 0 and \[2\] on rank 1"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    world.run(on_rank)


# ---- buffers ----


def with_buffers(rank: int) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module.register_buffer("mask", torch.tensor([rank % 2 == 0, True]))
    module[1].running_mean.fill_(rank)
    return module


def test_buffers_once(world):
    root = world.size - 1

    def on_rank(rank):
        module = with_buffers(rank)
        weight = module[0].weight.detach().clone()
        assert hvd.broadcast_buffers(module, root_rank=root) is None
        assert module[1].running_mean.tolist() == [root] * 2 and module.mask.tolist() == [root % 2 == 0, True]
        assert torch.equal(module[0].weight, weight), "parameters are not buffers"

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_buffers_before_every_forward(world):
    """In training only, not within no_sync, not without gradients, and not any more once the hook is removed."""

    def on_rank(rank):
        module = with_buffers(rank)
        hook = hvd.broadcast_buffers(module, every_forward=True)
        operations = rt.counters()["operations"]

        def sent() -> bool:
            nonlocal operations
            module(torch.full((3, 2), float(rank)))
            before, operations = operations, rt.counters()["operations"]
            return operations > before

        assert sent() and sent()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
        with optimizer.no_sync():
            assert not sent()
        with no_sync.accumulating():
            with no_sync.accumulating():
                assert not sent()
            assert not sent()
        with torch.no_grad():
            assert not sent()
        assert not copy.deepcopy(module).eval().training and pickle.loads(pickle.dumps(module)).training
        module.eval()
        assert not sent()
        module.train()
        differ = len({str(each) for each in hvd.allgather_object(module[1].running_mean.tolist())}) > 1
        assert differ, "each rank's batch moved its own statistics"
        hvd.broadcast_buffers(module)
        assert_replicas_equal(list(module.buffers()))
        operations = rt.counters()["operations"]
        assert sent()
        hook.remove()
        assert not sent()

    world.run(on_rank)
