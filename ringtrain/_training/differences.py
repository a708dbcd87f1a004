"""Something differs between ranks, as all of them have found out: they tell each other what they have, and raise one error.

``rounds`` comes here. Each method is a generator, which yields its operations while they are under way, so
that a thread may see to something else meanwhile.
"""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from ringtrain._binding.log import logger
from ringtrain._binding.tensor_memory import Buffer, as_buffer
from ringtrain._runtime.pending import Operation
from ringtrain._training import terms as words
from ringtrain._training import trained as lists
from ringtrain._training.adapter import checks
from ringtrain._training.adapter.checks import named_ranks
from ringtrain._training.drift import ComparedReplica, Settings, Words
from ringtrain._training.session import Session
from ringtrain.errors import MismatchError

ROUNDING = 1e-3  # of the largest element: processors that round differently stay far below after an update, other data far above

Result = TypeVar("Result")


def waited(steps: Generator[Operation, None, Result]) -> Result:
    """What the steps return, each of whose operations is waited for."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as end:
        result: Result = end.value
        return result


class Differences:
    """Those among the ranks of one optimizer.

    Args:
        session: the rank that it acts for.
        name: of the operations, without the last part; unique among the optimizers of the process set.
        optimizer: what errors call it.
    """

    def __init__(self, session: Session, name: str, optimizer: str):
        self._session, self._name, self._optimizer = session, name, optimizer

    def refuse_steps(self, own: int | None) -> Generator[Operation, None, NoReturn]:
        """Raises the error of steps since the last round; None where this rank does not know."""
        row = np.array([[self._session.context.rank, -1 if own is None else own]])
        counts = (yield from self.gathered("steps", row)).tolist()
        raise MismatchError(unequal_steps(self._optimizer, map(tuple, counts)))

    def refuse_terms(self, own: bytes) -> Generator[Operation, None, NoReturn]:
        """Raises the error of ``terms.encoded``."""
        raise MismatchError(unequal_terms(self._optimizer, (yield from self._gathered_terms("terms", own))))

    def require_trained(
        self, own: Sequence[lists.Parameter], compared_by: str = ""
    ) -> Generator[Operation, None, None]:
        """Returns if all ranks train the same parameters, told in the same order.

        Args:
            own: what this rank trains.
            compared_by: as for ``lists.unequal_trained``.

        Raises:
            MismatchError: they do not; the same on all ranks.
        """
        told = yield from self._gathered_bytes("trained", lists.encoded(own))
        of_ranks = [(rank, lists.decoded(content)) for rank, content in told]
        if not lists.are_alike(of_ranks):
            raise MismatchError(lists.unequal_trained(self._optimizer, of_ranks, compared_by))

    def refuse_settings(self, own: Settings, tense: str, called: Words) -> Generator[Operation, None, NoReturn]:
        """Raises the error of what ranks step with; see ``unequal_settings``."""
        of_ranks = yield from self._gathered_terms("settings", words.encoded(own))
        raise MismatchError(unequal_settings(self._optimizer, of_ranks, tense, called))

    def judge_parameters(self, replica: ComparedReplica) -> Generator[Operation, None, bool]:
        """Compares the parameters; by how much the first that differs does so is told by its extremes.

        Returns:
            Whether to compare them again. Processors of different kinds round differently: where it is no more than that, one
            rank warns of it, and they are not compared any more.

        Raises:
            MismatchError: they differ by more, or on processors of one kind.
        """
        rows = yield from self._gathered_digests(replica)
        odd = places_that_differ(rows)
        if not odd:
            return True
        processors = yield from self._gathered_terms("processors", words.encoded({"kind": replica.processor()}))
        kinds = {theirs["kind"] for _, theirs in processors}
        farthest = 0.0
        for place in odd:
            distance, size = yield from self._distance(replica.values(place))
            if len(kinds) == 1 or not distance <= ROUNDING * size:
                names, called = replica.names(), replica.called
                raise MismatchError(unequal_parameters(self._optimizer, names, rows, place, distance, called))
            farthest = max(farthest, distance)
        if self._session.context.rank == rows[:, 0].min():
            logger.warning("%s", rounded_differently(self._optimizer, len(odd), farthest, kinds, replica.called))
        return False

    def _gathered_digests(self, replica: ComparedReplica) -> Generator[Operation, None, np.ndarray]:
        """For each rank that knows them its number, and the digests of its parameters."""
        digests = replica.shown.digests
        own = np.zeros(len(replica.names()), np.int64) if digests is None else digests
        row = np.array([[digests is not None, self._session.context.rank, *own]], np.int64)
        rows = yield from self.gathered("digests", row)
        return rows[rows[:, 0] == 1, 1:]

    def _distance(self, own: np.ndarray) -> Generator[Operation, None, tuple[float, float]]:
        """The largest difference of an element between any two ranks, and the size of the largest element.

        NaN if ranks have different numbers of elements.
        """
        sizes = yield from self.gathered("sizes", np.array([own.size]))
        if (sizes != own.size).any():
            return math.nan, math.nan
        lowest = own.copy()
        yield from self._done("highest", "allreduce", [as_buffer(own)], [as_buffer(own)], "max")
        yield from self._done("lowest", "allreduce", [as_buffer(lowest)], [as_buffer(lowest)], "min")
        with np.errstate(all="ignore"):
            distance, size = np.max(own - lowest, initial=0.0), np.max(np.maximum(own, -lowest), initial=0.0)
        return float(distance), float(size)

    def gathered(self, what: str, own: np.ndarray) -> Generator[Operation, None, np.ndarray]:
        """The rows of all ranks, in rank order."""
        operation = yield from self._done(what, "allgather", [as_buffer(own)], [None])
        memory, _, shape = operation.allocated()
        return np.frombuffer(memory, own.dtype).reshape(shape)

    def _gathered_terms(self, what: str, own: bytes) -> Generator[Operation, None, list[tuple[int, dict[str, Any]]]]:
        """Ranks with their terms."""
        of_ranks = yield from self._gathered_bytes(what, own)
        return [(rank, words.decoded(content)) for rank, content in of_ranks]

    def _gathered_bytes(self, what: str, own: bytes) -> Generator[Operation, None, list[tuple[int, bytes]]]:
        """Ranks with what they have said."""
        sizes = yield from self.gathered(f"{what}.sizes", np.array([[self._session.context.rank, len(own)]]))
        everything = (yield from self.gathered(what, np.frombuffer(own, np.uint8))).tobytes()
        ends = np.cumsum(sizes[:, 1])
        contents = [everything[end - size : end] for end, size in zip(ends, sizes[:, 1], strict=True)]
        return [(int(rank), content) for rank, content in zip(sizes[:, 0], contents, strict=True)]

    def _done(
        self, what: str, kind: str, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None], reduction: str = "sum"
    ) -> Generator[Operation, None, Operation]:
        """An operation from an input into an output, or one that the core allocates."""
        process_set, name = self._session.process_set_id, f"{self._name}.{what}"
        operation = self._session.context.submit(
            kind, name, inputs, outputs, reduction=reduction, process_set=process_set
        )
        while not operation.finished():
            yield operation
        operation.wait()
        return operation


def unequal_steps(optimizer: str, counts: Iterable[tuple[int, int]]) -> str:
    """The error's text, from pairs of a rank and its steps, which are negative where it does not know."""
    ranks_by_count: dict[int, list[int]] = {}
    for rank, count in sorted(counts):
        ranks_by_count.setdefault(count, []).append(rank)
    found = " and ".join(f"{count} on {named_ranks(ranks)}" for count, ranks in ranks_by_count.items() if count >= 0)
    return (
        f"step '{optimizer}': the number of steps since gradients were last reduced must be the same on all ranks, but "
        f"is {found}. The parameters of these ranks differ now. Call step() on every rank or on none: decide by what all "
        "ranks know, such as a reduced loss; and run as many backward passes. Then start again from a checkpoint, or broadcast "
        "parameters and the optimizer's state."
    )


