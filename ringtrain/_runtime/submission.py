"""What precedes a submission: whatever goes wrong there fails the operation on all ranks, and not on this one alone.

Every public operation goes through ``Submission``. An exception within its block is announced to the members of the
process set under the operation's name, or under its number where it has none; their operation fails with the text that
is raised here. What cannot be announced: a call that Python refuses before the block (a missing argument), an interrupt
(KeyboardInterrupt, SystemExit), and what happens while no world is open.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from ringtrain._binding.tensor_memory import Buffer
from ringtrain._runtime.context import Context, current
from ringtrain._runtime.pending import Operation
from ringtrain.errors import InvalidArgumentError, ProcessSetLostError


def announce(context: Context, operation: str, name: str | None, process_set: Any, problem: Exception) -> NoReturn:
    """Raises what was met before a submission, once the members of the process set have been told; see ``Submission``."""
    if isinstance(problem, ProcessSetLostError):  # which all ranks know of
        raise problem
    try:
        identity = id_of(process_set)
    except Exception:  # then this is the problem: the world's ranks are told
        identity = 0
    context.refuse(operation, name, identity, problem)


class Submission:
    """An operation in the making; ``with`` it the arguments are looked at, and ``start`` submits.

    Args:
        operation: name of a row of ``tables.OPERATIONS``.
        name: identity among the ranks; None numbers unnamed operations in the order of submission.
        process_set: a registered ``ProcessSet``. With anything else the error is announced to the world's ranks.
        waits: whether ``wait`` follows at once.

    Raises:
        NotInitializedError: there is no world.
        ProcessSetLostError: the set has lost a member.
        InvalidArgumentError: whatever was wrong before the submission, with the text that the peers get; another class
            of this package keeps its own. The exception that was met is the cause.
    """

    __slots__ = ("_context", "_operation", "_name", "_process_set", "_waits", "_submitted")

    def __init__(self, operation: str, name: str | None, process_set: Any, waits: bool = False):
        self._context: Context = current()
        self._operation = operation
        self._name = name
        self._waits = waits
        self._submitted = False
        try:
            self._process_set = id_of(process_set)
        except Exception as problem:
            announce(self._context, operation, name, process_set, problem)

    def start(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None], **arguments: Any) -> Operation:
        """Submits; from here on the context itself announces what it refuses."""
        self._submitted = True
        return self._context.submit(
            self._operation, self._name, inputs, outputs, process_set=self._process_set, waits=self._waits, **arguments
        )

    def __enter__(self) -> "Submission":
        return self

    def __exit__(self, _kind: object, problem: BaseException | None, _traceback: object) -> None:
        if isinstance(problem, Exception) and not self._submitted:
            self._context.refuse(self._operation, self._name, self._process_set, problem)


def preparing(operation: str, name: str | None, process_set: Any) -> Submission:
    """For an adapter's own steps before it calls an operation: what goes wrong in its block fails that operation everywhere.

    Example:
        >>> with preparing("allreduce", name, process_set):
        ...     tensor = cast(tensor)
        >>> rt.allreduce(tensor, name, process_set=process_set)
    """
    return Submission(operation, name, process_set)


def current_of(process_set: Any) -> tuple[Context, int]:
    """The current context, and the id of a process set in it; for what the others of the set hear nothing of.

    Raises:
        NotInitializedError: there is no world.
        InvalidArgumentError, ProcessSetLostError: as ``id_of``.
    """
    return current(), id_of(process_set)


def id_of(process_set: Any) -> int:
    """The id that operations submit under.

    Raises:
        InvalidArgumentError: not a process set, or one that is not registered.
        ProcessSetLostError: it has lost a member.
    """
    try:
        identity = process_set.process_set_id
    except AttributeError:
        raise InvalidArgumentError(f"process_set: expected a ProcessSet but found {process_set!r}.") from None
    if identity is None:
        refuse_lost(process_set)
        raise InvalidArgumentError(
            f"process_set: expected a registered set but found {process_set}. Call add_process_set first."
        )
    return identity


def refuse_lost(process_set: Any) -> None:
    """Raises ProcessSetLostError for a process set that has lost a member, in the same words on all ranks."""
    if lost := getattr(process_set, "lost", ""):
        raise ProcessSetLostError(lost)
