"""Agreement of all ranks on which gradients of a step there are, for eager steps and for graphs.

``ringtrain._training.presence`` has the rule. In eager mode the ranks agree in every step. A graph knows what is None
when it is traced, and a rank may trace again alone, for a batch of another size: the ranks agree when they trace the
gradients of these variables for the first time, and remember the answer. A later graph of a rank then sends zeros for
what it lacks and others may have; where it has what nobody had, its first operation finds out whether all ranks do, and
fails on all of them if not. Where all ranks are known to trace anew, they ``begin_anew``. In an elastic job graphs outlive
worlds of any size, and a rank that joins traces alone: when a world begins, the ranks ``share`` what they remember.
"""

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ringtrain._bootstrap import membership
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.operations import Max
from ringtrain._runtime.process_sets import ProcessSet, id_of, is_alone
from ringtrain._training.agreement import Agreement, Remembered, stem_of
from ringtrain._training.presence import DENSE, MISSING, SPARSE_32, SPARSE_64, nobodys
from ringtrain._training.trained import Parameter
from ringtrain.errors import RingtrainError
from ringtrain.tensorflow import names as naming
from ringtrain.tensorflow import nodes
from ringtrain.tensorflow.library import current_slot
from ringtrain.tensorflow.types import Gradient, Source

_INDICES = {SPARSE_32: tf.int32, SPARSE_64: tf.int64}

_WHO_IS_MISSING = (
    "With it the ranks agree which gradients there are: the missing ones have not come to the gradients of these variables. "
    "Take the same steps on every rank, and trace functions with gradients on all of them."
)
_CHANGED = (
    "gradients: those that are None must be the same on all ranks as when their function was first traced, but a rank "
    "traced it again and others have not. Pass unconnected_gradients=tf.UnconnectedGradients.ZERO to the tape. Differing:"
)


class _Agreements:
    """What the ranks have agreed on for graphs, by names and variables; of one slot, so graphs may outlive a world.

    Attributes:
        size: of the worlds that it serves: in one of another size some ranks remember nothing, so all start anew; but not
            in an elastic job, whose ranks ``share``.
    """

    def __init__(self, size: int):
        self.size = size
        self._entries: dict[tuple, list[tuple[list[weakref.ref | None], Agreement]]] = {}
        self._counts: dict[tuple, int] = {}
        self._told: dict[tuple, bytes] = {}  # what others remember, and this rank is to trace yet

    def recall(
        self, codes: bytes, names: Sequence[str], variables: Sequence[Source], process_set: ProcessSet
    ) -> Agreement:
        """The agreement on the gradients of these variables under these names; a new one the first time."""
        key = (process_set.process_set_id, *names)
        entries = [entry for entry in self._entries.get(key, []) if _alive(entry[0])]
        self._entries[key] = entries
        for references, known in entries:
            if all(
                reference is None or reference() is each for reference, each in zip(references, variables, strict=True)
            ):
                return known
        agreement: Agreement
        if (told := self._told.pop(key, None)) is not None:
            agreement = Remembered(told)
        else:
            which = key[:2]
            self._counts[which] = self._counts.get(which, 0) + 1
            agreement = _agree(codes, f"{names[0]}.present.{self._counts[which]}", process_set)
        entries.append(([weakref.ref(each) if naming.is_variable(each) else None for each in variables], agreement))
        return agreement

    def forget(self, prefix: str) -> None:
        """What was agreed on under names that begin so is agreed on anew."""
        self._entries = {key: kept for key, kept in self._entries.items() if not key[1].startswith(prefix)}
        self._told = {key: answer for key, answer in self._told.items() if not key[1].startswith(prefix)}

    def known(self) -> tuple[dict[tuple, int], dict[tuple, bytes]]:
        """What this rank has to tell: how often ranks have agreed under a name, and the latest answers."""
        living = {key: [entry for entry in entries if _alive(entry[0])] for key, entries in self._entries.items()}
        latest = {key: _answer(entries[-1][1]) for key, entries in living.items() if entries}
        return self._counts, {**self._told, **latest}

    def learn(self, everyone: Sequence[tuple[dict[tuple, int], dict[tuple, bytes]]]) -> None:
        """Takes what all ranks have told: the greatest code of any counts, as it does when they agree."""
        told: dict[tuple, bytes] = {}
        for counts, answers in everyone:
            for which, count in counts.items():
                self._counts[which] = max(count, self._counts.get(which, 0))
            for key, answer in answers.items():
                told[key] = bytes(map(max, told.get(key, answer), answer))
        for key, entries in self._entries.items():
            if any(_alive(references) for references, _ in entries) and key in told:
                entries[-1] = (entries[-1][0], Remembered(told.pop(key)))
        self._told = told


_memories: dict[int, _Agreements] = {}


def share() -> None:
    """At the beginning of an elastic job's world, on all ranks: each learns what graphs of the others were traced with."""
    memory = _memory()
    memory.learn(allgather_object(memory.known(), "ringtrain.elastic.gradients"))


