"""Arguments that the optimizers and tapes of all adapters have in common, refused in the same words.

``torch.optimizer``, ``tensorflow.gradients`` and ``keras.optimizer`` call these with what the user gave. No framework here:
a member of a group is whatever the adapter takes gradients of.
"""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from ringtrain.errors import InvalidArgumentError
from ringtrain.operations import Average, Sum

Member = TypeVar("Member")


def check_scaling(owner: str, op: int, predivide: float) -> None:
    """Raises InvalidArgumentError unless gradients can be reduced by this ``op`` and ``gradient_predivide_factor``.

    Args:
        owner: who speaks in the error.
        op: must be ``Average`` or ``Sum``.
        predivide: above 0; for ``Sum`` it must be 1.
    """
    if op not in (Average, Sum):
        raise InvalidArgumentError(f"{owner}: op must be Average ({Average}) or Sum ({Sum}), but is {op!r}.")
    if predivide != 1.0 and op != Average:
        raise InvalidArgumentError(f"{owner}: gradient_predivide_factor needs op=Average, but op is Sum.")
    if not predivide > 0:
        raise InvalidArgumentError(f"{owner}: gradient_predivide_factor must be above 0, but is {predivide!r}.")


def check_passes(passes: Any) -> None:
    """Raises InvalidArgumentError unless ``backward_passes_per_step`` is a whole number of at least 1."""
    if not isinstance(passes, int) or passes < 1:
        raise InvalidArgumentError(
            f"DistributedOptimizer: backward_passes_per_step must be at least 1, but is {passes!r}."
        )


def given_groups(num_groups: int, groups: Any, members: str, stacklevel: int) -> int | list[list[Any]] | None:
    """The argument ``groups`` or, under Horovod's older name, ``num_groups``, with empty groups left out.

    Args:
        num_groups: 0 if it was not given.
        groups: None, a number above 0, or lists.
        members: what the lists hold, for the error.
        stacklevel: of the warning about the older name, counted from the caller of this function.

    Raises:
        InvalidArgumentError: ``groups`` is something else.
    """
    if num_groups:
        warnings.warn("num_groups has become groups.", DeprecationWarning, stacklevel=stacklevel + 1)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise InvalidArgumentError(f"DistributedOptimizer: groups must be at least 1, but is {groups}.")
        return groups
    if not (isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)):
        raise InvalidArgumentError(
            f"DistributedOptimizer: groups must be an int or lists of {members}, but is {groups!r}."
        )
    return [list(group) for group in groups if group]


def runs_of(members: Sequence[Member], count: int) -> list[list[Member]]:
    """The members in so many runs of about equal length; in fewer where there are not enough.

    Example:
        >>> runs_of("abcde", 2)
        [['a', 'b'], ['c', 'd', 'e']]
    """
    count = min(count, len(members))
    bounds = [len(members) * index // count for index in range(count + 1)]
    return [list(members[start:end]) for start, end in itertools.pairwise(bounds)]
