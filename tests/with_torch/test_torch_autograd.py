"""Gradients through the operations that wait: Horovod's factors, by hand, and adjoints by the dot-product test."""

import pytest
import torch

import ringtrain.torch as hvd

torch.set_num_threads(1)


def check_gradient(operate, tensor, weights, expected):
    """The gradient of a weighted sum of the operation's results on this rank."""
    leaf = tensor.clone().requires_grad_(True)
    results = operate(leaf)
    results = results if isinstance(results, (list, tuple)) else [results]
    sum((result * weight).sum() for result, weight in zip(results, weights, strict=False)).backward()
    torch.testing.assert_close(leaf.grad, expected)


def test_gradients_have_horovods_factors(world):
    """Each rank weighs its results by numbers of its own; the adjoint by hand, in float64."""
    size = world.size

    def weights(rank, *shape):
        return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + 1) * (rank + 1)

    def on_rank(rank):
        x = torch.ones(2 * size, 3, dtype=torch.float64)
        everyone = [weights(each, 2 * size, 3) for each in range(size)]
        mine, total = [everyone[rank]], sum(everyone)
        scales = {"prescale_factor": 3.0, "postscale_factor": 0.5}
        check_gradient(lambda t: hvd.allreduce(t, name="a", op=hvd.Sum), x, mine, total)
        check_gradient(lambda t: hvd.allreduce(t, name="b", **scales), x, mine, total * 1.5 / size)
        check_gradient(lambda t: hvd.grouped_allreduce([t, t * 2], name="c", op=hvd.Sum), x, mine * 2, total * 3)

        gathered = [weights(each, 2 * size * size, 3) for each in range(size)]
        rows = slice(2 * size * rank, 2 * size * (rank + 1))
        expected = sum(gathered)[rows] / size
        check_gradient(lambda t: hvd.allgather(t, name="d"), x, [gathered[rank]], expected)
        check_gradient(lambda t: hvd.grouped_allgather([t], name="e"), x, [gathered[rank]], expected)

        root = size - 1
        expected = total / size if rank == root else torch.zeros_like(x)
        check_gradient(lambda t: hvd.broadcast(t, root, name="f"), x, mine, expected)
        expected = torch.cat([everyone[each][2 * rank : 2 * rank + 2] for each in range(size)])
        check_gradient(lambda t: hvd.alltoall(t, name="g"), x, mine, expected)
        check_gradient(lambda t: hvd.alltoall(t, splits=[2] * size, name="h")[0], x, mine, expected)

        parts = [weights(each, 2, 3) for each in range(size)]
        check_gradient(lambda t: hvd.reducescatter(t, "i", op=hvd.Sum), x, [parts[rank]], torch.cat(parts) * size)
        check_gradient(lambda t: hvd.reducescatter(t, "j", **scales), x, [parts[rank]], torch.cat(parts) * 1.5)
        check_gradient(lambda t: hvd.grouped_reducescatter([t], "k"), x, [parts[rank]], torch.cat(parts))

    world.run(on_rank)


def test_gradients_of_other_reductions_are_refused(world):
    def on_rank(rank):
        leaf = torch.ones(2, requires_grad=True)
        with pytest.raises(NotImplementedError, match="backward of allreduce 'max'"):
            hvd.allreduce(leaf, name="max", op=hvd.Max).sum().backward()
        with torch.no_grad():
            assert not hvd.allreduce(leaf, name="quiet", op=hvd.Max).requires_grad

    world.run(on_rank)


def ragged(rank):
    """Rows of each rank: rank + 1."""
    return rank + 1


# operation of a tensor in a process set, the rows that rank r gives, and Horovod's factor on the exact gradient
ADJOINTS = {
    "allreduce": (lambda x, s: hvd.allreduce(x, name="x", postscale_factor=3.0, process_set=s), lambda r, n: 4, 1),
    "sum": (lambda x, s: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, process_set=s), lambda r, n: 4, 1),
    "fp16": (
        lambda x, s: hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum, process_set=s),
        lambda r, n: 4, 1,
    ),
    "grouped": (lambda x, s: hvd.grouped_allreduce([x, 3 * x[:1]], process_set=s), lambda r, n: 4, 1),
    "allgather": (lambda x, s: hvd.allgather(x, name="x", process_set=s), lambda r, n: ragged(r), lambda n: 1 / n),
    "gathered": (
        lambda x, s: hvd.grouped_allgather([x, x[1:]], process_set=s), lambda r, n: ragged(r), lambda n: 1 / n
    ),
    "broadcast": (lambda x, s: hvd.broadcast(x, s.ranks[-1], process_set=s), lambda r, n: 2, lambda n: 1 / n),
    "weighted": (lambda x, s: hvd.allreduce(x, weight=s.rank() + 1, process_set=s), lambda r, n: 4, 1),
    "weighted group": (
        lambda x, s: hvd.grouped_allreduce([x, x[:1]], name="x", weight=s.rank() + 1, process_set=s), lambda r, n: 4, 1
    ),
    "weighted rows": (
        lambda x, s: hvd.reducescatter(x, weight=s.rank() + 1, process_set=s), lambda r, n: n + 1, lambda n: n
    ),
    "alltoall": (lambda x, s: hvd.alltoall(x, process_set=s), lambda r, n: 2 * n, 1),
    "splits": (
        lambda x, s: hvd.alltoall(x, [ragged(each) for each in range(s.size())], process_set=s)[0],
        lambda r, n: sum(ragged(each) for each in range(n)), 1,
    ),
    "reducescatter": (lambda x, s: hvd.reducescatter(x, process_set=s), lambda r, n: n + 1, lambda n: n),
    "scattered": (
        lambda x, s: hvd.grouped_reducescatter([x, x[: s.size()]], op=hvd.Sum, process_set=s),
        lambda r, n: n + 1, lambda n: n,
    ),
}  # fmt: skip


