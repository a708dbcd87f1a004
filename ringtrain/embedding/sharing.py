"""What a table asks of the ranks that share it, the same in each framework."""

from collections.abc import Callable, Sequence

from ringtrain._bootstrap import membership
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, members_of
from ringtrain._training.adapter.checks import require_alike
from ringtrain._training.step_guard import under_way
from ringtrain.errors import InvalidArgumentError, UnsupportedError


def check_sharing(terms: Sequence[object], names: str, where: str, process_set: ProcessSet) -> None:
    """Before a table is made, whose ranks may come and go in an elastic job.

    Args:
        terms: what must be the same on all ranks.
        names: theirs.
        where: the name of what is submitted.
        process_set: the ranks.

    Raises:
        MismatchError: the same on all ranks, if these make different tables.
        UnsupportedError: ranks of an elastic job that are not all.
    """
    if membership.current() is None:
        demand = f"ShardedEmbedding: ({names}) must be the same on all ranks"
        require_alike(
            demand, allgather_object(terms, where, process_set), process_set, "Make the same tables in one order"
        )
    elif process_set is not global_process_set:
        raise UnsupportedError(
            f"ShardedEmbedding '{terms[0]}': in an elastic job a table must be shared by all ranks, but has a process set of its "
            "own, which ends with its world. Leave process_set out."
        )


def check_elastic_use(name: str, is_used: bool, places: str) -> None:
    """Raises UnsupportedError for a table of an elastic job outside of what survives.

    Args:
        name: of the table.
        is_used: whether it has rows, or belongs to an ``elastic.run``.
        places: where it can be used.
    """
    if not is_used and under_way() is None:
        raise UnsupportedError(
            f"embedding '{name}': in an elastic job a table must be used in {places}, where its rows survive, but is used outside of "
            "these. Move the call there."
        )


def on_all(name: str, process_set: ProcessSet, do: Callable[[], object]) -> None:
    """Does something on each rank; raises InvalidArgumentError, the same on all, with what the first has met."""
    raise_first(allgather_object(problem_of(do), name, process_set), members_of(process_set))


def problem_of(do: Callable[[], object]) -> str | None:
    """What keeps this rank from doing something with its files; None if nothing does."""
    try:
        do()
    except (OSError, InvalidArgumentError) as failed:
        return str(failed)
    return None


def raise_first(problems: Sequence[str | None], ranks: Sequence[int]) -> None:
    """Raises InvalidArgumentError for the first of the ranks that has met one."""
    for rank, problem in zip(ranks, problems, strict=True):
        if problem is not None:
            raise InvalidArgumentError(f"rank {rank}: {problem}")
