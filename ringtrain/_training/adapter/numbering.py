"""Numbers for the objects of a rank whose operations need names of their own, such as modules and optimizers.

Members of a process set make such objects, or use them first, in the same order; so the numbers agree without a word.
"""

import itertools
import weakref

from ringtrain._runtime.context import Context
from ringtrain._training.session import NewWorld, Session

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


class Number:
    """The number of one object, in one world after another: two of a world never share a name.

    Args:
        session: the rank that the object acts for; whoever makes names of the number registers with it later.
        kind: the word that names begin with.

    Attributes:
        value: in the present world.
        prefix: of the object's names there, without a dot.
    """

    def __init__(self, session: Session, kind: str):
        self._session, self._kind = session, kind
        session.on_new_world(self._take)
        self._take()

    def _take(self, _: NewWorld = NewWorld.ANEW) -> None:
        self.value = next_number(self._session.context, self._session.process_set_id, self._kind)
        self.prefix = f"{self._kind}.{self.value}"
