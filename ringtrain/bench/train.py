"""``ringtrain bench train``: training steps with PyTorch: ours, DDP over gloo and over us, and ranks that train alone.

A turn is a few steps back to back, as in a training loop, and its figure their mean. Before that, every system must
reach in two steps what one process reaches with the batches of all ranks in one. Ranks that train alone are the floor;
what a step takes beyond theirs is what communicating costs. Below the table stands what our hook costs autograd's
thread for each gradient, and beside it what a hook costs there that does nothing. Where gradients leave while the pass
goes on, submission is included; where they leave when it has ended (``ringtrain.torch.exchange``), only the noting is.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import ringtrain.torch as hvd
from ringtrain.bench import machine, ranks, report
from ringtrain.bench.torch_networks import NETWORKS, Batch, Classifier, loss_of
from ringtrain.bench.torch_systems import (
    PEERS,
    Ddp,
    MakeOptimizer,
    NoExchange,
    RingtrainTorch,
    TrainingSystem,
    make_optimizer,
    replicas_are_equal,
)
from ringtrain.bench.turns import WARM_UP, time_in_turn, time_of

STEPS_TO_VERIFY = 2
HOOK_STEPS = 10


def run(
    networks: Sequence[str],
    peers: Sequence[str],
    repetitions: int | None,
    json: str | None,
    one_by_one: bool = False,
    samples: int | None = None,
) -> bool:
    """Runs the benchmark on this rank; returns whether every system trained right."""
    results: list[dict[str, Any]] = []
    hooks: dict[str, dict[str, float]] = {}
    for name in networks:
        network = NETWORKS[name] if samples is None else replace(NETWORKS[name], samples=samples)
        makers = [RingtrainTorch, *(PEERS[peer] for peer in peers), NoExchange]
        results += _measure(name, network, [[each] for each in makers] if one_by_one else [makers], repetitions or 20)
        if one_by_one:
            continue
        hooks[name] = _time_hooks(network, _with_our_hooks) | {
            "of nothing": _time_hooks(network, _with_idle_hooks)["median"]
        }
    _print(results, hooks)
    report.write_json(json, results, hook_seconds=hooks)
    return all(result["verified"] for result in results)


def _measure(
    name: str, network: Classifier, groups: Sequence[Sequence[Callable[[], TrainingSystem]]], repetitions: int
) -> list[dict[str, Any]]:
    """Results of all systems; those of a group are there at once and take turns."""
    torch.manual_seed(0)
    start = network.make()
    batch = network.batches(ranks.rank())
    goal = _train_on_all_batches(start, network)
    verified: dict[str, bool] = {}
    passes: dict[str, int] = {}
    seconds: dict[str, np.ndarray] = {}
    for group in groups:
        systems = [make() for make in group]
        for system in systems:
            trained = copy.deepcopy(start)
            system.use(trained, _optimizer_for(network))
            verified[system.name] = _verify(system, trained, batch, start, goal)
            passes[system.name] = system.passes
        timed = {
            system.name: (lambda system=system: [_time_steps(system, batch, network.steps_in_a_turn)])
            for system in systems
        }
        seconds |= time_in_turn(timed, repetitions, WARM_UP if len(groups) == 1 else 1)
        for system in systems:
            system.close()
    a_batch = {system: float(np.median(times)) / passes[system] for system, times in seconds.items()}
    floor = a_batch[NoExchange.name]
    return [
        report.result(
            system, "train", times, verified[system],
            network=name, parameters=sum(each.numel() for each in start.parameters()), tensors=len(goal),
            samples_per_second=ranks.size() * network.samples / a_batch[system],
            of_alone=floor / a_batch[system],
            seconds_beyond_alone=float(np.median(times)) - floor * passes[system],
            of_ddp=a_batch[Ddp.name] / a_batch[system] if Ddp.name in a_batch else None,
        )
        for system, times in seconds.items()
    ]  # fmt: skip


def _optimizer_for(network: Classifier) -> MakeOptimizer:
    return partial(make_optimizer, momentum=network.momentum)


def _time_steps(system: TrainingSystem, batch: Batch, count: int) -> float:
    def steps() -> None:
        for _ in range(count):
            system.step(batch)

    return time_of(steps) / count


# ---- verifying ----


def _train_on_all_batches(start: torch.nn.Module, network: Classifier) -> list[torch.Tensor]:
    """The parameters that one process reaches with the batches of all ranks in one."""
    x, y = zip(*(network.batches(rank) for rank in range(ranks.size())), strict=True)
    alone = NoExchange()
    alone.use(copy.deepcopy(start), _optimizer_for(network))
    for _ in range(STEPS_TO_VERIFY):
        alone.step((torch.cat(x), torch.cat(y)))
    return [parameter.detach() for parameter in alone.network.parameters()]


def _verify(
    system: TrainingSystem,
    trained: torch.nn.Module,
    batch: Batch,
    start: torch.nn.Module,
    goal: Sequence[torch.Tensor],
) -> bool:
    for _ in range(STEPS_TO_VERIFY):
        system.step(batch)
    if not system.communicates:
        return True
    found = [parameter.detach() for parameter in trained.parameters()]
    if system.loses:
        begun = [parameter.detach() for parameter in start.parameters()]
        close = _distance(found, goal) <= system.loses * _distance(begun, goal)
    else:
        close = all(torch.allclose(*pair, rtol=1e-3, atol=1e-5) for pair in zip(found, goal, strict=True))
    return ranks.all_true(close) and replicas_are_equal(trained)


def _distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True)))


# ---- the hook ----


def _time_hooks(
    network: Classifier, make_hooked: Callable[[torch.nn.Module], torch.optim.Optimizer]
) -> dict[str, float]:
    """Seconds of processor time that autograd's thread spends in a hook, over all parameters and some steps, here.

    Hooks run in the order in which they were registered: one of ours comes before that which is measured, one after.
    Processor time, because on busy cores the clock would tell when the core was given to another thread.
    """
    hvd.init()
    model = network.make()
    batch = network.batches(ranks.rank())
    begun: dict[torch.Tensor, float] = {}
    seconds: list[float] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: begun.update({p: time.thread_time()}))
    optimizer = make_hooked(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seconds.append(time.thread_time() - begun[p]))
    for _ in range(HOOK_STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    hvd.shutdown()
    times = np.array(seconds[len(begun) :])  # the first step's are not typical
    return {"median": float(np.median(times)), "mean": float(times.mean())}


def _with_our_hooks(model: torch.nn.Module) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())


def _with_idle_hooks(model: torch.nn.Module) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    return make_optimizer(model)


# ---- saying ----


def _print(results: Sequence[dict[str, Any]], hooks: dict[str, dict[str, float]]) -> None:
    facts = machine.describe()
    report.say(f"training steps, {ranks.size()} ranks on {facts['cores']} cores ({facts['processor']}), "
               f"threads of each: {torch.get_num_threads()}, torch {facts['torch']}")  # fmt: skip
    ours = {each["network"]: each["seconds_median"] for each in results if each["system"] == RingtrainTorch.name}
    rows = [
        [
            each["network"],
            each["system"],
            report.seconds_text(each["seconds_median"]),
            report.seconds_text(each["seconds_min"]),
            f"{each['samples_per_second']:.1f}",
            f"{each['of_alone']:.3f}",
            f"{each['of_ddp']:.3f}" if each["of_ddp"] else "",
            report.seconds_text(max(each["seconds_beyond_alone"], 0.0)),
            f"{each['seconds_median'] / ours[each['network']]:.2f}",
            report.verdict(each),
        ]
        for each in results
    ]
    report.print_table(
        ["network", "system", "step", "fastest", "samples/s", "x alone's samples/s", "x ddp's samples/s",
         "beyond alone", "x our time", "result"],
        rows,
    )  # fmt: skip
    for network, seconds in hooks.items():
        texts = ", ".join(f"{name} {report.seconds_text(value)}" for name, value in seconds.items())
        report.say(f"processor time of our hook for each gradient of {network}, on rank 0: {texts}")
