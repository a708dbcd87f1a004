"""Ranks of unequal speed: what equal shares make of them, balanced ones, and DDP with gloo. ``python -m benchmarks.uneven``.

Each rank gets a part of a core by the kernel's quota (cgroups of version 1, as root). First each trains without the others,
all at once, which gives the sum that could be had. Then come jobs of all ranks. The speed is that of the last half.
With ``--curve`` there is one job with balanced shares, whose last rank has half of its cores in the middle third of the time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 5000  # microseconds: a slow machine does not compute in bursts
BATCH = 256  # of a rank with an equal share
WAYS = ("ddp", "constant", "balanced")
Step = Callable[[Any, Any], None]
Training = tuple[Step, Any, Iterable[int]]  # of a batch; the loader; epochs
Steps = list[tuple[float, int]]  # when each has ended, by a clock of all ranks, and this rank's samples in it


def main(given: Sequence[str]) -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uneven", description=__doc__)
    parser.add_argument("--cores", default="0.2,0.4,0.8", metavar="0.2,0.4,0.8", help="of each rank")
    parser.add_argument("--model", choices=("convnet", "transformer", "keras"), default="convnet")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each job (20)")
    parser.add_argument("--compression", default="none", metavar="int8", help="of gradients, in PyTorch (none)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--curve", type=Path, metavar="FILE.svg", help="speed over time, and shares below")
    asked = parser.parse_args(given)
    cores = [float(each) for each in asked.cores.split(",")]
    if asked.curve:
        return _draw(_run("curve", cores, asked), asked.seconds, asked.curve)
    alone = [_speed(steps) for steps in _run("alone", cores, asked)]
    found = {"cores": cores, "model": asked.model, "alone": alone, "sum": sum(alone)}
    print(f"alone: {', '.join(f'{each:.0f}' for each in alone)} samples/s; sum {sum(alone):.0f}")
    for way in WAYS if asked.model != "keras" else WAYS[1:]:
        found[way] = sum(_speed(steps) for steps in _run(way, cores, asked))
        print(f"{way:9} {found[way]:6.0f} samples/s, {100 * found[way] / found['sum']:5.1f} % of the sum", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


def _speed(steps: Steps) -> float:
    """Samples a second, in the last half."""
    middle = (steps[0][0] + steps[-1][0]) / 2
    last = [step for step in steps if step[0] >= middle]
    return sum(samples for _, samples in last[1:]) / (last[-1][0] - last[0][0])


def _run(way: str, cores: Sequence[float], asked: argparse.Namespace) -> list[Steps]:
    """A job's steps, by rank."""
    count = len(cores)
    with tempfile.TemporaryDirectory() as folder:
        told = {"way": way, "folder": folder, "cores": cores, "seconds": asked.seconds, "model": asked.model}
        rank = [sys.executable, "-m", "benchmarks.uneven", "rank", json.dumps({**told, "codec": asked.compression})]
        launch = [sys.executable, "-m", "ringtrain.launch", "-np", str(count)]
        if way == "ddp":
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--no-python"]
        elif way != "alone":
            launch += ["--elastic", "--batch", "balanced" if way == "curve" else way]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*launch, *rank], env=environment, capture_output=True, text=True)
        found = sorted(Path(folder).glob("*"))
        if len(found) != count:
            raise SystemExit(f"benchmarks.uneven: {way} has failed:\n{done.stdout}{done.stderr}")
        return [json.loads(each.read_text()) for each in found]


