"""Keeps ``torch.compile`` out of functions that talk to other ranks: graphs break around them, and they run as they are.

Traced into, they would act on tensors without memory. ``operations``, ``sync_batch_norm``, ``buffers``, ``hooks``
and ``distributed`` use it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class")


def eager(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a function that must not be traced. Outside of compiled code it costs 0.1 us a call.

    ``torch.compiler.disable`` alone would import the compiler with this package, which takes as long as torch itself.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def with_eager_methods(kind: type[_Class]) -> type[_Class]:
    """Decorates a class none of whose methods must be traced: C++ or a graph that is broken calls them by themselves."""
    for name, member in list(vars(kind).items()):
        if inspect.isfunction(member) and not name.startswith("__"):
            setattr(kind, name, eager(member))
    return kind
