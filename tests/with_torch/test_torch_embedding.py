"""Sharded embeddings: N ranks are one process with ``torch.nn.Embedding`` and all the batches."""

import functools

import pytest
import torch
from modes import in_mode
from torch_models import assert_replicas_equal

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.testing import World

torch.set_num_threads(1)

ROWS, WIDTH = 23, 6
OPTIMIZERS = {
    "sgd": (functools.partial(torch.optim.SGD, lr=0.5), True),
    "momentum": (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), True),
    "adagrad": (functools.partial(torch.optim.Adagrad, lr=0.1), True),
    "sparse_adam": (functools.partial(torch.optim.SparseAdam, lr=0.05), True),
    "rowwise_adagrad": (functools.partial(hvd.RowWiseAdagrad, lr=0.1), True),
    "adam": (functools.partial(torch.optim.Adam, lr=0.05), False),
}


def batch(rank: int, step: int, size: int) -> torch.Tensor:
    """Ids with duplicates within and across ranks; rank 1 has none in step 1. Of the ids all ranks have some others."""
    if rank == 1 and step == 1:
        return torch.empty(0, dtype=torch.int64)
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    return torch.cat([torch.randint(ROWS, (9 + rank,), generator=drawn), torch.tensor([3, 3, 22])])


def loss_of(rows: torch.Tensor, count: float) -> torch.Tensor:
    """A rank's sum over the mean number of ids, so that the average over ranks is the mean of all."""
    weights = torch.arange(1, WIDTH + 1, dtype=rows.dtype)
    return ((rows * weights).tanh() + rows.square()).sum() / count


def plain_training(size: int, make, sparse: bool, steps: int = 3, padding: int | None = None) -> torch.Tensor:
    plain = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse, padding_idx=padding)
    plain.load_state_dict({"weight": first_rows(padding)})
    optimizer = make(plain.parameters())
    for step in range(steps):
        ids = torch.cat([batch(rank, step, size) for rank in range(size)])
        optimizer.zero_grad()
        loss_of(plain(ids), len(ids)).backward()
        optimizer.step()
    return plain.weight.detach()


def first_rows(padding: int | None = None) -> torch.Tensor:
    with World(1) as alone:
        return alone.run(lambda rank: whole(hvd.ShardedEmbedding(ROWS, WIDTH, seed=4, padding_idx=padding)))[0]


def whole(table) -> torch.Tensor:
    """The table on every rank, by a way of its own: each rank's rows, by number."""
    ids = torch.arange(table.num_embeddings)[table.dealing.ids_of(hvd.rank())]
    numbers, rows = hvd.grouped_allgather([ids, table.rows().contiguous()], name="whole")
    return rows[torch.argsort(numbers)]


def train(table, optimizer, size: int, steps: int = 3) -> None:
    for step in range(steps):
        ids = batch(hvd.rank(), step, size)
        total = sum(len(batch(rank, step, size)) for rank in range(size))
        optimizer.zero_grad()
        loss_of(table(ids), total / size).backward()
        optimizer.step()


@pytest.mark.parametrize("dealing", ["modulo", "blocks"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 3])
def test_ranks_train_as_one_process(kind, dealing, size):
    make, sparse = OPTIMIZERS[kind]
    expected = plain_training(size, make, sparse, padding=3)

    def on_rank(rank):
        table = hvd.ShardedEmbedding(ROWS, WIDTH, seed=4, padding_idx=3, dealing=dealing, sparse=sparse)
        optimizer = hvd.DistributedOptimizer(make(table.parameters()), table.named_parameters())
        train(table, optimizer, size)
        return whole(table)

    with World(size) as world:
        for found in world.run(on_rank):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            assert not torch.equal(found, first_rows(3))


def test_a_gradient_that_is_not_averaged_is_noticed(monkeypatch):
    """The planted fault: the sum of the ranks' gradients is taken for their average."""
    make, sparse = OPTIMIZERS["sgd"]
    expected = plain_training(3, make, sparse)

    def on_rank(rank):
        table = hvd.ShardedEmbedding(ROWS, WIDTH, seed=4, op=hvd.Sum)
        train(table, make(table.parameters()), 3)
        return whole(table)

    with World(3) as world, pytest.raises(AssertionError):
        torch.testing.assert_close(world.run(on_rank)[0], expected, rtol=1e-6, atol=1e-6)


