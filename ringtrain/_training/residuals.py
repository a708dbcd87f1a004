"""What compression has lost of an optimizer's gradients, as arrays that can be saved and loaded in another world.

A host keeps what it has lost of what it sends, and of the sums that it finishes. Nothing is lost on the way to a world
of other hosts if each of them starts with its share of what the former kept, and the sums' part is taken over as it is.

In an elastic job whose steps survive nothing need be saved: each rank takes along what it keeps itself (the core's
``residuals.h``), and what is left to do is to take back what a step has lost that is done again.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from ringtrain._binding import tensor_memory
from ringtrain._binding._native import ffi
from ringtrain._binding.log import logger
from ringtrain._runtime import error_feedback
from ringtrain._runtime.process_sets import hosts_of, ranks_of
from ringtrain._training.session import Session
from ringtrain.errors import InvalidArgumentError

PARTS = ("sent", "finished")


def settle(session: Session, prefix: str, used: bool) -> None:
    """After a step: what compression has lost of its gradients stays lost until the next, or was lost for nothing.

    Args:
        prefix: of the names of the operations that carry the gradients.
        used: whether their results were; not so in a step that is skipped.
    """
    session.follow()
    act = error_feedback.keep if used else error_feedback.take_back
    act(session.context, session.process_set_id, prefix)


def take_back(session: Session, prefix: str, after: int) -> None:
    """In another world: those operations behind a number (``error_feedback.turns``) whose results are done again."""
    error_feedback.take_back(session.context, session.process_set_id, prefix, after)


def forget(session: Session, prefix: str) -> None:
    """Another state was loaded: the next steps make up for nothing that was lost before it.

    Args:
        prefix: of the names of the operations that carry the gradients, none of which may be under way.
    """
    context = session.context
    kept = error_feedback.sizes(context, session.process_set_id, prefix) if context.usable else {}
    for (name, place), elements in kept.items():
        _load_nothing(session, name, place, elements)
    note_forgotten(prefix, len(kept))


def note_forgotten(prefix: str, tensors: int) -> None:
    """Says in the log that something was forgotten, if it was."""
    if tensors:
        logger.info(
            "'%s': with another state, what compression has lost of %d tensors is forgotten; load_compression_state() brings "
            "back what was saved",
            prefix.rstrip("."),
            tensors,
        )


def of_all_ranks(session: Session, averages: bool, prefix: str) -> dict[str, dict[str, np.ndarray]]:
    """By gradient, the ``PARTS``: flat arrays of float32, the same on all ranks of the process set. Collective.

    ``finished`` is as the results are; so is ``sent``, what all hosts keep of their sums together.

    Args:
        averages: whether results are averages; else sums.
        prefix: of the names of the operations that carry the gradients; not part of the keys.
    """
    context, process_set = session.context, session.process_set_id
    state = {}
    for name, place, is_whole, sent, finished in _kept(session, prefix):
        if is_whole:
            sent *= np.float32(_hosts(session))
        else:  # each element is kept by one rank of a host; the others have zero
            for part, array in zip(PARTS, (sent, finished), strict=True):
                both = [tensor_memory.as_buffer(array)]
                context.submit(
                    "allreduce",
                    f"{name}.{place}.{part}",
                    both,
                    both,
                    reduction="sum",
                    process_set=process_set,
                    waits=True,
                ).wait()
        sent /= np.float32(_divisor(session, averages))
        state[_key(prefix, name, place)] = {"sent": sent, "finished": finished}
    return state


def load(session: Session, averages: bool, prefix: str, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Has the core go on with what ``of_all_ranks`` has returned.

    Raises:
        InvalidArgumentError: something else than that.
    """
    share = np.float32(_divisor(session, averages) / _hosts(session))
    for key, parts in state.items():
        name, slash, place = key.rpartition("/")
        if not slash or not place.isdecimal() or set(parts) != set(PARTS):
            raise InvalidArgumentError(
                f"load_compression_state: the state must be what compression_state() has returned, but has {key!r}."
            )
        sent, finished = (np.ascontiguousarray(parts[part], np.float32) for part in PARTS)
        _load(session, prefix + name, int(place), sent * share, finished)


def holder(session: Session) -> dict[str, int]:
    """Which rank keeps what it keeps: elements are dealt over the ranks of a host, and sums over the hosts."""
    context, process_set = session.context, session.process_set_id
    members = list(ranks_of(context, process_set) or [context.rank])
    return {"rank": members.index(context.rank), "ranks": len(members), "hosts": _hosts(session)}


def of_this_rank(session: Session, prefix: str) -> dict[str, dict[str, np.ndarray]]:
    """By gradient, the ``PARTS`` as this rank keeps them: flat arrays of float32, zeros where other ranks of its host do.

    Args:
        prefix: of the names of the operations that carry the gradients; not part of the keys.
    """
    return {
        _key(prefix, name, place): {"sent": sent, "finished": finished}
        for name, place, _, sent, finished in _kept(session, prefix)
    }


def load_of_this_rank(session: Session, prefix: str, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Has the core go on with what ``of_this_rank`` has returned on this rank, and with nothing that is not in it."""
    context, process_set = session.context, session.process_set_id
    for (name, place), elements in error_feedback.sizes(context, process_set, prefix).items():
        if _key(prefix, name, place) not in state:
            _load_nothing(session, name, place, elements)
    for key, parts in state.items():
        name, _, number = key.rpartition("/")
        _load(session, prefix + name, int(number), *(np.ascontiguousarray(parts[part], np.float32) for part in PARTS))


def _kept(session: Session, prefix: str) -> Iterator[tuple[str, int, bool, np.ndarray, np.ndarray]]:
    """Of each gradient the operation's name and the place in it, whether it is as it was loaded, whole, and the ``PARTS``."""
    context, process_set = session.context, session.process_set_id
    for (name, place), elements in error_feedback.sizes(context, process_set, prefix).items():
        is_whole, *memory = error_feedback.save(context, process_set, name, place, elements)
        sent, finished = (np.frombuffer(ffi.buffer(each), np.float32) for each in memory)
        yield name, place, is_whole, sent, finished


def _key(prefix: str, name: str, place: int) -> str:
    return f"{name.removeprefix(prefix)}/{place}"


def _load_nothing(session: Session, name: str, place: int, elements: int) -> None:
    nothing = np.zeros(elements, np.float32)
    _load(session, name, place, nothing, nothing)


def _load(session: Session, name: str, place: int, sent: np.ndarray, finished: np.ndarray) -> None:
    error_feedback.load(session.context, session.process_set_id, name, place, sent, finished)


def _hosts(session: Session) -> int:
    return hosts_of(session.context, session.process_set_id)


def _divisor(session: Session, averages: bool) -> int:
    return len(ranks_of(session.context, session.process_set_id) or ()) if averages else 1
