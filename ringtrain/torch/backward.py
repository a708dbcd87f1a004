"""What autograd's engine tells of a backward pass: when it ends, and whether it runs within another one.

``passes`` asks from the hooks of an optimizer's parameters. An activation checkpoint with ``use_reentrant=True`` runs a
backward pass of its own within a node of the one that the user started; only the end of the user's counts here.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch.autograd.function import BackwardCFunction

from ringtrain._runtime.pending import Operation
from ringtrain.errors import RingtrainError, TimeoutError

_TURN_SECONDS = 0.01  # how long one optimizer waits before another one that ends in the same pass goes on
_LOOK_SECONDS = 0.1  # from one look to the next at what makes waiting vain; Ctrl-C is answered as often
_NODE_IN_PYTHON = BackwardCFunction.apply.__code__


current_task: Callable[[], int] = torch._C._current_graph_task_id  # of the hook that asks


@dataclass(eq=False, slots=True)
class PassPart:
    """One graph task of a pass: the user's own, or a pass within it, which is a task of its own.

    Attributes:
        nested: whether it runs within a node of another one.
        due: how many gradients must have come for a hook to ask that they are looked at.
        came: places of the parameters whose hooks have run, in that order. Hooks write here, without a lock.
        seen: how many of them were looked at.
    """

    nested: bool
    due: int = 0
    came: list[int] = field(default_factory=list)
    seen: int = 0

    def unseen(self) -> list[int]:
        """Those that nobody has looked at, who does so now."""
        first, self.seen = self.seen, len(self.came)
        return self.came[first : self.seen]


class BackwardPass:
    """The user's backward pass under way, as the hooks of one optimizer see it.

    Args:
        ended: a method, called when it has ended, perhaps more than once: by each part of it that had a hook.

    Attributes:
        number: how many have begun.
        runs: whether a hook was called in it and its end was not noted yet.
        parts: by graph task.
    """

    def __init__(self, ended: Callable[[], None]):
        self.number = 0
        self.runs = False
        self.parts: dict[int, PassPart] = {}
        self._ended = weakref.WeakMethod(ended)  # of the object that holds this one: no cycle to be collected

    def enter(self) -> PassPart:
        """The part of the pass that the hook runs in which calls this; begins it if it is the first one there."""
        task = current_task()
        part = self.parts.get(task)
        if part is None:
            part = self.parts[task] = PassPart(is_nested())
            if not self.runs:
                self.runs = True
                self.number += 1
            ended = self._ended()
            assert ended is not None  # its holder runs this hook
            call_at_end(ended)
        return part

    def forget(self) -> None:
        """The pass has ended, or failed."""
        self.runs = False
        self.parts.clear()


def is_nested() -> bool:
    """Whether the pass that calls this hook runs within a node of another one. Looks at the whole stack, some 2 us."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NODE_IN_PYTHON:
            return True
        frame = frame.f_back
    return False


def call_at_end(function: Callable[[], None]) -> None:
    """Has the engine call a function when the user's backward pass has ended; to be called from a hook within it.

    What the function raises, ``backward()`` raises. If the pass fails, the function is not called.
    """

    def ended() -> None:
        node = torch._C._current_autograd_node()  # the one that this pass runs within
        if node is None:
            function()
        else:
            _call_in_pass_of(node, lambda: call_at_end(function))

    _queue(ended)


def take_turns(steps: Iterator[Operation]) -> None:
    """Runs an iterator of operations to wait for, in turns with others that the engine calls at the end of this pass.

    Two optimizers may end in one pass, on other ranks in another order; each must go on while the first one waits.
    """
    for operation in steps:
        try:
            operation.wait(_TURN_SECONDS)
        except TimeoutError:
            _queue(lambda: take_turns(steps))
            return
        except RingtrainError:
            pass  # the iterator looks at each operation itself


def wait_for(steps: Iterator[Operation]) -> None:
    """The same at once, where nothing else ends meanwhile."""
    for operation in steps:
        with suppress(RingtrainError):  # the iterator looks at each operation itself, and at what else may have come
            operation.wait(_LOOK_SECONDS)


class OneByOne:
    """Has optimizers whose gradients one pass has completed go on one after the other, in an order that ranks share."""

    def __init__(self) -> None:
        self._waiting: dict[int, Callable[[], None]] = {}  # by place in that order

    def call(self, place: int, function: Callable[[], None]) -> None:
        """Has the engine call a function behind those with lower places; to be called at the end of the pass."""
        if not self._waiting:
            _queue(self._call_all)  # behind the ends of all optimizers, which hooks have queued
        self._waiting[place] = function

    def _call_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for _, function in sorted(waiting.items()):
            function()


def _call_in_pass_of(node: torch.autograd.graph.Node, function: Callable[[], None]) -> None:
    """Calls a function in the pass that a node belongs to: before the node that follows it."""
    following = next((each for each, _ in node.next_functions if each is not None), None)
    if following is None:
        function()
        return

    def before(gradients: tuple) -> None:
        hook.remove()
        function()

    hook = following.register_prehook(before)


def _queue(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)