def test_dyadic_gradients_are_bit_equal():
    """Where no addition rounds, every order is the same: bits are, too."""
    ids = torch.arange(40).reshape(4, 10) % 7

    def step(table, mine, scale):
        weight = torch.nn.Parameter(table.weight.detach().clone()) if isinstance(table, torch.nn.Embedding) else None
        assert weight is None or len(weight) == 7
        (table(mine) * torch.tensor([0.5, 2.0])).sum().mul(scale).backward()

    plain = torch.nn.Embedding(7, 2, sparse=True)
    step(plain, ids.flatten(), 0.25)

    def on_rank(rank):
        table = hvd.ShardedEmbedding(7, 2)
        step(table, ids[rank], 1.0)
        own = table.weight.grad.to_dense()[:-1]
        assert torch.equal(own, plain.weight.grad.to_dense()[table.dealing.ids_of(rank)])

    with World(4) as world:
        world.run(on_rank)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("include_last", [False, True])
def test_bags(mode, include_last):
    size = 3
    data = [
        (torch.tensor([1, 5, 5, 2, 0]), torch.tensor([0, 2, 2])),
        (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])),
        (torch.tensor([5, 21, 2]), torch.tensor([0, 1])),
    ]
    plain = torch.nn.EmbeddingBag(ROWS, WIDTH, mode=mode, sparse=mode != "max", padding_idx=2)

    def on_rank(rank):
        table = hvd.ShardedEmbeddingBag(ROWS, WIDTH, mode=mode, include_last_offset=include_last, padding_idx=2, seed=4)
        ids, offsets = data[rank]
        if include_last:
            offsets = torch.cat([offsets, torch.tensor([len(ids)])])
        found = table(ids, offsets)
        found.square().sum().backward()
        return found.detach(), whole(table), table.weight.grad.to_dense()[:-1], table.dealing.ids_of(rank)

    with World(size) as world:
        results = world.run(on_rank)
    plain.load_state_dict({"weight": results[0][1]})
    expected = [plain(*each) for each in data]
    (sum(each.square().sum() for each in expected) / size).backward()
    gradient = plain.weight.grad.to_dense()
    for (found, _, own, rows), each in zip(results, expected, strict=True):
        torch.testing.assert_close(found, each.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(own, gradient[rows], rtol=1e-6, atol=1e-6)


def test_weights_of_samples_have_gradients():
    ids, offsets = torch.tensor([1, 5, 5, 2]), torch.tensor([0, 3])

    def on_rank(rank):
        table = hvd.ShardedEmbeddingBag(ROWS, WIDTH, mode="sum", seed=4)
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        table(ids, offsets, weights).square().sum().backward()
        full = whole(table).requires_grad_()  # torch 2.4 refuses one without
        other = weights.detach().clone().requires_grad_()
        torch.nn.functional.embedding_bag(
            ids, full, offsets, mode="sum", per_sample_weights=other
        ).square().sum().backward()
        torch.testing.assert_close(weights.grad, other.grad)

    with World(2) as world:
        world.run(on_rank)


class Model(torch.nn.Module):
    """A table and a dense part."""

    def __init__(self, **arguments):
        super().__init__()
        torch.manual_seed(hvd.rank())
        self.tables = hvd.ShardedEmbeddingCollection(
            {
                "words": hvd.ShardedEmbedding(ROWS, WIDTH, seed=1, **arguments),
                "tags": hvd.ShardedEmbeddingBag(11, 3, mode="sum", seed=2, **arguments),
            }
        )
        self.dense = torch.nn.Linear(WIDTH + 3, 1)

    def forward(self, words, tags):
        found = self.tables({"words": words, "tags": tags})
        return self.dense(torch.cat([found["words"], found["tags"]], 1)).squeeze(1)


class PlainModel(torch.nn.Module):
    """The same in one process."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
        self.tags = torch.nn.EmbeddingBag(11, 3, mode="sum", sparse=True)
        self.dense = torch.nn.Linear(WIDTH + 3, 1)

    def forward(self, words, tags):
        return self.dense(torch.cat([self.words(words), self.tags(tags)], 1)).squeeze(1)


def samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(77 * step + rank)
    words = torch.randint(ROWS, (8,), generator=drawn)
    return words, torch.randint(11, (8, 2), generator=drawn), words.remainder(2).float()


@pytest.mark.parametrize("how", ["plain", "clipped", "accumulated", "scaled"])
def test_a_model_trains_as_one_process(how):
    """Two tables in one exchange beside a dense part under ``DistributedOptimizer``, clipped by the norm of all."""
    size, passes = 3, 2 if how == "accumulated" else 1
    reference: dict[str, torch.Tensor] = {}

    def parts(step):
        return range(step * passes, (step + 1) * passes)

    def on_rank(rank):
        model = Model()
        hvd.broadcast_parameters(model.state_dict(), 0)
        if rank == 0:
            reference.update({name: each.clone() for name, each in model.dense.state_dict(prefix="dense.").items()})
        first = whole(model.tables["words"]), whole(model.tables["tags"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes)
        hvd.broadcast_optimizer_state(optimizer, 0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how == "scaled")
        for step in range(3):
            optimizer.zero_grad()
            for part in parts(step):
                words, tags, wanted = samples(rank, part)
                scaler.scale(torch.nn.functional.mse_loss(model(words, tags), wanted)).backward()
            if how == "clipped":
                hvd.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert_replicas_equal(list(model.dense.parameters()))
        last = whole(model.tables["words"]), whole(model.tables["tags"])
        return first, last, [each.detach().clone() for each in model.dense.parameters()]

    with World(size) as world:
        results = world.run(on_rank)
    (words, tags), _, _ = results[0]
    plain = PlainModel()
    plain.load_state_dict({"words.weight": words, "tags.weight": tags, **reference})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for part in parts(step):
            whole_batch = [torch.cat(each) for each in zip(*(samples(rank, part) for rank in range(size)), strict=True)]
            torch.nn.functional.mse_loss(plain(*whole_batch[:2]), whole_batch[2]).backward()
        if how == "clipped":
            for each in plain.parameters():
                each.grad = each.grad.to_dense()
            assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5
        optimizer.step()
    for _, (words, tags), dense in results:
        torch.testing.assert_close(words, plain.words.weight.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(tags, plain.tags.weight.detach(), rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(dense, plain.dense.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("unscales", [False, True])
def test_an_infinity_on_one_rank_skips_on_all(where, unscales):
    def on_rank(rank):
        table = hvd.ShardedEmbedding(ROWS, WIDTH, seed=4)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.5))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        first, changed = whole(table), []
        for step in range(3):
            optimizer.zero_grad()
            before = whole(table)
            loss = table(torch.tensor([rank])).sum() * (float("inf") if step == 1 and rank == where else 1.0)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            changed.append(not torch.equal(before, whole(table)))
        assert changed == [True, False, True]
        assert scaler.get_scale() == 4.0
        expected = first.clone()
        expected[:3] -= 2 * 0.5 / 3
        torch.testing.assert_close(whole(table), expected)

    with World(3) as world:
        world.run(on_rank)


def test_an_id_out_of_range_is_one_error_on_all_ranks():
    def on_rank(rank):
        table = hvd.ShardedEmbeddingCollection(
            {"a": hvd.ShardedEmbedding(ROWS, 2, name="users"), "b": hvd.ShardedEmbedding(5, 2, name="items")}
        )
        with pytest.raises(rt.errors.InvalidArgumentError) as problem:
            table({"a": torch.tensor([1]), "b": torch.tensor([2, -7 if rank == 1 else 4])})
        assert table({"a": torch.tensor([1]), "b": torch.tensor([4])})["b"].shape == (1, 2)  # goes on
        return str(problem.value)

    with World(3) as world:
        texts = set(world.run(on_rank))
    assert texts == {
        "embedding 'items': ids must be from 0 to 4, but rank 1 has -7. Look at its data, or make the table larger."
    }


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"a": torch.tensor([1.0]), "b": torch.tensor([2])}, "ids must be a tensor of int32 or int64"),
        ({"a": torch.tensor([1]), "b": [2]}, "ids must be a tensor of int32 or int64"),
        ({"a": torch.tensor([1])}, "inputs must be for"),
    ],
    ids=["floats", "a list", "a table without ids"],
)
def test_what_is_wrong_with_one_ranks_arguments_is_an_error_on_all(wrong, words):
    """The others would wait for this rank's question for as long as a stall may last."""

    def on_rank(rank):
        table = hvd.ShardedEmbeddingCollection(
            {"a": hvd.ShardedEmbedding(ROWS, 2, name="users"), "b": hvd.ShardedEmbedding(5, 2, name="items")}
        )
        with pytest.raises(rt.errors.InvalidArgumentError, match=words):
            table(wrong if rank == 1 else {"a": torch.tensor([1]), "b": torch.tensor([4])})
        assert table({"a": torch.tensor([1]), "b": torch.tensor([4])})["b"].shape == (1, 2)

    with World(3) as world:
        world.run(on_rank)


def test_different_tables_are_one_error_on_all_ranks():
    def on_rank(rank):
        with pytest.raises(
            rt.errors.MismatchError, match=r"\('table.0', 5, .* on rank 0 and \('table.0', 6, .* on rank 1"
        ):
            hvd.ShardedEmbedding(5 + rank, 2)

    with World(2) as world:
        world.run(on_rank)


def test_join_is_refused_while_a_table_lives():
    def on_rank(rank):
        table = hvd.ShardedEmbedding(5, 2)
        with pytest.raises(rt.errors.UnsupportedError, match="go on serving its rows"):
            hvd.join()
        del table
        hvd.join()

    with World(2) as world:
        world.run(on_rank)


def test_a_process_set_shares_a_table():
    def on_rank(rank):
        some = hvd.add_process_set([0, 2])
        if rank == 1:
            return
        table = hvd.ShardedEmbedding(5, 2, process_set=some, initializer=lambda rows: rows[:, None].repeat(2, 1))
        assert table(torch.tensor([[4, 0], [1, 1]])).tolist() == [[[4.0] * 2, [0.0] * 2], [[1.0] * 2] * 2]

    with World(3) as world:
        world.run(on_rank)


def test_only_needed_rows_travel_and_each_once():
    def on_rank(rank):
        table = hvd.ShardedEmbedding(1000, 256)
        ids = torch.arange(10).repeat(500)
        before = rt.counters()["bytes"]
        table(ids).sum().backward()
        return rt.counters()["bytes"] - before

    with World(2) as world:
        assert all(sent < 4 * 10 * 256 * 4 for sent in world.run(on_rank))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_norm": 1.0}, "max_norm must be None"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq must be False"),
        ({"dtype": torch.float16}, "dtype must be float32 or float64"),
        ({"dealing": "hash"}, "dealing must be one of modulo, blocks"),
        ({"storage": "disk"}, "storage must be 'memory' or 'file'"),
        ({"storage": "file"}, "must have path"),
        ({"initializer": "ones"}, "initializer must be one of"),
        ({"padding_idx": 5}, "padding_idx must be a row of 5"),
    ],
)
def test_arguments_that_cannot_be(arguments, words):
    with World(1) as world:
        with pytest.raises(rt.RingtrainError, match=words):
            world.run(lambda rank: hvd.ShardedEmbedding(5, 2, **arguments))


def test_optimizers_that_cannot_train_a_table():
    def on_rank(rank):
        table = hvd.ShardedEmbedding(5, 2)
        for arguments, words in [
            ({"op": hvd.Adasum}, "op=Adasum cannot be used with rows of a sharded embedding"),
            ({"every": 4}, "LocalSteps cannot be used with rows"),
            ({"op": hvd.Sum}, "op must be that of the sharded embeddings"),
            ({"average_aggregated_gradients": True, "backward_passes_per_step": 2}, "cannot be used with rows"),
        ]:
            with pytest.raises(rt.RingtrainError, match=words):
                hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), **in_mode(arguments))

    with World(2) as world:
        world.run(on_rank)
