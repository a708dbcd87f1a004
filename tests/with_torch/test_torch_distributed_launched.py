"""The backend "ringtrain" on ranks that are processes: torch's own cases, a mesh of four ranks, and a rank that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from environments import python_with, rank_environment, ringtrainrun

pytestmark = [pytest.mark.long, pytest.mark.tcp]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE = 120.0
LAUNCHERS = {
    # Time for those that are left to say what they met, before the agent ends them.
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--monitor-interval", "5"],
    "ringtrainrun": None,
}
# What a program needs before torch 2.5, which finds no backend by itself.
REGISTERED = "import ringtrain.torch.distributed\n" if torch.__version__ < "2.5" else ""
each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


def run(launcher: str, program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """A program on four ranks."""
    script = folder / "train.py"
    script.write_text(REGISTERED + program)
    line = ringtrainrun("tcp", 4, python_with("tcp"))
    if launcher == "torchrun":
        line = [python_with("tcp"), *LAUNCHERS[launcher]]
    return subprocess.run(
        [*line, str(script), *arguments], capture_output=True, text=True, timeout=PATIENCE,
        env=rank_environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip


@pytest.mark.timeout(2400)
def test_torchs_own_cases() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "torchs_own_cases.py")], capture_output=True, text=True, timeout=2300,
        env=rank_environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])),
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["failed"], json.dumps(found["failed"], indent=1)
    assert len(found["passed"]) >= 190, found["passed"]
    print("left out:", json.dumps(found["left out"] | found["skipped by torch"], indent=1))


MESH = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
try:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, DTensor
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed._tensor import Partial, Replicate, Shard, distribute_tensor, DTensor

dist.init_process_group("ringtrain")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "share"))
assert list(mesh.get_coordinate()) == [rank // 2, rank % 2]
sums = {}
for name in ("copy", "share"):
    number = torch.tensor([float(1 << rank)])
    dist.all_reduce(number, group=mesh.get_group(name))
    sums[name] = int(number)
assert sums == {"copy": (1 << rank % 2) | (1 << rank % 2 + 2), "share": 3 << 2 * (rank // 2)}, sums

torch.manual_seed(0)
whole = torch.randn(8, 6)
dealt = distribute_tensor(whole, mesh, [Shard(1), Shard(0)])
assert dealt.to_local().shape == (4, 3) and torch.equal(dealt.full_tensor(), whole)
share = DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [Replicate(), Partial()])
assert torch.equal(share.full_tensor(), torch.full((2, 3), 4.0 * (rank // 2) + 1))

# A step of FSDP2, which copies between hosts and deals within: as one process with all batches makes it.
def make():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))

def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()

x = torch.randn(4, 2, 6)
one, dealt = make(), make()
step(one, x.reshape(8, 6))
fully_shard(dealt, mesh=mesh)
step(dealt, x[rank])
for ours, wanted in zip(dealt.parameters(), one.parameters(), strict=True):
    torch.testing.assert_close(ours.full_tensor(), wanted)
dist.destroy_process_group()
os.write(1, b"right\\n")
"""


# DDP that is compiled whole or in part, and a graph that is broken around a collective, against the same without a compiler.
COMPILED = """
import os, torch, torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("ringtrain")
rank, size = dist.get_rank(), dist.get_world_size()

def train(wrap):
    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(size * step + rank)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]

def compiled(function, **settings):
    return torch.compile(function, backend="aot_eager", **settings)

wanted = train(DistributedDataParallel)
for splits in (True, False):
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = splits
    for wrap in (lambda model: compiled(DistributedDataParallel(model)), lambda model: DistributedDataParallel(compiled(model))):
        for ours, plain in zip(train(wrap), wanted, strict=True):
            torch.testing.assert_close(ours, plain)

@compiled
def broken(x):
    work = dist.all_reduce(x, async_op=True)
    torch._dynamo.graph_break()
    work.wait()
    return 2 * x

def whole(x):
    return 2 * collectives.all_reduce(x, "sum", dist.group.WORLD)

assert broken(torch.ones(3)).tolist() == compiled(whole, fullgraph=True)(torch.ones(3)).tolist() == [2.0 * size] * 3
dist.destroy_process_group()
os.write(1, b"right\\n")
"""


def test_compiled_programs_train_as_others_do(tmp_path: Path) -> None:
    done = run("torchrun", COMPILED, tmp_path)
    assert done.returncode == 0 and done.stdout.count("right") == 4, done.stdout + done.stderr


