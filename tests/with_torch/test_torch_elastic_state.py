"""``hvd.elastic.State``: which class it is, what it refuses, what it counts, and how results take their gradients' place."""

import os
import random
import resource
from inspect import signature

import needs
import numpy as np
import pytest
import torch

import ringtrain.torch as hvd
from ringtrain import elastic
from ringtrain._bootstrap import membership
from ringtrain.elastic.saving import SavingPlan
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.testing import World
from ringtrain.torch import hooks
from ringtrain.torch.elastic.checkpoints import TorchFolder
from ringtrain.torch.elastic.schedules import schedules_of
from ringtrain.torch.gradients import take_place
from ringtrain.torch.hooks import number_anew


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


def distributed(model):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())


def test_it_is_the_base_of_horovods_states_too(alone):
    class Own(hvd.elastic.State):
        def __init__(self, value):
            super().__init__()
            self.value = value

    model = torch.nn.Linear(1, 1)
    states = Own(3), hvd.elastic.State(), hvd.elastic.TorchState(), hvd.elastic.State(optimizer=distributed(model))
    assert all(isinstance(state, hvd.elastic.State) and isinstance(state, elastic.State) for state in states)
    assert [isinstance(state, Own) for state in states] == [True, False, False, False]
    assert isinstance(states[3], hvd.elastic.TransparentState) and issubclass(hvd.elastic.TorchState, hvd.elastic.State)


def test_what_it_refuses(alone):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="an optimizer from DistributedOptimizer but found none"):
        hvd.elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer = distributed(model)
    with pytest.raises(ValueError, match="names must not be those of its methods, or private, but epochs is"):
        hvd.elastic.State(optimizer=optimizer, epochs=3)
    with pytest.raises(NotImplementedError, match="there is nothing to commit"):
        hvd.elastic.State(optimizer=optimizer).commit()


def test_alone_it_counts_epochs_steps_and_samples(alone):
    model, data = torch.nn.Linear(1, 1), torch.arange(10.0).reshape(-1, 1)
    optimizer, sampler = distributed(model), hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, best=7)
    seen = []
    for epoch in state.epochs(2):
        read = []
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            read += x.flatten().tolist()
            assert sampler.processed_num == len(read)
        assert sorted(read) == list(range(10))
        seen.append((epoch, state.epoch, state.step, read))
    assert [each[:3] for each in seen] == [(0, 0, 3), (1, 1, 6)] and seen[0][3] != seen[1][3]
    assert (state.epoch, state.step, state.best) == (2, 6, 7)


def test_of_several_optimizers_the_first_counts_steps(alone):
    models, data = [torch.nn.Linear(1, 1) for _ in range(2)], torch.arange(8.0).reshape(-1, 1)
    optimizers, sampler = [distributed(model) for model in models], hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    state = hvd.elastic.State(a=optimizers[1], optimizer=optimizers[0], sampler=sampler)
    read = []
    for _ in state.epochs(1):
        for x in loader:
            for model, optimizer, steps in zip(models, optimizers, (1, 2), strict=True):
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
            read += x.flatten().tolist()
            assert sampler.processed_num == len(read)
    assert state.step == 2 and sorted(read) == list(range(8))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_one_pass(alone, workers):
    """A second one would be empty; what a break has left is not."""
    data = torch.arange(10)
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
    model = torch.nn.Linear(1, 1)
    optimizer = distributed(model)
    state = hvd.elastic.State(optimizer=optimizer, sampler=sampler)

    def train_on(batches):
        read = []
        for x in batches:
            optimizer.zero_grad()
            model(x[:, None].float()).sum().backward()
            optimizer.step()
            read += x.tolist()
        return read

    for epoch in state.epochs(2):
        read = train_on([next(iter(loader))])
        assert len(read) == 4
        read += train_on(loader)
        assert sorted(read) == list(range(10))
        with pytest.raises(InvalidArgumentError, match=f"one pass over the samples of epoch {epoch} but found another"):
            train_on(loader)
    assert state.step == 6