def unequal_terms(optimizer: str, terms: Sequence[tuple[int, Mapping[str, object]]]) -> str:
    """The error's text, from pairs of a rank and its terms."""
    term, values = words.difference(terms) or ("", "")
    return (
        f"step '{optimizer}': {term} must be the same on all ranks, but is {values}. Make the optimizer with the same "
        "arguments on every rank."
    )


def unequal_settings(optimizer: str, settings: Sequence[tuple[int, Settings]], tense: str, called: Words) -> str:
    """The error's text.

    Args:
        optimizer: that steps.
        settings: ranks with theirs; empty ones are not known.
        tense: ``is``, or ``was in the last step``.
        called: what things are called in the framework.
    """
    name, values = words.difference([(rank, theirs) for rank, theirs in settings if theirs]) or ("settings", "not")
    return (
        f"step '{optimizer}': {name} must be the same on all ranks, but {tense} {values}. Ranks that step with different "
        "settings train apart. Step a schedule equally often on all ranks, give one that follows a metric the metric of all "
        f'ranks, and begin again from one state: {called.broadcast}. Or give {called.wrapper} a mode with replicas="differ".'
    )


def unequal_parameters(
    optimizer: str, names: Sequence[str], rows: np.ndarray, place: int, distance: float, called: Words
) -> str:
    """The error's text.

    Args:
        optimizer: that steps.
        names: of the parameters.
        rows: for each rank its number, and the digests of its parameters.
        place: of one that differs.
        distance: the largest difference of an element of that, between any two ranks.
        called: what things are called in the framework.
    """
    odd = places_that_differ(rows)
    by = f", by up to {distance:.3g}" if math.isfinite(distance) else ""
    more = f" {len(odd)} of {len(names)} parameters differ." if len(odd) > 1 else ""
    return (
        f"step '{optimizer}': parameter '{names[place]}' must be the same on all ranks, but "
        f"{checks.sides(rows[:, 1 + place], rows[:, 0])}{by}.{more} Usual causes: no broadcast at the start; a layer that its "
        "first batch makes, or whose seed is not that of the others; an assignment on one rank; a hook of another library; "
        "gradients that are clipped where a rank had no backward pass, which needs synchronize() before. "
        f'Call {called.broadcast} on all ranks, from one that is right, or give {called.wrapper} a mode with replicas="differ".'
    )


def rounded_differently(optimizer: str, count: int, farthest: float, kinds: Iterable[str], called: Words) -> str:
    """The warning's text, of parameters that differ by rounding: how many, and by how much at most."""
    return (
        f"step '{optimizer}': {count} parameters differ between ranks by up to {farthest:.3g}, as processors of different kinds "
        f"round differently ({'; '.join(sorted(kinds))}). They are not compared again. Call {called.broadcast} now and then, "
        "which makes them equal."
    )


def places_that_differ(rows: np.ndarray) -> list[int]:
    """Which columns behind the first one are not the same in all rows."""
    return np.flatnonzero((rows[:, 1:] != rows[0, 1:]).any(axis=0)).tolist()
