"""Steps that have become alike, and which gradients share a bucket then. Pure.

What a step reduced is agreed on, so all ranks note the same and have the same buckets from the same step on.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from ringtrain._training.presence import is_there

# Steps that reduced the same gradients before buckets are made: the first ones find what is unused or sparse.
STEADY_STEPS = 3


class SteadySteps:
    """What the steps of one optimizer reduced, by parameter.

    Attributes:
        kinds: the codes for which buckets were made last, 0 for what was not reduced; zeros before.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, count: int) -> None:
        """Begins to look, at so many parameters."""
        self.kinds = self._of_step = self._of_last = bytes(count)
        self._alike = 0  # steps in a row

    def note(self, agreed: bytes, closes: bool) -> None:
        """Notes what a round has reduced, and whether the step is closed by that."""
        self._of_step = bytes(
            code if is_there(code) else kind for kind, code in zip(self._of_step, agreed, strict=True)
        )
        if closes:
            self._alike = self._alike + 1 if self._of_step == self._of_last else 1
            self._of_last, self._of_step = self._of_step, bytes(len(self._of_step))

    def have_new_kinds(self) -> bool:
        """Whether the last steps were alike, and not what ``kinds`` says, which then says it; between two steps."""
        if self._alike < STEADY_STEPS or self._of_last == self.kinds:
            return False
        self.kinds = self._of_last
        return True


class Assignment(NamedTuple):
    """Places of parameters whose gradients are one operation.

    Attributes:
        group: the given group that they are; None for a bucket made of parameters that were alone.
        in_bucket: whether they have memory in common.
    """

    places: list[int]
    group: int | None
    in_bucket: bool


def assigned(
    groups: Sequence[Sequence[int]],
    kind_of: Callable[[int], Hashable | None],
    bytes_of: Callable[[int], int],
    bucket_bytes: int,
) -> list[Assignment]:
    """Assigns gradients to buckets where that saves packing; what gets none stays in its group.

    A group of several members becomes one bucket. Members that are alone fill buckets in the order in which backward
    passes reach them, from the last one on. A bucket holds gradients of one kind.

    Args:
        groups: places of the parameters in each given group.
        kind_of: what the members of a bucket have in common; None for a parameter that is in none.
        bytes_of: size of a gradient.
        bucket_bytes: a bucket is full from this size on. What is larger travels alone, unpacked as it is.
    """
    found, lone = [], []
    for number, places in enumerate(groups):
        if len(places) == 1:
            lone.append((places[0], number))
        else:
            kinds = {kind_of(place) for place in places}
            found.append(Assignment(list(places), number, len(kinds) == 1 and None not in kinds))
    for run in _runs(reversed(lone), kind_of, bytes_of, bucket_bytes):
        is_bucket = len(run) > 1
        found.append(Assignment([place for place, _ in run], None if is_bucket else run[0][1], is_bucket))
    return found


def _runs(
    lone: Iterator[tuple[int, int]],
    kind_of: Callable[[int], Hashable | None],
    bytes_of: Callable[[int], int],
    bucket_bytes: int,
) -> Iterator[list[tuple[int, int]]]:
    """Places with their groups in runs of one kind, each as long as its gradients fit in a bucket."""
    open_runs: dict[Hashable, list[tuple[int, int]]] = {}
    for place, number in lone:
        kind = kind_of(place)
        if kind is None or bytes_of(place) >= bucket_bytes:
            yield [(place, number)]
            continue
        run = open_runs.setdefault(kind, [])
        run.append((place, number))
        if sum(bytes_of(each) for each, _ in run) >= bucket_bytes:
            yield open_runs.pop(kind)
    yield from open_runs.values()
