"""PowerSGD below a distributed optimizer: what is delivered, what is kept, and what becomes of steps that are skipped."""

import numpy as np
import pytest
import torch
from modes import in_mode

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._training import powersgd
from ringtrain._training.arrays import NUMPY
from ringtrain._training.powersgd import PowerSGD, halved_sum
from ringtrain.errors import InvalidArgumentError
from ringtrain.testing import World
from ringtrain.torch.arrays import TORCH

STEPS = 7
SHAPE = (24, 40)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradient(rank: int, step: int) -> torch.Tensor:
    """A part that changes, and one that is the rank's own: ranks with unlike data."""
    return drawn(*SHAPE, seed=1000 * step + rank) + 2 * drawn(*SHAPE, seed=-1 - rank)


def weight_and_optimizer(start_after=1, rank=2, **arguments):
    weight, vector = torch.nn.Parameter(torch.zeros(SHAPE)), torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight, vector], lr=1.0)
    compression = hvd.Compression.powersgd(rank=rank, start_after=start_after)
    named = [("w", weight), ("v", vector)]
    return weight, vector, hvd.DistributedOptimizer(optimizer, named, compression=compression, **in_mode(arguments))


def run_step(weight, vector, optimizer, rank, step):
    optimizer.zero_grad()
    ((weight * gradient(rank, step)).sum() + (vector * (rank + step)).sum()).backward()
    optimizer.step()


def mean_gradient(ranks: int, step: int) -> torch.Tensor:
    return sum(gradient(rank, step).double() for rank in range(ranks)) / ranks


# ---- what is computed ----


def own(arrays, tensor):
    return tensor.numpy() if arrays is NUMPY else tensor


def orthogonalised(matrix):
    """The same bits by PyTorch's arrays as by NumPy's."""
    ours = powersgd.orthogonalised(TORCH, matrix)
    with np.errstate(all="ignore"):
        theirs = powersgd.orthogonalised(NUMPY, matrix.numpy())
    torch.testing.assert_close(torch.as_tensor(theirs), ours, rtol=0, atol=0, equal_nan=True)
    return ours


def test_columns_become_orthonormal_in_order():
    matrix = drawn(37, 4, seed=1)
    q = orthogonalised(matrix)
    torch.testing.assert_close(q.t() @ q, torch.eye(4))
    torch.testing.assert_close(q[:, 0], matrix[:, 0] / matrix[:, 0].norm())
    assert (q.t() @ matrix).tril(-1).abs().max() < 1e-5  # each column lies in the span of those up to it


def test_columns_that_say_nothing_stay_zero_and_what_is_not_finite_is_seen():
    matrix = drawn(9, 3, seed=1)
    matrix[:, 1] = 0
    q = orthogonalised(matrix)
    assert q[:, 1].count_nonzero() == 0 and q[:, [0, 2]].norm() == pytest.approx(2**0.5)
    assert orthogonalised(torch.full((4, 2), 1e-40)).isfinite().all()
    assert orthogonalised(torch.full((4, 2), 3e38)).isfinite().all()
    for bad in (torch.nan, torch.inf):
        matrix[3, 0] = bad
        assert orthogonalised(matrix)[3].isnan().all()


@pytest.mark.parametrize("rows, columns", [(1, 1), (5, 7), (300, 1000)])
def test_products_and_sums_are_added_up_in_one_order(rows, columns):
    """By single elements, as any processor rounds them."""
    left, right = drawn(rows, 3, seed=1), drawn(columns, 3, seed=2)
    expected = left[:, 0, None] * right[:, 0]
    for place in (1, 2):
        expected = expected + left[:, place, None] * right[:, place]
    for arrays in (TORCH, NUMPY):
        left_, right_, out = (own(arrays, each) for each in (left, right, torch.empty(rows, columns)))
        powersgd.multiply(left_, arrays.like(right_.T, right_), out)
        assert torch.equal(torch.as_tensor(out), expected)
    values = drawn(1, columns, seed=3).double()
    total = values[0].tolist()
    while len(total) > 1:
        half = len(total) // 2
        added = [a + b for a, b in zip(total[:half], total[half : 2 * half], strict=True)]
        added[0] += total[-1] if len(total) % 2 else 0
        total = added
    assert halved_sum(values).item() == total[0]


@pytest.mark.parametrize("shape, found", [
    ((8,), None), ((4, 4), None), ((16, 16), (16, 16, 2)), ((16, 4, 2, 2), (16, 16, 2)), ((1, 64), None), ((0, 8), None)
])  # fmt: skip
def test_vectors_and_what_would_not_shrink_travel_exact(shape, found):
    assert PowerSGD(rank=2).shape_of(shape) == found


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"rank": True}, {"start_after": 0}, {"min_compression_rate": 0.5}])
def test_numbers_that_cannot_be_are_refused(arguments):
    with pytest.raises(InvalidArgumentError, match=f"PowerSGD: {next(iter(arguments))} must be"):
        PowerSGD(**arguments)