def test_a_checkpoint_goes_on_where_it_was(alone):
    model = torch.nn.Linear(1, 1)
    state = hvd.elastic.State(optimizer=distributed(model), epoch=1, step=40)
    assert list(state.epochs(3)) == [1, 2] and state.step == 40
    with pytest.raises(
        InvalidArgumentError, match="expected one loop over all epochs, or one fit, but found another one"
    ):
        next(state.epochs(4))


def test_a_result_takes_its_gradients_place_without_a_copy():
    gradient, twin = torch.ones(3), torch.full((3,), 2.0)
    addresses = gradient.data_ptr(), twin.data_ptr()
    spare = take_place(gradient, twin)
    assert gradient.tolist() == [2.0] * 3 and (spare.data_ptr(), gradient.data_ptr()) == addresses
    assert spare.tolist() == [1.0] * 3


def test_memory_that_others_see_keeps_its_place():
    flat = torch.ones(6)
    gradient, twin = flat[2:5], torch.full((3,), 2.0)
    assert take_place(gradient, twin) is twin
    assert flat.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 1.0]


def training(folder, stop=None, **given):
    """The bits of a training's end; one that stops early is as dead as a job whose hosts are gone."""
    torch.manual_seed(0)
    data = torch.randn(12, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, 2, sampler=sampler)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, schedule=schedule, seen=[], **given)
    resumed = state.resume(folder)
    state.save_every(folder, steps=2, keep=2)
    for _ in state.epochs(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            schedule.step()
            state.seen.append(batch.tolist())
            if state.step == stop:
                return None
    values = [*model.state_dict().values(), *(value for slots in optimizer.state.values() for value in slots.values())]
    return resumed, state.seen, schedule.state_dict(), [value.tolist() for value in values]


def test_a_training_goes_on_bit_for_bit_from_its_newest_file(alone, tmp_path):
    """From the middle of an epoch, with what it has of the data, and no file that is not needed."""
    whole = training(tmp_path / "whole")
    assert training(tmp_path / "cut", stop=9) is None
    assert sorted(os.listdir(tmp_path / "cut")) == ["step-000000000006.pt", "step-000000000008.pt"]
    (tmp_path / "cut" / ".step-10-1").write_bytes(b"of a process that was killed while it wrote")
    assert training(tmp_path / "cut") == (True, *whole[1:]) and whole[0] is False
    assert len(os.listdir(tmp_path / "cut")) == 2, "what a killed process has left is removed"
    with pytest.raises(InvalidArgumentError, match="expected a file with epoch, extra, .* but found epoch, model"):
        training(tmp_path / "cut", extra=1)


def undeclared(folder, every, stop=None):
    """What a training has drawn and stepped with whose schedule nobody has given, of a model with dropout and a later group."""
    torch.manual_seed(0)
    data = torch.randn(12, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    later = list(model[2].parameters())
    for parameter in later:
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20, cycle_momentum=False)
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, 2, sampler=sampler)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, seen=[])
    state.resume(folder)
    state.save_every(folder, **every)
    for _ in state.epochs(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            schedule.step()
            state.seen.append([random.random(), np.random.random(), *schedule.get_last_lr()])
            if state.step == 3:
                optimizer.add_param_group(
                    {"params": later, "lr": 0.01, "initial_lr": 0.01, "max_lr": 0.01, "min_lr": 0.001}
                )
                [parameter.requires_grad_(True) for parameter in later]
            if state.step == stop:
                return None
    return state.seen, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("every, stop", [({"steps": 2}, 5), ({"steps": 2}, 9), ({"minutes": 1e-9}, 9)])
def test_what_was_not_given_goes_on_too(every, stop, alone, tmp_path):
    """A schedule, layers that were unfrozen into a group of their own, and random numbers, as dropout draws them."""
    random.seed(1), np.random.seed(1)
    whole = undeclared(tmp_path / "whole", every)
    random.seed(1), np.random.seed(1)
    assert undeclared(tmp_path / "cut", every, stop=stop) is None
    random.seed(2), np.random.seed(2)
    assert undeclared(tmp_path / "cut", every) == whole


def test_optimizers_of_a_state_are_numbered_whatever_was_wrapped_before():
    """As on ranks that join others, which have numbered theirs in another world; here rank 1 has wrapped one more."""
    with World(2) as world:

        def on_rank(rank):
            model, critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
            dropped = [distributed(torch.nn.Linear(1, 1)) for _ in range(rank)]
            first, second = distributed(critic), distributed(model)
            dropped.clear()
            number_anew([second._mode, first._mode])
            assert second._mode._exchange.members.name_of(model.weight) == "optimizer.1.weight"
            second.zero_grad(), model(torch.ones(1, 1)).backward(), second.step()
            return model.weight.grad.item()

        assert world.run(on_rank) == [1.0, 1.0]


def test_a_commits_state_numbers_its_optimizers_whatever_was_wrapped_before(monkeypatch):
    """As above; and one that is not given has a number behind them, though it was made before."""
    with World(2) as world:
        monkeypatch.setattr(membership, "current", lambda: "a rank of an elastic job")

        def on_rank(rank):
            model, critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
            dropped = [distributed(torch.nn.Linear(1, 1)) for _ in range(rank)]
            other, optimizer = distributed(critic), distributed(model)
            dropped.clear()
            hvd.elastic.TorchState(model, optimizer)
            for each, of in ((optimizer, model), (other, critic)):
                each.zero_grad(), of(torch.ones(1, 1)).backward(), each.step()
            return optimizer._mode.order(), other._mode.order(), model.weight.grad.item(), critic.weight.grad.item()

        assert world.run(on_rank) == [(0, 1, 1.0, 1.0)] * 2


def test_optimizers_are_put_in_order_by_their_numbers():
    with World(2) as world:

        def on_rank(_rank):
            models = [torch.nn.Linear(1, 1) for _ in range(12)]
            made = [distributed(model) for model in models]
            found = hooks.others(made[0]._mode)  # those that former tests have left, too
            return [each.prefix for each in found if each.context.usable]

        assert world.run(on_rank) == [[f"optimizer.{number}" for number in range(1, 12)]] * 2


def test_two_schedules_of_a_kind_must_be_given(alone):
    model = torch.nn.Linear(1, 1)
    optimizer = distributed(model)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, each) for each in (5, 7)]
    state = hvd.elastic.State(model=model, optimizer=optimizer)
    with pytest.raises(InvalidArgumentError, match="there are 2 without one that are StepLR of optimizer. Give them"):
        next(state.epochs(1))
    next(hvd.elastic.State(model=model, optimizer=optimizer, one=schedules[0], other=schedules[1]).epochs(1))
    together = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [9])
    found = schedules_of({"optimizer": optimizer}, [])
    assert found == {"SequentialLR of optimizer": together}


