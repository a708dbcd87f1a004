"""The optimizer's state with ``ShardedStep`` in torch's own checkpoints: saved shard by shard on some ranks, loaded on others."""

import copy
import math
import pickle
import subprocess
import threading

import pytest
import torch
from environments import PATHS, python_with, rank_environment, ringtrainrun
from test_torch_sharded_step import OPTIMIZERS, START, STEPS, assert_all_equal, bits_of, train, wrapped

import ringtrain.torch as hvd
from ringtrain._training.shares import boxes
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.testing import World
from ringtrain.torch.modes import sharded_step

pytestmark = [pytest.mark.timeout(700), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(autouse=True)
def checkpoints():
    """torch's, which takes as long to import as torch itself: only where these tests run, not wherever they are collected."""
    global checkpoint, by_name
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as by_name


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Several of them, and parameters of which two ranks or more have a part."""
    monkeypatch.setattr(sharded_step, "BUCKET_BYTES", 2048)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (1, 5)], ids=str)
def test_boxes_are_a_run_of_elements(shape):
    count = math.prod(shape)
    whole = torch.arange(count).reshape(shape)
    for first in range(count + 1):
        for last in range(first, count + 1):
            found = boxes(shape, first, last)
            parts = [whole[within(box)] for box in found]
            assert [int(each) for part in parts for each in part.reshape(-1)] == list(range(first, last))
            assert [box.elements for box in found] == [part.numel() for part in parts]
            assert len(found) <= max(1, 2 * len(shape) - 1)


def within(box):
    return tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))


# ---- torch's own planners, on ranks that are threads ----


one_at_a_time = (
    threading.Lock()
)  # a planner of torch's reads names as an older version wrote them, for all of its process


def load_into(state, folder):
    with one_at_a_time:
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)


def save(states, folder):
    """What ``checkpoint.save`` does on ranks that are processes."""
    planners = [checkpoint.DefaultSavePlanner() for _ in states]
    writers = [checkpoint.FileSystemWriter(folder) for _ in states]
    for rank, (planner, writer, state) in enumerate(zip(planners, writers, states, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
    plans = [
        writer.prepare_local_plan(planner.create_local_plan())
        for planner, writer in zip(planners, writers, strict=True)
    ]
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    written = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for plan, planner, writer in zip(plans, planners, writers, strict=True)
    ]
    writers[0].finish(metadata, written)
    return plans


def saved_by(size, make, folder):
    """Trains, and saves on the way; returns the parameters at the save and at the end, and the plans of what is written."""
    models = {}

    def begin(rank):
        model, optimizer = wrapped(make)
        train(0, model, optimizer, range(2))
        optimizer.flush()
        models[rank] = copy.deepcopy(model.state_dict())
        return optimizer.sharded_state_dict(), model, optimizer

    with World(size) as world:
        begun = world.run(begin)
        plans = save([{"optimizer": state} for state, _, _ in begun], folder)
        _go_on(world, [each[1:] for each in begun])
    return models[0], bits_of(begun[0][1]), plans


def _go_on(world, trained):
    def go_on(rank):
        train(0, *trained[rank], range(2, STEPS))
        trained[rank][1].flush()

    world.run(go_on)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD with all", "Adagrad", "ASGD", "SGD"])
def test_shards_of_some_ranks_are_loaded_by_others(name, sizes, tmp_path):
    at_save, expected, plans = saved_by(sizes[0], OPTIMIZERS[name], tmp_path)
    shards = [item for plan in plans for item in plan.items if item.type.name == "SHARD"]
    if name != "SGD":
        assert all(any(item.type.name == "SHARD" for item in plan.items) for plan in plans)
        assert len(shards) > len(list(START.parameters()))  # some of them have boxes on several ranks

    def load(rank, trains):
        model, optimizer = wrapped(OPTIMIZERS[name])
        model.load_state_dict(at_save)
        if trains:  # what is there by then is written over
            train(0, model, optimizer, [9])
            optimizer.flush()
            model.load_state_dict(at_save)
        state = {"optimizer": optimizer.sharded_state_dict()}
        load_into(state, tmp_path)
        optimizer.load_sharded_state_dict(state["optimizer"])
        train(0, model, optimizer, range(2, STEPS))
        optimizer.flush()
        return bits_of(model)

    with World(sizes[1]) as world:
        for trains in (False, True):
            assert_all_equal(world.run(load, trains), expected)


def test_an_optimizer_that_has_all_of_its_state_loads_shards(tmp_path):
    """By torch's own names."""
    at_save, expected, _ = saved_by(4, OPTIMIZERS["AdamW"], tmp_path)
    model = copy.deepcopy(START)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    state = {"optimizer": by_name.get_optimizer_state_dict(model, optimizer)}
    load_into(state, tmp_path)
    by_name.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    model.load_state_dict(at_save)
    train(0, model, optimizer, range(2, STEPS))
    assert_all_equal([bits_of(model)], expected)


def test_shards_are_loaded_from_whole_state(tmp_path):
    model = copy.deepcopy(START)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(0, model, optimizer, range(2))
    at_save = copy.deepcopy(model.state_dict())
    checkpoint.save(
        {"optimizer": by_name.get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True
    )
    train(0, model, optimizer, range(2, STEPS))

    def load(rank):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"])
        model.load_state_dict(at_save)
        state = {"optimizer": optimizer.sharded_state_dict()}
        load_into(state, tmp_path)
        optimizer.load_sharded_state_dict(state["optimizer"])
        train(0, model, optimizer, range(2, STEPS))
        optimizer.flush()
        return bits_of(model)

    with World(2) as world:
        assert_all_equal(world.run(load), bits_of(model))


def test_asking_for_the_shares_changes_nothing():
    """Neither before the first step nor between two."""

    def on_rank(rank, asks):
        model, optimizer = wrapped(OPTIMIZERS["SGD with all"])
        for step in range(STEPS):
            if asks:
                optimizer.sharded_state_dict()
            train(rank, model, optimizer, [step])
        optimizer.flush()
        return bits_of(model)

    with World(2) as world:
        expected = world.run(on_rank, False)
        assert_all_equal(world.run(on_rank, True), expected[0])


def test_a_share_says_what_can_be_done_with_it():
    def on_rank(rank):
        model, optimizer = wrapped(OPTIMIZERS["AdamW"])
        train(rank, model, optimizer, range(2))
        share = next(iter(optimizer.sharded_state_dict()["state"].values()))["exp_avg"]
        assert "StateShard('" in repr(share)
        with pytest.raises(UnsupportedError, match=r"expected torch\.distributed\.checkpoint\.save or load"):
            share.norm()
        with pytest.raises(
            UnsupportedError, match=r"sharded_state_dict '0\.weight': expected .* but found aten\._foreach_norm"
        ):
            torch._foreach_norm([share])
        with pytest.raises(UnsupportedError, match="a copy or a pickle"):
            pickle.dumps(share)
        state = optimizer.sharded_state_dict()
        state["param_groups"][0]["params"].pop()
        with pytest.raises(InvalidArgumentError, match="Load the state of this model"):
            optimizer.load_sharded_state_dict(state)
        plain = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        with pytest.raises(InvalidArgumentError, match="must have mode=ShardedStep"):
            plain.sharded_state_dict()
        with pytest.raises(InvalidArgumentError, match="must have mode=ShardedStep"):
            plain.load_sharded_state_dict({})

    with World(2) as world:
        world.run(on_rank)


# ---- ranks that are processes ----

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
import ringtrain.torch as hvd

folder, loads = sys.argv[1], sys.argv[2] == "load"
dist.init_process_group("ringtrain")
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 301), torch.nn.Tanh(), torch.nn.Linear(301, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=hvd.ShardedStep(model))

def train(steps):
    for step in steps:
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

def state():
    optimizer.flush()
    return {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}

if loads:
    loaded = state()
    checkpoint.load(loaded, checkpoint_id=folder)
    model.load_state_dict(loaded["model"])
    optimizer.load_sharded_state_dict(loaded["optimizer"])
else:
    train(range(3))
    checkpoint.save(state(), checkpoint_id=folder)
train(range(3, 6))
optimizer.flush()
if hvd.rank() == 0:
    print("ends with", *(float(each.double().sum()).hex() for each in model.parameters()))
"""


@pytest.mark.tcp
def test_four_processes_save_and_two_load(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)

    def run(ranks, what):
        line = [*ringtrainrun("tcp", ranks, python_with("tcp")), str(script), str(tmp_path / "checkpoint"), what]
        environment = rank_environment(PYTHONPATH=PATHS)
        done = subprocess.run(line, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return next(line for line in done.stdout.splitlines() if "ends with" in line).partition("ends with")[2]

    assert run(4, "save") == run(2, "load")
    assert len(list((tmp_path / "checkpoint").glob("*.distcp"))) == 4