# ---- what is delivered ----


@pytest.mark.parametrize("layout, op", [("2+1", hvd.Average), ("1+1", hvd.Sum)])
def test_what_is_delivered_and_what_is_kept_is_all_that_was_to_be(layout, op):
    """The law, at each step; what is kept does not grow, with ranks of unlike data; the replicas have the same bits."""
    ranks, steps = sum(map(int, layout.split("+"))), 60

    def on_rank(rank):
        weight, vector, optimizer = weight_and_optimizer(op=op)
        kept, seen, own = [], [], []
        for step in range(steps):
            run_step(weight, vector, optimizer, rank, step)
            seen.append((weight.detach().clone(), vector.detach().clone()))
            if step in (steps // 2, steps - 1):
                kept.append(optimizer.compression_state()["w/0"]["residual"])
                own.append(optimizer._mode._exchange.members.memories()[0].residual.norm())
        assert own[1] < 1.4 * own[0]  # the mean over the ranks does not show it: errors of unlike data cancel out
        return seen, kept

    with World(ranks, layout) as world:
        results = world.run(on_rank)
    (seen, kept), *others = results
    for other, _ in others:
        assert all(
            torch.equal(a, b)
            for mine, theirs in zip(seen, other, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
    factor = ranks if op == hvd.Sum else 1
    exact = sum(mean_gradient(ranks, step) for step in range(steps)) * factor
    delivered = -seen[-1][0].double()
    assert (delivered + factor * kept[-1] - exact).norm() < 1e-6 * exact.norm() < 1e-3 * (delivered - exact).norm()
    vectors = -sum((rank + step) * factor / ranks for rank in range(ranks) for step in range(steps))
    torch.testing.assert_close(seen[-1][1], torch.full((8,), vectors))
    assert not torch.equal(seen[1][0], -mean_gradient(ranks, 0).float() - mean_gradient(ranks, 1).float())


def test_least_squares_end_where_exact_gradients_end(monkeypatch):
    """With unlike data on each rank what is lost counts near the optimum; without the feedback it shows."""
    data = [(drawn(60, 24, seed=rank), drawn(60, 40, seed=50 + rank)) for rank in range(2)]
    every_x, every_y = (torch.cat(parts).double() for parts in zip(*data, strict=True))

    def squares(weight):
        return (every_x @ weight.double() - every_y).square().sum().item()

    def excess(rank, compression):
        x, y = data[rank]
        weight = torch.nn.Parameter(torch.zeros(SHAPE))
        optimizer = torch.optim.SGD([weight], lr=0.05)
        optimizer = hvd.DistributedOptimizer(optimizer, [("w", weight)], compression=compression)
        for _ in range(300):
            optimizer.zero_grad()
            ((x @ weight - y).square().sum() / len(x) / 2).backward()
            optimizer.step()
        return squares(weight.detach()) / squares(torch.linalg.lstsq(every_x, every_y).solution) - 1

    with World(2, "1+1") as world:
        assert world.run(excess, hvd.Compression.powersgd(rank=2, start_after=1))[0] < 1e-4
        monkeypatch.setattr(powersgd.Memory, "settle", lambda self, used: None)
        assert world.run(excess, hvd.Compression.powersgd(rank=2, start_after=1))[0] > 0.02


def test_wire_bytes_are_those_of_the_factors():
    def bytes_of(rank, compression):
        weight = torch.nn.Parameter(torch.zeros(256, 256))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, [("w", weight)], compression=compression)
        for step in range(3):
            before = rt.counters()["wire_bytes_sent"]
            optimizer.zero_grad()
            (weight * drawn(256, 256, seed=step)).sum().backward()
            optimizer.step()
        return rt.counters()["wire_bytes_sent"] - before

    with World(2, "1+1") as world:
        exact, less = (
            sum(world.run(bytes_of, each))
            for each in (hvd.Compression.none, hvd.Compression.powersgd(rank=2, start_after=1))
        )
    assert exact >= 2 * 4 * 256 * 256
    assert 2 * 4 * 2 * (256 + 256) <= less < 1.2 * 2 * 4 * 2 * (256 + 256)


def test_groups_and_the_order_of_gradients_change_nothing():
    def on_rank(rank, groups):
        weight, vector, optimizer = weight_and_optimizer(groups=groups)
        for step in range(4):
            run_step(weight, vector, optimizer, rank, step)
        return weight.detach().clone(), vector.detach().clone()

    with World(2, "1+1") as world:
        alone, together = world.run(on_rank, None), world.run(on_rank, 1)
    assert all(torch.equal(a, b) for a, b in zip(alone[0], together[0], strict=True))


def test_a_gradient_that_is_missing_counts_zeros_and_keeps_what_was_lost():
    """On one rank, and on all: then nothing is sent, and nothing forgotten."""
    absent = {2: (0,), 3: (0, 1), 4: (1,)}

    def on_rank(rank):
        weight, vector, optimizer = weight_and_optimizer()
        for step in range(STEPS):
            optimizer.zero_grad()
            used = rank not in absent.get(step, ())
            ((weight * gradient(rank, step)).sum() if used else vector.sum()).backward()
            optimizer.step()
        return weight.detach().double(), optimizer.compression_state()["w/0"]["residual"]

    with World(2, "1+1") as world:
        (weight, kept), (other, _) = world.run(on_rank)
    exact = sum(
        gradient(rank, step).double() / 2
        for step in range(STEPS)
        for rank in range(2)
        if rank not in absent.get(step, ())
    )
    assert torch.equal(weight, other) and (kept - weight - exact).norm() < 1e-6 * exact.norm()


def test_a_gradient_of_zeros_does_not_end_the_approximation():
    def on_rank(rank):
        weight, _, optimizer = weight_and_optimizer(rank=1)
        direction = drawn(24, 1, seed=1) @ drawn(1, 40, seed=2)
        for step in range(6):
            optimizer.zero_grad()
            (weight * direction * (step not in (1, 2))).sum().backward()
            optimizer.step()
        return weight.detach() / -4, direction

    with World(2, "1+1") as world:
        torch.testing.assert_close(*world.run(on_rank)[0])


# ---- steps without an end ----


@pytest.mark.parametrize("start_after", [1, 3])
def test_a_step_that_a_scaler_skips_leaves_no_trace(start_after):
    """An overflow on one rank: it is seen on all, and the run's bits are those of a run without that batch."""

    def train(rank, left_out, overflows):
        weight, vector, optimizer = weight_and_optimizer(start_after)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            if step in left_out:
                continue
            optimizer.zero_grad()
            own = gradient(rank, step)
            if overflows.get(step) == rank:
                own[3, 5] = torch.inf if step % 2 else torch.nan
            scaler.scale((weight * own).sum() + vector.sum()).backward()
            assert weight.grad.isfinite().all().item() == (step not in overflows)
            scaler.step(optimizer)
            scaler.update(1024.0)
        return weight.detach().clone(), optimizer.compression_state()

    with World(3, "2+1") as world:
        for overflows in ({0: 2}, {2: 1, 3: 0}, {6: 1}):
            skipped, without = world.run(train, (), overflows), world.run(train, set(overflows), {})
            for (weight, state), (expected, expected_state) in zip(skipped, without, strict=True):
                assert torch.equal(weight, expected)
                for name, parts in expected_state.items():
                    assert all(torch.equal(state[name][part], parts[part]) for part in parts)


def test_a_step_that_is_given_up_leaves_no_trace():
    def train(rank, given_up, runs_it):
        weight, vector, optimizer = weight_and_optimizer()
        for step in range(STEPS):
            if step == given_up and runs_it:
                (weight * gradient(rank, 50)).sum().backward()
            if step == given_up:
                continue
            run_step(weight, vector, optimizer, rank, step)
        return weight.detach().clone()

    with World(2, "1+1") as world:
        for step in (0, 3):
            assert torch.equal(world.run(train, step, True)[0], world.run(train, step, False)[0])


# ---- what is saved ----


@pytest.mark.parametrize("layouts", [("1+1", "1+1+1"), ("2+1", "1+1")])
def test_another_world_goes_on_with_it_and_loses_nothing(layouts):
    def some(rank, state, numbers):
        weight, vector, optimizer = weight_and_optimizer(start_after=2)
        if state:
            optimizer.load_compression_state(state)
        for step in numbers:
            run_step(weight, vector, optimizer, rank, step)
        return weight.detach().double(), optimizer.compression_state()

    delivered, exact, state = torch.zeros(SHAPE).double(), torch.zeros(SHAPE).double(), {}
    for layout, numbers in zip(layouts, (range(6), range(6, 12)), strict=True):
        ranks = sum(map(int, layout.split("+")))
        with World(ranks, layout) as world:
            results = world.run(some, state, numbers)
        delivered, state = delivered - results[0][0], results[-1][1]
        exact += sum(mean_gradient(ranks, step) for step in numbers)
    assert state["steps"]["exact"].item() == 12
    assert (
        (delivered + state["w/0"]["residual"] - exact).norm() < 1e-6 * exact.norm() < 1e-4 * (delivered - exact).norm()
    )


def test_a_state_of_another_model_is_refused():
    def on_rank(rank):
        _, _, optimizer = weight_and_optimizer()
        state = optimizer.compression_state()
        state["w/0"]["factor"] = torch.zeros(40, 3)
        optimizer.load_compression_state(state)

    with (
        World(2) as world,
        pytest.raises(InvalidArgumentError, match=r"'w/0': expected .*\(40, 2\) but found .*\(40, 3\)"),
    ):
        world.run(on_rank)


# ---- what ranks must have alike ----


@pytest.mark.parametrize("arguments", [{"rank": 3}, {"start_after": 2}, None], ids=["rank", "start", "none"])
def test_other_settings_on_one_rank_are_one_error_on_all(arguments):
    def on_rank(rank):
        other = (arguments or {}) if rank == 1 else {}
        settings = hvd.Compression.powersgd(**{"rank": 2, "start_after": 1, **other})
        weight = torch.nn.Parameter(torch.zeros(SHAPE))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        if arguments is None and rank == 1:
            settings = hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(optimizer, [("w", weight)], compression=settings)
        try:
            for _ in range(3):
                (weight * gradient(rank, 0)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except rt.errors.MismatchError as problem:
            return str(problem)

    with World(3, "1+1+1") as world:
        texts = world.run(on_rank)
    assert len(set(texts)) == 1
    assert "compression must be the same on all ranks, but is PowerSGD(rank=2, start_after=1" in texts[0]
    assert "on ranks 0, 2 and " in texts[0] and "on rank 1. " in texts[0]


def test_after_a_join_all_ranks_go_on_with_an_exact_step():
    def on_rank(rank):
        weight, vector, optimizer = weight_and_optimizer(start_after=3)
        for step in range(5 if rank else 2):
            run_step(weight, vector, optimizer, rank, step)
        hvd.join()
        hvd.broadcast_parameters({"w": weight.data, "v": vector.data}, root_rank=1)
        for step in range(5, 9):
            run_step(weight, vector, optimizer, rank, step)
        return weight.detach().clone(), optimizer.compression_state()["steps"]["exact"]

    with World(2, "1+1") as world:
        (weight, _), (other, _) = world.run(on_rank)
    assert torch.equal(weight, other)


@pytest.mark.parametrize("arguments, words", [
    ({"op": hvd.Adasum}, "op=Adasum"), ({"every": 2}, "LocalSteps"), ({"gradient_as_bucket_view": True}, "bucket_view"),
])  # fmt: skip
def test_what_cannot_go_with_it_is_refused(arguments, words):
    with (
        World(1) as world,
        pytest.raises(InvalidArgumentError, match=f"{words} cannot be used with Compression.powersgd"),
    ):
        world.run(lambda rank: weight_and_optimizer(**arguments))


def test_sparse_gradients_that_travel_dense_are_approximated_too():
    """They stay sparse, with the bits of dense ones, in exact steps and in the others."""
    own = torch.Generator().manual_seed(3)  # the ranks are threads, which share torch's
    start = torch.randn(24, 16, generator=own)

    def train(sparse):
        table = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=sparse)
        powersgd = hvd.Compression.powersgd(rank=1, start_after=1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), 0.5),
            table.named_parameters(),
            compression=powersgd,
            sparse_as_dense=True,
        )
        for step in range(4):
            optimizer.zero_grad()
            ids = torch.tensor([hvd.rank(), step, 5])
            (table(ids) * torch.arange(16.0)).sum().backward()
            optimizer.step()
            assert table.weight.grad.is_sparse == sparse
        assert optimizer.compression_state()
        return table.weight.detach()

    with World(2) as world:
        for mine in world.run(lambda rank: (train(True), train(False))):
            assert torch.equal(*mine)


def test_an_operation_by_itself_has_no_memory_for_it():
    with (
        World(1) as world,
        pytest.raises(InvalidArgumentError, match="needs no memory.*Give it to a DistributedOptimizer"),
    ):
        world.run(lambda rank: hvd.allreduce(torch.zeros(3), compression=hvd.Compression.powersgd(rank=1)))


def test_a_pass_after_synchronize_is_refused():
    """What was reduced would lose a second time."""

    def on_rank(rank):
        weight, _, optimizer = weight_and_optimizer()
        (weight * gradient(rank, 0)).sum().backward()
        optimizer.synchronize()
        (weight * gradient(rank, 1)).sum().backward()

    with World(2) as world, pytest.raises(InvalidArgumentError, match="With PowerSGD the reduced part"):
        world.run(on_rank)
