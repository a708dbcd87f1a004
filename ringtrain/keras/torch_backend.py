"""Gradients of Keras on PyTorch; see ``backends`` for who asks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import ringtrain.torch as hvd


class _Eager:
    """PyTorch knows one scope only."""


_EAGER = _Eager()


def unconverted(method: Callable) -> Callable:
    """The method: PyTorch does not convert control flow."""
    return method


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with all its rows."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """The gradient times a number."""
    return gradient * factor


def scopes() -> list[Any]:
    """What is being run now, as ``tensorflow_backend`` has it."""
    return [_EAGER]


def reduce(
    gradients: Sequence[torch.Tensor], names: Sequence[str], variables: Sequence[Any], settings: Any
) -> list[torch.Tensor]:
    """The gradients, none of them None, combined over the ranks as ``reduction.Settings`` say."""
    arguments = {
        "op": settings.op,
        "prescale_factor": 1.0 / settings.gradient_predivide_factor,
        "postscale_factor": settings.gradient_predivide_factor,
        "process_set": settings.process_set,
        "compression": settings.compression or hvd.Compression.none,
    }
    results = list(gradients)
    with torch.no_grad():
        for places in _groups(len(gradients), variables, settings.groups):
            sent = [dense(gradients[place]) for place in places]
            combined = hvd.grouped_allreduce(sent, name=names[places[0]], **arguments)
            for place, tensor in zip(places, combined, strict=True):
                results[place] = tensor
    return results


def maximum(gradient: torch.Tensor, name: str, settings: Any) -> torch.Tensor:
    """The largest of the ranks' values."""
    return hvd.allreduce(gradient, op=hvd.Max, name=name, process_set=settings.process_set)


def _groups(count: int, variables: Sequence[Any], groups: Any) -> list[list[int]]:
    """Places of the gradients of each operation: all in one, unless the user has groups of his own."""
    numbers = [0] * count
    if isinstance(groups, int):
        numbers = [place * min(groups, count) // count for place in range(count)]
    elif groups is not None:
        of_variable = {id(variable): number for number, group in enumerate(groups) for variable in group}
        numbers = [of_variable.get(id(variable), -1) for variable in variables]
    return [[place for place in range(count) if numbers[place] == number] for number in dict.fromkeys(numbers)]
