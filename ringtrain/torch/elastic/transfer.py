"""How a rank takes a value over from rank 0: modules, optimizers and what has a ``state_dict`` keep their identity."""

from typing import Any

import torch

from ringtrain.objects import broadcast_object
from ringtrain.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringtrain.torch.shards import Shard


def keeps_identity(value: Any) -> bool:
    """Whether a value can take a state over; else another object takes its place."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def outline_of(name: str, value: Any) -> dict[str, str]:
    """What a value must be on each rank that takes it over, by the names of its parts; rows of shards are each rank's own."""
    if isinstance(value, torch.nn.Module):
        tensors = {key: each for key, each in value.state_dict().items() if isinstance(each, torch.Tensor)}
        shapes = {
            key: each.outline
            if isinstance(each, Shard)
            else f"{str(each.dtype).removeprefix('torch.')} of {tuple(each.shape)}"
            for key, each in tensors.items()
        }
        return {name: type(value).__name__, **{f"{name}.{key}": shape for key, shape in shapes.items()}}
    if isinstance(value, torch.optim.Optimizer):
        sizes = " + ".join(str(len(group["params"])) for group in value.param_groups)
        return {name: f"{type(value).__name__} of {sizes} parameters"}
    return {name: type(value).__name__}


def take_over(value: Any) -> None:
    """Gives a value the state that rank 0's has. To be called on all ranks."""
    if isinstance(value, torch.nn.Module):
        broadcast_parameters(value.state_dict(), root_rank=0)
    elif isinstance(value, torch.optim.Optimizer):
        broadcast_optimizer_state(value, root_rank=0)
    else:
        take_state_dict(value)


def take_state_dict(value: Any) -> None:
    """Gives anything with a ``state_dict`` that of rank 0."""
    value.load_state_dict(broadcast_object(value.state_dict(), 0, "ringtrain.elastic.state_dict"))
