"""``ShardedGuard``: FSDP2 in replicas, each a torchrun in a slot of ringtrainrun; some die, and come again."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from applied_samples import require_each_sample_once
from environments import python_with, rank_environment, transport_of

from ringtrain._training import sharding
from ringtrain.errors import InvalidArgumentError, NotInitializedError, UnsupportedError
from ringtrain.torch.distributed import Guard, ReplicaSampler, ShardedGuard
from ringtrain.torch.distributed.replica_gradients import local

ROOT = Path(__file__).parents[2]
SAMPLES, SEED, PROCESSES, BATCH = 120, 3, 2, 2
COMMON = f"""
import hashlib, json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from ringtrain.torch.distributed import ReplicaSampler, ShardedGuard

folder, deaths, epochs, backend = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


class Data(Dataset):
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        return index, torch.randn(3, generator=drawn), torch.randn(1, generator=drawn)


dist.init_process_group(backend)
torch.manual_seed(int(os.environ["RINGTRAIN_RANK"]))  # replicas begin with different parameters
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = ReplicaSampler(Data(), seed={SEED})
loader = DataLoader(Data(), batch_size={BATCH}, sampler=sampler)
"""
END = """
bits = b"".join(each.full_tensor().detach().numpy().tobytes() for each in model.parameters())
os.write(1, f"end {guard.step} {hashlib.sha256(bits).hexdigest()}\\n".encode())
dist.destroy_process_group()
"""
# Each fifth step a process is killed within it, if there are two replicas at least: behind or before its backward pass.
DEATHS = (
    COMMON
    + """
def strike(is_behind_pass):
    mark = folder / f"death-{guard.step}"
    due = guard.step % 5 == 4 and len(list(folder.glob("death-*"))) < deaths and not mark.exists()
    turn = guard.step // 5
    due = due and is_behind_pass == (turn // 2 % 2 == 0)
    if due and guard.replicas > 1 and (guard.replica, dist.get_rank()) == ((turn + turn // 2) % guard.replicas, 1 - turn % 2):
        mark.touch()
        time.sleep(0.2)  # the others of its replica come to where it is
        os.kill(os.getpid(), signal.SIGKILL)


guard = ShardedGuard(model, optimizer, sampler)
guard.on_change(lambda former, now: os.write(1, f"change {former} {now}\\n".encode()))
for epoch in guard.epochs(epochs):
    for indices, x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        strike(False)
        loss.backward()
        os.write(1, f"applied {epoch} {json.dumps(indices.tolist())}\\n".encode())  # all have what it contributes
        strike(True)
        optimizer.step()
        time.sleep(0.05 if guard.replicas > 1 else 0.3)  # so that the killed one comes back before the end
    assert guard.allgather_object(guard.step) == [guard.step] * (2 * guard.replicas)
"""
    + END
)
# Two passes a step, gradients that are clipped, a schedule, and a layer that is trained from the second epoch on.
EQUAL = (
    COMMON
    + """
import torch.distributed.checkpoint as dcp

schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
model[2].bias.requires_grad_(False)
guard = ShardedGuard(model, optimizer, sampler, schedule)
for epoch in guard.epochs(epochs):
    model[2].bias.requires_grad_(epoch > 0)
    for number, (indices, x, y) in enumerate(loader):
        model.set_requires_gradient_sync(number % 3 > 0)  # of three passes the first sends nothing
        (model(x) - y).square().mean().backward()
        if number % 3 == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    places = guard.allgather_object((guard.replica, dist.get_rank()))
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)], places
if guard.replica == 0:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "checkpoint")
"""
    + END
)


def run(folder: Path, program: str, deaths: int, epochs: int, backend: str, *flags: str) -> subprocess.CompletedProcess:
    script = folder / "train.py"
    script.write_text(program)
    python = python_with("tcp")
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", PROCESSES]
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), *flags, *torchrun, script]
    done = subprocess.run(
        [*map(str, line), str(folder), str(deaths), str(epochs), backend], capture_output=True, text=True, timeout=600,
        env=rank_environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done


def ends_of(done: subprocess.CompletedProcess) -> list[str]:
    return re.findall(r"^\[\d+\] end (.*)$", done.stdout, re.MULTILINE)


@pytest.mark.tcp
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "replicas, deaths, epochs, backend",
    [(2, 1, 5, "ringtrain"), pytest.param(3, 20, 160, "gloo", marks=pytest.mark.long)],
)
def test_replicas_of_which_a_process_is_killed_cost_no_step(
    replicas: int, deaths: int, epochs: int, backend: str, tmp_path: Path
) -> None:
    flags = ("--elastic", "-np", f"1:{replicas}", "--blacklist-cooldown-range", "1", "1")
    done = run(tmp_path, DEATHS, deaths, epochs, backend, *flags)
    assert len(list(tmp_path.glob("death-*"))) == deaths
    require_each_sample_once(done, SAMPLES, epochs, replicas * PROCESSES - 1)
    assert "has joined after step" in done.stderr and f"change {replicas} {replicas - 1}" in done.stdout
    assert len(set(ends_of(done))) == 1, ends_of(done)


class Data(torch.utils.data.Dataset):
    """The programs'."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return index, torch.randn(3, generator=drawn), torch.randn(1, generator=drawn)


