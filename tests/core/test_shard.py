"""Sharding: which samples each rank reads, as a pure function, in a world, and through torch's sampler."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._training import sharding
from ringtrain.testing import World

counts = st.integers(0, 60)
sizes = st.integers(1, 9)
policies = st.sampled_from(sharding.POLICIES)
seeds = st.none() | st.integers(0, 2**63 - 1)


def shards(count, size, policy, seed=0, epoch=0, start=0):
    """What each rank reads, or None where there is too little to truncate."""
    if policy == "truncate" and 0 < count < size:
        return None
    return [sharding.indices(count, rank, size, policy, seed, epoch, start).tolist() for rank in range(size)]


def in_turn(parts):
    """The order in which the ranks together read: the first of each, the second of each, …"""
    rows = itertools.zip_longest(*parts)
    return [index for row in rows for index in row if index is not None]


# ---- the pure function ----


@given(counts, sizes, policies, seeds, st.integers(0, 5))
def test_each_policy_keeps_its_promise(count, size, policy, seed, epoch):
    parts = shards(count, size, policy, seed, epoch)
    if parts is None:
        return
    read = in_turn(parts)
    lengths = [len(part) for part in parts]
    times = np.bincount(read, minlength=count) if read else np.zeros(count, int)
    if policy == "pad":
        assert len(set(lengths)) == 1 and lengths[0] == -(-count // size)
        assert count == 0 or (times.min() >= 1 and sum(times) - count < size)
    elif policy == "truncate":
        assert set(lengths) == {count // size}
        assert count == 0 or times.max() <= 1
    else:
        assert sorted(read) == list(range(count))
        assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@given(counts, sizes, policies, seeds)
def test_ranks_read_together_what_one_process_reads(count, size, policy, seed):
    """Step for step: the b samples of each of the ranks are the b * size samples of one process."""
    parts = shards(count, size, policy, seed)
    if parts is None:
        return
    alone = sharding.indices(count, 0, 1, "uneven", seed).tolist()
    read = in_turn(parts)
    assert read[:count] == alone[: len(read)]
    assert all(index == alone[place % count] for place, index in enumerate(read))


@given(counts, sizes, sizes, policies, seeds, st.data())
def test_a_run_goes_on_where_it_stopped(count, size, next_size, policy, seed, data):
    """After some steps on ``size`` ranks, ``next_size`` ranks read the rest: all of it, and nothing twice."""
    parts = shards(count, size, policy, seed)
    if parts is None or shards(count, next_size, policy) is None:
        return
    steps = data.draw(st.integers(0, min(map(len, parts))))
    before = in_turn([part[:steps] for part in parts])
    after = in_turn(shards(count, next_size, policy, seed, start=steps * size))
    if next_size == size:
        assert before + after == in_turn(parts)
    if policy != "truncate":
        assert set(before + after) == set(range(count))
    assert len(before + after) - len(set(before + after)) < max(size, next_size)


@given(st.integers(2, 60), st.integers(0, 2**63 - 1))
def test_orders_are_permutations(count, seed):
    assert sorted(sharding.order(count, seed, 3)) == list(range(count))
    assert sharding.order(count, None, 3).tolist() == list(range(count))


def test_orders_differ_between_epochs_and_seeds_and_never_between_releases():
    orders = {tuple(sharding.order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert sharding.order(10, seed=1, epoch=2).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"data": 10, "policy": "drop"}, "policy must be one of pad, truncate, uneven, but is 'drop'"),
        (
            {"data": 1, "policy": "truncate"},
            "'truncate' must find a sample for each of 2 ranks, but finds 1. Use 'pad'",
        ),
        ({"data": 10, "seed": -1}, "seed must be an int from 0 to 2**63 - 1, but is -1"),
        ({"data": 10, "epoch": 1.5}, "epoch must be an int from 0 to 2**63 - 1, but is 1.5"),
        ({"data": -4}, "number of samples must be an int from 0"),
        (
            {"data": (letter for letter in "abc")},
            "must be a number of samples, or have len() and [index], but is a generator",
        ),
        ({"data": {"x": 1}}, "but is a dict"),
    ],
)
def test_wrong_arguments(arguments, words):
    with World(2) as world, pytest.raises(rt.errors.InvalidArgumentError) as caught:
        world.run(lambda rank: rt.shard(**arguments))
    assert words in str(caught.value)


# ---- in a world ----


def test_a_number_gives_indices_and_a_data_set_gives_samples():
    letters = "abcdefg"
    with World(3) as world:
        indices = world.run(lambda rank: rt.shard(7, seed=5, epoch=1))
        views = world.run(lambda rank: rt.shard(letters, seed=5, epoch=1))
        by_numpy = world.run(lambda rank: rt.shard(np.int64(7), seed=5, epoch=1))
    assert all(each.dtype == np.int64 for each in indices)
    assert [view.indices.tolist() for view in views] == [each.tolist() for each in indices]
    assert [each.tolist() for each in by_numpy] == [each.tolist() for each in indices]
    assert ["".join(view) for view in views] == ["".join(letters[i] for i in each) for each in indices]
    assert set(itertools.chain(*views)) == set(letters) and [len(view) for view in views] == [3, 3, 3]
    assert list(views[0][1:]) == [views[0][1], views[0][-1]]
    with pytest.raises(IndexError):
        views[0][3]


def test_a_process_set_shares_among_its_members():
    def on_rank(rank):
        outer = rt.add_process_set([0, 2])
        if not outer.included():
            with pytest.raises(rt.errors.InvalidArgumentError, match="must be a member"):
                rt.shard(5, process_set=outer)
            return []
        assert list(hvd.DistributedSampler(5, policy="uneven", seed=3, process_set=outer)) == list(
            rt.shard(5, "uneven", seed=3, process_set=outer)
        )
        return rt.shard(5, "uneven", seed=None, process_set=outer).tolist()

    with World(3) as world:
        assert world.run(on_rank) == [[0, 2, 4], [], [1, 3]]


def test_uneven_shards_end_together_by_join():
    """5 samples on 3 ranks, one a step: a rank that is done joins, and the last step averages those who are left."""

    def on_rank(rank):
        means = [
            float(rt.allreduce(np.float64(index), name="step"))
            for index in rt.shard(5, "uneven", seed=None)
        ]  # fmt: skip
        rt.join()
        return means

    with World(3) as world:
        assert world.run(on_rank) == [[1.0, 3.5], [1.0, 3.5], [1.0]]


def test_training_on_uneven_shards_equals_one_process():
    """5 samples on 2 ranks, one a step; who was last hands the model on, as docs/training.md says."""
    start = torch.nn.Linear(4, 2)
    x, y = torch.randn(5, 4), torch.randn(5, 2)

    def train(model, optimizer, batches):
        for places in batches:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[places]), y[places]).backward()
            optimizer.step()

    def on_rank(rank):
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        train(model, optimizer, [[place] for place in hvd.shard(5, "uneven", seed=None)])
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
        return model

    alone = copy.deepcopy(start)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), [[0, 1], [2, 3], [4]])
    with World(2) as world:
        for model in world.run(on_rank):
            for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


# ---- torch's sampler ----


def samplers(size, *arguments, **keywords):
    with World(size) as world:
        return world.run(lambda rank: hvd.DistributedSampler(*arguments, **keywords))


def test_a_loader_reads_the_ranks_share_of_each_epoch():
    data = torch.arange(10)
    for rank, sampler in enumerate(samplers(3, data, policy="pad", seed=4)):
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        assert len(sampler) == 4 and len(loader) == 2
        for epoch in range(2):
            sampler.set_epoch(epoch)
            read = torch.cat(list(loader)).tolist()
            assert read == sharding.indices(10, rank, 3, "pad", 4, epoch).tolist()


@pytest.mark.parametrize("next_size", [2, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_resumes_between_two_batches(next_size, workers):
    """With workers, the loader asks for samples ahead of the training; the script says how far it is."""
    data, batch, steps = torch.arange(23), 2, 3
    read, states = [], []
    for sampler in samplers(2, data, seed=4):
        sampler.set_epoch(5)
        loader = torch.utils.data.DataLoader(data, batch, sampler=sampler, num_workers=workers)
        read += torch.cat(list(itertools.islice(loader, steps))).tolist()
        states.append(json.loads(json.dumps(sampler.state_dict(steps * batch if workers else None))))
    assert states[0] == states[1] == {"epoch": 5, "read": 12, "seed": 4, "count": 23}
    resumed = samplers(next_size, data, seed=4)
    for sampler in resumed:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(5)  # as the loop over the epochs does
        assert len(sampler) == -(-11 // next_size)
        read += list(sampler)
    assert set(read) == set(range(23)) and len(read) == 12 + next_size * -(-11 // next_size)
    for sampler in resumed:  # the epochs after that are whole
        assert sampler.state_dict()["read"] >= 23
        sampler.set_epoch(6)
        assert len(sampler) == len(list(sampler)) == -(-23 // next_size)
        assert len(list(sampler)) == -(-23 // next_size)


def test_the_state_of_a_finished_epoch_leaves_nothing_to_read():
    [sampler] = samplers(1, 6)
    list(sampler)
    [resumed] = samplers(1, 6)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == [] and len(resumed) == 6
    resumed.set_epoch(1)
    assert sorted(resumed) == list(range(6))


@pytest.mark.parametrize("other", [{"dataset": 7}, {"dataset": 6, "seed": 1}])
def test_a_state_of_other_data_is_refused(other):
    [saved], [sampler] = samplers(1, 6), samplers(1, **other)
    with pytest.raises(rt.errors.InvalidArgumentError, match="must be that of the saved run"):
        sampler.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_its_arguments_are_those_of_torchs_sampler(shuffle, drop_last):
    """By place, too; each replica has as many samples, and all of them together the same ones."""
    data = range(11)
    replicas = 3
    theirs = [
        torch.utils.data.DistributedSampler(data, replicas, rank, shuffle, 5, drop_last) for rank in range(replicas)
    ]
    with World(1) as world:
        ours = world.run(
            lambda _: [hvd.DistributedSampler(data, replicas, rank, shuffle, 5, drop_last) for rank in range(replicas)]
        )[0]
    assert list(map(len, ours)) == list(map(len, theirs))
    read = [list(sampler) for sampler in ours]
    assert list(map(len, read)) == list(map(len, ours))
    if not shuffle:
        assert read == [list(sampler) for sampler in theirs]
    if not drop_last:
        assert set(itertools.chain(*read)) == set(data)


@pytest.mark.parametrize(
    "arguments", [{"rank": 1}, {"num_replicas": 2, "rank": 2}, {"num_replicas": "2"}, {"rank": True}]
)
def test_a_sampler_of_a_replica_that_is_none_is_refused(arguments):
    with (
        World(1) as world,
        pytest.raises(rt.errors.InvalidArgumentError, match="DistributedSampler: (rank|num_replicas) must be"),
    ):
        world.run(lambda _: hvd.DistributedSampler(6, **arguments))
