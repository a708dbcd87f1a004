"""Sharded embeddings on disk, and ranks with unequal numbers of batches."""

import json

import pytest
import torch
from test_torch_embedding import OPTIMIZERS, ROWS, WIDTH, PlainModel, batch, first_rows, loss_of, whole

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.testing import World

torch.set_num_threads(1)


def test_first_values_do_not_depend_on_the_number_of_ranks():
    for dealing in ("modulo", "blocks"):
        with World(3) as world:
            found = world.run(lambda rank: whole(hvd.ShardedEmbedding(ROWS, WIDTH, seed=4, dealing=dealing)))
        assert torch.equal(found[0], first_rows())
    table = first_rows()
    assert abs(table.mean()) < 0.3 and 0.8 < table.std() < 1.2 and len(table.unique()) == table.numel()


@pytest.mark.parametrize("kind", ["momentum", "adagrad", "sparse_adam", "rowwise_adagrad"])
def test_training_goes_on_with_other_numbers_of_ranks(kind, tmp_path):
    """2 ranks, 3 ranks, each with half of the steps, are the same as one run: every step has the batches of 6 ranks."""
    make, _ = OPTIMIZERS[kind]

    def steps_on(table, optimizer, steps):
        for step in steps:
            mine = [batch(rank, step, 6) for rank in range(hvd.rank(), 6, hvd.size())]
            total = sum(len(batch(rank, step, 6)) for rank in range(6))
            optimizer.zero_grad()
            loss_of(table(torch.cat(mine)), total / hvd.size()).backward()
            optimizer.step()

    def first(rank):
        table = hvd.ShardedEmbedding(ROWS, WIDTH, seed=4)
        optimizer = make(table.parameters())
        steps_on(table, optimizer, range(3))
        hvd.save_tables(tmp_path, table, optimizer)

    def second(rank):
        table = hvd.ShardedEmbedding(ROWS, WIDTH, seed=5, dealing="blocks")
        optimizer = make(table.parameters())
        hvd.load_tables(tmp_path, table, optimizer)
        steps_on(table, optimizer, range(3, 5))
        return whole(table)

    def at_once(rank):
        table = hvd.ShardedEmbedding(ROWS, WIDTH, seed=4)
        optimizer = make(table.parameters())
        steps_on(table, optimizer, range(5))
        return whole(table)

    with World(2) as world:
        world.run(first)
    with World(3) as world:
        found = world.run(second)[0]
    with World(1) as world:
        expected = world.run(at_once)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_save_loads_into_a_plain_model(tmp_path):
    def on_rank(rank):
        model = torch.nn.ModuleDict(
            {"words": hvd.ShardedEmbedding(ROWS, WIDTH), "tags": hvd.ShardedEmbeddingBag(11, 3)}
        )
        hvd.save_tables(tmp_path, model)
        return whole(model["words"])

    with World(2) as world:
        expected = world.run(on_rank)[0]
    plain = PlainModel()
    plain.words.weight.data = hvd.plain_weight(tmp_path, "words")
    assert torch.equal(plain.words.weight, expected)
    assert hvd.plain_weight(tmp_path, "tags").shape == (11, 3)


def test_a_plain_state_loads_into_shards_and_a_shard_into_its_own():
    plain = torch.nn.Embedding(ROWS, WIDTH)

    def on_rank(rank):
        table = hvd.ShardedEmbedding(ROWS, WIDTH)
        table.load_state_dict(plain.state_dict())
        assert torch.equal(whole(table), plain.weight.detach())
        other = hvd.ShardedEmbedding(ROWS, WIDTH, seed=9)
        other.load_state_dict(table.state_dict())
        assert torch.equal(whole(other), plain.weight.detach())
        return table.state_dict()

    with World(2) as world:
        states = world.run(on_rank)

    def swapped(rank):
        with pytest.raises(RuntimeError, match=rf"weight must be that of rank {rank} of 2 \(modulo\)"):
            hvd.ShardedEmbedding(ROWS, WIDTH).load_state_dict(states[1 - rank])
        with pytest.raises(RuntimeError, match=r"must be of shape \(7, 6\), but is \(23, 6\)"):
            hvd.ShardedEmbedding(7, WIDTH).load_state_dict(plain.state_dict())

    with World(2) as world:
        world.run(swapped)