def dot(tensors, others):
    return sum((one * other).sum() for one, other in zip(tensors, others, strict=True))


def assert_adjoint(operate, rows, factor, process_set):
    """With a direction d and weights w on each rank: the sum of <A d, w> equals that of <d, adjoint of A on w>."""
    rank, size = process_set.rank(), process_set.size()
    generator = torch.Generator().manual_seed(rank)

    def whole(*shape):
        return torch.randint(-8, 9, shape, generator=generator).double()

    def listed(results):
        return list(results) if isinstance(results, (list, tuple)) else [results]

    x, direction = whole(rows(rank, size), 3).requires_grad_(True), whole(rows(rank, size), 3)
    results = listed(operate(x, process_set))
    weights = [whole(*result.shape) for result in results]
    dot(results, weights).backward()
    moved = dot(listed(operate(direction, process_set)), weights)
    mine = torch.stack([moved, dot([x.grad], [direction]) / (factor(size) if callable(factor) else factor)])
    forward, backward = hvd.allreduce(mine, op=hvd.Sum, process_set=process_set).tolist()
    assert backward == pytest.approx(forward, rel=1e-9, abs=1e-9) and (forward != 0)


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("case", ADJOINTS)
def test_gradients_are_adjoints(world, case):
    """In the world and in a process set without rank 0, where places are not ranks."""

    def on_rank(rank):
        part = hvd.add_process_set(range(1, world.size)) if world.size > 2 else hvd.global_process_set
        assert_adjoint(*ADJOINTS[case], hvd.global_process_set)
        if part.included():
            assert_adjoint(*ADJOINTS[case], part)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("factor", [2, 1 / 2])
def test_a_wrong_factor_is_noticed(world, factor):
    operate, rows, _ = ADJOINTS["sum"]

    def on_rank(rank):
        with pytest.raises(AssertionError):
            assert_adjoint(operate, rows, factor, hvd.global_process_set)

    world.run(on_rank)


def test_second_derivatives(world):
    """The penalty on a gradient that went through an allreduce: |d/dx sum(mean(x)^2)|^2 has derivatives of its own."""
    size = world.size

    def on_rank(rank):
        x = torch.full((2,), float(rank + 1), dtype=torch.float64, requires_grad=True)
        mean = hvd.allreduce(x, name="mean")
        (slope,) = torch.autograd.grad(mean.square().sum(), x, create_graph=True)
        value = sum(range(1, size + 1)) / size
        torch.testing.assert_close(slope.detach(), torch.full((2,), 2 * value, dtype=torch.float64))
        slope.square().sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2,), 8 * value, dtype=torch.float64))

    world.run(on_rank)


def test_groups_of_which_some_have_no_gradient(world):
    """Integers and constants in a group: their gradients are asked for by nobody."""

    def on_rank(rank):
        x, constant = torch.ones(2, requires_grad=True), torch.ones(3)
        results = hvd.grouped_allreduce([x, torch.arange(3), constant], name="mixed", op=hvd.Sum)
        assert results[1].tolist() == [0, world.size, 2 * world.size]
        (results[0].sum() + results[2].sum()).backward()
        assert x.grad.tolist() == [world.size] * 2 and constant.grad is None

    world.run(on_rank)


@pytest.mark.least_ranks(3)
def test_gradients_beside_a_rank_that_has_joined(world):
    """The others' rows move up; sums and averages are theirs."""
    others = world.size - 1

    def on_rank(rank):
        if rank > 0:
            x = torch.full((2, 1), float(rank), requires_grad=True)
            gathered = hvd.allgather(x, name="rows")
            (gathered * torch.arange(2.0 * others).unsqueeze(1)).sum().backward()
            assert x.grad.flatten().tolist() == [2.0 * (rank - 1), 2.0 * (rank - 1) + 1]
            x.grad = None
            (hvd.allreduce(x, name="mean") * rank).sum().backward()
            assert x.grad.flatten().tolist() == [sum(range(1, world.size)) / others] * 2
        hvd.join()

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_compiled_code_calls_operations(world):
    """The graph breaks around an operation, a SyncBatchNorm and the broadcast of buffers; results are those without."""

    class Scales(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = hvd.SyncBatchNorm(2, affine=False)

        def forward(self, x):
            total = hvd.allreduce(x * 2, name="total", op=hvd.Sum)
            return (self.norm(total[:1] * torch.arange(4.0).reshape(2, 2)) + total).sum()

    def on_rank(rank):
        module = Scales()
        hvd.broadcast_buffers(module, every_forward=True)
        found = []
        for run in (module, torch.compile(module, backend="eager")):
            x = torch.full((2, 2), float(rank + 1), requires_grad=True)
            value = run(x)
            value.backward()
            found.append((value.item(), x.grad.tolist(), module.norm.running_mean.tolist()))
            module.norm.reset_running_stats()
        assert found[0] == found[1] and found[0][1][1] == [2.0 * world.size] * 2

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_gradients_of_a_reducescatter_need_all_ranks(world):
    """What a joined rank received is lost: an error of ours, the same on all others, and no hang."""

    def on_rank(rank):
        hvd.allreduce(torch.ones(1), name="start")
        texts = []
        if rank > 0:
            x = torch.ones(2 * hvd.size(), 3, requires_grad=True)
            result = hvd.reducescatter(x, name="scattered", op=hvd.Sum)
            with pytest.raises(
                NotImplementedError, match="scattered': expected the gradients of all .* joined"
            ) as raised:
                result.sum().backward()
            texts = [str(raised.value)]
        hvd.join()
        assert len(set(sum(hvd.allgather_object(texts), []))) == 1

    world.run(on_rank)
