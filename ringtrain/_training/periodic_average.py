"""``PeriodicAverage``: local steps for training loops on NumPy arrays."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ringtrain._binding.tables import COMPRESSIONS
from ringtrain._runtime.operations import Compression
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._training.arrays import NUMPY
from ringtrain._training.averaging.outer import AveragingPlan, Outer, checked_outer
from ringtrain._training.averaging.period import Period
from ringtrain._training.averaging.shared import Role, Shared
from ringtrain._training.averaging.worker import Worker
from ringtrain._training.session import Session
from ringtrain.errors import InvalidArgumentError


class PeriodicAverage:
    """Averages arrays over the ranks after every so many steps; in between each rank trains alone.

    Example:
        >>> average = rt.PeriodicAverage([weights, bias], every=32)
        >>> for x, y in batches:
        ...     update(weights, bias, x, y)
        ...     average.step(samples=len(x))
        >>> average.join()

    Local SGD (Stich, arXiv:1805.09767), or DiLoCo (arXiv:2311.08105) with ``outer``. Floating-point arrays become the
    average, integers the maximum; all of it in place, and right after it they have the same bits on every rank. What a
    rank has changed weighs as much as it has samples since the last time.

    Args:
        arrays: contiguous NumPy arrays, or a mapping of names to such; equal on all ranks now.
        every: steps from one average to the next, at least 1.
        outer: the outer optimizer; None for plain averaging.
        compression: of what the arrays have changed, as for ``allreduce``.
        process_set: the ranks that average. On another rank nothing is done.
        fragments: parts that arrays are averaged in, one after another and evenly spread over a period, so that the network
            is never asked for all at once (Streaming DiLoCo, arXiv:2501.18512). Integers wait for ``synchronize()``.
        overlap: steps, less than ``every``, for which a part's change travels while training goes on.
        merge: what becomes of a value x, x' when it was sent, when the new common value X is there: ``"additive"``,
            x + (X - x'), or ``"half"``, (x + X) / 2.

    Raises:
        InvalidArgumentError: something else than such arrays, or a number that cannot be.
        MismatchError: when ranks meet: they have different arguments, or started from different values.
    """

    def __init__(
        self,
        arrays: Iterable[np.ndarray] | Mapping[str, np.ndarray],
        every: int,
        outer: Outer | None = None,
        compression: str = Compression.none,
        process_set: ProcessSet = global_process_set,
        fragments: int = 1,
        overlap: int = 0,
        merge: str = "additive",
    ):
        plan = AveragingPlan(checked_outer(outer), checked_compression(compression))
        named = arrays.items() if isinstance(arrays, Mapping) else ((str(at), each) for at, each in enumerate(arrays))
        self._arrays = [_shared(name, array) for name, array in named]
        period = Period(every, 0, fragments, overlap, merge)
        self._worker: Worker | None = None
        if process_set.included() and (process_set.size() != 1 or outer is not None):
            self._worker = Worker(Session(process_set), period, plan, "average")
            self._worker.adopt(self._arrays)

    def step(self, samples: int | None = None) -> bool:
        """Counts a step that was taken; after every ``every``-th one averages, and returns True then.

        With ``fragments`` or ``overlap`` it returns True where a part was sent or merged.

        Args:
            samples: what it counts, such as the size of its batch; on all ranks, or None on all.
        """
        if self._worker is None:
            return False
        self._worker.before_step(self._arrays)
        if samples is not None:
            self._worker.period.count_samples(samples)
        return self._worker.after_step()

    def synchronize(self) -> None:
        """Averages now: before evaluation, and before saving. All ranks call it after the same step."""
        if self._worker is not None:
            self._worker.before_step(self._arrays)
            self._worker.synchronize()

    def join(self) -> None:
        """Says that this rank has no more data, and averages with the others until all ranks have said so."""
        if self._worker is not None:
            self._worker.before_step(self._arrays)
            self._worker.join()

    def state_dict(self) -> dict[str, Any]:
        """What goes on where this rank is, at any step: to be saved together with the arrays."""
        return {} if self._worker is None else self._worker.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state_dict`` has returned, on this rank or on another one; all ranks load."""
        if self._worker is not None:
            self._worker.load(state or None)
            self._worker.adopt(self._arrays)


def _found(array: object) -> str:
    if not isinstance(array, np.ndarray):
        return f"a {type(array).__name__}"
    return "not contiguous" if not array.flags.c_contiguous else "read-only"


def _shared(name: str, array: object) -> Shared:
    if not (isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.writeable):
        raise InvalidArgumentError(
            f"PeriodicAverage: arrays must be contiguous NumPy arrays that can be written to, but number {name} is {_found(array)}. "
            "Pass the arrays that training changes."
        )
    is_float = bool(np.issubdtype(array.dtype, np.floating))
    return Shared(NUMPY, name, Role.of(is_float, is_float), lambda: array)


def checked_compression(compression: object) -> str:
    """A row of ``tables.COMPRESSIONS``; raises InvalidArgumentError for another."""
    if not isinstance(compression, str) or compression not in COMPRESSIONS:
        known = ", ".join(COMPRESSIONS)
        raise InvalidArgumentError(f"local steps: compression must be one of {known}, but is {compression!r}.")
    return compression