def test_what_is_not_sharded_is_saved_by_one_rank():
    def on_rank(rank):
        model = torch.nn.ModuleDict({"words": hvd.ShardedEmbedding(ROWS, WIDTH), "dense": torch.nn.Linear(WIDTH, 1)})
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        model["dense"](model["words"](batch(rank, 0, 2))).sum().backward()
        optimizer.step()
        assert set(hvd.dense_state_dict(model)) == {"dense.weight", "dense.bias"}
        assert set(hvd.dense_state_dict(optimizer)["state"]) == {1, 2} and set(optimizer.state_dict()["state"]) == {
            0,
            1,
            2,
        }
        before = whole(model["words"])
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_parameters(model.named_parameters(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert torch.equal(before, whole(model["words"]))
        assert not torch.equal(before[0], before[1])

    with World(2) as world:
        world.run(on_rank)


def test_saves_that_cannot_be_read(tmp_path):
    def save(rank):
        hvd.save_tables(tmp_path, hvd.ShardedEmbedding(ROWS, WIDTH))

    def load(rank, rows=ROWS, width=WIDTH, words=""):
        with pytest.raises(rt.errors.InvalidArgumentError, match=words):
            hvd.load_tables(tmp_path, hvd.ShardedEmbedding(rows, width))

    with World(2) as world:
        world.run(load, ROWS, WIDTH, "rank 0: .*nothing of it is there")
        world.run(save)
        world.run(load, ROWS + 1, WIDTH, "must have 24 rows, but 23 were saved")
        world.run(load, ROWS, 2, "must have 2 numbers in a row, but 6 were saved")
        about = tmp_path / "table.1-of-2.json"
        text = about.read_text()
        about.unlink()
        world.run(load, ROWS, WIDTH, r"lacks that of ranks \[1\]")
        about.write_text(json.dumps({**json.loads(text), "token": "of another save"}))
        world.run(load, ROWS, WIDTH, "parts of several")
    with World(3) as world, pytest.raises(rt.errors.InvalidArgumentError, match="by another number of ranks than 3"):
        world.run(save)


def test_a_folder_that_takes_no_file_is_one_error_on_all_ranks(tmp_path):
    def on_rank(rank):
        folder = tmp_path / "missing" if rank == 1 else tmp_path
        with pytest.raises(
            rt.errors.InvalidArgumentError,
            match="rank 1: embedding 'table': every rank must be able to write into '.*missing'",
        ):
            hvd.save_tables(folder, hvd.ShardedEmbedding(ROWS, WIDTH))

    with World(2) as world:
        world.run(on_rank)


@pytest.mark.parametrize("width", [0, -1, 2.5])
def test_a_row_has_a_number_at_least(width):
    with World(1) as world, pytest.raises(rt.errors.InvalidArgumentError, match="a row must have a number at least"):
        world.run(lambda rank: hvd.ShardedEmbedding(ROWS, width))


def test_uneven_batches_train_as_one_process():
    """Rank r has r + 1 batches; those who are done serve their rows to the rest."""
    counts = [1, 3, 0]
    plain = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    plain.load_state_dict({"weight": first_rows()})
    for step in range(3):
        ids = torch.cat([batch(rank, step + 2, 3) for rank in range(3) if step < counts[rank]])
        plain.weight.grad = None
        loss_of(plain(ids), 30).backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()

    def on_rank(rank):
        table = hvd.ShardedEmbedding(ROWS, WIDTH, seed=4)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.5))
        mine = [batch(rank, step + 2, 3) for step in range(counts[rank])]
        for ids in hvd.until_all_are_done(mine, empty=torch.empty(0, dtype=torch.int64)):
            optimizer.zero_grad()
            loss_of(table(ids), 30 / 3).backward()
            optimizer.step()
        return whole(table)

    with World(3) as world:
        torch.testing.assert_close(world.run(on_rank)[0], plain.weight.detach(), rtol=1e-6, atol=1e-6)