def _draw(ranks: Sequence[Steps], seconds: float, file: Path) -> None:
    """Samples a second of all, and each rank's share of each step."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ringtrain"
    from matplotlib import pyplot

    figure, (speed, shares) = pyplot.subplots(2, 1, sharex=True, figsize=(7.0, 4.5), layout="constrained")
    begun = ranks[0][0][0]
    batches = [sum(samples for _, samples in of_a_step) for of_a_step in zip(*ranks, strict=False)]
    ends = [at - begun for at, _ in ranks[0]][: len(batches)]
    speed.step(
        ends[1:],
        [batch / (end - before) for batch, end, before in zip(batches[1:], ends[1:], ends, strict=False)],
        where="pre",
        color="#1f5fbf",
    )
    for rank, steps in enumerate(ranks):
        shares.step(
            [at - begun for at, _ in steps], [samples for _, samples in steps], where="pre", label=f"rank {rank}"
        )
    for each in (speed, shares):
        each.axvspan(seconds / 3, 2 * seconds / 3, color="#eeeeee")
        each.set_ylim(bottom=0)
    speed.set_ylabel("samples a second")
    shares.set_ylabel("samples of a batch")
    shares.set_xlabel(f"seconds; rank {len(ranks) - 1} has half of its cores in the grey third")
    shares.legend(loc="lower center", ncols=len(ranks))
    figure.savefig(file, metadata={"Date": None})
    print(file)


# ---- one rank ----


def _limit(rank: int, cores: float) -> None:
    """Has this process, and those that it starts, no more than so many cores."""
    group = GROUPS / f"ringtrain-uneven-{rank}"
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text(str(PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD)))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def run_rank(way: str, model: str, codec: str, seconds: float, folder: str, cores: Sequence[float]) -> None:
    """Trains, and writes its steps."""
    rank = int(os.environ.get("RANK", os.environ.get("RINGTRAIN_RANK", 0)))
    trained = _keras_steps(way) if model == "keras" else _torch_steps(way, model, codec)
    steps: Steps = []
    part = -1
    for samples in trained:
        now = time.monotonic()
        if not steps:  # which may compile, for minutes with a part of a core
            _limit(rank, cores[rank])
        steps.append((now, samples))
        begun = steps[0][0]
        if way == "curve" and rank == len(cores) - 1 and part != int(3 * (now - begun) / seconds):
            part = int(3 * (now - begun) / seconds)
            _limit(rank, cores[rank] / (1 + (part == 1)))
        if now - begun > seconds and not (written := Path(folder, str(rank))).exists():
            written.write_text(json.dumps(steps))
        if now - begun > seconds + 2:  # the others have written, too
            sys.stdout.flush()
            os._exit(0)


# ---- Keras ----


def _keras_steps(way: str) -> Iterator[int]:
    """``fit`` calls back where a generator would be asked, so its steps come through a thread's queue."""
    import queue
    import threading

    done: queue.Queue[int | Exception] = queue.Queue(1)

    def fit() -> None:
        try:
            _fit(way, done.put)
        except Exception as problem:
            done.put(problem)

    threading.Thread(target=fit, daemon=True).start()
    while True:
        step = done.get()
        if isinstance(step, Exception):
            raise step
        yield step


def _fit(way: str, note: Callable[[int], None]) -> None:
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    import keras
    import numpy as np

    import ringtrain.keras as hvd

    if way == "alone":
        os.environ["RINGTRAIN_ALONE"] = "1"
    hvd.init()
    model = keras.Sequential([
        keras.Input((32, 32, 3)),
        keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.MaxPool2D(),
        keras.layers.Conv2D(64, 3, activation="relu"), keras.layers.MaxPool2D(),
        keras.layers.Flatten(), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss)
    x, y = np.random.rand(1024, 32, 32, 3).astype("float32"), np.random.randint(10, size=1024)
    sampler = hvd.elastic.BatchSampler(1024 * 400, BATCH, drop_last=True)
    read: list[int] = []

    def load(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        read.append(len(indices))
        return x[indices % 1024], y[indices % 1024]

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            note(read[-1])

    elastic = hvd.elastic.Elastic(model, sampler=sampler)
    data = hvd.elastic.batches(sampler, load)
    model.fit(data, epochs=1 << 20, initial_epoch=elastic.epoch, callbacks=[elastic, Note()], verbose=0)


# ---- PyTorch ----


def _torch_steps(way: str, model: str, codec: str) -> Iterator[int]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    made, inputs = _made(model)
    data = torch.utils.data.Subset(
        torch.utils.data.TensorDataset(torch.randn(1024, *inputs), torch.randint(10, (1024,))), [*range(1024)] * 400
    )
    step, loader, epochs = _elastic(made, data, codec) if way not in _TRAINERS else _TRAINERS[way](made, data)
    for _ in epochs:
        for x, y in loader:
            step(x, y)
            yield len(x)


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


def _elastic(model: Any, data: Any, codec: str) -> Training:
    import torch

    import ringtrain.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        compression=getattr(hvd.Compression, codec),
    )
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
    return _stepper(model, optimizer), loader, state.epochs(1 << 30)


_TRAINERS = {"alone": _alone, "ddp": _with_ddp}  # all others are elastic jobs

if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(**json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:])
