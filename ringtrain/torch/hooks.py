"""Hooks of the distributed optimizers on their parameters, and which optimizers of a rank there are.

``window`` attaches one to each parameter. A hook keeps neither the optimizer nor the parameter alive: the garbage
collector does not look into a tensor's hooks. Optimizers are found so that the one made last can take a parameter over.
"""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from ringtrain.context import Context
from ringtrain.torch.compilation import eager


class Owner(Protocol):
    """What a hook calls, and what owners of one rank are told apart and put in order by."""

    prefix: str

    @property
    def context(self) -> Context:
        """The rank that it acts for."""

    def on_gradient(self, index: int) -> None:
        """Called when the gradient of parameter number ``index`` was added up in a backward pass."""


_live: "weakref.WeakValueDictionary[int, Owner]" = weakref.WeakValueDictionary()  # by id


def enlist(owner: Owner) -> None:
    """Lets other owners find this one while it lives."""
    _live[id(owner)] = owner


def dismiss(owner: Owner) -> None:
    """Lets no other owner find this one any more."""
    _live.pop(id(owner), None)


def others(own: Owner) -> list[Owner]:
    """The other owners of the same rank, in an order that is the same on all ranks."""
    # Copied in one step, since the ranks of a testing.World make optimizers on threads of their own meanwhile.
    living = [owner for owner in (reference() for reference in _live.valuerefs()) if owner is not None]
    return sorted(
        (each for each in living if each is not own and each.context is own.context), key=lambda each: each.prefix
    )


def attach(owner: Owner, parameter: torch.Tensor, index: int) -> torch.utils.hooks.RemovableHandle | None:
    """Has the owner called for each gradient of a parameter, also of one that is frozen now; None if it can have none."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return None
    needed = parameter.requires_grad
    parameter.requires_grad_(True)  # or torch takes no hook; a frozen one may be unfrozen later
    handle = parameter.register_post_accumulate_grad_hook(_calls(weakref.ref(owner), index))
    parameter.requires_grad_(needed)
    return handle


def _calls(reference: "weakref.ref[Owner]", index: int) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        _deliver(reference, index)

    return hook


@eager  # compiled autograd would trace it
def _deliver(reference: "weakref.ref[Owner]", index: int) -> None:
    owner = reference()
    if owner is not None:
        owner.on_gradient(index)
