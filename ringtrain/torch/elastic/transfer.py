"""How a rank takes a value over from rank 0: modules, optimizers and what has a ``state_dict`` keep their identity."""

from typing import TYPE_CHECKING, TypeGuard

import torch

from ringtrain._runtime.objects import broadcast_object
from ringtrain._runtime.process_sets import global_process_set
from ringtrain.torch.elastic.sampler import ElasticSampler
from ringtrain.torch.functions import broadcast_parameters, give_optimizer_state, is_added
from ringtrain.torch.shards import TableShard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


def keeps_identity(value: object) -> TypeGuard["Stateful"]:
    """Whether a value can take a state over; else another object takes its place."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def outline_of(name: str, value: object) -> dict[str, str]:
    """What a value must be on each rank that takes it over, by the names of its parts; rows of shards are each rank's own."""
    if isinstance(value, torch.nn.Module):
        tensors = {key: each for key, each in value.state_dict().items() if not is_added(key, each)}
        shapes = {
            key: each.outline
            if isinstance(each, TableShard)
            else f"{str(each.dtype).removeprefix('torch.')} of {tuple(each.shape)}"
            for key, each in tensors.items()
        }
        return {name: type(value).__name__, **{f"{name}.{key}": shape for key, shape in shapes.items()}}
    if isinstance(value, torch.optim.Optimizer):
        sizes = " + ".join(str(len(group["params"])) for group in value.param_groups)
        return {name: f"{type(value).__name__} of {sizes} parameters"}
    if isinstance(value, ElasticSampler):
        return {name: value.outline}
    return {name: type(value).__name__}


def take_over(value: "Stateful", has_it: bool = False) -> None:
    """Gives a value the state that rank 0's has. To be called on all ranks.

    Args:
        value: a module, an optimizer, or what has a ``state_dict``.
        has_it: whether this rank has that state already, so that what compression has lost belongs to it.
    """
    if isinstance(value, torch.nn.Module):
        broadcast_parameters(value, root_rank=0)
    elif isinstance(value, torch.optim.Optimizer):
        give_optimizer_state(value, 0, global_process_set, forgets=not has_it)
    else:
        take_state_dict(value)


def take_state_dict(value: "Stateful") -> None:
    """Gives anything with a ``state_dict`` that of rank 0."""
    value.load_state_dict(broadcast_object(value.state_dict(), 0, "ringtrain.elastic.state_dict"))
