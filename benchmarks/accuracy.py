"""``python -m benchmarks accuracy``: what the modes of sending gradients cost in accuracy, beside DDP with PowerSGD.

Each rank is a host of its own, simulated, so that what is rounded between hosts is rounded. Of each task and seed all
ways see the same samples, so their differences from exact sums are those of one seed. A training is right if all ranks
end with the same bits, where they communicate.

It is a benchmark of its own, and not a part of ``compress``: it needs no root, no links and no quiet machine, but torch.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import ringtrain.torch as hvd
from benchmarks.torch_tasks import TASKS, Task, batch_of, evaluate
from ringtrain.bench import machine, ranks, report
from ringtrain.bench.torch_systems import NoExchange, PowerSgd, RingtrainTorch, TrainingSystem, replicas_are_equal

EXACT = "float32"
SEEN = 4096  # samples that the loss of training is taken of in the end


def _ours(name: str, **settings: Any) -> Callable[[], TrainingSystem]:
    return lambda: RingtrainTorch(name, layout="+".join(["1"] * ranks.size()), **settings)


def _compressed(name: str, variant: str = "") -> Callable[[], TrainingSystem]:
    chosen = getattr(hvd.Compression, name)
    if not variant:
        return _ours(name, compression=chosen)
    return _ours(f"{name} {variant.replace('_', ' ')}", compression=getattr(chosen, variant))


# One row for each way to train, with the arguments of ``DistributedOptimizer`` where it is ours.
WAYS: dict[str, Callable[[], TrainingSystem]] = {
    EXACT: _ours("float32"),
    **{name: _compressed(name) for name in ("bf16", "int8", "int4")},
    "int4-without-feedback": _compressed("int4", "without_feedback"),
    "every-8": _ours("every 8", mode=hvd.LocalSteps(8)),
    "every-8-int8": _ours("every 8 int8", mode=hvd.LocalSteps(8), compression=hvd.Compression.int8),
    "every-32": _ours("every 32", mode=hvd.LocalSteps(32)),
    "every-32-fragments": _ours("every 32, 4 fragments", mode=hvd.LocalSteps(32, fragments=4, overlap=4)),
    "every-32-diloco-half": _ours(
        "every 32, 4 fragments, half",
        mode=hvd.LocalSteps(32, fragments=4, overlap=5, merge="half", outer=hvd.Outer(0.4, 0.9)),
        compression=hvd.Compression.int8,
    ),
    "one-step-late": _ours("one step late", mode=hvd.OneStepLate()),
    "one-step-late-int8": _ours("one step late int8", mode=hvd.OneStepLate(), compression=hvd.Compression.int8),
    "powersgd-2": _ours("PowerSGD 2", compression=hvd.Compression.powersgd(rank=2, start_after=2)),
    "powersgd-4": _ours("PowerSGD 4", compression=hvd.Compression.powersgd(rank=4, start_after=2)),
    "ddp-powersgd-2": lambda: PowerSgd(2),
    "ddp-powersgd-4": lambda: PowerSgd(4),
    "alone": NoExchange,
}


def run(tasks: Sequence[str], ways: Sequence[str], seeds: int, steps: int | None, json: str | None) -> bool:
    """Runs the benchmark on this rank; returns whether the ranks of each training ended with the same bits."""
    torch.set_num_threads(1)  # small networks, and as many ranks as cores at least
    results = []
    for task in tasks:
        found = {way: [_train(TASKS[task], WAYS[way], seed, steps) for seed in range(seeds)] for way in ways}
        results += [_result(task, way, trained, found.get(EXACT)) for way, trained in found.items()]
    _print(results, seeds)
    report.write_json(json, results)
    return all(result["verified"] for result in results)


def _train(task: Task, make: Callable[[], TrainingSystem], seed: int, steps: int | None) -> dict[str, Any]:
    """One training: losses and accuracy in the end, of this rank where ranks train alone."""
    steps = steps or task.steps
    train, held_out = task.data(seed)
    torch.manual_seed(seed)
    network = task.make()
    system = make()
    system.use(network, task.optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(system.optimizer, lambda step: task.rate(step / steps))
    random = torch.Generator().manual_seed(seed)
    sent = system.sent()
    begun = time.perf_counter()
    for _ in range(steps):
        chosen = torch.randint(len(train[0]), (task.samples * ranks.size(),), generator=random)
        system.step(batch_of(train, chosen, ranks.rank(), ranks.size()))
        schedule.step()
    system.finish()
    seconds = time.perf_counter() - begun
    sent = (system.sent() - sent) // steps
    equal = not system.communicates or replicas_are_equal(network)
    system.close()
    losses = ranks.gathered((evaluate(network, (train[0][:SEEN], train[1][:SEEN])), evaluate(network, held_out)))
    (train_loss, _), (loss, accuracy) = np.mean(losses, axis=0)
    return {"train_loss": train_loss, "loss": loss, "accuracy": accuracy, "seconds": seconds, "equal": equal,
            "bytes_sent": sent}  # fmt: skip


FIGURES = ("train_loss", "loss", "accuracy")


def _result(
    task: str, way: str, trained: Sequence[dict[str, Any]], exact: Sequence[dict[str, Any]] | None
) -> dict[str, Any]:
    seconds = ranks.slowest([each["seconds"] for each in trained])
    right = all(each["equal"] and np.isfinite(each["loss"]) for each in trained)
    figures: dict[str, float] = {}
    for name in FIGURES:
        values = np.array([each[name] for each in trained])
        figures |= _mean_and_spread(name, values)
        if exact is not None and way != EXACT:
            figures |= _mean_and_spread(f"{name}_beyond_exact", values - [each[name] for each in exact])
    return report.result(way, "accuracy", seconds, ranks.all_true(right), task=task, bytes_sent=trained[0]["bytes_sent"],
                         seeds=len(trained), **figures)  # fmt: skip


def _mean_and_spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Of the seeds; the spread is the standard deviation of one of them."""
    return {name: float(values.mean()), f"{name}_spread": float(values.std(ddof=1)) if len(values) > 1 else 0.0}


def _print(results: Sequence[dict[str, Any]], seeds: int) -> None:
    facts = machine.describe()
    report.say(f"seeds: {seeds}; {ranks.size()} ranks, each a host, on {facts['cores']} cores ({facts['processor']}), "
               f"Python {facts['python']}, torch {facts['torch']}")  # fmt: skip
    rows = [
        [
            result["task"],
            result["system"],
            str(result["bytes_sent"]) if result["bytes_sent"] else "-",
            _text(result, "train_loss", 1, 4),
            _text(result, "loss", 1, 4),
            _text(result, "loss_beyond_exact", 1, 4),
            _text(result, "accuracy", 100, 2),
            report.seconds_text(result["seconds_median"]),
            report.verdict(result),
        ]
        for result in results
    ]
    report.print_table(
        [
            "task",
            "gradients",
            "a rank sends",
            "train loss",
            "held-out loss",
            "beyond exact",
            "accuracy, %",
            "time",
            "result",
        ],
        rows,
    )


def _text(result: dict[str, Any], figure: str, factor: float, digits: int) -> str:
    if figure not in result:
        return "-"
    return f"{factor * result[figure]:.{digits}f} ± {factor * result[figure + '_spread']:.{digits}f}"
