"""Runs a script of PyTorch on ranks that are threads, and in one process with the batches of all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import numpy as np
import torch
from modes import in_mode

import ringtrain.torch as hvd
from ringtrain.torch.modes import sharded_step
from training.fuzzing import Fuzzer, difference, on_ranks
from training.torch_script import ADDED, LAYERS, MODES, SCRIPTS, Pass, Script, Turn

WIDTH, SAMPLES = 3, 2
STALL_SECONDS = 20.0
CLIP = 0.5
TOLERANCE = 1e-8
BUCKET_BYTES = 200  # of ShardedStep: parts of two layers
OPS = {"average": hvd.Average, "weighed": hvd.Average, "sum": hvd.Sum, "per item": hvd.PerItem}
# eps large enough that what rounds otherwise is not divided by next to nothing
OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-2, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-2),
}


class Net(torch.nn.Module):
    """Layers of which each pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH).double() for _ in range(LAYERS))
        drawn = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn, dtype=torch.float64) / 2)

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for layer in used:
            x = torch.tanh(self.layers[layer](x))
        return x


class Loop:
    """The user's loop.

    Args:
        script: what it does.
        ranks: whose batches this process has.
        wraps: whether the optimizer is distributed.
    """

    def __init__(self, script: Script, ranks: range, wraps: bool):
        self.script, self.ranks, self.wraps = script, ranks, wraps
        self.model = Net()
        adds = any(turn.adds for turn in script.turns)
        first = [layer for number, layer in enumerate(self.model.layers) if not (adds and number == ADDED)]
        self.freeze(script.turns[0])
        self.optimizer = OPTIMIZERS[script.optimizer]([p for layer in first for p in layer.parameters()])
        if wraps:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer,
                list(self.model.named_parameters()) if script.named else None,
                op=OPS[script.op],
                backward_passes_per_step=script.passes_per_step,
                average_aggregated_gradients=script.averages_passes,
                **self.mode(),
            )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=script.scales)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5) if script.schedules else None

    def mode(self) -> dict:
        if self.script.mode == "sharded" and self.script.named:  # and values travel in the next forward pass
            return {"mode": hvd.ShardedStep(self.model)}
        return in_mode(MODES[self.script.mode])

    @property
    def divisor(self) -> float:
        """Of each loss in one process: what the ranks' optimizers make of it."""
        script = self.script
        ranks = script.ranks if script.op == "average" else 1
        return ranks * (script.passes_per_step if script.averages_passes else 1)

    def run(self) -> list[np.ndarray]:
        """The parameters after each turn, one after the other."""
        seen = []
        for number, turn in enumerate(self.script.turns):
            self.turn(number, turn)
            seen.append(torch.cat([p.detach().flatten() for p in self.model.parameters()]).numpy())
        return seen

    def freeze(self, turn: Turn) -> None:
        for number, layer in enumerate(self.model.layers):
            layer.requires_grad_(number not in turn.frozen)

    def zero(self) -> None:
        if self.script.zeroes == "module":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=self.script.zeroes != "zeros")

    def turn(self, number: int, turn: Turn) -> None:
        goes_on = number > 0 and self.script.turns[number - 1].ends == "go on"
        if self.script.counts_first:
            self.count(number, turn, 0)
        if turn.adds:
            self.optimizer.add_param_group({"params": list(self.model.layers[ADDED].parameters())})
        if turn.reloads:
            if self.wraps and self.script.mode == "sharded":
                self.optimizer.consolidate_state_dict(to=None)
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        if self.script.zeroes in ("before", "module", "zeros") and not goes_on:
            self.zero()
        self.freeze(turn)
        if turn.ends == "closure":
            self.optimizer.step(lambda: self.evaluation(number, turn))
        else:
            for place, each in enumerate(turn.passes):
                with self.silence(each):
                    self.backward(number, turn, place)
            self.end(turn)
        if turn.ends in ("step", "closure"):
            if self.schedule is not None:
                self.schedule.step()
            if self.script.zeroes == "after":
                self.optimizer.zero_grad()

    def evaluation(self, number: int, turn: Turn) -> torch.Tensor:
        return sum((each.detach() for each in self.backward(number, turn, 0)), torch.zeros((), dtype=torch.float64))

    def count(self, number: int, turn: Turn, place: int) -> None:
        for rank in self.ranks if self.wraps else ():
            if self.script.op == "per item":
                self.optimizer.count(items_of(rank, number, turn, place))
            if self.script.op == "weighed" and place == 0:
                self.optimizer.count_samples(weight_of(rank, number, turn))

    def backward(self, number: int, turn: Turn, place: int) -> list[torch.Tensor]:
        """One pass of each rank whose batches this process has; returns the losses."""
        return [loss for rank in self.ranks for loss in self.backward_of(rank, number, turn, place)]

    def backward_of(self, rank: int, number: int, turn: Turn, place: int) -> Iterator[torch.Tensor]:
        used = turn.passes[place].used[rank]
        if place > 0 or not self.script.counts_first:
            self.count(number, turn, place)
        if not used:
            return
        drawn = torch.Generator().manual_seed(1000 * number + 10 * place + rank)
        x = torch.randn(SAMPLES, WIDTH, generator=drawn, dtype=torch.float64)
        loss = (self.model(x, used) - 0.3).square().mean() * (float("inf") if turn.overflow == rank else 1.0)
        counts = self.script.op == "per item"
        if counts:
            loss = loss * items_of(rank, number, turn, place)
        if self.script.op == "weighed" and not self.wraps:
            loss = loss * weight_of(rank, number, turn) / self.weight(number, turn)
        if not self.wraps:
            loss = loss / (self.items(number, turn) if counts else self.divisor)
        self.scaler.scale(loss).backward()
        yield loss

    def items(self, number: int, turn: Turn) -> int:
        """Of all ranks and passes of a turn."""
        places = range(len(turn.passes))
        return sum(items_of(rank, number, turn, place) for rank in range(self.script.ranks) for place in places)

    def weight(self, number: int, turn: Turn) -> int:
        """Of all ranks in a turn."""
        return sum(weight_of(rank, number, turn) for rank in range(self.script.ranks))

    def silence(self, each: Pass) -> AbstractContextManager:
        return self.optimizer.no_sync() if self.wraps and each.silent else nullcontext()

    def end(self, turn: Turn) -> None:
        if turn.ends == "go on":
            return
        if turn.ends == "discard":
            self.zero()
            return
        if turn.clips == "synchronized" and self.wraps:
            self.optimizer.synchronize()
        if turn.clips:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        skips = self.optimizer.skip_synchronize() if turn.clips == "synchronized" and self.wraps else nullcontext()
        with skips:
            self.scaler.step(self.optimizer)
        self.scaler.update()


def items_of(rank: int, number: int, turn: Turn, place: int) -> int:
    """Of how many items the loss of a pass is the sum."""
    return 1 + (5 * rank + 3 * number + 7 * place) % 4 if turn.passes[place].used[rank] else 0


def weight_of(rank: int, number: int, turn: Turn) -> int:
    """What a rank's step counts."""
    return 1 + (5 * rank + 3 * number) % 4 if any(each.used[rank] for each in turn.passes) else 0


def verdict(script: Script) -> str:
    """What is wrong with a script's parameters on ranks; "" if they are those of one process."""
    expected = Loop(script, range(script.ranks), wraps=False).run()

    def found() -> list[list[np.ndarray]]:
        def run(rank: int) -> list[np.ndarray]:
            return Loop(script, range(rank, rank + 1), wraps=True).run()

        return on_ranks(script.ranks, script.layout, STALL_SECONDS, run)

    with patch.object(sharded_step, "BUCKET_BYTES", BUCKET_BYTES):
        return difference(found, [expected] * script.ranks, TOLERANCE)


FUZZER = Fuzzer(SCRIPTS, verdict)
