"""``save_every`` and ``resume`` of a State whose model has tables, in worlds of threads. tests/faults has real deaths."""

import os

import pytest
import torch
from test_torch_embedding import ROWS, WIDTH, whole

import ringtrain.torch as hvd
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.testing import World
from ringtrain.torch.elastic.checkpoints import TorchFolder

torch.set_num_threads(1)
SAMPLES = 24


class _Sum(torch.nn.Module):
    def forward(self, rows):
        return rows.sum(1)


def sample(index):
    drawn = torch.Generator().manual_seed(index)
    return torch.randint(ROWS, (3,), generator=drawn), torch.randn(1, generator=drawn)


def make(**given):
    table = hvd.ShardedEmbedding(ROWS, WIDTH, seed=4, name="words", **given)
    dense = torch.nn.Linear(WIDTH, 1)
    for number, parameter in enumerate(dense.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    model = torch.nn.Sequential(table, _Sum(), dense)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def training(folder, stop=None, when=None, **given):
    """What a rank has at the end; one that stops early is as dead as a job whose hosts are gone."""
    model, optimizer = make(**given)
    data = [sample(index) for index in range(SAMPLES)]
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, 2, sampler=sampler)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
    resumed = state.resume(folder)
    state.save_every(folder, keep=2, **(when or {"steps": 2}))
    begins = None
    for _ in state.epochs(2):
        begins = whole(model[0]) if begins is None else begins
        for ids, y in loader:
            optimizer.zero_grad()
            (model(ids) - y).square().mean().backward()
            optimizer.step()
            if state.step == stop:
                return None
    rows = optimizer.state[model[0].weight]["sum"][:-1].clone()
    return resumed, begins, whole(model[0]), rows, [each.detach().clone() for each in model[2].parameters()]


def on_ranks(size, *arguments, **given):
    with World(size) as world:
        return world.run(lambda rank: training(*arguments, **given))


def names(folder):
    return sorted(name[:17] for name in os.listdir(folder))


def test_a_training_with_tables_goes_on_bit_for_bit(tmp_path):
    """From the middle of an epoch, with what the optimizer keeps of each row; old rows go with their files."""
    expected = on_ranks(2, tmp_path / "whole")
    assert on_ranks(2, tmp_path / "cut", stop=9) == [None, None]
    assert names(tmp_path / "cut") == [
        "step-000000000006",
        "step-000000000006",
        "step-000000000008",
        "step-000000000008",
    ]
    left = tmp_path / "cut" / "step-000000000010-00ff"
    left.mkdir()
    (left / "model.0.0-of-5.json").write_text("of a rank that died while it wrote")
    for found, wanted in zip(on_ranks(2, tmp_path / "cut"), expected, strict=True):
        assert (found[0], wanted[0]) == (True, False)
        assert torch.equal(found[2], wanted[2]) and torch.equal(found[3], wanted[3])
        assert all(torch.equal(*pair) for pair in zip(found[4], wanted[4], strict=True))
    assert not left.exists() and len(names(tmp_path / "cut")) == 4


def test_another_number_of_ranks_goes_on_with_the_rows(tmp_path):
    assert on_ranks(2, tmp_path, stop=5) == [None, None]
    saved = TorchFolder(tmp_path).rows_of(TorchFolder(tmp_path).newest()[1])
    expected = hvd.plain_weight(saved, "model.0")
    for found in on_ranks(3, tmp_path, dealing="blocks"):
        assert found[0] and torch.equal(found[1], expected) and not torch.equal(found[2], expected)


def test_minutes_are_those_of_rank_0(tmp_path, monkeypatch):
    """The clock of rank 1 stands still: all write when that of rank 0 says so, in one step."""
    from ringtrain.torch.elastic import transparent

    seconds = iter(range(0, 10_000_000, 20))
    monkeypatch.setattr(transparent, "monotonic", lambda: float(next(seconds)) if hvd.rank() == 0 else 0.0)
    on_ranks(2, tmp_path, when={"minutes": 1.0})
    kept = TorchFolder(tmp_path).steps()
    assert len(kept) == 2 and len(names(tmp_path)) == 4
    assert hvd.plain_weight(TorchFolder(tmp_path).rows_of(TorchFolder(tmp_path).newest()[1]), "model.0").shape == (
        ROWS,
        WIDTH,
    )


def test_what_a_rank_cannot_read_all_say(tmp_path):
    assert on_ranks(2, tmp_path, stop=5) == [None, None]
    saved = TorchFolder(tmp_path).rows_of(TorchFolder(tmp_path).newest()[1])
    (saved / "model.0.1-of-2.json").unlink()

    def on_rank(rank):
        with pytest.raises(
            InvalidArgumentError, match="rank 0: embedding 'model.0': .* lacks that of ranks .1."
        ) as told:
            training(tmp_path)
        return str(told.value)

    with World(2) as world:
        assert len(set(world.run(on_rank))) == 1


def test_rows_that_cannot_be_written_are_said_and_the_training_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("a file stands where the folder above would")
    assert on_ranks(2, tmp_path / "file" / "folder")[0][0] is False
    assert {each.split(":")[0] for each in caplog.messages} == {"save_every"} and len(caplog.messages) == 6


def test_tables_of_some_ranks_are_refused(tmp_path):
    def on_rank(rank):
        own = hvd.add_process_set([0, 1])
        model, optimizer = make(process_set=own)
        state = hvd.elastic.State(model=model, optimizer=optimizer)
        for refused in (lambda: state.save_every(tmp_path, steps=1), lambda: state.resume(tmp_path)):
            with pytest.raises(UnsupportedError, match="must be shared by all ranks, but 'model.0' has a process set"):
                refused()

    with World(2) as world:
        world.run(on_rank)