def begin_anew(prefix: str) -> None:
    """Before all ranks trace new functions: which of the gradients there are whose names begin so is agreed on again."""
    _memory().forget(prefix)


def complete(
    gradients: Sequence[Gradient], names: Sequence[str], variables: Sequence[Source], process_set: ProcessSet
) -> tuple[list[Gradient], Agreement | None]:
    """The gradients with zeros for those that only other ranks have.

    Args:
        gradients: of this rank, None for those that it lacks.
        names: of the gradients, the same on all ranks, not yet claimed in the graph.
        variables: what the gradients belong to.
        process_set: the ranks that take part, this one among them.

    Returns:
        The gradients; and in eager mode an agreement to ``settle`` once they are reduced.

    Raises:
        TimeoutError: this rank lacks a gradient, and some rank never said what it has.
        MismatchError: the same, and ranks have different numbers of gradients.
    """
    if not gradients or is_alone(process_set):
        return list(gradients), None
    codes = bytes(_code_of(gradient) for gradient in gradients)
    if tf.executing_eagerly():
        agreement = _agree(codes, f"{stem_of(names[0])}.present", process_set)
        agreement.meet(process_set, lambda: _listed(variables))
        return agreement.complete(gradients, codes, _zeros_for(variables)), agreement
    agreement = _memory().recall(codes, names, variables, process_set)
    agreement.meet(process_set, lambda: _listed(variables))
    completed = agreement.complete(gradients, codes, _zeros_for(variables))
    if MISSING in agreement.own:
        completed = _checked(completed, codes, names, agreement.agreed(), process_set)
    return completed, None


def _agree(codes: bytes, name: str, process_set: ProcessSet) -> Agreement:
    return Agreement(current(), id_of(process_set), name, codes, _WHO_IS_MISSING)


def _listed(variables: Sequence[Source]) -> list[Parameter]:
    return [
        Parameter(naming.path_of(each), str(list(each.shape))) if naming.is_variable(each) else Parameter("source")
        for each in variables
    ]


def _memory() -> _Agreements:
    slot, size = current_slot(), current().size
    lasts = membership.current() is not None
    if slot not in _memories or not (lasts or _memories[slot].size == size):
        _memories[slot] = _Agreements(size)
    return _memories[slot]


def settle(agreement: Agreement | None) -> None:
    """Waits for an agreement of this step, which is over when the step's gradients are there; its name is free then."""
    if agreement is not None:
        agreement.agreed()


def _zeros_for(variables: Sequence[Source]) -> Callable[[int, int], tf.Tensor | tf.IndexedSlices]:
    """What makes a gradient of zeros, of the agreed kind, for the variable at a place."""

    def zeros(place: int, code: int) -> tf.Tensor | tf.IndexedSlices:
        values = tf.convert_to_tensor(variables[place])
        if code == DENSE:
            return tf.zeros_like(values)
        shape = tf.shape(values, _INDICES[code])
        return tf.IndexedSlices(tf.zeros_like(values[:0]), tf.zeros([0], _INDICES[code]), shape)

    return zeros


def _checked(
    gradients: list[Gradient], codes: bytes, names: Sequence[str], agreed: bytes, process_set: ProcessSet
) -> list[Gradient]:
    """The gradients; those that nobody had when the ranks agreed come after a look whether all ranks have them now."""
    absent = nobodys(agreed)
    if not absent or naming.in_session_graph():  # a session's graph is made once
        return gradients
    own = np.array([codes[place] for place in absent], np.uint8)
    bounds = nodes.run(
        "allreduce", [[tf.constant(np.concatenate([own, ~own]))]], naming.claim(f"{names[0]}.unchanged"),
        id_of(process_set), reduction=Max, prescale_bits=nodes.bits(1.0), postscale_bits=nodes.bits(1.0),
        compression=0,
    )[0]  # fmt: skip
    highest, lowest = bounds[: own.size], tf.bitwise.invert(bounds[own.size :])
    differs = tf.not_equal(highest, lowest)
    who = tf.boolean_mask(tf.constant([names[place] for place in absent]), differs)
    unchanged = tf.debugging.Assert(tf.logical_not(tf.reduce_any(differs)), [_CHANGED, who], summarize=8)
    with tf.control_dependencies([unchanged]):
        for place in absent:
            if gradients[place] is not None:
                gradients[place] = tf.nest.map_structure(tf.identity, gradients[place], expand_composites=True)
    return gradients


def _code_of(gradient: Gradient) -> int:
    if gradient is None:
        return MISSING
    if not isinstance(gradient, tf.IndexedSlices):
        return DENSE
    return SPARSE_32 if gradient.indices.dtype == tf.int32 else SPARSE_64


def _answer(agreement: Agreement) -> bytes:
    """What was agreed on; of ranks that did not come to an agreement before their world ended, what this one has said."""
    try:
        return agreement.agreed()
    except RingtrainError:
        return agreement.own


def _alive(references: Sequence[weakref.ref | None]) -> bool:
    return all(reference is None or reference() is not None for reference in references)
