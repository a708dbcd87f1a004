"""The states of random numbers that a training draws from: Python's, NumPy's, torch's, and that of this rank's GPU."""

import random

import numpy as np
import torch

from ringtrain.torch.modes.base import State


def random_states() -> State:
    """Of this process, as numbers, texts and tensors alone."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: State) -> None:
    """Goes on there."""
    version, keys, drawn = states["python"]
    random.setstate((version, tuple(keys), drawn))
    name, words, *rest = states["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
