"""What goes with the values of a state without being given: schedules, what is frozen, later groups, random states."""

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from ringtrain._binding.log import logger
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object, broadcast_object
from ringtrain.embedding.kept_rows import surviving
from ringtrain.torch.elastic.schedules import Schedule, is_plain, schedules_of
from ringtrain.torch.elastic.structure import Structure, structure_of, take_structure
from ringtrain.torch.modes.base import State

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_NAME = "ringtrain.elastic.belongings"
_RANDOM = "ringtrain.elastic.random_states"


class Belongings:
    """Those of one state.

    Args:
        values: what the state was given that has a state of its own, by name.
    """

    def __init__(self, values: Mapping[str, "Stateful"]):
        self._values = values
        self._modules = {name: each for name, each in values.items() if isinstance(each, torch.nn.Module)}
        self._optimizers = {name: each for name, each in values.items() if isinstance(each, torch.optim.Optimizer)}
        self._counts = {name: len(each.param_groups) for name, each in self._optimizers.items()}
        self._schedules: dict[str, Schedule] = {}
        self._kept: State = {}  # states of schedules, as a file has them
        self._random: list[State] | None = None  # of all ranks, from which they are to go on

    def begin(self) -> None:
        """The loop begins: what sets the learning rates is there by now."""
        found = schedules_of(self._optimizers, list(self._values.values()))
        self._schedules = {name: each for name, each in found.items() if is_plain(each.state_dict())}
        for name in sorted(found.keys() - self._schedules.keys()):
            logger.warning(
                "elastic.State: ranks that join do not take the %s over, whose state_dict has objects of other kinds. Give what "
                "it counts to the State under a name",
                name,
            )
        for name in self._schedules.keys() & self._kept.keys():
            self._schedules[name].load_state_dict(self._kept[name])

    def outline(self) -> dict[str, str]:
        """What ranks must have alike; groups that came later are handed over."""
        sizes = {
            name: " + ".join(str(len(group["params"])) for group in each.param_groups[: self._counts[name]])
            for name, each in self._optimizers.items()
        }
        optimizers = {
            name: f"{type(each).__name__} of {sizes[name]} parameters" for name, each in self._optimizers.items()
        }
        return {**optimizers, **dict.fromkeys(self._schedules, "a schedule that was not given")}

    def take_structure(self, has_it: bool) -> None:
        """Takes over from rank 0 what is trained, before the state of models and optimizers."""
        theirs = broadcast_object(self._structure(), 0, f"{_NAME}.structure")
        if not has_it:
            take_structure(theirs, self._modules, self._optimizers, self._counts)

    def take_over(self, has_it: bool) -> None:
        """Takes over from rank 0 the rest, behind the state of the optimizers."""
        told = broadcast_object((self._states(), self._random), 0, _NAME)
        if has_it:
            return
        states, self._random = told
        for name, each in self._schedules.items():
            each.load_state_dict(states[name])

    def draw_on(self) -> None:
        """Goes on with the random numbers behind those of the saved training, on as many ranks."""
        states, self._random = self._random, None
        if states is not None and len(states) == current().size:
            _set_random_states(states[current().rank])

    # ---- files ----

    def gathered(self) -> list[State]:
        """The random states of all ranks, which call this together."""
        return surviving(lambda: allgather_object(_random_states(), _RANDOM))

    def in_file(self, states: list[State] | None) -> State:
        """What a file keeps, with the random states of all ranks if they are there."""
        kept = {"structure": list(self._structure()), "schedules": self._states()}
        return kept if states is None else {**kept, "random": states}

    def load_structure(self, kept: State) -> None:
        """Takes what is trained from a file, before the state of models and optimizers."""
        take_structure(kept["structure"], self._modules, self._optimizers, self._counts)

    def load(self, kept: State) -> None:
        """Takes the rest; schedules when the loop begins."""
        self._kept, self._random = kept["schedules"], kept.get("random")

    def _structure(self) -> Structure:
        return structure_of(self._modules, self._optimizers, self._counts)

    def _states(self) -> State:
        return {name: each.state_dict() for name, each in self._schedules.items()}


def _random_states() -> State:
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


def _set_random_states(states: State) -> None:
    """Goes on there."""
    version, keys, drawn = states["python"]
    random.setstate((version, tuple(keys), drawn))
    name, words, *rest = states["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
