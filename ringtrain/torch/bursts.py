"""Gradients on their way out: small ones leave in bursts, and what this rank had to refuse is raised when all is done.

``exchange`` gathers here what hooks complete, and sends what a round calls for.
"""

from collections.abc import Callable, Sequence

from ringtrain.errors import RingtrainError
from ringtrain.torch.gradients import Group, OptimizedParameter, ReductionSettings
from ringtrain.torch.passes import Passes


class Bursts:
    """What is complete on this rank and has not left yet.

    Args:
        settings: how gradients are combined.
        passes: which the gradients are summed over.

    Attributes:
        overlap: whether they leave while the pass goes on, or all when it has ended.
        keeps_inputs: whether gradients stay as they are until their results are released.
        weight: says what this rank's gradients count in the average of a step; None if all count alike.
    """

    def __init__(self, settings: ReductionSettings, passes: Passes):
        self.overlap = True
        self.keeps_inputs = False
        self.weight: Callable[[], int | None] = lambda: passes.items
        self._settings = settings
        self._passes = passes
        self._gathered: list[tuple[Group, list[OptimizedParameter]]] = []
        self._bytes = self._enough = 0
        self._problems: list[RingtrainError] = []  # what this rank had to refuse, or learned when it took results

    def gather(self, member: OptimizedParameter, codes: bytes | bytearray) -> bool:
        """Notes a gradient that is complete here; submits when there is enough for a burst. A big one leaves at once.

        Returns whether a burst has left.
        """
        group = member.group
        if not self._gathered:
            # Small gradients leave together: the first finds caches that the pass has filled with data, the others warm ones.
            self._enough = self._settings.session.context.burst_bytes()
        self._bytes += member.parameter.nbytes
        if group.gather():
            self._gathered.append((group, group.unsettled(codes)))
            if self.overlap and self._bytes >= self._enough:
                self.leave()
                return True
        return False

    def leave(self, waits: bool = False) -> None:
        """Submits what was gathered; ``waits`` if this thread waits for all of it next."""
        gathered, self._gathered, self._bytes = self._gathered, [], 0
        for group, members in gathered:
            self.submit(group, members, waits)

    def submit(self, group: Group, members: Sequence[OptimizedParameter], waits: bool = False) -> None:
        """Submits, and goes on after a refusal: the other ranks wait for the rest."""
        try:
            group.submit(members, self._settings, self._postscale, self.weight(), self.keeps_inputs, waits)
        except RingtrainError as problem:
            self.note_problem(problem)
        if group.bucket is not None:
            for member in members:
                self._passes.note_moved(member.index, member.parameter.grad)

    def go_on(self, group: Group) -> None:
        """Submits what follows from what a group has submitted, which has arrived."""
        try:
            group.go_on(self._settings, self._postscale, self.weight())
        except RingtrainError as problem:
            self.note_problem(problem)

    @property
    def _postscale(self) -> float:
        return self._settings.postscale / self._passes.divisor

    def note_problem(self, problem: RingtrainError) -> None:
        """Keeps an error until everything that was agreed on has travelled."""
        self._problems.append(problem)

    def raise_problem(self) -> None:
        """Raises the first error that was kept."""
        if self._problems:
            raise self._problems[0]

    def forget(self) -> None:
        """Lets go of what has not left."""
        self._gathered.clear()
        self._bytes = 0
        self._problems = []
