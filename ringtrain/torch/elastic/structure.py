"""What an optimizer trains: which parameters are frozen, and those groups that it was given while it trained."""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Structure(NamedTuple):
    """Of the models and optimizers of a state; the same on all ranks.

    Attributes:
        frozen: parameters that need no gradient.
        groups: of each optimizer, for each group behind those that it had at first, the parameters.
    """

    frozen: list[str]
    groups: dict[str, list[list[str]]]


def structure_of(
    modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer], counts: Mapping[str, int]
) -> Structure:
    """What it is now.

    Args:
        modules: by their names.
        optimizers: by theirs.
        counts: groups that each optimizer had at first.
    """
    named = _parameters(modules)
    names = {parameter: name for name, parameter in named.items()}
    groups = {
        name: [[names.get(each, "") for each in group["params"]] for group in optimizer.param_groups[counts[name] :]]
        for name, optimizer in optimizers.items()
    }
    return Structure([name for name, each in named.items() if not each.requires_grad], groups)


def take_structure(
    structure: Structure | list,
    modules: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    counts: Mapping[str, int],
) -> None:
    """Gives models and optimizers the structure that those of another rank have; the state is taken over behind it.

    Raises:
        KeyError: a group has parameters of none of the models.
    """
    frozen, groups = structure
    named = _parameters(modules)
    for name, parameter in named.items():
        parameter.requires_grad_(name not in frozen)
    for name, optimizer in optimizers.items():
        for group in groups[name][len(optimizer.param_groups) - counts[name] :]:
            optimizer.add_param_group({"params": [named[each] for each in group]})


def _parameters(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {f"{place}.{name}": each for place, module in modules.items() for name, each in module.named_parameters()}