# The schedules of torch.distributed.pipelining, against one process that has all parts.
PIPELINES = """
import os, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B

dist.init_process_group("ringtrain")
rank, size = dist.get_rank(), dist.get_world_size()

def make(parts):
    torch.manual_seed(3)
    return [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()).double() for _ in range(parts)]

torch.manual_seed(1)
batches, goals = torch.randn(4, 16, 6).double(), torch.randn(4, 16, 6).double()
loss_of = torch.nn.functional.mse_loss
for schedule, per_rank in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
    parts = size * per_rank
    alone = torch.nn.Sequential(*make(parts))
    of_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    modules = {part: module for part, module in enumerate(make(parts)) if part % size == rank}
    stages = [PipelineStage(module, part, parts, torch.device("cpu")) for part, module in modules.items()]
    runs = schedule(stages if per_rank > 1 else stages[0], n_microbatches=8, loss_fn=loss_of)
    ours = torch.optim.SGD([each for module in modules.values() for each in module.parameters()], lr=0.1)
    for inputs, wanted in zip(batches, goals):
        of_alone.zero_grad(); loss_of(alone(inputs), wanted).backward(); of_alone.step()
        ours.zero_grad()
        losses = []
        given = (inputs,) if rank == 0 else ()
        last = rank == size - 1
        runs.step(*given, target=wanted if last else None, losses=losses if last else None)
        ours.step()
    for part, module in modules.items():
        for mine, whole in zip(module.parameters(), alone[part].parameters()):
            assert torch.allclose(mine, whole, atol=1e-12), (schedule.__name__, part, (mine - whole).abs().max())
dist.destroy_process_group()
os.write(1, b"right\\n")
"""


@each_launcher
@pytest.mark.parametrize("program", [MESH, PIPELINES], ids=["a mesh of two by two", "pipelines"])
def test_programs_of_four_ranks(launcher: str, program: str, tmp_path: Path) -> None:
    done = run(launcher, program, tmp_path)
    assert done.returncode == 0 and done.stdout.count("right") == 4, done.stdout + done.stderr


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.timeout(200)
def test_what_programs_do_beside_collectives(debug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    program = (HERE / "distributed_programs.py").read_text()
    done = run("torchrun", program, tmp_path)
    cases = re.findall(r"^def (\w+)\(\) -> None:", program, re.MULTILINE)
    assert done.returncode == 0 and len(cases) == 14, done.stdout + done.stderr
    assert {case: done.stdout.count(f"done: {case}\n") for case in cases} == dict.fromkeys(cases, 4), done.stdout


# Rank 1 is killed in the fifth step, while the others wait for it.
KILLED = """
import os, signal, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("ringtrain")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(64, 64))

def all_reduce():
    dist.all_reduce(torch.ones(1000))

def ddp():
    model(torch.randn(4, 64)).sum().backward()

step = {"all_reduce": all_reduce, "ddp": ddp}[sys.argv[1]]
try:
    for number in range(1000):
        if (rank, number) == (1, 5):
            time.sleep(0.5)
            os.write(1, f"killed at {time.monotonic()}\\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        step()
except Exception as problem:
    text = str(problem).replace("\\n", " ")
    os.write(1, f"told at {time.monotonic()} {type(problem).__name__} {text}\\n".encode())
    dist.destroy_process_group()
    sys.exit(3)
"""


@each_launcher
@pytest.mark.parametrize("step", ["all_reduce", "ddp"])
def test_a_rank_that_is_killed(launcher: str, step: str, tmp_path: Path) -> None:
    """All others are told at once, in the same words, which name it; and the job ends."""
    begun = time.monotonic()
    done = run(launcher, KILLED, tmp_path, step)
    assert done.returncode != 0 and time.monotonic() - begun < 60, done
    [killed] = re.findall(r"killed at (\S+)", done.stdout)
    told = re.findall(r"told at (\S+) (\w+) (.*)", done.stdout)
    assert len(told) == 3, done.stdout + done.stderr
    for moment, kind, text in told:
        assert float(moment) - float(killed) < 12, told  # a rank that is only silent is given up after 15 s
        assert kind == {"all_reduce": "PeerLostError", "ddp": "RuntimeError"}[step], told
        assert "rank 1 on host '" in text and "its process has ended" in text, text
    assert len({re.search(r"rank 1 on host '.*?has ended", text)[0] for _, _, text in told}) == 1, told
    if launcher == "ringtrainrun":
        assert done.returncode == 128 + signal.SIGKILL, done.stderr
