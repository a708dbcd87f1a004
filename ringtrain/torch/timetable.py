"""When gradients leave in a backward pass, as it was in the step before: between those times hooks only note what comes.

Nothing depends on it but the moment. What leaves is what hooks have noted, so a gradient that comes later than it did in
the step before leaves at the next time, or when the pass ends. A pass that went otherwise is learned anew.
"""

import sys
from collections.abc import Mapping

from ringtrain.torch.backward import PassPart

_AT_ONCE, _NEVER = 0, sys.maxsize  # at each gradient; not before the pass ends


class Timetable:
    """Of the passes of one optimizer, each by its place in its step."""

    def __init__(self) -> None:
        self._times: dict[int, list[int]] = {}  # after how many gradients of a pass some have left
        # of the pass under way, and of the last one until the next begins
        self._place = 0
        self._left: list[int] = []
        self._plan: list[int] | None = None  # None while it is learned
        self._is_regular = False

    def begin(self, parts: Mapping[int, PassPart], part: PassPart, place: int, is_open: bool) -> None:
        """A part of a pass has begun, and says from now on when it is due.

        Args:
            parts: of the pass, this one included, and of those before it that have failed.
            place: of the pass in its step.
            is_open: whether nothing is settled in the step: what is, a gradient ends by coming again, which is not to wait.
        """
        if len(parts) == 1:
            self._end()
            self._place, self._is_regular = place, is_open and not part.nested
            self._plan = self._times.get(place) if self._is_regular else None
            part.due = self._next(part)
        else:
            self._is_regular = False
            for each in parts.values():
                each.due = _AT_ONCE

    def note(self, part: PassPart, some_left: bool) -> None:
        """Somebody has looked at what has come in a part; whether some has left."""
        if some_left:
            self._left.append(part.seen)
        if self._is_regular:
            part.due = self._next(part)

    def _next(self, part: PassPart) -> int:
        if self._plan is None:
            return _AT_ONCE
        return next((time for time in self._plan if time > part.seen), _NEVER)

    def _end(self) -> None:
        if self._is_regular and self._plan in (None, self._left):
            self._times[self._place] = self._left
        else:
            self._times.pop(self._place, None)
        self._left, self._plan = [], None
