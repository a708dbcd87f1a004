"""Schedules of learning rates that a script has not given to its state: each is known by the optimizer that it sets."""

import gc
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TypeAlias

import torch

from ringtrain.elastic.likeness import is_made_of
from ringtrain.errors import InvalidArgumentError

Schedule: TypeAlias = torch.optim.lr_scheduler.LRScheduler
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device)
_OF_ALL_SCHEDULES = {"optimizer", "last_epoch"}


def schedules_of(optimizers: Mapping[str, torch.optim.Optimizer], given: Collection[object]) -> dict[str, Schedule]:
    """The schedules of some optimizers, under names that are the same on all ranks.

    Those that are part of another one, as of a ``SequentialLR``, go with that.

    Args:
        optimizers: by their names.
        given: schedules that have names already.

    Raises:
        InvalidArgumentError: one optimizer has two of a kind, which nothing tells apart.
    """
    found = _named(optimizers, given)
    if len(dict(found)) < len(found):
        gc.collect()  # one may be in use no more
        found = _named(optimizers, given)
    counts = Counter(name for name, _ in found)
    for name, count in sorted(counts.items()):
        if count > 1:
            raise InvalidArgumentError(
                f"elastic.State: each schedule must have a name under which ranks that join take it over, but there are {count} "
                f"without one that are {name}. Give them: State(..., schedule=one, other=another)."
            )
    return dict(found)


def _named(optimizers: Mapping[str, torch.optim.Optimizer], given: Collection[object]) -> list[tuple[str, Schedule]]:
    names = {id(optimizer): name for name, optimizer in optimizers.items()}
    there = [each for each in _referring_to(*optimizers.values()) if id(each.__dict__.get("optimizer")) in names]
    parts = {id(part) for each in (*there, *given) for part in _held_by(each)} | {id(each) for each in given}
    alone = [each for each in there if id(each) not in parts]
    return [(f"{type(each).__name__} of {names[id(each.__dict__['optimizer'])]}", each) for each in alone]


def _referring_to(*optimizers: torch.optim.Optimizer) -> list[Schedule]:
    """The schedules with such an attribute.

    The other ranks wait meanwhile. There are 300,000 objects where torch is loaded, through which the collector looks
    several times as fast as a loop in Python.
    """
    referrers = gc.get_referrers(*optimizers)
    attributes = [each for each in referrers if type(each) is dict and _OF_ALL_SCHEDULES <= each.keys()]
    owners = gc.get_referrers(*attributes) if attributes else []  # an object whose `__dict__` was asked for has it
    return list({id(each): each for each in (*referrers, *owners) if _is_schedule(each)}.values())


def _is_schedule(value: object) -> bool:
    return issubclass(type(value), torch.optim.lr_scheduler.LRScheduler)  # an instance may be a proxy, which would act


def _held_by(schedule: object) -> list[object]:
    values = list(getattr(schedule, "__dict__", {}).values())
    return [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]


def is_plain(value: object) -> bool:
    """Whether a state has values alone, which another process may take over, and no objects of the script's."""
    return is_made_of(lambda each: isinstance(each, _PLAIN), value)
