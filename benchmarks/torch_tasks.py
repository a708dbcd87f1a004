"""What the accuracy of training is measured on: data that every machine has, a network, and an optimizer with a schedule.

Not tuned for any way of sending. All ways of one seed see the same samples in the same order.
"""

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ringtrain.bench.torch_networks import Batch
from ringtrain.errors import UnsupportedError

WINDOW = 12  # bytes that the language model sees
TEXT_BYTES = 4_000_000
HELD_OUT = 1 << 13


@dataclass(frozen=True)
class Task:
    """A network and its data.

    Attributes:
        make: a fresh network, the same for the same torch seed.
        optimizer: of a network.
        rate: factor of the learning rate, by the part of the training that is done.
        data: what there is to train with, and what is held out, by seed.
        samples: of one rank in one step.
        steps: of a training.
    """

    make: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    rate: Callable[[float], float]
    data: Callable[[int], tuple[Batch, Batch]]
    samples: int
    steps: int


def batch_of(train: Batch, chosen: torch.Tensor, part: int, parts: int) -> Batch:
    """A rank's part of the samples that were chosen for a step."""
    x, y = train
    mine = chosen[part::parts]
    return x[mine], y[mine]


@torch.no_grad()
def evaluate(network: nn.Module, held_out: Batch) -> tuple[float, float]:
    """The mean loss, and the share of labels that are found."""
    x, y = held_out
    scores = network(x)
    return float(nn.functional.cross_entropy(scores, y)), float((scores.argmax(1) == y).float().mean())


# ---- digits ----


def _digits(seed: int) -> tuple[Batch, Batch]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UnsupportedError(
            "task 'digits': scikit-learn must be installed, for its pictures of 8 x 8 digits, but is not. "
            "Install it, or leave the task out (--tasks bytes)."
        ) from None
    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.target))
    x, y = torch.from_numpy((found.data[order] / 16).astype(np.float32)), torch.from_numpy(found.target[order])
    return (x[:1440], y[:1440]), (x[1440:], y[1440:])


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _cosine(done: float) -> float:
    """Warm-up over a twentieth, then down along half a cosine."""
    return done / 0.05 if done < 0.05 else 0.5 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))


# ---- the next byte of Python's own sources ----


@cache
def _text() -> np.ndarray:
    folder = Path(sysconfig.get_path("stdlib"))
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return np.frombuffer(sources[:TEXT_BYTES], np.uint8)


def _windows(starts: np.ndarray) -> Batch:
    text = _text()
    windows = text[starts[:, None] + np.arange(WINDOW + 1)].astype(np.int64)
    return torch.from_numpy(windows[:, :WINDOW].copy()), torch.from_numpy(windows[:, WINDOW].copy())


def _bytes(seed: int) -> tuple[Batch, Batch]:
    """The last part of the text is held out, and the same for all seeds."""
    first_held_out = len(_text()) * 19 // 20
    random = np.random.default_rng(seed)
    held_out = np.linspace(first_held_out, len(_text()) - WINDOW - 2, HELD_OUT).astype(np.int64)
    return _windows(random.integers(0, first_held_out - WINDOW - 1, 1 << 17)), _windows(held_out)


def _language_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 24), nn.Flatten(), nn.Linear(24 * WINDOW, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(),
        nn.Linear(256, 256),
    )  # fmt: skip


TASKS = {
    "digits": Task(
        _classifier,
        lambda network: torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
        _cosine, _digits, samples=16, steps=300,
    ),
    "bytes": Task(
        _language_model,
        lambda network: torch.optim.AdamW(network.parameters(), lr=0.003),
        _cosine, _bytes, samples=64, steps=400,
    ),
}  # fmt: skip
