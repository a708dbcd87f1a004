"""Ranks of unequal speed: what equal shares make of them, balanced ones, and DDP with gloo. ``python -m benchmarks.uneven``.

Each rank gets a part of a core by the kernel's quota (cgroups of version 1, as root). First each trains without the others,
all at once, which gives the sum that could be had. Then come jobs of all ranks. The speed is that of the last half.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 5000  # microseconds: a slow machine does not compute in bursts
BATCH = 256  # of a rank with an equal share
WAYS = ("ddp", "constant", "balanced")
Step = Callable[[Any, Any], None]
Training = tuple[Step, Any, Iterable[int]]  # of a batch; the loader; epochs


def main(given: Sequence[str]) -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uneven", description=__doc__)
    parser.add_argument("--cores", default="0.2,0.4,0.8", metavar="0.2,0.4,0.8", help="of each rank")
    parser.add_argument("--model", choices=("convnet", "transformer"), default="convnet")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each job (20)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(given)
    cores = [float(each) for each in asked.cores.split(",")]
    alone = _speed("alone", cores, asked)
    found = {"cores": cores, "model": asked.model, "alone": alone, "sum": sum(alone)}
    print(f"alone: {', '.join(f'{each:.0f}' for each in alone)} samples/s; sum {sum(alone):.0f}")
    for way in WAYS:
        found[way] = sum(_speed(way, cores, asked))
        print(f"{way:9} {found[way]:6.0f} samples/s, {100 * found[way] / found['sum']:5.1f} % of the sum", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


def _speed(way: str, cores: Sequence[float], asked: argparse.Namespace) -> list[float]:
    """Samples a second of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        rank = [
            sys.executable,
            "-m",
            "benchmarks.uneven",
            "rank",
            way,
            asked.model,
            str(asked.seconds),
            folder,
            *map(str, cores),
        ]
        launch = [sys.executable, "-m", "ringtrain.launch", "-np", str(len(cores))]
        if way == "ddp":
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(len(cores)), "--no-python"]
        elif way in ("constant", "balanced"):
            launch += ["--elastic", "--batch", way]
        done = subprocess.run(
            [*launch, *rank], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        found = sorted(Path(folder).glob("*"))
        if len(found) != len(cores):
            raise SystemExit(f"benchmarks.uneven: {way} has failed:\n{done.stdout}{done.stderr}")
        return [float(each.read_text()) for each in found]


# ---- one rank ----


def _limit(rank: int, cores: float) -> None:
    group = GROUPS / f"ringtrain-uneven-{rank}"
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text(str(PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD)))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def run_rank(way: str, model: str, seconds: float, folder: Path, cores: Sequence[float]) -> None:
    """Trains, and writes its speed."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ.get("RANK", os.environ.get("RINGTRAIN_RANK", 0)))
    made, inputs = _made(model)
    data = torch.utils.data.Subset(
        torch.utils.data.TensorDataset(torch.randn(1024, *inputs), torch.randint(10, (1024,))), [*range(1024)] * 400
    )
    step, loader, epochs = _TRAINERS[way](made, data)
    _limit(rank, cores[rank])
    begun, samples, since, counted, written = time.monotonic(), 0, 0.0, 0, False
    for _ in epochs:
        for x, y in loader:
            step(x, y)
            samples += len(x)
            now = time.monotonic() - begun
            if not since and now > seconds / 2:
                since, counted = now, samples
            if now > seconds and not written:
                written = True
                (folder / str(rank)).write_text(str((samples - counted) / (now - since)))
            if now > seconds + 2:  # the others have written, too
                sys.stdout.flush()
                os._exit(0)


def _made(model: str) -> tuple[Any, tuple[int, ...]]:
    from torch import nn

    if model == "convnet":
        layers = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 36, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
        return layers, (3, 32, 32)
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(block, 2), nn.Flatten(), nn.Linear(64 * 32, 10)), (32, 64)


def _stepper(model: Any, optimizer: Any) -> Step:
    import torch

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _with_ddp(model: Any, data: Any) -> Training:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    return _stepper(model, torch.optim.SGD(model.parameters(), lr=0.01)), loader, iter(int, 1)


def _alone(model: Any, data: Any) -> Training:
    import torch

    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)
    return _stepper(model, torch.optim.SGD(model.parameters(), lr=0.01)), loader, iter(int, 1)


def _elastic(model: Any, data: Any) -> Training:
    import torch

    import ringtrain.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
    return _stepper(model, optimizer), loader, state.epochs(1 << 30)


_TRAINERS = {"alone": _alone, "ddp": _with_ddp, "constant": _elastic, "balanced": _elastic}

if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        way, model, seconds, folder, *cores = sys.argv[2:]
        run_rank(way, model, float(seconds), Path(folder), [float(each) for each in cores])
    else:
        main(sys.argv[1:])
