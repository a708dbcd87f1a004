"""Numbers for the objects of a rank whose operations need names of their own, such as modules and optimizers.

Members of a process set make such objects, or use them first, in the same order; so the numbers agree without a word.
"""

import itertools
import weakref

from ringtrain._runtime.context import Context

_counts: "weakref.WeakKeyDictionary[Context, dict[tuple[int, str], itertools.count]]" = weakref.WeakKeyDictionary()


def next_number(context: Context, process_set: int, kind: str) -> int:
    """Numbers the objects of a kind in a process set (its id), from 0."""
    counts = _counts.setdefault(context, {})
    return next(counts.setdefault((process_set, kind), itertools.count()))


def number_anew(context: Context, process_set: int, kind: str) -> None:
    """The objects of a kind that come next are numbered from 0: those that had numbers get new ones, or are gone."""
    _counts.get(context, {}).pop((process_set, kind), None)


def keep_number(context: Context, process_set: int, kind: str, number: int) -> None:
    """An object of a world before goes on under its number: those that come get later ones."""
    reached = next_number(context, process_set, kind)
    _counts[context][process_set, kind] = itertools.count(max(reached, number + 1))
