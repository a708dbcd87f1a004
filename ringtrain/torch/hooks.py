"""Hooks of the distributed optimizers on their parameters, and which optimizers of a rank there are.

``reducer`` attaches one to each parameter. A hook keeps neither the optimizer nor the parameter alive: the garbage
collector does not look into a tensor's hooks. Optimizers are found so that the one made last can take a parameter over.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ringtrain._runtime import ranges
from ringtrain._runtime.context import Context, current
from ringtrain._runtime.process_sets import global_process_set, id_of
from ringtrain._training.adapter import numbering
from ringtrain._training.session import NewWorld
from ringtrain.torch.backward import PassPart, current_task
from ringtrain.torch.eager import eager


class Target(Protocol):
    """Whom hooks tell that a backward pass has added to a gradient: by a note in the part of the pass that they run in."""

    @property
    def parts(self) -> dict[int, PassPart]:
        """Of the pass under way, by graph task; always the same object."""

    def begin_part(self) -> PassPart:
        """Called by the first hook of a part, which is not in ``parts`` yet."""

    def look(self, part: PassPart) -> None:
        """Called by a hook when as many gradients have come as were due."""


class Owner(Protocol):
    """What owners of one rank are told apart and put in order by, and how they leave parameters to each other."""

    @property
    def prefix(self) -> str:
        """Unique among the owners of a rank, and the same on all ranks."""

    @property
    def context(self) -> Context:
        """The rank that it acts for."""

    def order(self) -> int | None:
        """Its place among the owners of a rank."""

    def enter_world(self, change: NewWorld) -> None:
        """Goes on in the present world, where it is another one than before, or optimizers are numbered anew."""

    def release(self, parameters: set[torch.Tensor], owner: "Owner") -> None:
        """Called when another owner takes parameters over."""


class Lost(NamedTuple):
    """A parameter that another optimizer has taken over, and that one's prefix."""

    parameter: torch.Tensor
    owner: str


class Hooks:
    """The hooks of one optimizer.

    Attributes:
        lost: the first parameter that another optimizer has taken over; None if there is none.
    """

    def __init__(self) -> None:
        self.lost: Lost | None = None
        self._handles: dict[torch.Tensor, torch.utils.hooks.RemovableHandle] = {}

    def attach(self, target: Target, parameter: torch.Tensor, index: int) -> None:
        """Has the target called for each gradient of a parameter, also of one that is frozen now, if it can have any."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        needed = parameter.requires_grad
        parameter.requires_grad_(True)  # or torch takes no hook; a frozen one may be unfrozen later
        self._handles[parameter] = parameter.register_post_accumulate_grad_hook(
            _note_of(target.parts, weakref.ref(target), index)
        )
        parameter.requires_grad_(needed)

    def has_any(self, parameters: set[torch.Tensor]) -> bool:
        """Whether one of these parameters has a hook."""
        return not parameters.isdisjoint(self._handles)

    def release(self, parameters: set[torch.Tensor], owner: str) -> None:
        """Leaves parameters to the optimizer with another prefix."""
        for parameter in [each for each in self._handles if each in parameters]:
            self._handles.pop(parameter).remove()
            self.lost = self.lost or Lost(parameter, owner)

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


_live: "weakref.WeakValueDictionary[int, Owner]" = weakref.WeakValueDictionary()  # by id


def enlist(owner: Owner) -> None:
    """Lets other owners find this one while it lives."""
    _live[id(owner)] = owner


def dismiss(owner: Owner) -> None:
    """Lets no other owner find this one any more."""
    _live.pop(id(owner), None)


def others(own: Owner) -> list[Owner]:
    """The other owners of the same rank, or of a world that has ended, in an order that is the same on all ranks."""
    return [
        each for each in _in_order() if each is not own and (each.context is own.context or not each.context.usable)
    ]


def _owners(context: Context) -> list[Owner]:
    """Those of a rank of a world, in an order that is the same on all ranks."""
    return [each for each in _in_order() if each.context is context]


def number_anew(modes: Sequence[Any]) -> None:
    """Numbers optimizers in their order from 0, as in each world that follows: this process may have wrapped others, now gone.

    Others that still live come behind them: no two of a world share a number.
    """
    known = {id(part) for mode in modes for part in mode.parts()}
    left = [owner for owner in _owners(current()) if id(owner) not in known]
    numbering.number_anew(current(), id_of(global_process_set), "optimizer")
    for mode in [*sorted(modes, key=lambda mode: mode.order()), *left]:
        mode.enter_world(NewWorld.NUMBERED)


def _in_order() -> list[Owner]:
    # Copied in one step, since the ranks of a testing.World make optimizers on threads of their own meanwhile.
    living = [owner for owner in (reference() for reference in _live.valuerefs()) if owner is not None]
    return sorted(living, key=lambda each: (len(each.prefix), each.prefix))  # optimizer.2 before optimizer.10


def _note_of(
    parts: dict[int, PassPart], reference: "weakref.ref[Target]", index: int
) -> Callable[[torch.Tensor], None]:
    """A hook. The pass has driven everything out of the caches: what it costs is how much code and memory it touches."""

    def hook(_: torch.Tensor, task: Callable[[], int] = current_task) -> None:
        part = parts.get(task())
        if part is None:
            part = _begun(reference)
        came = part.came
        came.append(index)
        if len(came) >= part.due:
            _look(reference, part)

    hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable() sets, without its layers
    return hook


@eager
def _begun(reference: "weakref.ref[Target]") -> PassPart:
    target = reference()
    return PassPart(nested=False) if target is None else target.begin_part()


@eager
def _look(reference: "weakref.ref[Target]", part: PassPart) -> None:
    target = reference()
    if target is not None:
        with ranges.around("ringtrain.hook"):
            target.look(part)
