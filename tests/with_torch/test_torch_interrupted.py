"""An exception of one rank in the middle of a wait, as Ctrl-C in a notebook raises: what it leaves, and how one goes on."""

import sys
import threading

import pytest
import torch
from modes import in_mode
from torch_models import assert_all_close, assert_replicas_equal, batches, mean_square, network, parameters, share

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain import testing
from ringtrain._runtime.pending import Operation

pytestmark = [pytest.mark.timeout(120)]


@pytest.fixture
def interrupted(monkeypatch):
    """Has the first wait of a rank's thread raise KeyboardInterrupt while the others have not come; returns the exception."""
    wait, first, alone = Operation.wait, set(), threading.Barrier(2)

    def raising(operation, *arguments):
        thread = threading.current_thread()
        if thread in first:
            first.remove(thread)
            raise KeyboardInterrupt
        return wait(operation, *arguments)

    monkeypatch.setattr(Operation, "wait", raising)

    def run(rank, function):
        kept = None
        if rank == 0:
            first.add(threading.current_thread())
            try:
                function()
            except KeyboardInterrupt:
                kept = sys.exc_info()  # with its frames, as a notebook keeps the last error
        alone.wait(60)
        if rank != 0:
            function()
        return kept

    return run


def sgd(trained):
    return torch.optim.SGD(trained, lr=0.1)


def model_and_batch(rank):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    return model, optimizer, *share(batches(2)[0], rank, 2)


MODES = {
    "plain": {},
    "predivided": {"gradient_predivide_factor": 2.0},
    "int8": {"compression": hvd.Compression.int8},
    "buckets": {"gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_goes_on_after_an_interrupted_backward(interrupted, mode):
    """The others are in the round, and so is this rank as soon as it asks anything of the optimizer."""
    start, data = network(torch.float64), batches(2, torch.float64)

    def on_rank(rank):
        model = network(torch.float64)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **in_mode(MODES[mode]))
        losses = (mean_square(model(x), y) for x, y in (share(batch, rank, 2) for batch in data))
        next(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = interrupted(rank, next(losses).backward)
        assert (kept is None) == (rank != 0)
        optimizer.step()
        optimizer.zero_grad()
        next(losses).backward()
        optimizer.step()
        assert_replicas_equal(parameters(model))
        return parameters(model)

    with testing.World(2) as world:
        found, *_ = world.run(on_rank)
    optimizer = sgd(start.parameters())
    for x, y in data[:3]:
        optimizer.zero_grad()
        mean_square(start(x), y).backward()
        optimizer.step()
    assert_all_close(found, parameters(start), **({"rtol": 0.1, "atol": 0.01} if mode == "int8" else {}))


def test_a_step_that_only_the_interrupted_rank_gives_up_is_told(interrupted):
    def on_rank(rank):
        model, optimizer, x, y = model_and_batch(rank)
        kept = interrupted(rank, mean_square(model(x), y).backward)
        if kept is None:
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(rt.errors.MismatchError, match="number of steps .* is 0 on rank 0 and 1 on rank 1"):
            mean_square(model(x), y).backward()
        del kept

    with testing.World(2) as world:
        world.run(on_rank)


def test_another_pass_behind_an_interrupted_one_is_refused(interrupted):
    """Its gradients would be added to what is on its way."""

    def on_rank(rank):
        model, optimizer, x, y = model_and_batch(rank)
        kept = interrupted(rank, mean_square(model(x), y).backward)
        if kept is not None:
            with pytest.raises(
                rt.errors.InvalidArgumentError, match="expected zero_grad.. or step.. of this optimizer"
            ):
                mean_square(model(x), y).backward()
        optimizer.zero_grad()
        mean_square(model(x), y).backward()
        optimizer.step()
        assert_replicas_equal(parameters(model))

    with testing.World(2) as world:
        world.run(on_rank)
