"""SyncBatchNorm against torch's BatchNorm on the concatenated batch: results, gradients and running statistics."""

import copy
import pickle

import pytest
import torch
from torch_models import assert_all_close, assert_replicas_equal, batches, parameters, sgd, share, train

import ringtrain.torch as hvd
from ringtrain.torch import sync_batch_norm

torch.set_num_threads(1)

CHANNELS = 3
PLAIN = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
CASES = {  # dimensions of the input, dtype, arguments of BatchNorm
    "1d": (2, torch.float64, {}),
    "sequences": (3, torch.float32, {"momentum": None}),
    "images": (4, torch.float32, {}),
    "volumes": (5, torch.float64, {"eps": 1e-3, "affine": False}),
    "no statistics kept": (4, torch.float32, {"track_running_stats": False}),
    "16 bits": (4, torch.bfloat16, {}),
}


def rows_of(rank: int, ranks: int) -> slice:
    """Unequal batches: rank r has r + 2 samples, and the last of several has none."""
    starts = [sum(each + 2 for each in range(rank)) for rank in range(ranks)]
    counts = [rank + 2 for rank in range(ranks)]
    if ranks > 1:
        counts[-1] = 0
    return slice(starts[rank], starts[rank] + counts[rank])


def batch(ranks: int, dimensions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with a mean far from zero, and the gradients of a loss; on all ranks together."""
    generator = torch.Generator().manual_seed(5)
    count = rows_of(ranks - 1, ranks).stop
    shape = [count, CHANNELS, 4, 3, 2][:dimensions]
    inputs = (torch.randn(shape, generator=generator) * 2 + 10).to(dtype)
    if dtype == torch.float32:
        inputs = inputs.contiguous(memory_format=torch.channels_last) if dimensions == 4 else inputs
    return inputs, torch.randn(shape, generator=generator).to(dtype)


def one_step(module, inputs, weights):
    """Result of a pass and the gradients of its weighted sum."""
    inputs = inputs.clone().requires_grad_(True)
    result = module(inputs)
    (result * weights).sum().backward()
    return result.detach(), inputs.grad


def compared_with_one_process(world, dimensions, dtype, arguments, compare):
    """Two passes of each rank, of which the second shows what running statistics became.

    Ranks call ``compare(rank, found, expected)`` with lists of tensors once nobody waits for them any more.
    """
    torch.manual_seed(3)
    start = PLAIN[dimensions](CHANNELS, **arguments).to(torch.promote_types(dtype, torch.float32))
    if start.affine:
        torch.nn.init.normal_(start.weight)
        torch.nn.init.normal_(start.bias)
    inputs, weights = batch(world.size, dimensions, dtype)
    whole = copy.deepcopy(start)
    passes = [one_step(whole, inputs + turn, weights) for turn in range(2)]
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    evaluated = copy.deepcopy(whole).eval()(inputs)

    def on_rank(rank):
        mine = rows_of(rank, world.size)
        module = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(start))
        found, expected = [], []
        for turn, each in enumerate(passes):
            found += one_step(module, inputs[mine] + turn, weights[mine])
            expected += [tensor[mine] for tensor in each]
        for name, gradient in gradients.items():
            found.append(hvd.allreduce(module.get_parameter(name).grad, name=name, op=hvd.Sum))
            expected.append(gradient)
        assert_replicas_equal(list(module.buffers()))
        found += [*module.buffers(), module.eval()(inputs)]
        expected += [*whole.buffers(), evaluated]
        compare(rank, found, expected)

    world.run(on_rank)


@pytest.mark.parametrize("case", CASES)
def test_equals_batch_norm_of_all_batches(world, case):
    dimensions, dtype, arguments = CASES[case]
    close = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}

    def compare(rank, found, expected):
        assert_all_close(found, expected, **close)

    compared_with_one_process(world, dimensions, dtype, arguments, compare)


FAULTS = {
    "counts ignored": ("_Ranks", "rows", lambda rows: torch.cat([torch.ones_like(rows[:, :1]), rows[:, 1:]], 1)),
    "gradient of the own batch": ("_Ranks", "sum", lambda total: total * 0.5),
}


@pytest.mark.least_ranks(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(world, fault, monkeypatch):
    owner, method, spoil = FAULTS[fault]
    owner = getattr(sync_batch_norm, owner)
    right = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, tensor: spoil(right(self, tensor)))

    def compare(rank, found, expected):
        if len(found[0]) > 0:  # the rank without samples sees none of it
            with pytest.raises(AssertionError, match="close"):
                assert_all_close(found, expected, rtol=1e-4, atol=1e-5)

    compared_with_one_process(world, 4, torch.float32, {}, compare)


def test_training_equals_one_process(world):
    """With the distributed optimizer, for some steps; a plain BatchNorm in its place must make a difference."""
    torch.manual_seed(3)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    start = torch.nn.Sequential(*layers).double()
    data = batches(world.size, torch.float64)
    whole = copy.deepcopy(start)
    train(whole, sgd(whole.parameters()), data)

    def on_rank(rank):
        mine = [share(batch, rank, world.size) for batch in data]
        synchronized = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(start))
        for model in (synchronized, copy.deepcopy(start)):
            train(model, hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters()), mine)
            equal = all(torch.allclose(*pair) for pair in zip(parameters(model), parameters(whole), strict=True))
            assert equal == (model is synchronized or world.size == 1)
        assert_replicas_equal(list(synchronized.state_dict().values()))

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_too_few_values(world):
    def on_rank(rank):
        module = hvd.SyncBatchNorm(CHANNELS)
        with pytest.raises(ValueError, match="but found 1"):
            module(torch.ones(1 if rank == 0 else 0, CHANNELS))
        with pytest.raises(ValueError, match=r"shape \(N, C"):
            module(torch.ones(CHANNELS))
        assert module(torch.ones(1, CHANNELS)).shape == (1, CHANNELS)

    world.run(on_rank)


def test_members_of_a_process_set(world):
    """The other ranks normalise by themselves and send nothing."""

    def on_rank(rank):
        members = list(range(0, world.size, 2))
        evens = hvd.add_process_set(members) if world.size > 1 else hvd.global_process_set
        module = hvd.SyncBatchNorm(1, momentum=1.0, process_set=evens)
        module(torch.tensor([[float(rank)], [float(rank)]]))
        expected = sum(members) / len(members) if rank % 2 == 0 else rank
        assert module.running_mean.item() == pytest.approx(expected)

    world.run(on_rank)


def test_conversion():
    """All kinds at every depth, the same parameters, a shared module once; and the result can be copied and pickled."""
    shared = torch.nn.BatchNorm2d(2)
    network = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 2)),
        shared, shared, torch.nn.BatchNorm3d(2, eps=0.5, momentum=None).eval(), torch.nn.SyncBatchNorm(2),
    )  # fmt: skip
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(network)
    kinds = [
        type(module) for module in converted.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    ]
    assert converted is network and kinds == [hvd.SyncBatchNorm] * 4
    assert converted[1] is converted[2] and converted[1].weight is shared.weight
    assert (converted[3].eps, converted[3].momentum, converted[3].training) == (0.5, None, False)
    single = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(2))
    assert isinstance(single, hvd.SyncBatchNorm) and list(single.state_dict()) == list(
        torch.nn.BatchNorm1d(2).state_dict()
    )
    assert isinstance(pickle.loads(pickle.dumps(copy.deepcopy(single))), hvd.SyncBatchNorm)
