"""Elastic states, their sampler and the loop, in worlds of threads; tests/faults/test_elastic.py has real jobs."""

import pytest
import torch

import ringtrain as rt
import ringtrain.elastic
import ringtrain.torch as hvd
from ringtrain._bootstrap import membership
from ringtrain.errors import ClosedError, InvalidArgumentError, MismatchError, PeerLostError, WorldChangedError
from ringtrain.testing import World


@pytest.fixture
def alone():
    with World(1) as world:
        yield world


def trained(model, optimizer, schedule):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()


def made():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def bits(model, optimizer):
    slots = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *slots)]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_restore_goes_back_to_the_commit_bit_for_bit(alone):
    def check(_rank):
        model, optimizer, schedule = made()
        trained(model, optimizer, schedule)
        state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, seen=[1, 2], epoch=3)
        kept, rate = bits(model, optimizer), optimizer.param_groups[0]["lr"]
        for _ in range(2):  # what is restored is a copy itself
            trained(model, optimizer, schedule)
            state.seen.append(3)
            state.epoch += 1
            assert not same(bits(model, optimizer), kept)
            state.restore()
            assert same(bits(model, optimizer), kept) and optimizer.param_groups[0]["lr"] == rate
            assert (state.seen, state.epoch, schedule.last_epoch) == ([1, 2], 3, 3)
            assert all(parameter.grad is None for parameter in model.parameters())
            assert state.model is model and state.optimizer is optimizer and state.schedule is schedule

    alone.run(check)


def test_all_take_the_state_of_rank_0_and_keep_it():
    def check(rank):
        torch.manual_seed(rank)
        model, optimizer, schedule = made()
        if rank == 0:
            trained(model, optimizer, schedule)
        sampler = hvd.elastic.ElasticSampler(range(10))
        sampler.record_batch(0, 2 + rank)
        state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, sampler=sampler, name=f"of {rank}")
        state.sync()
        took = bits(model, optimizer), state.name, schedule.last_epoch, sampler.processed_num
        trained(model, optimizer, schedule)
        state.name = "changed"
        state.restore()
        assert same(bits(model, optimizer), took[0]) and state.name == "of 0"
        return took

    with World(2) as world:
        (one, *of_one), (other, *of_other) = world.run(check)
    assert same(one, other) and of_one == of_other == ["of 0", 3, 4]


def test_what_an_epoch_has_left_is_dealt_anew():
    def dealt(rank, processed, size):
        sampler = hvd.elastic.ElasticSampler(range(20), shuffle=True, seed=5)
        sampler.load_state_dict({"epoch": 1, "processed_num": processed})
        return list(sampler), len(sampler), sampler

    with World(4) as world:
        first = [indices[:2] for indices, _, _ in world.run(lambda rank: dealt(rank, 0, 4))]
    with World(3) as world:
        later = world.run(lambda rank: dealt(rank, 8, 3))
        assert all(sampler.num_replicas == 3 for _, _, sampler in later)
    rest = sorted(index for indices, length, _ in later for index in indices)
    assert all(len(indices) == length == 4 for indices, length, _ in later)
    assert sorted({*sum(first, []), *rest}) == list(range(20)) and len(rest) == 12


def test_an_epoch_that_begins_has_another_order_and_nothing_behind_it(alone):
    def check(_rank):
        sampler = hvd.elastic.ElasticSampler(range(20), seed=1)
        first = list(sampler)
        sampler.record_batch(0, 7)
        assert sampler.state_dict() == {"epoch": 0, "processed_num": 7} and list(sampler) == first
        sampler.reset()
        assert list(sampler) == first[7:]
        sampler.set_epoch(1)
        assert sorted(sampler) == list(range(20)) and list(sampler) != first
        sampler.record_batch(0, 20)
        sampler.reset()
        assert list(sampler) == [] and len(sampler) == 0

    alone.run(check)


@pytest.mark.parametrize("name", ["save", "_hidden", "commit"])
def test_an_attribute_that_hides_a_method_is_refused(name, alone):
    def check(_rank):
        with pytest.raises(InvalidArgumentError, match=f"ObjectState: names must not be .* but {name} is"):
            rt.elastic.ObjectState(**{name: 1})

    alone.run(check)


class FakeMember:
    """A rank of an elastic job, of which only the loop's questions are asked."""

    def __init__(self):
        self.wants_pause = False
        self.planned, self.balances = 0, False
        self.synced = 0

    def got_state(self):
        self.synced += 1


@pytest.fixture
def member(monkeypatch):
    fake = FakeMember()
    monkeypatch.setattr(membership, "_member", fake)
    return fake


@pytest.mark.parametrize(
    "problem", [PeerLostError("p"), WorldChangedError("w"), ClosedError("c"), rt.RingtrainError("u")]
)
def test_after_a_failure_the_function_goes_on_from_the_commit_in_the_next_world(problem, member, alone):
    did = []

    def train(state):
        did.append((state.step, member.synced))
        state.step += 1
        state.commit()
        state.step += 100
        if len(did) == 1:
            raise problem
        return state.step

    def check(_rank):
        state = rt.elastic.ObjectState(step=0)
        state.register_reset_callbacks([lambda: did.append("told")])
        assert rt.elastic.run_fn(train, lambda: did.append("reset"))(state) == 102

    alone.run(check)
    assert did == [(0, 1), "reset", "told", (1, 2)]


def test_who_waits_to_join_is_let_in_with_what_is_there(member, alone):
    did = []

    def train(state):
        did.append(state.step)
        state.step += 1
        member.wants_pause = len(did) == 1
        state.check_host_updates()
        return "done"

    def check(_rank):
        assert rt.elastic.run_fn(train, lambda: None)(rt.elastic.ObjectState(step=0)) == "done"

    alone.run(check)
    assert did == [0, 1]


@pytest.mark.parametrize("problem", [MismatchError("m"), InvalidArgumentError("i"), ValueError("v")])
def test_what_would_fail_again_leaves_the_function(problem, member, alone):
    def train(state):
        raise problem

    def check(_rank):
        with pytest.raises(type(problem)) as met:
            rt.elastic.run_fn(train, lambda: pytest.fail("there is no next world"))(rt.elastic.ObjectState(step=0))
        assert met.value is problem

    alone.run(check)


def test_in_a_job_of_a_fixed_size_a_failure_ends_it(alone):
    def train(state):
        state.commit()
        raise PeerLostError("rank 1 died")

    def check(_rank):
        with pytest.raises(PeerLostError):
            rt.elastic.run(train)(rt.elastic.ObjectState(step=0))

    alone.run(check)