def test_a_folder_that_takes_no_file_is_said_and_the_training_goes_on(alone, tmp_path, caplog):
    (tmp_path / "file").write_text("a file stands where the folder above would")
    assert training(tmp_path / "file" / "folder")[0] is False
    assert [each.split(":")[0] for each in caplog.messages] == ["save_every"] * 6


def test_a_disk_that_becomes_full_is_said_and_the_training_goes_on(alone, tmp_path, caplog):
    """Within a file: torch's archive says something else then than the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    try:
        assert training(tmp_path)[0] is False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caplog.messages) == 6 and all("could not be written: [Errno 27]" in each for each in caplog.messages)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_gone_on_from_is_said(alone, tmp_path):
    """Nothing begins anew without a word, and the message says which file it is."""
    assert training(tmp_path, stop=9) is None
    newest = tmp_path / "step-000000000008.pt"
    with pytest.raises(InvalidArgumentError, match=f"resume: expected a folder but found the file {newest}"):
        training(newest)
    whole = newest.read_bytes()
    for cut in (whole[:2000], b""):
        newest.write_bytes(cut)
        with pytest.raises(InvalidArgumentError, match=f"could not read {newest} .*go on from step-000000000006.pt"):
            training(tmp_path)


def test_a_file_with_values_of_another_shape_is_named(alone, tmp_path):
    def state(width):
        model = torch.nn.Linear(3, width)
        return hvd.elastic.State(model=model, optimizer=distributed(model))

    TorchFolder(tmp_path).write(8, state(2)._values(None), keep=1)
    newest = tmp_path / "step-000000000008.pt"
    with pytest.raises(
        InvalidArgumentError, match=f"values of 'model' in {newest} to be .* \\(RuntimeError: .*size mismatch"
    ):
        state(4).resume(tmp_path)
    assert state(2).resume(tmp_path)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"epoch": "3"}, "epoch must be a whole number, but is '3'"),
        ({"epoch": 2.5}, "epoch must be a whole number, but is 2.5"),
        ({"step": None}, "step must be a whole number, but is None"),
        ({"schedule": 0.1}, "schedule must have state_dict and load_state_dict, .* but is a float"),
    ],
)
def test_what_is_of_another_type_is_refused_by_name(given, words, alone):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=f"elastic.State: {words}"):
        hvd.elastic.State(model=model, optimizer=distributed(model), **given)


def test_files_of_another_training_are_not_taken_for_its_own(alone, tmp_path):
    """They would be what the next one goes on from, and those of this one would be the oldest."""
    assert training(tmp_path, stop=9) is None
    model = torch.nn.Linear(3, 1)
    state = hvd.elastic.State(model=model, optimizer=distributed(model))
    state.save_every(tmp_path, steps=2)
    with pytest.raises(InvalidArgumentError, match="no file behind step 0, .* but found .*step-000000000008.pt"):
        next(state.epochs(1))
    TorchFolder(tmp_path).write(7, {}, keep=1)
    assert TorchFolder(tmp_path).steps() == [7, 8]


@pytest.mark.parametrize(
    "given", [{}, {"steps": 0}, {"minutes": -1.0}, {"epochs": 0}, {"steps": 1, "keep": 0}], ids=str
)
def test_a_file_that_is_never_due_is_refused(given, alone, tmp_path):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(InvalidArgumentError, match="save_every: expected (steps=, minutes= or epochs=|keep=) above 0"):
        hvd.elastic.State(model=model, optimizer=distributed(model)).save_every(tmp_path, **given)


def test_a_file_is_due_by_steps_or_by_time_and_once_a_step():
    plan = SavingPlan(10, 1.0, 5, 100.0)
    assert [plan.is_due(step) for step in (5, 14, 15)] == [False, False, True]
    assert [plan.asks_at(step) for step in (5, 6)] == [False, True]
    assert [plan.answer(*at)[0] for at in [(6, 159.0), (6, 160.0)]] == [0, 1]
    plan.note(6, 160.0)
    assert not plan.asks_at(6) and [plan.is_due(step) for step in (15, 16)] == [False, True]
    assert [plan.answer(*at)[0] for at in [(15, 219.0), (7, 220.0)]] == [0, 1]


def test_files_are_due_at_the_ends_of_epochs(alone, tmp_path):
    """Of twelve samples in batches of five; and what was due is not again in the midst of one."""
    data = torch.randn(12, 1)
    model = torch.nn.Linear(1, 1)
    optimizer, sampler = distributed(model), hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, 5, sampler=sampler)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
    state.save_every(tmp_path, epochs=2, keep=9)
    for _ in state.epochs(5):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    assert TorchFolder(tmp_path).steps() == [6, 12]


def test_a_sampler_before_init_says_so():
    with pytest.raises(ValueError, match="ElasticSampler: init.. must be called before"):
        hvd.elastic.ElasticSampler(range(4))


class Follower:
    """Counts steps; has samples dealt in another way where a test says so."""

    def __init__(self):
        self.changes = []

    def before_draw(self):
        while self.changes:
            self.changes.pop()()


def followed(**options):
    sampler, follower = hvd.elastic.ElasticSampler(range(40), shuffle=False), Follower()
    sampler.follow(follower)
    loader = torch.utils.data.DataLoader(range(40), batch_size=2, sampler=sampler, **{"num_workers": 2, **options})
    return sampler, follower, loader


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "prefetch_factor": 3}], ids=["", "persistent"])
def test_batches_of_workers_count_when_they_are_taken(options, alone):
    """And those that are made when the samples are dealt in another way come again in the new one."""
    sampler, follower, loader = followed(**options)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches, seen = iter(loader), []
        for _ in range(3):
            seen.append(next(batches).tolist())
            sampler.finish_window(None)
        assert (seen, sampler.processed_num, len(loader)) == ([[0, 1], [2, 3], [4, 5]], 6, 20)
        assert next(batches).tolist() == [6, 7]
        follower.changes.append(lambda: sampler.deal(2, 1))  # between two steps, when the next batch is asked for
        sampler.finish_window(None)
        assert next(batches).tolist() == [9, 11]
        sampler.finish_window({1})  # rank 0 is lost within the step, and what it has drawn comes first
        sampler.deal(1, 0)
        seen = [batch.tolist() for batch in batches if sampler.finish_window(None) is None]
        assert seen == [[8, 10], *([first, first + 1] for first in range(12, 40, 2))]
        assert sampler.state_dict() == {"epoch": epoch, "processed_num": 40}
    del batches, loader


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {}, {"persistent_workers": True}], ids=["none", "", "persistent"]
)
def test_the_length_of_a_loader_is_that_of_its_pass(options, alone):
    """So that the last batch is known by it, and so is what a sum over all of them is divided by."""
    sampler, follower, loader = followed(**options)
    for epoch, last in enumerate((19, 13)):
        sampler.set_epoch(epoch)
        lengths, steps = [], []
        for number, _ in enumerate(loader):
            sampler.finish_window(None)
            lengths.append(len(loader))
            if number + 1 == len(loader) or (number + 1) % 8 == 0:
                steps.append(number)
            if number == 4:
                sampler.load_state_dict(sampler.state_dict())  # as all take rank 0's when ranks join
            if number == 7 and epoch == 1:
                follower.changes.append(lambda: sampler.deal(2, 1))
        assert len(loader) == last + 1 == len(lengths)
        assert steps == ([7, 15, 19] if epoch == 0 else [7, 13])
        assert lengths == [20] * (20 if epoch == 0 else 8) + [14] * (6 * epoch)
    with pytest.raises(InvalidArgumentError, match="one pass over"):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_begins_as_its_first_step_is_dealt(workers, alone):
    """To three ranks, one of which was lost between the last step and the next epoch, as in a metric of `survive`."""
    sampler, _, loader = followed(num_workers=workers)
    sampler.deal(3, 2)
    sampler.set_epoch(1)
    sampler.load_state_dict(sampler.state_dict())
    batches = iter(loader)
    assert next(batches).tolist() == [2, 5]
    sampler.finish_window({0, 2})
    sampler.deal(2, 1)
    seen = [batch.tolist() for batch in batches if sampler.finish_window(None) is None]
    assert seen == [[4, 7], *([first, first + 2] for first in range(9, 37, 4)), [37, 39]]


def test_a_rank_that_gives_its_batches_up_draws_them_again(alone):
    """As a script does that leaves its loop within an epoch."""
    sampler, _, loader = followed()
    assert next(iter(loader)).tolist() == [0, 1]
    sampler.finish_window(None)
    assert next(iter(loader)).tolist() == [2, 3]


@needs.machine(
    "" if "in_order" in signature(torch.utils.data.DataLoader).parameters else "needs torch 2.6: RINGTRAIN_TORCH"
)
def test_a_loader_that_returns_batches_in_any_order_is_refused(alone):
    with pytest.raises(UnsupportedError, match="in_order of the loader must be True, .* but is False"):
        iter(followed(in_order=False)[2])


def test_a_loader_of_another_kind_is_refused(alone):
    class Other(torch.utils.data.dataloader._MultiProcessingDataLoaderIter):
        pass

    loader = followed()[2]
    loader._get_iterator = lambda: Other(loader)
    with pytest.raises(UnsupportedError, match="its iterator is a .*Other. Use DataLoader, or num_workers=0"):
        iter(loader)
