"""The guard against silent divergence: did the first update move all replicas alike?

An optimizer that was compiled without ``DistributedOptimizer``, or loaded from a file and not wrapped again, trains
each rank on its own data without an error. Each rank's update is put into two numbers for each variable, and these are
compared; an update that was averaged gives all ranks the same ones.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.process_sets import ProcessSet, members_of
from ringtrain._training.terms import difference
from ringtrain.errors import MismatchError
from ringtrain.keras.types import Variable
from ringtrain.keras.variables import path_of

_TOLERANCE = 1e-3  # of the update's size; processors that round differently stay far below, other data far above
_PART = 1 << 20  # elements


def require_equal(own: Mapping[str, object], operation: str, process_set: ProcessSet, demand: str, advice: str) -> None:
    """Compares some values, by their names, of the ranks of a ``fit``; collective, under the operation's name.

    Raises:
        MismatchError: the first that is not the same on all ranks, with what they have; the same on all.
    """
    everyone = allgather_object(own, operation, process_set)
    found = difference(list(zip(members_of(process_set), everyone, strict=True)))
    if found is not None:
        name, values = found
        raise MismatchError(f"{demand}, but {name} is {values}. {advice}.")


class ReplicaGuard:
    """Compares the first update of all ranks.

    Args:
        variables: those that training changes, with equal values on all ranks now.
        process_set: the ranks that must move alike.
    """

    def __init__(self, variables: Sequence[Variable], process_set: ProcessSet):
        self._variables = list(variables)
        self._process_set = process_set
        self._before = [np.array(variable.numpy()) for variable in self._variables]

    def passed(self) -> bool:
        """Compares, on all ranks together. False if nothing has moved on any rank yet; ask again after the next step.

        Raises:
            MismatchError: the updates differ.
        """
        own = [
            fingerprint(before, np.asarray(variable.numpy()))
            for variable, before in zip(self._variables, self._before, strict=True)
        ]
        everyone = allgather_object(own, "replica_guard", self._process_set)
        if not any(size for theirs in everyone for size, _ in theirs):
            return False
        for rank, theirs in zip(members_of(self._process_set), everyone, strict=True):
            differing = first_difference(everyone[0], theirs)
            if differing is not None:
                raise MismatchError(
                    f"first update of '{path_of(self._variables[differing])}': the change must be the same "
                    f"on all ranks, but differs between rank {members_of(self._process_set)[0]} and rank {rank}: gradients "
                    "are not averaged, or the ranks' optimizers have other settings, such as weight decay or clipping. Compile with "
                    "DistributedOptimizer(...), with the same settings on all ranks, load files with load_model(), or pass "
                    "check_replicas=False to BroadcastGlobalVariablesCallback if ranks shall part."
                )
        return True


def fingerprint(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """The norm of an update, and its projection onto a direction that is fixed for its size; part by part, to need
    little memory beside the two."""
    directions = np.random.Generator(np.random.Philox(key=before.size))
    squares = projection = 0.0
    for start in range(0, before.size, _PART):
        part = slice(start, start + _PART)
        update = after.reshape(-1)[part].astype(np.float64) - before.reshape(-1)[part]
        squares += float(update @ update)
        projection += float(update @ directions.standard_normal(update.size))
    return float(np.sqrt(squares)), projection


def first_difference(first: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> int | None:
    """The place of the first fingerprints that are not of the same update."""
    for place, ((size, projection), (other_size, other_projection)) in enumerate(zip(first, other, strict=True)):
        allowed = _TOLERANCE * max(size, other_size)
        alike = abs(size - other_size) <= allowed and abs(projection - other_projection) <= allowed
        if not alike and not (np.isnan(size) and np.isnan(other_size)):
            return place
    return None