def one_process(epochs: int, batch: int) -> dict[str, torch.Tensor]:
    """What ``EQUAL`` comes to."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    data = Data()
    for epoch in range(epochs):
        model[2].bias.requires_grad_(epoch > 0)
        order = sharding.order(SAMPLES, SEED, epoch).tolist()
        for number, begin in enumerate(range(0, SAMPLES, batch)):
            _, x, y = zip(*(data[index] for index in order[begin : begin + batch]), strict=True)
            (model(torch.stack(x)) - torch.stack(y)).square().mean().backward()
            if number % 3 == 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return model.state_dict()


@pytest.mark.tcp
@pytest.mark.timeout(700)
@pytest.mark.parametrize("backend", ["ringtrain", pytest.param("gloo", marks=pytest.mark.long)])
def test_replicas_equal_one_process(backend: str, tmp_path: Path) -> None:
    ends = ends_of(run(tmp_path, EQUAL, 0, 3, backend, "-np", "2"))
    assert len(ends) == 2 * PROCESSES and len(set(ends)) == 1, ends
    expected = one_process(3, 2 * PROCESSES * BATCH)
    found = {"model": {name: torch.empty_like(each) for name, each in expected.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there, as is meant
        dcp.load(found, checkpoint_id=tmp_path / "checkpoint")
    for name, each in expected.items():
        torch.testing.assert_close(found["model"][name], each, rtol=1e-5, atol=1e-6)


# ---- one replica of one process: this one ----


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fully_sharded(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard  # here: torch has it from 2.6 on

    return fully_shard(model)


def sharded() -> torch.nn.Module:
    return fully_sharded(torch.nn.Linear(3, 1))


def sgd_of(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.usefixtures("alone")
def test_one_replica_trains_and_counts() -> None:
    model = sharded()
    optimizer, sampler = sgd_of(model), ReplicaSampler(Data(), shuffle=False)
    guard = ShardedGuard(model, optimizer, sampler, seen=0)
    before = model.weight.full_tensor().clone()
    for _ in guard.epochs(2):
        for indices, x, y in torch.utils.data.DataLoader(Data(), batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            guard.seen += len(indices)
        assert guard.allgather_object("a") == ["a"]
    assert (guard.step, guard.epoch, guard.seen, guard.replica, guard.replicas) == (30, 2, 240, 0, 1)
    assert not torch.equal(model.weight.full_tensor(), before)
    with pytest.raises(InvalidArgumentError, match="found another one, in which replicas that join would not be"):
        next(guard.epochs(3))


@pytest.mark.usefixtures("alone")
def test_what_is_refused() -> None:
    whole, model = torch.nn.Linear(3, 1), sharded()
    sampler = ReplicaSampler(Data())
    plain = torch.utils.data.RandomSampler(Data())
    for given, words in [
        ((whole, sgd_of(whole), sampler), "'weight' is a Parameter. Call fully_shard"),
        ((model, sgd_of(whole), sampler), "the optimizer must train parameters of the model, but has others"),
        ((model, sgd_of(model), plain), "the sampler must be a ReplicaSampler, but is a RandomSampler"),
        ((model, model, sampler), "the optimizer must be one of torch.optim"),
        ((None, sgd_of(model), sampler), r"the model must be a torch.nn.Module"),
    ]:
        with pytest.raises(InvalidArgumentError, match=words):
            ShardedGuard(*given)
    with pytest.raises(InvalidArgumentError, match="epoch must be 0 at least"):
        ShardedGuard(model, sgd_of(model), sampler, epoch=-1)
    with pytest.raises(UnsupportedError, match="Use ringtrain.torch.distributed.ShardedGuard"):
        Guard(model, sgd_of(model))


@pytest.mark.usefixtures("alone")
def test_what_a_replica_takes_over() -> None:
    """A schedule that nobody has given, what is frozen, a group that came later; on another model in the place of a replica."""

    def trained(seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(sharded(), torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
        model = fully_sharded(model)
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        sampler = ReplicaSampler(Data())
        guard = ShardedGuard(model, optimizer, sampler, seen=0)
        guard._state.begin()
        guard._replica.together(guard._others.enter)
        loader = torch.utils.data.DataLoader(Data(), batch_size=8, sampler=sampler)
        for number, (_, x, y) in zip(range(steps), loader, strict=False):
            if number == 2:
                model[0].bias.requires_grad_(False)
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.3})
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            schedule.step()
            guard.seen += 1
        return model, optimizer, schedule, guard

    (model, optimizer, schedule, guard), (other, others, later, joins) = trained(0, 5), trained(1, 0)
    joins._state._take_over(pickle.loads(pickle.dumps(guard._state._own())))
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(local(one), local(two))
    assert [each.requires_grad for each in other.parameters()] == [each.requires_grad for each in model.parameters()]
    assert [len(group["params"]) for group in others.param_groups] == [2, 2]
    assert [group["lr"] for group in others.param_groups] == [group["lr"] for group in optimizer.param_groups]
    for one, two in zip(optimizer.state.values(), others.state.values(), strict=True):
        assert all(
            torch.equal(local(one[name]), local(two[name])) and type(one[name]) is type(two[name]) for name in one
        )
    assert (later.last_epoch, joins.step, joins.seen) == (schedule.last_epoch, guard.step, guard.seen) == (5, 5, 5)
    assert joins._state.outline(1) == guard._state.outline(1)


@pytest.mark.usefixtures("alone")
def test_a_step_without_samples_and_a_second_guard_are_refused() -> None:
    model = sharded()
    optimizer, sampler = sgd_of(model), ReplicaSampler(Data())
    guard = ShardedGuard(model, optimizer, sampler)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(
        InvalidArgumentError, match="a step must have samples of the guard's sampler, but none was drawn"
    ):
        optimizer.step()
    with pytest.raises(InvalidArgumentError, match="expected one guard but found another one with this sampler"):
        ShardedGuard(model, sgd_of(model), sampler)
    with pytest.raises(
        InvalidArgumentError, match="names must not be those of its methods, or private, but replicas is"
    ):
        ShardedGuard(model, sgd_of(model), ReplicaSampler(Data()), replicas=5)
    for _ in guard.epochs(1):
        next(iter(torch.utils.data.DataLoader(Data(), batch_size=8, sampler=sampler)))
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        with pytest.raises(InvalidArgumentError, match="must train parameters of the model, but has others"):
            optimizer.step()


def test_there_must_be_a_default_group() -> None:
    with pytest.raises(NotInitializedError, match="init_process_group must be called before"):
        ReplicaSampler(Data())
    whole = torch.nn.Linear(3, 1)
    with pytest.raises(NotInitializedError, match="torch's default group must have the processes of this replica"):
        ShardedGuard(whole, sgd_of(whole), None)
