"""``Guard``: a script with DistributedDataParallel under ringtrainrun --elastic, whose ranks are killed and come again."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from applied_samples import require_each_sample_once
from environments import python_with, rank_environment, transport_of
from torch.nn.parallel import DistributedDataParallel

from ringtrain.errors import InvalidArgumentError
from ringtrain.torch.distributed import Guard

ROOT = Path(__file__).parents[2]
SAMPLES, RANKS = 120, 3
# Each fifth step one of the ranks is killed within it, if two are there at least: before its gradients have left.
PROGRAM = f"""
import hashlib, json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
import ringtrain.torch as hvd
from ringtrain.torch.distributed import Guard

folder, deaths, epochs = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


class Data(Dataset):
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        return index, torch.randn(3, generator=drawn), torch.randn(1, generator=drawn)


def strike():
    rank, size = dist.get_rank(), dist.get_world_size()
    mark = folder / f"death-{{guard.step}}"
    due = guard.step % 5 == 4 and len(list(folder.glob("death-*"))) < deaths and not mark.exists()
    if due and size > 1 and rank == guard.step // 5 % size:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("ringtrain", init_method="ringtrain://")
torch.manual_seed(os.getpid())  # ranks begin with different parameters
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
sampler = hvd.elastic.ElasticSampler(Data(), seed=3)
loader = DataLoader(Data(), batch_size=2, sampler=sampler)
guard = Guard(model, optimizer, sampler)
for epoch in guard.epochs(epochs):
    for indices, x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        strike()
        loss.backward()
        optimizer.step()
        os.write(1, f"applied {{epoch}} {{json.dumps(indices.tolist())}}\\n".encode())
        time.sleep(0.05)
    losses = guard.survive(lambda loss=loss: hvd.allgather(loss.detach().reshape(1), name="losses"))
    total = torch.ones(1)
    guard.survive(lambda: dist.all_reduce(total.fill_(1.0)))
    assert total.item() == dist.get_world_size() == len(losses)
bits = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
os.write(1, f"end {{guard.step}} {{hashlib.sha256(bits).hexdigest()}}\\n".encode())
dist.destroy_process_group()
"""


def run(folder: Path, deaths: int, epochs: int, *flags: str) -> subprocess.CompletedProcess:
    script = folder / "train.py"
    script.write_text(PROGRAM)
    line = [python_with("tcp"), "-m", "ringtrain.launch", *transport_of("tcp"), *flags, python_with("tcp"), script]
    return subprocess.run(
        [*map(str, line), str(folder), str(deaths), str(epochs)], capture_output=True, text=True, timeout=600,
        env=rank_environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])),
    )  # fmt: skip


@pytest.mark.tcp
@pytest.mark.timeout(700)
@pytest.mark.parametrize("deaths, epochs", [(2, 4), pytest.param(20, 100, marks=pytest.mark.long)])
def test_ranks_that_are_killed_cost_no_step(deaths: int, epochs: int, tmp_path: Path) -> None:
    done = run(tmp_path, deaths, epochs, "--elastic", "-np", f"1:{RANKS}", "--blacklist-cooldown-range", "1", "1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list(tmp_path.glob("death-*"))) == deaths
    require_each_sample_once(done, SAMPLES, epochs, RANKS - 1)
    ends = set(re.findall(r"^\[\d+\] end (.*)$", done.stdout, re.MULTILINE))
    assert len(ends) == 1, ends


@pytest.mark.tcp
@pytest.mark.timeout(700)
def test_a_job_of_a_fixed_size_trains_as_ever(tmp_path: Path) -> None:
    done = run(tmp_path, 0, 4, "-np", "2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    require_each_sample_once(done, SAMPLES, 4, RANKS - 1)
    assert len(set(re.findall(r"^\[\d+\] end (.*)$", done.stdout, re.MULTILINE))) == 1


REFUSED = """
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import ringtrain.torch as hvd
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.torch.distributed import Guard

def refused(kind, words, call):
    try:
        call()
    except kind as problem:
        assert words in str(problem), problem
    else:
        raise AssertionError(words)

refused(ValueError, "MASTER_ADDR expected", lambda: dist.init_process_group("ringtrain"))
hvd.init()
place = dict(rank=hvd.rank(), world_size=hvd.size())
shared = "file://" + __file__ + ".store"
refused(
    InvalidArgumentError, "must not meet by torch's store",
    lambda: dist.init_process_group("ringtrain", init_method=shared, **place),
)
dist.init_process_group("ringtrain", init_method="ringtrain://")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
refused(InvalidArgumentError, "must be a DistributedDataParallel, but is a Linear", lambda: Guard(model, optimizer))
wrapped = DistributedDataParallel(model)
sampler = torch.utils.data.distributed.DistributedSampler(data)
refused(InvalidArgumentError, "found torch's DistributedSampler", lambda: Guard(wrapped, optimizer, sampler))
alone = [torch.zeros(1) for _ in range(2)]
for call in (
    lambda: dist.all_reduce(torch.ones(1)), dist.barrier, lambda: dist.broadcast(torch.ones(1), 0),
    lambda: dist.all_gather(alone, torch.ones(1)), lambda: dist.broadcast_object_list([1], 0),
    lambda: dist.all_gather_into_tensor(torch.zeros(2), torch.ones(1)), lambda: dist.all_gather_object([0, 0], 1),
):
    refused(UnsupportedError, "torch.distributed: in an elastic job ranks must exchange tensors within Guard.epochs()", call)
refused(UnsupportedError, "by barrier()", dist.monitored_barrier)
other = DistributedDataParallel(torch.nn.Linear(2, 1))
refused(InvalidArgumentError, "as critic", lambda: Guard(wrapped, optimizer, critic=other))
refused(UnsupportedError, "has its default group alone", lambda: dist.new_group([0, 1]))
refused(UnsupportedError, "within Guard.epochs()", lambda: dist.send(torch.ones(1), 1 - dist.get_rank()))
hooked = DistributedDataParallel(torch.nn.Linear(2, 1))
hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
refused(UnsupportedError, "a communication hook", lambda: Guard(hooked, torch.optim.SGD(hooked.parameters(), lr=0.1)))
mesh = torch.distributed.device_mesh.DeviceMesh.from_group(dist.group.WORLD, "cpu")
sharded = torch.nn.Linear(2, 1)
sharded.weight = torch.nn.Parameter(DTensor.from_local(torch.zeros(1, 2), mesh, run_check=False))
refused(UnsupportedError, "parameters are sharded", lambda: Guard(sharded, optimizer))
guard = Guard(wrapped, optimizer)
for call in (wrapped.register_comm_hook, wrapped._register_builtin_comm_hook):
    refused(UnsupportedError, "a communication hook", lambda: call(None, default_hooks.fp16_compress_hook))
for epoch in guard.epochs(1):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
print("refused", flush=True)
"""


@pytest.mark.tcp
@pytest.mark.timeout(700)
def test_what_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(REFUSED)
    line = [
        python_with("tcp"),
        "-m",
        "ringtrain.launch",
        *transport_of("tcp"),
        "--elastic",
        "-np",
        "2",
        python_with("tcp"),
        script,
    ]
    done = subprocess.run(
        list(map(str, line)), capture_output=True, text=True, timeout=600,
        env=rank_environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])),
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("refused") == 2, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_group_of_another_backend(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        with pytest.raises(InvalidArgumentError, match="of the backend 'ringtrain', but is a"):
            Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        dist.destroy_process_group()
