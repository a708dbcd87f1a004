"""Which parameters an optimizer trains, their names and groups, checked as the user gave them.

``optimizer.DistributedOptimizer`` and its ``add_param_group`` call this; everything comes in an order that all ranks
share.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ringtrain._runtime.arguments import check_unique
from ringtrain._training import grouping
from ringtrain._training.grouping import Groups
from ringtrain._training.optimizer_arguments import given_groups
from ringtrain.errors import InvalidArgumentError


def trained(optimizer: torch.optim.Optimizer, group: Mapping[str, Sequence]) -> list[torch.Tensor]:
    """The parameters of a param group as autograd knows them.

    NVIDIA Apex's O2 puts float32 copies into the optimizer, which never meet autograd: the model's parameters do.
    """
    stash = getattr(optimizer, "_amp_stash", None)
    masters = getattr(stash, "all_fp32_from_fp16_params", ())
    of_model = dict(zip(masters, getattr(stash, "all_fp16_params", ()), strict=True))
    return [of_model.get(parameter, parameter) for parameter in group["params"]]


def names_of(optimizer: torch.optim.Optimizer, known: dict[torch.Tensor, str] | None) -> dict[torch.Tensor, str]:
    """The optimizer's parameters in its order, with the names that all ranks know them by.

    Raises InvalidArgumentError if ``known`` lacks one, or a name comes twice.
    """
    names = {}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, (parameter, own_name) in enumerate(_numbered(optimizer, group_index, group)):
            if known is not None and parameter not in known:
                raise InvalidArgumentError(
                    f"DistributedOptimizer: named_parameters must name every parameter of the optimizer, but lacks "
                    f"number {index} of group {group_index}, of shape {tuple(parameter.shape)}. "
                    "Pass the model's named_parameters()."
                )
            names[parameter] = own_name if known is None else known[parameter]
    _require_unique(names.values())
    return names


def names_of_group(optimizer: torch.optim.Optimizer, group_index: int) -> dict[torch.Tensor, str]:
    """The parameters of one param group with the names that the optimizer has for them."""
    return dict(_numbered(optimizer, group_index, optimizer.param_groups[group_index]))


def _numbered(
    optimizer: torch.optim.Optimizer, group_index: int, group: Mapping[str, Sequence]
) -> list[tuple[torch.Tensor, str]]:
    parameters = trained(optimizer, group)
    given = group.get("param_names")  # torch keeps them when it was given named parameters
    return list(zip(parameters, given or [f"noname.{group_index}.{i}" for i in range(len(parameters))], strict=True))


def known_names(named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> dict[torch.Tensor, str] | None:
    """``named_parameters`` as a dict; raises InvalidArgumentError for anything else than unique pairs."""
    if named_parameters is None:
        return None
    pairs = list(named_parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidArgumentError(
                f"DistributedOptimizer: named_parameters must be (name, parameter) tuples, but holds a "
                f"{type(pair).__name__}. Pass model.named_parameters()."
            )
    _require_unique(name for name, _ in pairs)
    return {parameter: name for name, parameter in pairs}


def _require_unique(names: Iterable[str]) -> None:
    check_unique("DistributedOptimizer: names of parameters", names, "Put the model's name in front")


# ---- groups ----


def checked_groups(
    num_groups: int, groups: int | Sequence[Sequence[torch.Tensor]] | None, parameters: set[torch.Tensor]
) -> Groups:
    """The argument ``groups`` or, under Horovod's older name, ``num_groups``; raises InvalidArgumentError."""
    groups = given_groups("DistributedOptimizer", num_groups, groups, "parameter", stacklevel=4)
    if isinstance(groups, list):
        _check_members(groups, parameters)
    return groups


def grouped(parameters: Sequence[torch.Tensor], groups: Groups) -> list[list[torch.Tensor]]:
    """The parameters that travel together, and then, each in a list of its own, those that travel alone."""
    together = ([parameters[place] for place in places] for places in grouping.grouped(parameters, groups))
    return [part for group in together for part in _of_each_device(group)]


def _of_each_device(group: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The group, parted by device: what travels as one operation is in one memory."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in group:
        parts.setdefault(parameter.device, []).append(parameter)
    return list(parts.values())


def _check_members(groups: Sequence[Sequence[torch.Tensor]], parameters: set[torch.Tensor]) -> None:
    for index, group in enumerate(groups):
        if any(parameter not in parameters for parameter in group):
            raise InvalidArgumentError(
                f"DistributedOptimizer: groups must hold the optimizer's parameters, each once, but group {index} "
                "holds one that is not the optimizer's."
            )
