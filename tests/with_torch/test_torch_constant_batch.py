"""``--batch constant`` in one process: what loaders take from an ``ElasticSampler``, and what is refused."""

import pytest
import torch

import ringtrain.torch as hvd
from ringtrain import elastic
from ringtrain._bootstrap import membership
from ringtrain.elastic.lossless import require_averages, require_one_sampler
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.testing import World


@pytest.fixture
def planned(monkeypatch):
    """A world of one in a job that is planned with three ranks."""
    hvd.init()
    monkeypatch.setattr(membership, "planned", lambda: 3)
    yield 3
    hvd.shutdown()


class Follower:
    """Has samples dealt in another way where a test says so."""

    def __init__(self):
        self.changes = []

    def before_draw(self):
        while self.changes:
            self.changes.pop()()


def followed(count, size=2, place=0, **options):
    sampler, follower = hvd.elastic.ElasticSampler(range(count), shuffle=False), Follower()
    sampler.follow(follower)
    sampler.deal(size, place)
    return sampler, follower, torch.utils.data.DataLoader(range(count), batch_size=2, sampler=sampler, **options)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["", "workers"])
def test_a_loaders_batch_is_this_ranks_share(options, planned):
    """In each world; with what a lost rank has drawn, and what workers have made ahead, dealt again."""
    sampler, follower, loader = followed(32, **options)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        sampler.deal(2, 0)
        batches, seen = iter(loader), []
        assert (len(loader), len(sampler)) == (6, 16)
        seen += [(next(batches).tolist(), sampler.weight(None))]
        sampler.finish_window(None)
        seen += [(next(batches).tolist(), sampler.weight({0}))]
        sampler.finish_window({0})  # rank 1 is lost within the step
        follower.changes.append(lambda: sampler.deal(4, 3))  # ranks have come when the next batch is asked for
        seen += [(next(batches).tolist(), sampler.weight(None))]
        sampler.finish_window(None)
        sampler.deal(1, 0)
        assert seen == [([0, 2, 4], 3), ([6, 8, 10], 3), ([12], 1)] and len(loader) == 6
        rest = [(batch.tolist(), sampler.weight(None)) for batch in batches if sampler.finish_window(None) is None]
        assert rest == [(list(range(15, 21)), 6), (list(range(21, 27)), 6), (list(range(27, 32)), 5)]
        assert sampler.state_dict() == {"epoch": epoch, "processed_num": 32}
    del batches, loader


def test_a_rank_without_a_share_has_a_batch_that_weighs_nothing(planned):
    sampler, _, loader = followed(7, size=3, place=2)
    seen = []
    for batch in loader:
        seen.append((batch.tolist(), sampler.weight(None)))
        sampler.finish_window(None)
        assert sampler.weight(None) == seen[-1][1]  # of a step for which nothing is drawn
    assert seen == [([2, 5], 2), ([6], 0)]


def test_the_last_batch_is_dropped_as_one_process_drops_it(planned):
    sampler, _, loader = followed(17, size=1, drop_last=True)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        sampler.finish_window(None)
    assert seen == [list(range(6)), list(range(6, 12))] and len(loader) == 2
    with pytest.raises(InvalidArgumentError, match="one pass over the samples of epoch 0 but found another"):
        next(iter(loader))


def test_without_a_state_batches_are_the_same(planned):
    """As of a loader whose length makes a schedule before there is a state, or that reads data to validate with."""
    data = torch.arange(16)
    sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    assert len(loader) == 3
    assert [len(batch) for batch in loader] == [len(batch) for batch in loader] == [6, 6, 4]


def test_other_batch_samplers_are_torchs(planned):
    hvd.elastic.ElasticSampler(range(5))
    batches = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(5)), 2, drop_last=False)
    assert (list(batches), len(batches)) == ([[0, 1], [2, 3], [4]], 3)


def test_what_draws_single_samples_is_refused(planned):
    class Own(torch.utils.data.BatchSampler):
        def __iter__(self):
            yield list(self.sampler)

    sampler, _, loader = followed(8)
    for other in ({"batch_size": None, "sampler": sampler}, {"batch_sampler": Own(sampler, 2, False)}):
        with pytest.raises(UnsupportedError, match="must be drawn by a DataLoader with batch_size="):
            next(iter(torch.utils.data.DataLoader(range(8), **other)))
    assert next(iter(loader)).tolist() == [0, 2, 4]


def test_batches_of_two_sizes_are_no_step(planned):
    sampler, _, loader = followed(40)
    next(iter(loader))
    larger = torch.utils.data.DataLoader(range(40), batch_size=3, sampler=sampler)
    with pytest.raises(InvalidArgumentError, match="one of 6 samples on all ranks is under way, and one of 9 is asked"):
        next(iter(larger))
    sampler.finish_window(None)
    assert next(iter(larger)).tolist() == [6, 8, 10, 12, 14]


def test_states_that_cannot_follow_say_so(planned):
    with pytest.raises(InvalidArgumentError, match="--batch constant: .* must have one BatchSampler"):
        elastic.State(weights=1)
    with pytest.raises(UnsupportedError, match="--batch constant: steps must be counted by State"):
        elastic.run(lambda state: None)(hvd.elastic.TorchState())
    for count in 0, 2:
        with pytest.raises(InvalidArgumentError, match=f"must have one ElasticSampler.* has {count}"):
            require_one_sampler("ElasticSampler", count)
    with pytest.raises(UnsupportedError, match="with --batch constant gradients must be averaged"):
        require_averages("DistributedOptimizer", False)
    require_one_sampler("ElasticSampler", 1)
    require_averages("DistributedOptimizer", True)


class Net(torch.nn.Module):
    """Of which all gradients are dense but that of the table."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(25, 3, sparse=True)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        for number, parameter in enumerate(self.double().parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))

    def forward(self, indices):
        return self.layers(self.table(indices // 2) + indices[:, None] / 50)


def trained(loader, model, optimizer, after_step=lambda: None):
    for indices in loader:
        optimizer.zero_grad()
        (model(indices) - indices[:, None].double().sin()).square().mean().backward()
        optimizer.step()
        after_step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_steps_are_those_of_one_process(size, monkeypatch):
    """Whatever the number of ranks: 8 samples each, and at the end of the epoch two, where some ranks have none."""
    monkeypatch.setattr(membership, "planned", lambda: 4)
    model = Net()
    expected = trained(torch.utils.data.DataLoader(range(50), batch_size=8), model, sgd(model))

    def run(rank):
        model = Net()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        sampler, _, loader = followed(50, size, rank)
        optimizer._mode._exchange._bursts.weight = lambda: sampler.weight(None)
        return trained(loader, model, optimizer, lambda: sampler.finish_window(None))

    with World(size) as world:
        found = world.run(run)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)
