"""Backward passes of one optimizer in a step, counted for each parameter: when is a gradient complete?

Gradients of ``per_step`` passes are summed before they travel. A pass within another one, as a reentrant checkpoint
runs it, is part of that one.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ringtrain.torch.backward import BackwardPass, PassPart


class Passes:
    """How many passes have added to each gradient in the current step.

    Args:
        look: a method, called with each part of a pass of which nobody has seen all gradients that have come in it.
        ended: a method, called when a pass has ended that was the last one for a gradient.
        per_step: passes whose gradients are summed.
        averages: whether the sum is then divided by ``per_step``.

    Attributes:
        per_step: as given, or as set since.
        averages: as given.
        divisor: of the sum of a step's passes.
        parts: of the pass under way, and of one that has failed.
        silent: whether passes only add to the gradients of this rank.
        items: of how many the step's losses are sums on this rank, as far as it was said; None where nobody has. After a step
            is closed they are the next one's.
        reduced_items: those of the step that was closed last.
    """

    def __init__(self, look: Callable[[PassPart], None], ended: Callable[[], None], per_step: int, averages: bool):
        self.averages = averages
        self.set_per_step(per_step)
        self._look = weakref.WeakMethod(look)  # of the object that holds this one: no cycle to be collected
        self._ended = weakref.WeakMethod(ended)
        self._pass = BackwardPass(self._end)
        self.parts = self._pass.parts
        self._completes = False  # whether the pass under way is the last one for a gradient
        self.silent = False
        self.items: int | None = None
        self.reduced_items: int | None = None
        self._are_given_up = False  # whether gradients were set to zero since the items were said, and no pass has come
        self._first = 1  # number of the step's first pass
        # by parameter
        self._counts: list[int] = []
        self._last: list[int] = []  # number of the last pass that added to the gradient
        self._versions: list[int] = []  # of the gradient, as that pass left it

    def set_per_step(self, passes: int) -> None:
        """Changes the number of passes in a step, between two steps."""
        self.per_step = passes
        self.divisor = passes if self.averages else 1

    def instead_of_another(self) -> str:
        """What to do where a pass comes after the last one of a step."""
        return f"Call step() or zero_grad(), raise backward_passes_per_step, or use no_sync(){self.at_an_epochs_end()}"

    def at_an_epochs_end(self) -> str:
        """And what to do there, where its batches may be no multiple of the passes in a step."""
        return (
            "; behind the last batch of an epoch, call step(), which sends what there is" if self.per_step > 1 else ""
        )

    def add(self, count: int) -> None:
        """Counts for so many further parameters."""
        for values in (self._counts, self._last, self._versions):
            values.extend([0] * count)

    def enter(self) -> PassPart:
        """The part of the pass that the hook runs in which calls this."""
        self._are_given_up = False
        return self._pass.enter()

    @property
    def number_in_step(self) -> int:
        """The place of the pass under way among those of its step."""
        return self._pass.number - self._first

    def look_at_all(self) -> None:
        """Has all gradients looked at that have come: at the end of a pass, or after one that failed."""
        for part in list(self.parts.values()):
            look = self._look()
            if part.seen < len(part.came) and look is not None:
                look(part)

    def count(self, index: int, gradient: torch.Tensor, nested: bool) -> bool:
        """The pass has added to a gradient; returns whether that is complete, and no part of this pass adds to it."""
        number = self._pass.number
        if not nested or self._last[index] != number:
            self._counts[index] += 1
            self._last[index] = number
        self._versions[index] = gradient._version
        if self.silent or self._counts[index] < self.per_step:
            return False
        self._completes = True
        return not nested  # else another part of this pass may add to it; the round at its end sends it

    def count_rows(self) -> None:
        """The pass has brought gradients of rows, of an optimizer that has nothing else: the step's last pass has all."""
        if not self.silent and self.number_in_step + 1 >= self.per_step:
            self._completes = True

    def has_come(self, index: int) -> bool:
        """Whether a pass of this step has added to a gradient."""
        return self._counts[index] > 0

    def has_all(self, index: int) -> bool:
        """Whether no more is to be expected of a gradient after the pass that has ended.

        One with fewer passes is complete too, unless the micro-batches have several passes each: then the pass for this
        one may be still to come.
        """
        one_a_batch = self.number_in_step < self.per_step
        return self._counts[index] > 0 and (one_a_batch or self._counts[index] >= self.per_step)

    def left_changed(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Whether somebody has changed a gradient since a pass of this step left it."""
        return self._counts[index] > 0 and gradient is not None and gradient._version != self._versions[index]

    def note_moved(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient lies in another tensor now, as the last pass left it."""
        self._versions[index] = gradient._version

    def count_items(self, items: int) -> None:
        """The loss of the next pass is the sum of so many more; of one that was given up before it, nothing is left."""
        self.items = items + (0 if self._are_given_up else self.items or 0)
        self._are_given_up = False

    def close_step(self) -> None:
        """All gradients of the step are settled, and whether it is used or skipped its passes and items are over."""
        self._counts = [0] * len(self._counts)
        self.reduced_items, self.items = self.items, None

    def begin_step(self, settled: list[int], reopened: bool) -> None:
        """A new step begins, with the pass under way if there is one; what was settled has had no pass in it.

        One that is ``reopened`` reduces once more what the last one has, of the same items if nothing else was said.
        """
        if reopened and self.items is None:
            self.items = self.reduced_items
        for index in settled:
            self._counts[index] = 0
        self._first = self._pass.number + (not self._pass.runs)

    def forget(self) -> None:
        """Starts anew, without what was begun; but with the items of passes that are still to come."""
        if any(self._counts):
            self.items = None
        self._are_given_up = self.items is not None
        self._counts = [0] * len(self._counts)
        self._forget_pass()

    @contextmanager
    def silence(self) -> Iterator[None]:
        """A block of passes that only add to the gradients of this rank: none completes one."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def _end(self) -> None:
        if not self._pass.runs:
            return  # several parts of the pass have asked to be told
        self.look_at_all()
        completes = self._completes
        self._forget_pass()
        ended = self._ended()
        if completes and ended is not None:
            ended()

    def _forget_pass(self) -> None:
        self._completes = False
        self._pass.forget()
