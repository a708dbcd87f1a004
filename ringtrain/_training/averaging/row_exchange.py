"""How the rows of a ``negotiation`` get from rank to rank, and the terms where they differ."""

from collections.abc import Mapping

import numpy as np

from ringtrain._binding.tensor_memory import as_buffer
from ringtrain._training import terms
from ringtrain._training.averaging.negotiation import AveragingRow
from ringtrain._training.session import Session
from ringtrain.errors import MismatchError, TimeoutError

_WHO_IS_MISSING = (
    "With it the ranks agree to average after local steps: the missing ones have taken fewer steps, or have ended. Call "
    "the optimizer's join() on a rank that has no more data, and synchronize() on all ranks or on none."
)


def gathered(session: Session, name: str, own: np.ndarray) -> np.ndarray:
    """The rows of all ranks, in rank order; collective."""
    operation = session.context.submit(
        "allgather", name, [as_buffer(own)], [None], process_set=session.process_set_id, waits=True
    )
    try:
        operation.wait()
    except TimeoutError as given_up:
        raise TimeoutError(f"{given_up} {_WHO_IS_MISSING}") from None
    memory, _, shape = operation.allocated()
    return np.frombuffer(memory, own.dtype).reshape(shape)


def refuse_terms(session: Session, prefix: str, name: str, rows: list[AveragingRow], content: bytes) -> None:
    """Raises MismatchError for the first difference between the ranks' terms; collective.

    Args:
        session: the ranks that have met.
        prefix: the worker's name, for the error.
        name: of the meeting.
        rows: what all have said there.
        content: this rank's terms.
    """
    everything = gathered(session, f"{name}.terms", np.frombuffer(content, np.uint8)).tobytes()
    ends = np.cumsum([row.terms_bytes for row in rows])
    theirs = [
        (row.rank, terms.decoded(everything[end - row.terms_bytes : end])) for row, end in zip(rows, ends, strict=True)
    ]
    term, values = terms.difference(theirs) or ("", "")
    raise MismatchError(
        f"synchronisation '{prefix}': {term} must be the same on all ranks, but is {values}. Make the same model "
        "and optimizer, with the same arguments, on every rank."
    )


def average_in_place(session: Session, prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Puts the average over the ranks into arrays, each under its name; collective."""
    pending = []
    for name, array in arrays.items():
        buffer = [as_buffer(array)]
        operation = session.context.submit(
            "allreduce", f"{prefix}.{name}", buffer, buffer, process_set=session.process_set_id, reduction="average"
        )
        pending.append(operation)
    for operation in pending:
        operation.wait()
