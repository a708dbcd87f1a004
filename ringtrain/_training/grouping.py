"""Which gradients travel as one operation, for the ``groups`` argument of all adapters. Pure.

``optimizer_arguments.given_groups`` has checked the argument. Members are told apart by identity, since Keras' variables have no
hash of their own.
"""

import itertools
from collections.abc import Sequence
from typing import Any

Groups = int | list[list[Any]] | None


def grouped(members: Sequence[object], groups: Groups) -> list[list[int]]:
    """Places of the members that travel together, for each operation.

    Example:
        >>> a, b, c, d = "abcd"
        >>> grouped([a, b, c, d], [[c, a]])
        [[0, 2], [1], [3]]

    Args:
        members: what gradients are taken of, in an order that is the same on all ranks.
        groups: None: each travels alone. A number: that many runs. Lists: each list is one operation, whatever its
            order, without members that there are not; those in no list travel alone, behind the others.
    """
    if isinstance(groups, int):
        return runs_of(len(members), groups)
    place_of = {id(member): place for place, member in enumerate(members)}
    together = [sorted(place_of[id(member)] for member in group if id(member) in place_of) for group in groups or ()]
    taken = set(itertools.chain(*together))
    return [places for places in together if places] + [[each] for each in range(len(members)) if each not in taken]


def runs_of(length: int, count: int) -> list[list[int]]:
    """The places below ``length`` in so many runs of about equal length; in fewer where there are not enough.

    Example:
        >>> runs_of(5, 2)
        [[0, 1], [2, 3, 4]]
    """
    count = min(count, length)
    bounds = [length * index // max(count, 1) for index in range(count + 1)]
    return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]
