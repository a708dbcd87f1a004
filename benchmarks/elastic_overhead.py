"""What `elastic.State` costs a step without faults: steps with it and without it in turns, on ranks of one elastic job.

One rank: ``python -m benchmarks.elastic_overhead FILE BYTES TURNS``; rank 0 writes the result.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ringtrain as rt
import ringtrain.torch as hvd
from benchmarks.elastic_training import BATCH, CLASSES, INPUTS, SAMPLES, make_network, make_optimizer
from ringtrain.bench.machine import proportional_set_bytes

STEPS = 20  # of a turn
WARM_UP = 2  # turns


def main(found: Path, size_bytes: int, turns: int) -> None:
    """Measures, and writes what was found on rank 0."""
    torch.set_num_threads(1)
    networks = [make_network(size_bytes) for _ in range(3)]
    makers = [make_optimizer(network) for network in networks]
    hvd.init()
    with_state = hvd.DistributedOptimizer(makers[2], networks[2].named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
    state = hvd.elastic.State(model=networks[2], optimizer=with_state, sampler=sampler)
    for _ in state.epochs(1):
        unmeasured, without = (  # here, since a state wants all optimizers that there are when it is made
            hvd.DistributedOptimizer(optimizer, network.named_parameters())
            for network, optimizer in zip(networks[:2], makers[:2], strict=True)
        )
        _bytes_after(_steps(networks[0], unmeasured, itertools.count()))  # the first one has buffers made for all
        plain = _steps(networks[1], without, itertools.count())
        elastic = _steps(networks[2], with_state, iter(sampler))
        held = [proportional_set_bytes(), _bytes_after(plain), _bytes_after(elastic)]
        seconds = _in_turns([plain, elastic], turns)
        break
    if rt.rank() == 0:
        more_bytes = (held[2] - held[1]) - (held[1] - held[0])
        found.write_text(json.dumps(_result(size_bytes, more_bytes, *seconds)))


def _result(size_bytes: int, more_bytes: int, plain: np.ndarray, elastic: np.ndarray) -> dict[str, float]:
    return {
        "gradient_bytes": size_bytes,
        "plain_seconds": float(np.median(plain)),
        "elastic_seconds": float(np.median(elastic)),
        "more_seconds": float(np.median(elastic - plain)),  # of turns that stood side by side
        "more_bytes": more_bytes,
        "turns": len(plain),
    }


def _steps(network: nn.Module, optimizer: torch.optim.Optimizer, drawn: Iterator[int]) -> Iterator[None]:
    x, y = torch.randn(BATCH, INPUTS), torch.randint(CLASSES, (BATCH,))
    while True:
        next(drawn)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
        yield


def _bytes_after(steps: Iterator[None]) -> int:
    for _ in range(3):
        next(steps)
    return proportional_set_bytes()


def _in_turns(systems: list[Iterator[None]], turns: int) -> list[np.ndarray]:
    """Seconds of a step, turn by turn, of the rank that took longest."""
    seconds = np.zeros((len(systems), turns))
    for turn in range(-WARM_UP, turns):
        for place, steps in enumerate(systems):
            rt.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                next(steps)
            if turn >= 0:
                seconds[place, turn] = (time.perf_counter() - begin) / STEPS
    return list(rt.allreduce(seconds, op=rt.Max, name="bench.seconds"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
